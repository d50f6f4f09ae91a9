"""The entry point of vLLM's plugins (`vllm.general_plugins`): what this library's engines on CPUs add to vLLM.

vLLM calls it in each of its processes, also in those of other programs in the same environment: only the engines of
this library set the variable without which it does nothing.
"""

import gc
import os
import time
from functools import cache, partial

from lookahead_agent.cpu import VARIABLE

_NAP = 0.0005  # seconds that vLLM's processes sleep while they wait for each other


@cache
def load() -> None:
    """Add everything to a process of vLLM that one of this library's engines has started on a CPU."""
    if os.environ.get(VARIABLE) != "1":
        return
    register_names()
    from vllm.distributed.device_communicators import shm_broadcast

    from lookahead_agent.cpu import operations, pausing_draft, sampling

    operations.replace_activation()
    sampling.replace_sampling()
    pausing_draft.replace_proposals()
    # vLLM's engine core looks for its worker's answer without pause, which takes a core from a worker that uses all.
    # (Its way of waiting for longer pauses, by a message, loses messages when it is used at once.)
    shm_broadcast.sched_yield = partial(time.sleep, _NAP)
    # Or vLLM's processes would look through all that they have imported once more when they end.
    gc.unfreeze = lambda: None


def register_names() -> None:
    """Make the quantizations and the operations known to vLLM, which checks an engine's arguments by their names."""
    from lookahead_agent.cpu import int8, operations  # noqa: F401
