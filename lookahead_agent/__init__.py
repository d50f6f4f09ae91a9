"""Lookahead Reasoning for LangGraph agents.

The public names are imported on first use, so that `import lookahead_agent` is fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lookahead_agent.agents.middleware import LookaheadPolicyMiddleware
    from lookahead_agent.agents.templates import build_plan_execute
    from lookahead_agent.agents.tool_results import InvalidToolCallMiddleware
    from lookahead_agent.chat.model import ChatLookahead
    from lookahead_agent.errors import LookaheadError
    from lookahead_agent.policy import POLICIES, VerifierPolicy

__version__ = "0.1.0"

_MODULES = {
    "ChatLookahead": "lookahead_agent.chat.model",
    "InvalidToolCallMiddleware": "lookahead_agent.agents.tool_results",
    "LookaheadError": "lookahead_agent.errors",
    "LookaheadPolicyMiddleware": "lookahead_agent.agents.middleware",
    "POLICIES": "lookahead_agent.policy",
    "VerifierPolicy": "lookahead_agent.policy",
    "build_plan_execute": "lookahead_agent.agents.templates",
}

__all__ = [
    "POLICIES",
    "ChatLookahead",
    "InvalidToolCallMiddleware",
    "LookaheadError",
    "LookaheadPolicyMiddleware",
    "VerifierPolicy",
    "__version__",
    "build_plan_execute",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
