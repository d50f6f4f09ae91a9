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
