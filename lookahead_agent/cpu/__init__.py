"""A vLLM plugin for CPUs: an int8 kernel, sampling, norms and activations, the output layer.

It imports nothing else of this library. vLLM loads it in each of its processes by the entry point
`vllm.general_plugins` of `pyproject.toml`; see `plugin`. Importing the package loads no kernel: it holds the names
under which vLLM registers the additions, and divides the CPU's cores between engines.
"""

import re
from collections.abc import Sequence

ENTRY_POINT = "lookahead_cpu"  # the plugin's name in the group `vllm.general_plugins`
VARIABLE = "LOOKAHEAD_AGENT_CPU_PLUGIN"  # "1" in processes of this library's engines, else the plugin does nothing
INSTRUCTIONS = "LOOKAHEAD_AGENT_INT8"  # names an instruction set of `int8_kernel` in place of the fastest
INT8 = "lookahead_int8"  # W8A8, with the output layer in int8 too: see `int8`
LAYOUT = "panels of 32 rows, 4 columns at a time"  # layout of a folder's packed weights; another one has another name
NO_DRAFT = "lookahead_no_draft"  # key of a request's `extra_args`: a draft model that pauses proposes nothing for it


def share_cores(cores: Sequence[int], *, with_draft: bool) -> tuple[list[int], list[int]]:
    """Divide the cores; a draft gets a quarter, since a target step costs about three times as much as its own."""
    if not with_draft:
        return list(cores), []
    if len(cores) < 2:
        return list(cores), list(cores)
    draft_count = max(1, len(cores) // 4)
    return list(cores[:-draft_count]), list(cores[-draft_count:])


def format_cores(cores: Sequence[int]) -> str:
    """Format cores for `VLLM_CPU_OMP_THREADS_BIND`: `[0, 1, 2, 5]` becomes "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def parse_cores(cores: str) -> list[int]:
    """Read the cores of `format_cores`; empty for vLLM's other notations, such as "auto" or "0-3|4-7"."""
    runs = [re.fullmatch(r"(\d+)(?:-(\d+))?", run) for run in cores.split(",")]
    return [core for run in runs if run for core in range(int(run[1]), int(run[2] or run[1]) + 1)] if all(runs) else []
