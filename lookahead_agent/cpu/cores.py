"""Which CPU cores each engine runs on, so that two engines never share one while both run."""

from __future__ import annotations

from collections.abc import Sequence


def share_cores(cores: Sequence[int], *, with_draft: bool) -> tuple[list[int], list[int]]:
    """Divide cores between target and draft.

    The draft gets a quarter (at least one core), the target the rest: a step of the target costs about three times
    one of the draft. With a single core both get it, there is no other way.

    Args:
        cores: Core numbers.
        with_draft: Whether there is a draft engine.

    Returns:
        The target's cores and the draft's.
    """
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
