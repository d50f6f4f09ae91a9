"""A draft that pauses, by what vLLM's model runner asks of it; on an engine it is in test_token_speculation.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from lookahead_agent.cpu import NO_DRAFT
from lookahead_agent.cpu.pausing_draft import _pausing, _without_excluded

BLOCK = 4


class Runner(SimpleNamespace):
    """Two replies, each in blocks of its own, and a schedule that says 0 for two at once."""

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
        super().__init__(speculative_config=config, input_batch=batch, requests=requests, asked=0)

    def passes(self, slots: list[int], draft_tokens: int, computed: tuple[int, int] = (0, 0)) -> Any:
        """One pass that writes to these places; the draft tokens that vLLM is given."""
        self.input_batch.block_table[0].slot_mapping.gpu[: len(slots)] = torch.tensor(slots)
        self.input_batch.num_computed_tokens_cpu[:] = computed
        scheduled = SimpleNamespace(num_spec_tokens_to_schedule=draft_tokens, total_num_scheduled_tokens=len(slots))
        proposed = _pausing(propose)(self, scheduled)
        return _without_excluded(lambda _: SimpleNamespace(req_ids=["a", "b"], draft_token_ids=proposed.tolist()))(self)


def propose(runner: Runner, scheduled: Any) -> torch.Tensor:
    runner.asked += 1
    return torch.ones((2, scheduled.num_spec_tokens_to_schedule), dtype=torch.int32)


def test_it_reads_nothing_where_the_schedule_says_so_and_proposes_nothing_on_top_of_that() -> None:
    runner = Runner([(1, 1, 2), (2, 32, 0)])
    assert runner.passes([0, 1, 2, 3, 8, 9], 2).draft_token_ids == [[1, 1], [1, 1]]
    assert runner.asked == 1
    assert runner.passes([4, 10], 0, (4, 2)).draft_token_ids == [[], []]
    assert runner.asked == 1, "it has paused"
    # Reply a goes on in a block that was read partly, b begins anew in blocks of its own.
    assert runner.passes([5, 8], 2, (5, 0)).draft_token_ids == [[], [1, 1]]
    assert runner.asked == 2


def test_a_reply_with_a_seed_gets_none() -> None:
    runner = Runner([(1, 1, 2), (2, 32, 0)])
    runner.input_batch.generators = {1: torch.Generator()}
    assert runner.passes([0, 8], 2).draft_token_ids == [[1, 1], []]
    runner.input_batch.generators = {0: torch.Generator(), 1: torch.Generator()}
    assert runner.passes([1, 9], 2, (1, 1)).draft_token_ids == [[], []]
    assert runner.asked == 1, "nothing is read for nobody"


def test_it_reads_nothing_for_a_reply_that_is_to_be_written_without_it() -> None:
    runner = Runner([(1, 1, 2), (2, 32, 0)])
    for reply in ("a", "b"):
        runner.requests[reply].sampling_params.extra_args = {NO_DRAFT: True}
    assert runner.passes([0, 1, 8, 9], 2).draft_token_ids == [[], []]
    assert runner.asked == 0
    runner.requests["b"].sampling_params.extra_args = None
    assert runner.passes([2, 12], 2, (2, 0)).draft_token_ids == [[], [1, 1]]
    assert runner.asked == 1


def test_a_draft_that_never_pauses_is_left_alone() -> None:
    for schedule in (None, [(1, 1, 2), (2, 32, 1)]):
        runner = Runner(schedule)
        runner.input_batch.generators = {0: torch.Generator()}
        assert runner.passes([0, 8], 2).draft_token_ids == [[1, 1], [1, 1]]
