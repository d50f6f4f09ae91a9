"""Event loops for foreign code: tools, verifiers and clients of the user, which may block or never return."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lookahead_agent.system.background import LoopThread

T = TypeVar("T")

_SECONDS_TO_RESPOND = 0.5  # a loop that takes longer is blocked: the next call starts another


class ForeignLoop:
    """Runs coroutines of foreign code in an event loop of their own, which keeps what they connect between calls.

    Code that blocks the loop keeps its thread, and later calls run in a new loop. Calls that were running beside it
    wait for it, so give each tool, verifier or server a `ForeignLoop` of its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._thread = LoopThread(name)

    def run(self, call: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine function and wait for its result; an exception here (Ctrl-C) cancels it.

        Raises what the coroutine raises, and ForeignCodeError in place of an exception that ends programs or tasks.
        """
        return self._find_thread().run(_await(call))

    async def arun(self, call: Callable[[], Awaitable[T]]) -> T:
        """The asynchronous `run`, for callers in another event loop; its cancellation cancels the coroutine."""
        thread = await asyncio.to_thread(self._find_thread)
        return await asyncio.wrap_future(thread.submit(_await(call)))

    def retire(self) -> None:
        """End the loop's thread once its coroutines have ended."""
        self._thread.retire()

    def _find_thread(self) -> LoopThread:
        # Another call may have replaced the thread meanwhile, and block the new one.
        while (thread := self._thread).is_current or not thread.responds(_SECONDS_TO_RESPOND):
            with self._lock:
                if self._thread is thread:
                    self._thread = LoopThread(self._name)
                    thread.retire()
        return thread


async def _await(call: Callable[[], Awaitable[T]]) -> T:
    return await call()
