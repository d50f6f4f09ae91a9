"""The pausing draft in a fake model runner; `test_token_speculation.py` tests it on an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lookahead_agent.cpu import NO_DRAFT
from lookahead_agent.cpu.pausing_draft import _make_pausing, _without_excluded

BLOCK = 4


class Runner(SimpleNamespace):
    """A fake of vLLM's model runner with two replies, each in its own KV cache blocks."""

    def __init__(self, schedule: list[tuple[int, int, int]] | None) -> None:
        config = SimpleNamespace(num_speculative_tokens_per_batch_size=schedule, uses_draft_model=lambda: True)
        table = SimpleNamespace(
            block_size=BLOCK,
            block_table=SimpleNamespace(np=np.array([[0, 1], [2, 3]])),
            slot_mapping=SimpleNamespace(gpu=torch.zeros(16, dtype=torch.int64)),
        )
        batch = SimpleNamespace(
            block_table=[table], req_ids=["a", "b"], generators={}, num_computed_tokens_cpu=np.zeros(2, dtype=np.int32)
        )
        requests = {reply: SimpleNamespace(sampling_params=SimpleNamespace(extra_args=None)) for reply in batch.req_ids}
        super().__init__(speculative_config=config, input_batch=batch, requests=requests, proposals=0)

    def run_pass(self, slots: list[int], draft_tokens: int, computed: tuple[int, int] = (0, 0)) -> Any:
        """Run one forward pass that writes these slots; return the draft tokens that vLLM takes."""
        self.input_batch.block_table[0].slot_mapping.gpu[: len(slots)] = torch.tensor(slots)
        self.input_batch.num_computed_tokens_cpu[:] = computed
        scheduled = SimpleNamespace(num_spec_tokens_to_schedule=draft_tokens, total_num_scheduled_tokens=len(slots))
        proposed = _make_pausing(propose)(self, scheduled)
        return _without_excluded(lambda _: SimpleNamespace(req_ids=["a", "b"], draft_token_ids=proposed.tolist()))(self)


def propose(runner: Runner, scheduled: Any) -> torch.Tensor:
    runner.proposals += 1
    return torch.ones((2, scheduled.num_spec_tokens_to_schedule), dtype=torch.int32)


def test_paused_draft_does_not_run_and_proposes_nothing_after_unread_blocks() -> None:
    runner = Runner([(1, 1, 2), (2, 32, 0)])
    assert runner.run_pass([0, 1, 2, 3, 8, 9], 2).draft_token_ids == [[1, 1], [1, 1]]
    assert runner.proposals == 1
    assert runner.run_pass([4, 10], 0, (4, 2)).draft_token_ids == [[], []]
    assert runner.proposals == 1, "a paused draft does not run"
    # Reply a continues in a block that the draft read partly; b starts again in its own blocks.
    assert runner.run_pass([5, 8], 2, (5, 0)).draft_token_ids == [[], [1, 1]]
    assert runner.proposals == 2


def test_reply_with_a_seed_gets_no_draft_tokens() -> None:
    runner = Runner([(1, 1, 2), (2, 32, 0)])
    runner.input_batch.generators = {1: torch.Generator()}
    assert runner.run_pass([0, 8], 2).draft_token_ids == [[1, 1], []]
    runner.input_batch.generators = {0: torch.Generator(), 1: torch.Generator()}
    assert runner.run_pass([1, 9], 2, (1, 1)).draft_token_ids == [[], []]
    assert runner.proposals == 1, "without a reply to draft for, the draft does not run"


def test_draft_does_not_run_for_replies_that_exclude_it() -> None:
    runner = Runner([(1, 1, 2), (2, 32, 0)])
    for reply in ("a", "b"):
        runner.requests[reply].sampling_params.extra_args = {NO_DRAFT: True}
    assert runner.run_pass([0, 1, 8, 9], 2).draft_token_ids == [[], []]
    assert runner.proposals == 0
    runner.requests["b"].sampling_params.extra_args = None
    assert runner.run_pass([2, 12], 2, (2, 0)).draft_token_ids == [[], [1, 1]]
    assert runner.proposals == 1


def test_draft_whose_schedule_never_pauses_is_unchanged() -> None:
    for schedule in (None, [(1, 1, 2), (2, 32, 1)]):
        runner = Runner(schedule)
        runner.input_batch.generators = {0: torch.Generator()}
        assert runner.run_pass([0, 8], 2).draft_token_ids == [[1, 1], [1, 1]]
