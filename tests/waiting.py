"""Wait in a test for the work of another thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until a condition holds; fails if it does not within `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)
