"""The entry point for vLLM (`vllm.general_plugins`): installs this library's additions in its engines on CPUs.

vLLM calls it in each of its processes, also in those of other programs in the same environment. Only this library's
engines set `VARIABLE`; without it, it does nothing.
"""

import gc
import os
from functools import cache

from lookahead_agent.cpu import VARIABLE


@cache
def load() -> None:
    """Install all additions in a vLLM process that one of this library's engines started on a CPU."""
    if os.environ.get(VARIABLE) != "1":
        return
    register_names()
    from lookahead_agent.cpu import operations, pausing_draft, sampling

    operations.replace_layers()
    sampling.replace_sampling()
    pausing_draft.replace_proposals()
    # Otherwise garbage collection would scan everything imported once more when vLLM's processes exit.
    gc.unfreeze = lambda: None


def register_names() -> None:
    """Register quantizations in vLLM, which validates an engine's arguments by their names."""
    from lookahead_agent.cpu import int8  # noqa: F401
