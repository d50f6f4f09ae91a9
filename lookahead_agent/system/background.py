"""The background event loop in which engines run: one thread for the whole process.

An asyncio engine is bound to the loop that first used it, but users call from sync code, threads and repeated
`asyncio.run`. So all decoding runs in one background loop, and callers wait for its results in their own threads.
"""

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from concurrent.futures import Future
from contextlib import aclosing, asynccontextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from lookahead_agent.errors import ForeignCodeError, LookaheadError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 10.0  # seconds until a request or a job that does not end is abandoned

_OWN_THREAD = (
    "a synchronous call (invoke, stream, batch) in the library's own event loop would wait for itself: "
    "use the asynchronous one there (await llm.ainvoke(…))"
)
_LOOPS: "weakref.WeakSet[LoopThread]" = weakref.WeakSet()
_parent_loops: list[asyncio.AbstractEventLoop] = []  # kept: garbage collection would close what the parent uses


class LoopThread:
    """An event loop in a daemon thread of its own, which the first call starts.

    Foreign code cannot end it: neither an exception that ends programs nor `loop.stop()` ends the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._retired = False
        self._initialize()
        _LOOPS.add(self)

    def _initialize(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop; cancelling the future cancels it.

        The future raises ForeignCodeError in place of an exception that ends programs, such as `SystemExit`.
        """
        return asyncio.run_coroutine_threadsafe(contain(coroutine), self._start_loop())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop and wait for its result; an exception here (Ctrl-C) cancels it.

        Raises LookaheadError if the loop's own thread calls, which would wait for itself.
        """
        if self.is_current:
            coroutine.close()
            raise LookaheadError(_OWN_THREAD)
        return result_of(self.submit(coroutine))

    @property
    def is_current(self) -> bool:
        """Whether this is the loop's own thread."""
        return self._thread is threading.current_thread()

    def responds(self, seconds: float) -> bool:
        """Return whether the loop runs a callback within some seconds: not if a coroutine blocks it."""
        answered = threading.Event()
        self._start_loop().call_soon_threadsafe(answered.set)
        return answered.wait(seconds)

    def retire(self) -> None:
        """End the thread once the coroutines in it have ended."""

        async def stop() -> None:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(others)
            await asyncio.sleep(0)  # the callbacks of tasks that just ended run first
            self._retired = True
            asyncio.get_running_loop().stop()

        self.submit(stop())

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._serve, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return self._loop

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._retired:
            try:
                loop.run_forever()
            except BaseException as error:  # a task that foreign code started may raise SystemExit in the loop itself
                logger.error("%s: foreign code raised %s in the event loop", self._name, type(error).__name__)
        loop.close()

    def reset_after_fork(self) -> None:
        """Drop the loop inherited by fork: its thread exists only in the parent."""
        if self._loop is not None:
            _parent_loops.append(self._loop)
        self._initialize()


def result_of(future: Future[T]) -> T:
    """Wait for the result of a call in another thread; an exception here (Ctrl-C) cancels the call."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


async def contain(awaitable: Awaitable[T]) -> T:
    """Await foreign code; raise ForeignCodeError in place of an exception that would end the program or the task.

    A cancellation of the running task passes.
    """
    task = asyncio.current_task()
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        if task is None or task.cancelling():
            raise
        raise ForeignCodeError("it raised CancelledError, and nobody had cancelled it") from error
    except GeneratorExit as error:
        if _current_task() is not task:  # the garbage collector closes this coroutine
            raise
        raise ForeignCodeError("it raised GeneratorExit") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise _foreign_exit(error) from error


def _current_task() -> "asyncio.Task[Any] | None":
    return asyncio.current_task() if asyncio._get_running_loop() is not None else None


def _foreign_exit(error: BaseException) -> ForeignCodeError:
    return ForeignCodeError(f"it raised {describe(error)}, which would end the program")


_background = LoopThread("lookahead-agent")
submit = _background.submit
run = _background.run


def _reset_after_fork() -> None:
    for thread in list(_LOOPS):
        thread.reset_after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)


def submit_unattended(coroutine: Coroutine[Any, Any, None], failure: str) -> None:
    """Start a coroutine for which nobody waits in the background loop; its error is a warning that says `failure`."""

    def report(future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            log_unattended(logging.WARNING, failure, error)

    submit(coroutine).add_done_callback(report)


def log_unattended(level: int, failure: str, error: BaseException) -> None:
    """Log an error for which nobody waits, unless the program ends: libraries then fail under what still runs."""
    if threading.main_thread().is_alive():
        logger.log(level, "%s: %s", failure, describe(error))


class _StreamEnd:
    """Marks the end of a stream."""


Producer = Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]
"""A coroutine function that passes each item to its argument."""


async def event_stream(produce: Producer[T]) -> AsyncGenerator[T, None]:
    """Run `produce(emit)` in this loop, and yield the emitted items; closing the generator cancels it."""
    items: asyncio.Queue[T | _StreamEnd] = asyncio.Queue()
    async with _run_tasks([produce(items.put_nowait)]) as (task,):
        task.add_done_callback(lambda _: items.put_nowait(_StreamEnd()))
        while not isinstance(item := await items.get(), _StreamEnd):
            yield item
        task.result()


def stream(produce: Producer[T]) -> Iterator[T]:
    """Run `produce(emit)` in the background loop, and yield the emitted items; closing the iterator cancels it."""
    if _background.is_current:
        raise LookaheadError(_OWN_THREAD)
    queue: SimpleQueue[T | _StreamEnd] = SimpleQueue()
    process = os.getpid()
    future = _start(produce, queue.put)
    try:
        while not isinstance(item := queue.get(), _StreamEnd):
            yield item
            if os.getpid() != process:
                raise LookaheadError("this stream runs in the parent process: start a stream of its own after the fork")
        future.result()
    finally:
        if os.getpid() == process:
            future.cancel()


async def astream(produce: Producer[T]) -> AsyncGenerator[T, None]:
    """The asynchronous `stream`, for callers in another event loop."""
    caller = asyncio.get_running_loop()
    queue: asyncio.Queue[T | _StreamEnd] = asyncio.Queue()

    def put(item: T | _StreamEnd) -> None:
        try:
            caller.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the caller's loop is closed: stop reading
            future.cancel()

    future = _start(produce, put)
    try:
        while not isinstance(item := await queue.get(), _StreamEnd):
            yield item
        future.result()  # already done, since `_StreamEnd` was its last item; raises the producer's error
    finally:
        future.cancel()


def _start(produce: Producer[T], put: Callable[[T | _StreamEnd], None]) -> Future[None]:
    """Run a producer in the background loop; the end marker follows its items."""
    future = submit(produce(put))
    future.add_done_callback(lambda _: put(_StreamEnd()))
    return future


async def forward(items: AsyncGenerator[T, None], emit: Callable[[T], None]) -> None:
    """Pass each item of a generator to `emit`: with the generator bound, it is a producer."""
    async with aclosing(items):
        async for item in items:
            emit(item)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """Run a blocking function in a daemon thread: unlike a default executor's thread, it does not delay exit."""
    future: Future[T] = Future()

    def target() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except (SystemExit, KeyboardInterrupt) as error:
                future.set_exception(_foreign_exit(error))
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=target, name="lookahead-agent-start", daemon=True).start()
    return await asyncio.wrap_future(future)


async def gather_or_cancel(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order; if one fails, cancel the others."""
    async with _run_tasks(coroutines) as tasks:
        return list(await asyncio.gather(*tasks))


async def as_completed(coroutines: Iterable[Coroutine[Any, Any, T]]) -> AsyncGenerator[T, None]:
    """Yield the results of coroutines in order of completion; if one fails, cancel the others."""
    async with _run_tasks(coroutines) as tasks:
        for future in asyncio.as_completed(tasks):
            yield await future


@asynccontextmanager
async def _run_tasks(coroutines: Iterable[Coroutine[Any, Any, T]]) -> AsyncIterator[list[asyncio.Task[T]]]:
    """Run coroutines as tasks within the context; cancel the unfinished ones at its end."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_foreign(part: object) -> bool:
    """Whether a verifier, or a model that it asks, runs in an event loop of its own: a user's class does.

    A loop with a clock of its own, as in a simulation, runs everything itself: another loop would wait in real time.
    """
    if type(part).__module__.partition(".")[0] == "lookahead_agent":
        return False
    return abs(asyncio.get_running_loop().time() - time.monotonic()) < 1


def is_cancelled() -> bool:
    """Whether the current task was asked to end, in contrast to a CancelledError that foreign code raises itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """Describe a foreign error in a line; an exception that is meant to end the program names its type."""
    try:
        text = str(error)
    except BaseException:  # a foreign class may raise anything here too
        text = ""
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
