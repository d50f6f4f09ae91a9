"""Programs that nobody trusts, behind boundaries of the operating system."""

from lookahead_agent.errors import IsolationError
from lookahead_agent.sandbox.backends import Isolation, available, choose
from lookahead_agent.sandbox.child import Finished, frames, program_text, run_child
from lookahead_agent.sandbox.python import PythonLimits, run_isolated

__all__ = [
    "Finished",
    "Isolation",
    "IsolationError",
    "PythonLimits",
    "available",
    "choose",
    "frames",
    "program_text",
    "run_child",
    "run_isolated",
]
