"""Shared draft: its lines in the buffer, the tokens proposed from them, and the draft length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.engines.shared_draft import LINES, LINES_OF_REPLY, ROOM, SharedDraftBuffer, open_buffer
from lookahead_agent.engines.shared_draft_proposer import (
    ACCEPTANCE,
    BUFFER,
    COSTS,
    DraftLength,
    ReadLine,
    SharedDraftProposer,
    propose,
    read_lines,
)

PROMPT = [5, 6, 7]
REPLY = list(range(20, 40))
FLAT = {1: 1.0, 64: 1.0}


@pytest.fixture
def buffer(tmp_path: Path) -> SharedDraftBuffer:
    return SharedDraftBuffer(tmp_path)


def read(buffer: SharedDraftBuffer) -> list[ReadLine]:
    return read_lines(open_buffer(buffer.path))


def ids(tokens: list[int]) -> Any:
    return np.asarray(tokens, dtype=np.int32)


def test_a_line_is_readable_until_its_reply_closes(buffer: SharedDraftBuffer) -> None:
    draft_lines = buffer.draft_lines(PROMPT)
    line = draft_lines.begin([*PROMPT, *REPLY[:2]])
    assert line is not None
    line.extend(REPLY[2:4])
    line.extend(REPLY[4:5])
    (found,) = read(buffer)
    assert found.token_ids.tolist() == [*PROMPT, *REPLY[:5]]
    assert found.origin == 0
    assert found.prompt_length == len(PROMPT)
    draft_lines.close()
    assert read(buffer) == []


def test_a_reply_keeps_its_newest_lines_and_ignores_replaced_ones(buffer: SharedDraftBuffer) -> None:
    draft_lines = buffer.draft_lines(PROMPT)
    lines = [draft_lines.begin([*PROMPT, number]) for number in range(LINES_OF_REPLY + 1)]
    assert [found.token_ids[-1] for found in read(buffer)] == [1, 2, 3, 4]
    assert lines[0] is not None
    lines[0].extend([99])
    assert all(99 not in found.token_ids for found in read(buffer))


def test_a_full_buffer_gives_no_line_and_a_full_line_is_truncated(buffer: SharedDraftBuffer) -> None:
    replies = [buffer.draft_lines([number]) for number in range(LINES + 1)]
    lines = [draft_lines.begin([number]) for number, draft_lines in enumerate(replies)]
    assert lines[-1] is None
    assert all(line is not None for line in lines[:-1])
    replies[0].close()
    line = replies[-1].begin([1])
    assert line is not None
    line.extend([1] * (2 * ROOM))
    assert max(len(found.token_ids) for found in read(buffer)) == ROOM


def test_the_buffer_works_after_its_file_is_removed(buffer: SharedDraftBuffer) -> None:
    opened = open_buffer(buffer.path)
    buffer.forget_file()
    assert not buffer.path.exists()
    buffer.draft_lines(PROMPT).begin(PROMPT)
    assert len(read_lines(opened)) == 1


def write_line(buffer: SharedDraftBuffer, prefix_length: int, draft_tokens: list[int]) -> None:
    line = buffer.draft_lines(PROMPT).begin([*PROMPT, *REPLY[:prefix_length]])
    assert line is not None
    line.extend(draft_tokens)


def test_proposed_tokens_continue_the_draft_line(buffer: SharedDraftBuffer) -> None:
    write_line(buffer, 2, REPLY[2:12])
    assert propose(ids([*PROMPT, *REPLY[:5]]), read(buffer), 4) == REPLY[5:9]
    assert propose(ids([*PROMPT, *REPLY[:2]]), read(buffer), 99) == REPLY[2:12]
    assert propose(ids([*PROMPT, *REPLY[:12]]), read(buffer), 4) == [], "the draft has not written that far"


def test_the_proposer_realigns_after_the_target_diverges(buffer: SharedDraftBuffer) -> None:
    write_line(buffer, 0, REPLY[:15])
    diverged = [*PROMPT, *REPLY[:3], 90, 91, 92, *REPLY[5:7]]
    assert propose(ids(diverged), read(buffer), 8) == REPLY[7:11], "two matching tokens allow four draft tokens"
    assert propose(ids([*diverged, *REPLY[7:9]]), read(buffer), 8) == REPLY[9:15]
    assert propose(ids([*PROMPT, *REPLY[:3], 90, 91]), read(buffer), 8) == []


@given(
    target=st.lists(st.integers(0, 3), max_size=30),
    draft=st.lists(st.integers(0, 3), max_size=30),
    start=st.integers(0, 10),
    limit=st.integers(0, 9),
)
def test_proposed_tokens_are_a_bounded_part_of_the_draft_line(
    tmp_path_factory: pytest.TempPathFactory, target: list[int], draft: list[int], start: int, limit: int
) -> None:
    buffer = SharedDraftBuffer(tmp_path_factory.mktemp("board"))
    prefix = [*PROMPT, *target[:start]]
    line = buffer.draft_lines(PROMPT).begin(prefix)
    assert line is not None
    line.extend(draft)
    found = propose(ids([*PROMPT, *target]), read(buffer), limit)
    assert len(found) <= limit
    tokens = [*prefix, *draft]
    assert found in [tokens[at : at + len(found)] for at in range(len(tokens))]


def proposer(
    buffer: SharedDraftBuffer, limit: int = 4, context: int = 64, costs: Any = FLAT, **additional: Any
) -> SharedDraftProposer:
    config = SimpleNamespace(
        additional_config={BUFFER: str(buffer.path), COSTS: costs, **additional},
        model_config=SimpleNamespace(max_model_len=context, get_vocab_size=lambda: 100),
        speculative_config=SimpleNamespace(num_speculative_tokens=limit),
    )
    return SharedDraftProposer(config)


def batch(*rows: list[int]) -> tuple[Any, Any]:
    tokens = np.zeros((len(rows), 64), dtype=np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return np.asarray([len(row) for row in rows], dtype=np.int32), tokens


def test_each_reply_is_proposed_tokens_of_its_own_lines(buffer: SharedDraftBuffer) -> None:
    write_line(buffer, 0, REPLY)
    other = buffer.draft_lines([8, 9]).begin([8, 9])
    assert other is not None
    other.extend([50, 51, 52])
    lengths, tokens = batch([*PROMPT, *REPLY[:3]], [8, 9, 50], [1, 2, *REPLY[:3]], [*PROMPT, *REPLY[:2]])
    found = proposer(buffer).propose([[REPLY[2]], [50], [REPLY[2]], []], lengths, tokens, slot_mappings=None)
    assert found == [REPLY[3:7], [51, 52], [], []]


def test_proposed_tokens_stay_within_the_context_and_the_vocabulary(buffer: SharedDraftBuffer) -> None:
    write_line(buffer, 0, [*REPLY[:3], 100, 3])
    lengths, tokens = batch([*PROMPT, *REPLY[:3]])
    assert proposer(buffer).propose([[22]], lengths, tokens) == [[]], "the vocabulary ends at 99"
    lengths, tokens = batch([*PROMPT, *REPLY[:1]])
    assert proposer(buffer, context=6).propose([[20]], lengths, tokens) == [[REPLY[1]]]
    assert proposer(buffer, context=5).propose([[20]], lengths, tokens) == [[]]


def test_draft_length_grows_with_acceptance_and_shrinks_with_batch_size() -> None:
    costs = {1: 1.0, 8: 1.3, 64: 8.0}
    accepted, rejected = DraftLength(8, costs), DraftLength(8, costs)
    for _ in range(30):
        accepted.learn(4, 4)
        rejected.learn(4, 0)
    assert accepted.best(1) > rejected.best(1)
    assert accepted.best(1) >= accepted.best(8) >= accepted.best(64)
    assert accepted.acceptance_rate > 0.9
    assert rejected.acceptance_rate < 0.2


def test_the_expected_acceptance_rate_counts_until_replies_are_measured(buffer: SharedDraftBuffer) -> None:
    write_line(buffer, 0, REPLY)
    lengths, tokens = batch([*PROMPT, *REPLY[:1]])
    steep = {1: 1.0, 5: 3.0}
    proposed = [
        len(proposer(buffer, costs=steep, **rate).propose([[REPLY[0]]], lengths, tokens)[0])
        for rate in ({ACCEPTANCE: 0.2}, {}, {ACCEPTANCE: 0.9})
    ]
    assert proposed == [0, 2, 3]


def test_unprofitable_proposals_stop_and_are_probed_again() -> None:
    steep = DraftLength(8, {1: 1.0, 2: 2.0, 64: 64.0})
    for _ in range(50):
        steep.learn(4, 0)
    lengths = [steep.best(1) for _ in range(60)]
    assert lengths.count(0) > 50
    assert 1 in lengths
    for _ in range(200):
        steep.learn(1, 1)
    cheap = DraftLength(8, FLAT)
    for _ in range(50):
        cheap.learn(4, 0)
    low = cheap.acceptance_rate
    for _ in range(200):
        cheap.learn(1, 1)
    assert cheap.acceptance_rate > low
    assert cheap.best(1) == 8
