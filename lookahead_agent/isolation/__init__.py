"""Programs that nobody trusts, behind boundaries of the operating system."""

from lookahead_agent.errors import IsolationError
from lookahead_agent.isolation.boundaries import Isolation, available, choose
from lookahead_agent.isolation.child import Finished, frames, program_text, run_child
from lookahead_agent.isolation.python import PythonLimits, run_isolated

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
