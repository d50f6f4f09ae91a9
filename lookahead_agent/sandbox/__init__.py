"""Runs untrusted programs in a sandbox of the operating system."""

from lookahead_agent.errors import IsolationError as IsolationError
from lookahead_agent.sandbox.backends import Isolation as Isolation
from lookahead_agent.sandbox.backends import PythonLimits as PythonLimits
from lookahead_agent.sandbox.backends import available as available
from lookahead_agent.sandbox.backends import choose as choose
from lookahead_agent.sandbox.backends import run_isolated as run_isolated
from lookahead_agent.sandbox.child import ChildResult as ChildResult
from lookahead_agent.sandbox.child import program_text as program_text
from lookahead_agent.sandbox.child import run_child as run_child
