"""Runs code that the library does not control, which may block, raise anything, or never return."""

import asyncio
import logging
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Any, TypeVar

from lookahead_agent.engines.foreign_loop import ForeignLoop

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 10.0  # until a request or a job that does not end is abandoned


# By class: an instance that blocks the loop keeps its thread, and later calls get a new one.
_LOOPS: weakref.WeakKeyDictionary[type, ForeignLoop] = weakref.WeakKeyDictionary()


def is_foreign(part: object) -> bool:
    """Whether a verifier, or a model that it asks, runs in an event loop of its own: a user's class does.

    A loop with a clock of its own, as in a simulation, runs everything itself: another loop would wait in real time.
    """
    if type(part).__module__.partition(".")[0] == "lookahead_agent":
        return False
    return abs(asyncio.get_running_loop().time() - time.monotonic()) < 1


async def call_part(part: object, call: Callable[[], Awaitable[T]]) -> T:
    """Await a call of a verifier, or of a model that it asks; a foreign one cannot block or end the decoder's loop."""
    if not is_foreign(part):
        return await call()
    cls = type(part)
    return await _LOOPS.setdefault(cls, ForeignLoop(f"lookahead-agent-{cls.__name__}")).arun(call)


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
    """Close an engine request; an engine that fails to close it, or never ends, is logged."""

    async def close() -> None:
        try:
            await deltas.aclose()
        except BaseException as error:
            if is_cancelled():
                raise
            logger.warning("closing an engine request failed: %s", describe(error))

    closing = asyncio.get_running_loop().create_task(close())
    await wait_for_end([closing])
    closing.cancel()


async def wait_for_end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until tasks that were told to end have ended; abandon those that go on."""
    if tasks:
        _, left = await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        if left:
            logger.warning("%d requests do not end %g s after they were told to: abandoned", len(left), _CLOSE_SECONDS)
