"""What a draft that pauses has not read, by blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.cpu.pausing_draft import DraftMemory

SIZE = 4


def slots(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(numbers, dtype=np.int64)


def test_what_it_has_missed_stays_missed_until_the_block_holds_something_else() -> None:
    memory = DraftMemory(SIZE)
    memory.write(slots(0, 1, 2, 3, 4), read=True)
    assert memory.knows([0, 1])
    memory.write(slots(5), read=False)
    assert memory.knows([0])
    assert not memory.knows([0, 1])
    memory.write(slots(6, 7, 8), read=True)
    assert not memory.knows([1]), "the token before is still missing"
    assert memory.knows([2])
    memory.write(slots(4), read=True)
    assert memory.knows([0, 1, 2]), "another reply's, from its first token"


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20))
def test_it_knows_a_reply_if_and_only_if_it_has_read_every_pass(passes: list[tuple[int, bool]]) -> None:
    memory, written, missed = DraftMemory(SIZE), 0, set()
    for tokens, read in passes:
        places = range(written, written + tokens)
        memory.write(slots(*places), read=read)
        missed |= set() if read else {place // SIZE for place in places}
        written += tokens
    for block in range(written // SIZE + 1):
        assert memory.knows([block]) == (block not in missed)
