"""What a draft model that pauses has not read."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt


class DraftMemory:
    """Which blocks hold tokens that the draft has not read.

    Args:
        block_size: Tokens of a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._missed: set[int] = set()

    def write(self, slots: npt.NDArray[np.int64], *, read: bool) -> None:
        """Take in where the tokens of a pass were written to.

        Args:
            slots: Their places, shape (tokens,): those of a block follow each other.
            read: Whether the draft has read them, too.
        """
        if read and self.whole:
            return
        blocks = slots // self._block_size
        # What a block held before is gone with its first token.
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
