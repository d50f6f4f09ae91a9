"""What code that the library does not control may do to a reply: raise anything, or never return."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection
from typing import Any

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # until a request or a job that does not end is abandoned


def is_cancelled() -> bool:
    """Whether the current task was asked to end, in contrast to a CancelledError that foreign code raises itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """Describe a foreign error in a line; an exception that is meant to end the program names its type."""
    text = str(error)
    if isinstance(error, Exception) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


async def close_request(deltas: AsyncGenerator[Any, None]) -> None:
    """Close an engine request; an engine that fails to close it, or does not end, is logged."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await deltas.aclose()
    except BaseException as error:
        if is_cancelled():
            raise
        logger.warning("closing an engine request failed: %s", describe(error))


async def wait_for_end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until cancelled tasks have ended; abandon those that catch their cancellation and continue."""
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
        if left:
            logger.warning("%d requests ignore their cancellation and are abandoned", len(left))
