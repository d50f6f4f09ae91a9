"""The event loop in which engines live: one thread for the whole process.

Engines belong to the loop in which they were first used, and users call from many: sync code, threads, `asyncio.run`
called again and again. So all decoding runs in one loop of our own, and callers wait for its results in theirs.
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
_of_parents: list[asyncio.AbstractEventLoop] = []  # kept, so that nothing is closed that the parent uses


def _begin_anew() -> None:
    """Leave the parent's loop to it, in a process that was forked: the thread that runs it is not here."""
    global _loop, _lock
    _lock = threading.Lock()
    if _loop is not None:
        _of_parents.append(_loop)
    _loop = None


os.register_at_fork(after_in_child=_begin_anew)


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the background loop, which the first call starts; cancelling the future cancels it."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="lookahead-agent", daemon=True).start()
        loop = _loop
    return asyncio.run_coroutine_threadsafe(work, loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the background loop and wait; an exception here (Ctrl-C) cancels it."""
    future = submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _End:
    """Follows the last item of a stream."""


async def events_of(work: Callable[[Callable[[S], None]], Coroutine[Any, Any, T]]) -> AsyncGenerator[S | T, None]:
    """Run `work(emit)`; yields what it emits, and at last its result. Closing the generator ends the work."""
    items: asyncio.Queue[S | _End] = asyncio.Queue()
    async with _tasks([work(items.put_nowait)]) as (task,):
        task.add_done_callback(lambda _: items.put_nowait(_End()))
        while not isinstance(item := await items.get(), _End):
            yield item
        yield task.result()


def stream(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """The items of a generator that runs in the background loop; closing the iterator closes the generator."""
    queue: SimpleQueue[T | _End] = SimpleQueue()
    future = _reading(items, queue.put)
    try:
        while not isinstance(item := queue.get(), _End):
            yield item
        future.result()
    finally:
        future.cancel()


async def astream(items: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """`stream` for callers in another event loop."""
    caller = asyncio.get_running_loop()
    queue: asyncio.Queue[T | _End] = asyncio.Queue()

    def put(item: T | _End) -> None:
        try:
            caller.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the caller's loop has ended, and nobody wants the rest
            future.cancel()

    future = _reading(items, put)
    try:
        while not isinstance(item := await queue.get(), _End):
            yield item
        future.result()  # it is done: the end of the stream followed it
    finally:
        future.cancel()


def _reading(items: AsyncGenerator[T, None], put: Callable[[T | _End], None]) -> Future[None]:
    """Have the background loop put all items, and the end, somewhere."""

    async def read() -> None:
        async with aclosing(items):
            async for item in items:
                put(item)

    future = submit(read())
    future.add_done_callback(lambda _: put(_End()))
    return future


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Run blocking work of minutes in a thread that is not waited for at exit, as the default executor's would be."""
    future: Future[T] = Future()

    def target() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=target, name="lookahead-agent-start", daemon=True).start()
    return await asyncio.wrap_future(future)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of several pieces of work, in order; if one fails, the others are stopped."""
    async with _tasks(work) as tasks:
        return list(await asyncio.gather(*tasks))


async def as_they_come(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """The results of several pieces of work, the first to be there first; if one fails, the others are stopped."""
    async with _tasks(work) as tasks:
        for done in asyncio.as_completed(tasks):
            yield await done


@asynccontextmanager
async def _tasks(work: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Several pieces of work at once; what is left of them is stopped at the end."""
    tasks = [asyncio.ensure_future(piece) for piece in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
