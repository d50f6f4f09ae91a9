"""A guided target's guesses: what the draft writes, shown on a board, found again, and how much of it is guessed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.engines.guessing import GuessCount, guess
from lookahead_agent.engines.guide_board import LINES, LINES_OF_REPLY, ROOM, BoardReader, GuideBoard, ReadLine
from lookahead_agent.engines.guided_proposer import BOARD, COSTS, GuidedProposer

PROMPT = [5, 6, 7]
REPLY = list(range(20, 40))
FLAT = {1: 1.0, 64: 1.0}


@pytest.fixture
def board(tmp_path: Path) -> GuideBoard:
    return GuideBoard(tmp_path)


def read(board: GuideBoard) -> list[ReadLine]:
    return BoardReader(board.path).lines()


def ids(tokens: list[int]) -> Any:
    return np.asarray(tokens, dtype=np.int32)


def test_what_is_written_is_read_and_cleared_with_its_reply(board: GuideBoard) -> None:
    guides = board.guides(PROMPT)
    line = guides.begin([*PROMPT, *REPLY[:2]])
    assert line is not None
    line.extend(REPLY[2:4])
    line.extend(REPLY[4:5])
    (found,) = read(board)
    assert found.token_ids.tolist() == [*PROMPT, *REPLY[:5]]
    assert found.origin == 0
    assert found.prompt_length == len(PROMPT)
    guides.close()
    assert read(board) == []


def test_a_reply_keeps_its_newest_lines_and_a_replaced_one_writes_no_more(board: GuideBoard) -> None:
    guides = board.guides(PROMPT)
    lines = [guides.begin([*PROMPT, number]) for number in range(LINES_OF_REPLY + 1)]
    assert [found.token_ids[-1] for found in read(board)] == [1, 2, 3, 4]
    assert lines[0] is not None
    lines[0].extend([99])
    assert all(99 not in found.token_ids for found in read(board))


def test_a_full_board_and_a_full_line_leave_the_rest_out(board: GuideBoard) -> None:
    replies = [board.guides([number]) for number in range(LINES + 1)]
    lines = [guides.begin([number]) for number, guides in enumerate(replies)]
    assert lines[-1] is None
    assert all(line is not None for line in lines[:-1])
    replies[0].close()
    line = replies[-1].begin([1])
    assert line is not None
    line.extend([1] * (2 * ROOM))
    assert max(len(found.token_ids) for found in read(board)) == ROOM


def test_the_file_is_gone_and_the_board_still_works(board: GuideBoard) -> None:
    reader = BoardReader(board.path)
    board.forget_file()
    assert not board.path.exists()
    board.guides(PROMPT).begin(PROMPT)
    assert len(reader.lines()) == 1


def line_of(board: GuideBoard, begun: int, drafted: list[int]) -> None:
    line = board.guides(PROMPT).begin([*PROMPT, *REPLY[:begun]])
    assert line is not None
    line.extend(drafted)


def test_what_follows_in_the_drafts_line_is_guessed(board: GuideBoard) -> None:
    line_of(board, 2, REPLY[2:12])
    assert guess(ids([*PROMPT, *REPLY[:5]]), read(board), 4) == REPLY[5:9]
    assert guess(ids([*PROMPT, *REPLY[:2]]), read(board), 99) == REPLY[2:12]
    assert guess(ids([*PROMPT, *REPLY[:12]]), read(board), 4) == [], "the draft has not written that far"


def test_the_target_is_found_again_after_it_has_said_something_else(board: GuideBoard) -> None:
    line_of(board, 0, REPLY[:15])
    other = [*PROMPT, *REPLY[:3], 90, 91, 92, *REPLY[5:7]]
    assert guess(ids(other), read(board), 8) == REPLY[7:11], "two words agree: four guesses"
    assert guess(ids([*other, *REPLY[7:9]]), read(board), 8) == REPLY[9:15]
    assert guess(ids([*PROMPT, *REPLY[:3], 90, 91]), read(board), 8) == []


@given(
    written=st.lists(st.integers(0, 3), max_size=30),
    drafted=st.lists(st.integers(0, 3), max_size=30),
    begun=st.integers(0, 10),
    most=st.integers(0, 9),
)
def test_guesses_are_the_drafts_own_words_and_never_too_many(
    tmp_path_factory: pytest.TempPathFactory, written: list[int], drafted: list[int], begun: int, most: int
) -> None:
    board = GuideBoard(tmp_path_factory.mktemp("board"))
    prefix = [*PROMPT, *written[:begun]]
    line = board.guides(PROMPT).begin(prefix)
    assert line is not None
    line.extend(drafted)
    found = guess(ids([*PROMPT, *written]), read(board), most)
    assert len(found) <= most
    text = ",".join(map(str, [*prefix, *drafted]))
    assert ",".join(map(str, found)) in text


def proposer(board: GuideBoard, most: int = 4, context: int = 64, costs: Any = FLAT) -> GuidedProposer:
    config = SimpleNamespace(
        additional_config={BOARD: str(board.path), COSTS: costs},
        model_config=SimpleNamespace(max_model_len=context, get_vocab_size=lambda: 100),
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
    )
    return GuidedProposer(config)


def batch(*rows: list[int]) -> tuple[Any, Any]:
    tokens = np.zeros((len(rows), 64), dtype=np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = row
    return np.asarray([len(row) for row in rows], dtype=np.int32), tokens


def test_each_reply_is_guessed_by_its_own_lines(board: GuideBoard) -> None:
    line_of(board, 0, REPLY)
    other = board.guides([8, 9]).begin([8, 9])
    assert other is not None
    other.extend([50, 51, 52])
    lengths, tokens = batch([*PROMPT, *REPLY[:3]], [8, 9, 50], [1, 2, *REPLY[:3]], [*PROMPT, *REPLY[:2]])
    found = proposer(board).propose([[REPLY[2]], [50], [REPLY[2]], []], lengths, tokens, slot_mappings=None)
    assert found == [REPLY[3:7], [51, 52], [], []]


def test_nothing_is_guessed_beyond_the_context_or_that_is_no_token(board: GuideBoard) -> None:
    line_of(board, 0, [*REPLY[:3], 100, 3])
    lengths, tokens = batch([*PROMPT, *REPLY[:3]])
    assert proposer(board).propose([[22]], lengths, tokens) == [[]], "the vocabulary ends at 99"
    lengths, tokens = batch([*PROMPT, *REPLY[:1]])
    assert proposer(board, context=6).propose([[20]], lengths, tokens) == [[REPLY[1]]]
    assert proposer(board, context=5).propose([[20]], lengths, tokens) == [[]]


def test_more_is_guessed_where_guesses_are_right_and_less_where_many_wait() -> None:
    costs = {1: 1.0, 8: 1.3, 64: 8.0}
    sure, unsure = GuessCount(8, costs), GuessCount(8, costs)
    for _ in range(30):
        sure.learn(4, 4)
        unsure.learn(4, 0)
    assert sure.best(1) > unsure.best(1)
    assert sure.best(1) >= sure.best(8) >= sure.best(64)
    assert sure.right > 0.9
    assert unsure.right < 0.2


def test_guessing_ends_where_it_costs_time_and_is_tried_again() -> None:
    steep = GuessCount(8, {1: 1.0, 2: 2.0, 64: 64.0})
    for _ in range(50):
        steep.learn(4, 0)
    counts = [steep.best(1) for _ in range(60)]
    assert counts.count(0) > 50
    assert 1 in counts
    for _ in range(200):
        steep.learn(1, 1)
    cheap = GuessCount(8, FLAT)
    for _ in range(50):
        cheap.learn(4, 0)
    low = cheap.right
    for _ in range(200):
        cheap.learn(1, 1)
    assert cheap.right > low
    assert cheap.best(1) == 8
