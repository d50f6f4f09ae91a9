"""The planner templates and their tools, from the repository's top folders or from the installed package."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from lookahead_agent.errors import ConfigurationError

if TYPE_CHECKING:
    from lookahead_agent.chat.model import ChatLookahead
    from lookahead_agent.policy import VerifierPolicy

    build_plan_execute: Callable[..., Any]
    build_react: Callable[..., Any]
    build_rewoo: Callable[..., Any]
    build_llm_compiler: Callable[..., Any]
    build_reflection: Callable[..., Any]
    build_supervisor: Callable[..., Any]
    build_self_consistency: Callable[..., Any]

TEMPLATES = ("plan_execute", "react", "rewoo", "llm_compiler", "reflection", "supervisor", "self_consistency")
"""The templates in `graphs/`."""

_PACKAGE = Path(__file__).parents[1]
_FOLDERS = (_PACKAGE / "_templates", _PACKAGE.parent)


def template_path(kind: str, name: str, folders: Iterable[Path] = _FOLDERS) -> Path:
    """Return the path of a template file: `kind` is "graphs" or "tools", `name` the file's name without `.py`.

    Raises:
        FileNotFoundError: There is no such template.
    """
    for folder in folders:
        path = folder / kind / f"{name}.py"
        if path.is_file():
            return path
    raise FileNotFoundError(f"there is no template {kind}/{name}.py")


_load_lock = threading.RLock()
"""Held while a template is loaded, which may load others, so that no thread sees a half-loaded module."""


def template(kind: str, name: str, folders: Iterable[Path] = _FOLDERS) -> ModuleType:
    """Load a template file; see `template_path`. Concurrent threads wait for the first one to load it."""
    module_name = f"lookahead_agent._templates.{kind}.{name}"
    with _load_lock:
        if (loaded := sys.modules.get(module_name)) is not None:
            return loaded
        spec = importlib.util.spec_from_file_location(module_name, template_path(kind, name, folders))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
        return module


_FROM_ENVIRONMENT = (
    "model", "draft_model", "base_url", "draft_url", "tokenizer", "policy", "max_tokens", "temperature",
)  # fmt: skip
"""Fields of the chat model that `LOOKAHEAD_MODEL` and similar variables may set."""


def default_llm(policies: Mapping[str, str | VerifierPolicy]) -> ChatLookahead:
    """Create the chat model of a template's `graph`, for LangGraph's own server.

    Args:
        policies: The template's, by node. `LOOKAHEAD_POLICY` in the environment replaces all of them.

    More environment variables: `LOOKAHEAD_MODEL`, `LOOKAHEAD_DRAFT_MODEL`, `LOOKAHEAD_BASE_URL`, `LOOKAHEAD_DRAFT_URL`,
    `LOOKAHEAD_TOKENIZER`, `LOOKAHEAD_MAX_TOKENS`, `LOOKAHEAD_TEMPERATURE`.

    Raises:
        LookaheadError: The settings are invalid.
    """
    from lookahead_agent.chat.model import ChatLookahead

    chosen: dict[str, Any] = {
        field: value for field in _FROM_ENVIRONMENT if (value := os.environ.get(f"LOOKAHEAD_{field.upper()}"))
    }
    if "policy" not in chosen:
        chosen["policies"] = dict(policies)
    try:
        return ChatLookahead.model_validate(chosen)
    except ValidationError as error:
        problem = error.errors()[0]
        name = "_".join(["LOOKAHEAD", *map(str, problem["loc"])]).upper()
        raise ConfigurationError(f"{name}: {problem['msg']}, not {problem['input']!r}") from None


_BUILDERS = {f"build_{name}": name for name in TEMPLATES}


def __getattr__(name: str) -> Any:
    """Return a template's function, such as `build_react`; the first use of each loads its file."""
    if name not in _BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(template("graphs", _BUILDERS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_BUILDERS})
