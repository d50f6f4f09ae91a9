"""The background event loop in which engines run: one thread for the whole process.

An asyncio engine is bound to the loop that first used it, but users call from sync code, threads and repeated
`asyncio.run`. So all decoding runs in one background loop, and callers wait for its results in their own threads.
"""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
S = TypeVar("S")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_parent_loops: list[asyncio.AbstractEventLoop] = []  # kept: garbage collection would close what the parent uses


def _reset_after_fork() -> None:
    """Drop the loop inherited by fork: its thread exists only in the parent."""
    global _loop, _lock
    _lock = threading.Lock()
    if _loop is not None:
        _parent_loops.append(_loop)
    _loop = None


os.register_at_fork(after_in_child=_reset_after_fork)


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the background loop, which the first call creates; cancelling the future cancels it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="lookahead-agent", daemon=True).start()
        loop = _loop
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the background loop and wait for its result; an exception here (Ctrl-C) cancels it."""
    future = submit(coroutine)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _StreamEnd:
    """Marks the end of a stream."""


async def event_stream(produce: Callable[[Callable[[S], None]], Coroutine[Any, Any, T]]) -> AsyncGenerator[S | T, None]:
    """Run `produce(emit)`; yield the emitted items, then its result. Closing the generator cancels it."""
    items: asyncio.Queue[S | _StreamEnd] = asyncio.Queue()
    async with _running_tasks([produce(items.put_nowait)]) as (task,):
        task.add_done_callback(lambda _: items.put_nowait(_StreamEnd()))
        while not isinstance(item := await items.get(), _StreamEnd):
            yield item
        yield task.result()


def stream(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """Iterate over a generator that runs in the background loop; closing the iterator closes the generator."""
    queue: SimpleQueue[T | _StreamEnd] = SimpleQueue()
    future = _forward(items, queue.put)
    try:
        while not isinstance(item := queue.get(), _StreamEnd):
            yield item
        future.result()
    finally:
        future.cancel()


async def astream(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The asynchronous `stream`, for callers in another event loop."""
    caller = asyncio.get_running_loop()
    queue: asyncio.Queue[T | _StreamEnd] = asyncio.Queue()

    def put(item: T | _StreamEnd) -> None:
        try:
            caller.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the caller's loop is closed: stop reading
            future.cancel()

    future = _forward(items, put)
    try:
        while not isinstance(item := await queue.get(), _StreamEnd):
            yield item
        future.result()  # already done, since `_StreamEnd` was its last item; raises the generator's error
    finally:
        future.cancel()


def _forward(items: AsyncGenerator[T, None], put: Callable[[T | _StreamEnd], None]) -> Future[None]:
    """Pass each item of a generator in the background loop to `put`, then the end marker."""

    async def read() -> None:
        async with aclosing(items):
            async for item in items:
                put(item)

    future = submit(read())
    future.add_done_callback(lambda _: put(_StreamEnd()))
    return future


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a blocking function in a daemon thread: unlike a default executor's thread, it does not delay exit."""
    future: Future[T] = Future()

    def target() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=target, name="lookahead-agent-start", daemon=True).start()
    return await asyncio.wrap_future(future)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; if one fails, cancel the others."""
    async with _running_tasks(coroutines) as tasks:
        return list(await asyncio.gather(*tasks))


async def as_completed(coroutines: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Yield the results of coroutines in order of completion; if one fails, cancel the others."""
    async with _running_tasks(coroutines) as tasks:
        for future in asyncio.as_completed(tasks):
            yield await future


@asynccontextmanager
async def _running_tasks(coroutines: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run coroutines as tasks within the context; cancel the unfinished ones at its end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
