"""The memory of the KV cache blocks that a paused draft has not read."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.cpu.pausing_draft import DraftMemory

SIZE = 4


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_missed_block_stays_unknown_until_it_is_overwritten_from_its_first_token() -> None:
    memory = DraftMemory(SIZE)
    memory.write(slots(0, 1, 2, 3, 4), read=True)
    assert memory.knows([0, 1])
    memory.write(slots(5), read=False)
    assert memory.knows([0])
    assert not memory.knows([0, 1])
    memory.write(slots(6, 7, 8), read=True)
    assert not memory.knows([1]), "an earlier token of the block is still unread"
    assert memory.knows([2])
    memory.write(slots(4), read=True)
    assert memory.knows([0, 1, 2]), "another reply overwrote the block from its first token"


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20))
def test_block_is_known_if_and_only_if_the_draft_read_all_its_passes(passes: list[tuple[int, bool]]) -> None:
    memory, written, missed = DraftMemory(SIZE), 0, set()
    for tokens, read in passes:
        positions = range(written, written + tokens)
        memory.write(slots(*positions), read=read)
        missed |= set() if read else {position // SIZE for position in positions}
        written += tokens
    for block in range(written // SIZE + 1):
        assert memory.knows([block]) == (block not in missed)
