"""The planner templates and their tools, from the repository's top folders or from the installed package."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).parent


@cache
def template(kind: str, name: str) -> ModuleType:
    """Load a template file.

    Args:
        kind: "graphs" or "tools".
        name: The file's name without `.py`.

    Raises:
        FileNotFoundError: There is no such template.
    """
    for folder in (_PACKAGE / "_templates" / kind, _PACKAGE.parent / kind):
        path = folder / f"{name}.py"
        if path.is_file():
            break
    else:
        raise FileNotFoundError(f"there is no template {kind}/{name}.py")
    module_name = f"lookahead_agent._templates.{kind}.{name}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def build_plan_execute(*args: Any, **kwargs: Any) -> Any:
    """Build the plan-and-execute graph: see `graphs/plan_execute.py`, whose arguments these are."""
    return template("graphs", "plan_execute").build_plan_execute(*args, **kwargs)


def build_react(*args: Any, **kwargs: Any) -> Any:
    """Build the ReAct graph: see `graphs/react.py`, whose arguments these are."""
    return template("graphs", "react").build_react(*args, **kwargs)


def build_rewoo(*args: Any, **kwargs: Any) -> Any:
    """Build the ReWOO graph: see `graphs/rewoo.py`, whose arguments these are."""
    return template("graphs", "rewoo").build_rewoo(*args, **kwargs)


def build_reflection(*args: Any, **kwargs: Any) -> Any:
    """Build the reflection graph: see `graphs/reflection.py`, whose arguments these are."""
    return template("graphs", "reflection").build_reflection(*args, **kwargs)


def build_supervisor(*args: Any, **kwargs: Any) -> Any:
    """Build the supervisor graph: see `graphs/supervisor.py`, whose arguments these are."""
    return template("graphs", "supervisor").build_supervisor(*args, **kwargs)


def build_self_consistency(*args: Any, **kwargs: Any) -> Any:
    """Build the self-consistency graph: see `graphs/self_consistency.py`, whose arguments these are."""
    return template("graphs", "self_consistency").build_self_consistency(*args, **kwargs)
