"""A draft model on the target's cores that pauses while many replies are written.

vLLM's `num_speculative_tokens_per_batch_size` may say 0; its draft then reads on all the same, as long as it does not
miss a token. Measured on two shared cores, against one draft token for each reply, two runs each: eight replies at once
take 3.7 and 4.5 s with a draft that pauses, and 4.7 and 6.1 s without; sixteen take 6.7 and 7.8 s, and 10.2 and 10.3 s.

A draft that pauses reads nothing, and does not catch up: `DraftMemory` keeps in mind which blocks of vLLM's memory it
has missed, and replies that rest on such a block get no draft tokens. Draft tokens change no reply, but how many there
are decides which random numbers a sampled reply takes: one with a seed gets none.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead_agent.cpu import NO_DRAFT


class DraftMemory:
    """Which blocks of so many tokens hold some that the draft has not read."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._missed: set[int] = set()

    def write(self, slots: npt.NDArray[np.int64], *, read: bool) -> None:
        """Take in the slots of a pass, shape (tokens,), those of a block in order, and whether the draft read them."""
        if read and self.whole:
            return
        blocks = slots // self._block_size
        # A block's earlier content is gone with its first token.
        self._missed.difference_update(blocks[slots % self._block_size == 0].tolist())
        if not read:
            self._missed.update(blocks.tolist())

    @property
    def whole(self) -> bool:
        """Whether the draft has read all that is in any block."""
        return not self._missed

    def knows(self, blocks: Iterable[int]) -> bool:
        """Whether the draft has read all that is in these blocks."""
        return self._missed.isdisjoint(blocks)


def replace_proposals() -> None:
    """Have vLLM's model runner pause a draft model where its schedule says no draft tokens."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    GPUModelRunner.propose_draft_token_ids = _pausing(GPUModelRunner.propose_draft_token_ids)
    GPUModelRunner.take_draft_token_ids = _without_excluded(GPUModelRunner.take_draft_token_ids)


def _pausing(propose: Callable[..., Any]) -> Callable[..., Any]:
    def propose_or_pause(runner: Any, scheduled: Any, *given: Any, **named: Any) -> Any:
        import torch

        schedule = runner.speculative_config.num_speculative_tokens_per_batch_size or ()
        if not runner.speculative_config.uses_draft_model() or all(tokens for _, _, tokens in schedule):
            return propose(runner, scheduled, *given, **named)
        table = runner.input_batch.block_table[0]
        if (memory := getattr(runner, "lookahead_draft_memory", None)) is None:
            memory = runner.lookahead_draft_memory = DraftMemory(table.block_size)
        replies = runner.input_batch.req_ids
        excluded = runner.lookahead_excluded = _without_draft_tokens(runner, memory)
        reads = scheduled.num_spec_tokens_to_schedule > 0 and len(excluded) < len(replies)
        memory.write(table.slot_mapping.gpu[: scheduled.total_num_scheduled_tokens].numpy(), read=reads)
        if not reads:
            return torch.zeros((len(replies), 0), dtype=torch.int32)
        return propose(runner, scheduled, *given, **named)

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


def _without_draft_tokens(runner: Any, memory: DraftMemory) -> set[str]:
    """The replies of a pass with a seed, or to be written without the draft, or with tokens that it has not read."""
    batch, table, excluded = runner.input_batch, runner.input_batch.block_table[0], set()
    for index, reply in enumerate(batch.req_ids):
        params = runner.requests[reply].sampling_params
        asked = params is not None and NO_DRAFT in (params.extra_args or {})
        blocks = -(-int(batch.num_computed_tokens_cpu[index]) // table.block_size)
        whole = memory.whole or memory.knows(table.block_table.np[index, :blocks].tolist())
        if asked or not whole or index in batch.generators:
            excluded.add(reply)
    return excluded
