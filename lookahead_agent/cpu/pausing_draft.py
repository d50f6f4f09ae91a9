"""A draft model on the target's cores that pauses while many replies are generated.

vLLM's `num_speculative_tokens_per_batch_size` may be 0 for a batch size, but its draft still reads every token then.
Measured on two shared cores in two runs, against one draft token per reply. Eight concurrent replies take 3.7 and 4.5 s
with a draft that pauses, 4.7 and 6.1 s without. Sixteen take 6.7 and 7.8 s with it, 10.2 and 10.3 s without.

A paused draft reads nothing, and does not catch up. `DraftMemory` records the blocks of vLLM's KV cache that it has
missed; replies that use such a block get no draft tokens. Draft tokens change no reply, but their number decides which
random numbers a sampled reply consumes, so replies with a seed get none.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead_agent.cpu import NO_DRAFT


class DraftMemory:
    """Tracks the KV cache blocks, of `block_size` tokens, with tokens that the draft has not read."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._missed: set[int] = set()

    def write(self, slots: npt.NDArray[np.int64], *, read: bool) -> None:
        """Record a pass's slots, shape (tokens,), in order within a block, and whether the draft read them."""
        if read and self.whole:
            return
        blocks = slots // self._block_size
        # A write to a block's first slot replaces the block's earlier content.
        self._missed.difference_update(blocks[slots % self._block_size == 0].tolist())
        if not read:
            self._missed.update(blocks.tolist())

    @property
    def whole(self) -> bool:
        """Whether the draft has read every token of every block."""
        return not self._missed

    def knows(self, blocks: Iterable[int]) -> bool:
        """Whether the draft has read every token of these blocks."""
        return self._missed.isdisjoint(blocks)


def replace_proposals() -> None:
    """Patch vLLM's model runner: a draft model pauses where its schedule has no draft tokens."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.propose_draft_token_ids = _make_pausing(GPUModelRunner.propose_draft_token_ids)
    GPUModelRunner.take_draft_token_ids = _without_excluded(GPUModelRunner.take_draft_token_ids)


def _make_pausing(propose: Callable[..., Any]) -> Callable[..., Any]:
    def propose_or_pause(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        schedule = runner.speculative_config.num_speculative_tokens_per_batch_size or ()
        if not runner.speculative_config.uses_draft_model() or all(tokens for _, _, tokens in schedule):
            return propose(runner, scheduler_output, *args, **kwargs)
        table = runner.input_batch.block_table[0]
        if (memory := getattr(runner, "lookahead_draft_memory", None)) is None:
            memory = runner.lookahead_draft_memory = DraftMemory(table.block_size)
        replies = runner.input_batch.req_ids
        excluded = runner.lookahead_excluded = _find_excluded(runner, memory)
        reads = scheduler_output.num_spec_tokens_to_schedule > 0 and len(excluded) < len(replies)
        memory.write(table.slot_mapping.gpu[: scheduler_output.total_num_scheduled_tokens].numpy(), read=reads)
        if not reads:
            return torch.zeros((len(replies), 0), dtype=torch.int32)
        return propose(runner, scheduler_output, *args, **kwargs)

    return propose_or_pause


def _without_excluded(take: Callable[..., Any]) -> Callable[..., Any]:
    def take_draft_tokens(runner: Any) -> Any:
        taken, excluded = take(runner), getattr(runner, "lookahead_excluded", None)
        if taken is not None and excluded:
            taken.draft_token_ids = [
                [] if reply in excluded else token_ids
                for reply, token_ids in zip(taken.req_ids, taken.draft_token_ids, strict=True)
            ]
        return taken

    return take_draft_tokens


def _find_excluded(runner: Any, memory: DraftMemory) -> set[str]:
    """The replies of a pass that get no draft tokens: with a seed, `NO_DRAFT`, or tokens the draft has not read."""
    batch, table, excluded = runner.input_batch, runner.input_batch.block_table[0], set()
    for index, reply in enumerate(batch.req_ids):
        params = runner.requests[reply].sampling_params
        opted_out = params is not None and NO_DRAFT in (params.extra_args or {})
        blocks = -(-int(batch.num_computed_tokens_cpu[index]) // table.block_size)
        known = memory.whole or memory.knows(table.block_table.np[index, :blocks].tolist())
        if opted_out or not known or index in batch.generators:
            excluded.add(reply)
    return excluded
