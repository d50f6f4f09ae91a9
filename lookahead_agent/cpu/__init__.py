"""A plugin of vLLM for CPUs: int8 and VNNI kernels, sampling, norms and activations, the output layer.

It imports nothing else of this library. vLLM loads it in each of its processes by the entry point
`vllm.general_plugins` of `pyproject.toml`; see `plugin`. Importing the package itself loads nothing: it has the names
under which vLLM knows what is added, and the division of the CPU's cores between engines.
"""

from collections.abc import Sequence

ENTRY_POINT = "lookahead_cpu"  # of the plugin, in the group `vllm.general_plugins`
VARIABLE = "LOOKAHEAD_AGENT_CPU_PLUGIN"  # "1" in the processes of this library's engines: else the plugin does nothing
INT8 = "lookahead_int8"  # W8A8 with the output layer in int8 too: see `int8`
INT8_WEIGHTS = "lookahead_int8_weights"  # weights as integers, activations in floating point: see `int8`
NO_DRAFT = "lookahead_no_draft"  # in a request's `extra_args`: the engine's draft model neither reads nor proposes
PROVIDER = "lookahead_cpu"  # Provider of the operations in `operations`, for vLLM's `ir_op_priority`


def share_cores(cores: Sequence[int], *, with_draft: bool) -> tuple[list[int], list[int]]:
    """Divide cores between target and draft, if there is one, which gets a quarter: it is about that fast."""
    if not with_draft:
        return list(cores), []
    if len(cores) < 2:
        return list(cores), list(cores)
    drafts = max(1, len(cores) // 4)
    return list(cores[:-drafts]), list(cores[-drafts:])


def binding(cores: Sequence[int]) -> str:
    """Cores in the notation of `VLLM_CPU_OMP_THREADS_BIND`: `[0, 1, 2, 5]` is "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
