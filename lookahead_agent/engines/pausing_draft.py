"""A draft model on the target's cores that pauses while many replies are written: passes are the target's alone then.

vLLM's schedule of guesses by the number of replies may say none; its draft then reads on all the same, for nothing, as
long as it does not miss a token. Here it reads nothing, and what it has missed is kept in mind by the blocks of
memory in which vLLM keeps a reply: replies that rest on such a block get no guesses, for the draft does not catch up.
Guesses are right or wrong to the target's mind, so none of this changes a reply. But how many there are decides which
random numbers a sampled reply takes: one with a seed, which is to say the same beside any others, gets none.

Imported by vLLM's processes when they are sent an engine's configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from lookahead_agent.engines.draft_memory import DraftMemory


def _behind(runner: Any, memory: DraftMemory) -> set[str]:
    """The replies of a pass whose tokens before it the draft has not all read."""
    if memory.whole:  # at every pass of one reply
        return set()
    table = runner.input_batch.block_table[0]
    blocks = table.block_table.np
    found = set()
    for index, reply in enumerate(runner.input_batch.req_ids):
        before = -(-int(runner.input_batch.num_computed_tokens_cpu[index]) // table.block_size)
        if not memory.knows(blocks[index, :before].tolist()):
            found.add(reply)
    return found


def _seeded(runner: Any) -> set[str]:
    """The replies of a pass that are sampled with a seed of their own."""
    replies = runner.input_batch.req_ids
    return {replies[index] for index in runner.input_batch.generators if index < len(replies)}


def _pausing(propose: Callable[..., Any]) -> Callable[..., Any]:
    def propose_or_pause(runner: Any, scheduled: Any, *given: Any, **named: Any) -> Any:
        if not runner.speculative_config.uses_draft_model():
            return propose(runner, scheduled, *given, **named)
        memory = getattr(runner, "lookahead_draft_memory", None)
        if memory is None:
            memory = DraftMemory(runner.input_batch.block_table[0].block_size)
            runner.lookahead_draft_memory = memory
        replies = runner.input_batch.req_ids
        unguessed = _behind(runner, memory) | _seeded(runner)
        runner.lookahead_unguessed = unguessed
        reads = scheduled.num_spec_tokens_to_schedule > 0 and len(unguessed) < len(replies)
        slots = runner.input_batch.block_table[0].slot_mapping.gpu[: scheduled.total_num_scheduled_tokens].numpy()
        memory.write(slots, read=reads)
        if not reads:
            return torch.zeros((len(replies), 0), dtype=torch.int32)
        return propose(runner, scheduled, *given, **named)

    return propose_or_pause


def _without_the_unguessed(take: Callable[..., Any]) -> Callable[..., Any]:
    def take_guesses(runner: Any) -> Any:
        taken = take(runner)
        unguessed = getattr(runner, "lookahead_unguessed", None)
        if taken is not None and unguessed:
            taken.draft_token_ids = [
                [] if reply in unguessed else draft_tokens
                for reply, draft_tokens in zip(taken.req_ids, taken.draft_token_ids, strict=True)
            ]
        return taken

    return take_guesses


def _plainly_without_guesses(sample: Callable[..., Any]) -> Callable[..., Any]:
    def sample_plainly(runner: Any, logits: torch.Tensor, metadata: Any) -> Any:
        """With no guess in a pass there is nothing to reject, which vLLM takes two milliseconds to find out."""
        nothing = metadata is not None and not any(metadata.num_draft_tokens)
        return sample(runner, logits, None if nothing else metadata)

    return sample_plainly


def _remembering(schedule: Callable[..., Any]) -> Callable[..., Any]:
    def schedule_and_remember(scheduler: Any, *given: Any, **named: Any) -> Any:
        scheduled = schedule(scheduler, *given, **named)
        scheduler.lookahead_guesses = scheduled.num_spec_tokens_to_schedule
        return scheduled

    return schedule_and_remember


def _asking_where_there_are_some(post_step: Callable[..., None]) -> Callable[..., None]:
    def ask(core: Any, model_executed: bool) -> None:
        """Between passes the worker is asked for its guesses, which on a CPU takes a millisecond."""
        post_step(core, model_executed and getattr(core.scheduler, "lookahead_guesses", 1) > 0)

    return ask


GPUModelRunner.propose_draft_token_ids = _pausing(GPUModelRunner.propose_draft_token_ids)
GPUModelRunner.take_draft_token_ids = _without_the_unguessed(GPUModelRunner.take_draft_token_ids)
GPUModelRunner._sample = _plainly_without_guesses(GPUModelRunner._sample)
Scheduler.schedule = _remembering(Scheduler.schedule)
EngineCore.post_step = _asking_where_there_are_some(EngineCore.post_step)
