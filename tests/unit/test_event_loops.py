"""No reply blocks others, and foreign code neither blocks nor ends an event loop of the library."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable

import pytest

from lookahead_agent.engines.foreign_loop import ForeignLoop
from lookahead_agent.errors import ForeignCodeError, LookaheadError
from lookahead_agent.system import background
from lookahead_agent.system.background import LoopThread
from lookahead_agent.testing import scripted_chat

EXITS = [SystemExit("bye"), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
SCRIPT = """
import asyncio, builtins, io, os
from lookahead_agent.testing import scripted_chat

seen = {True: [], False: []}

def watched(call):
    def watching(*arguments, **named):
        seen[asyncio._get_running_loop() is not None].append((call.__name__, str(arguments[0])))
        return call(*arguments, **named)
    return watching

async def ask(policy):
    llm = scripted_chat("One.\\n\\nTwo.", policy=policy)
    assert (await llm.ainvoke("q")).text
    async for _ in llm.astream("q"):
        pass

asyncio.run(ask("exact"))  # imports what is imported at the first call
os.stat, os.listdir, os.scandir = watched(os.stat), watched(os.listdir), watched(os.scandir)
builtins.open, io.open = watched(open), watched(io.open)
for policy in ("balanced", "balanced:depth=2", "fast", "risk=0.02", "strict"):
    asyncio.run(ask(policy))
print(seen[True])
print(len(seen[False]))
"""


def test_files_are_read_only_outside_of_event_loops() -> None:
    process = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    reads_in_loops, other_reads = process.stdout.splitlines()
    assert reads_in_loops == "[]"
    assert int(other_reads) > 0, "certificates are read in other threads"


async def forty_two() -> int:
    return 42


def raising(error: BaseException) -> Callable[[], Awaitable[int]]:
    async def raise_error() -> int:
        await asyncio.sleep(0)
        raise error

    return raise_error


@pytest.mark.parametrize("error", EXITS, ids=lambda error: type(error).__name__)
def test_exceptions_that_end_programs_are_errors_and_leave_the_loop_running(error: BaseException) -> None:
    loop = ForeignLoop("foreign")
    with pytest.raises(ForeignCodeError, match=f"it raised {type(error).__name__}"):
        loop.run(raising(error))
    with pytest.raises(ForeignCodeError, match=f"it raised {type(error).__name__}"):
        asyncio.run(loop.arun(raising(error)))
    assert loop.run(forty_two) == 42


def test_a_task_that_exits_and_a_stopped_loop_leave_the_loop_running() -> None:
    thread = LoopThread("foreign")

    async def start_a_task_that_exits() -> None:
        task = asyncio.ensure_future(raising(SystemExit())())
        await asyncio.wait([task])

    async def stop() -> None:
        asyncio.get_running_loop().stop()

    thread.run(start_a_task_that_exits())
    thread.run(stop())
    assert thread.run(forty_two()) == 42


def test_code_that_blocks_delays_no_later_call() -> None:
    loop, blocked, release, ended = ForeignLoop("foreign"), threading.Event(), threading.Event(), threading.Event()

    async def block() -> None:
        blocked.set()
        release.wait(60)
        ended.set()

    first = threading.Thread(target=loop.run, args=(block,))
    first.start()
    assert blocked.wait(60)
    assert loop.run(forty_two) == 42
    assert asyncio.run(loop.arun(forty_two)) == 42
    assert not ended.is_set()
    release.set()
    first.join(60)
    assert ended.is_set(), "the blocked call ends in its own thread"


def test_calls_share_a_loop_and_a_call_from_within_gets_another() -> None:
    loop = ForeignLoop("foreign")

    async def current() -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    async def call_from_within() -> tuple[asyncio.AbstractEventLoop, asyncio.AbstractEventLoop]:
        return await current(), loop.run(current)

    assert loop.run(current) is loop.run(current)
    outer, inner = loop.run(call_from_within)
    assert outer is not inner


def test_cancelled_call_cancels_the_foreign_coroutine() -> None:
    loop, cancelled = ForeignLoop("foreign"), threading.Event()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def call() -> None:
        async with asyncio.timeout(0.05):
            await loop.arun(wait_for_ever)

    with pytest.raises(TimeoutError):
        asyncio.run(call())
    assert cancelled.wait(60)


def test_retired_thread_ends_after_its_coroutines() -> None:
    thread = LoopThread("foreign")

    async def wait(seconds: float) -> int:
        await asyncio.sleep(seconds)
        return 42

    futures = [thread.submit(wait(0.05)), thread.submit(forty_two())]
    thread.retire()
    assert [future.result(60) for future in futures] == [42, 42]
    assert thread._thread is not None
    thread._thread.join(60)
    assert not thread._thread.is_alive()


def test_synchronous_call_in_the_loops_own_thread_is_an_error_in_words() -> None:
    llm = scripted_chat("It is 4.")

    async def ask() -> list[str]:
        errors = []
        for call in (llm.invoke, lambda question: list(llm.stream(question))):
            with pytest.raises(LookaheadError, match="would wait for itself") as error:
                call("q")
            errors.append(str(error.value))
        return [*errors, (await llm.ainvoke("q")).text]

    assert background.run(ask())[-1] == "It is 4."


ENDING = """
import atexit, asyncio, logging
from lookahead_agent.system import background

async def fail():
    raise RuntimeError(when)

def fail_unattended(name):
    global when
    when = name
    background.submit_unattended(fail(), "prompts are not read ahead")
    background.run(asyncio.sleep(0.1))

logging.basicConfig()
fail_unattended("in the program")
atexit.register(fail_unattended, "at its end")
"""


def test_errors_for_which_nobody_waits_are_logged_until_the_program_ends() -> None:
    process = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    assert [line.rpartition(": ")[2] for line in process.stderr.splitlines()] == ["in the program"]
