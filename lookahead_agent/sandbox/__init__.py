"""Programs that nobody trusts, in a sandbox of the operating system."""

from lookahead_agent.errors import IsolationError
from lookahead_agent.sandbox.backends import Isolation, PythonLimits, available, choose, run_isolated
from lookahead_agent.sandbox.child import ChildResult, program_text, run_child

__all__ = [
    "ChildResult",
    "Isolation",
    "IsolationError",
    "PythonLimits",
    "available",
    "choose",
    "program_text",
    "run_child",
    "run_isolated",
]
