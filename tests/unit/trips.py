"""Counts the modules of the library that a call passes through, and how often it changes from one to another.

The scripted engine and its script stand in for an engine and a model: neither they nor what they call count.
`python -m tests.unit.trips` prints both numbers for `llm.invoke` and for `plan_execute` with two model calls.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import lookahead_agent
from graphs.plan_execute import build_plan_execute
from lookahead_agent.system import background
from lookahead_agent.testing import scripted_chat, scripted_replies
from tools.calculator import calculator

PACKAGE = Path(lookahead_agent.__file__).parent
FAKES = {str(PACKAGE / name) for name in ("testing.py", "engines/scripted.py")}
EXECUTOR_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""The size of asyncio's default executor."""
QUESTION = "What is 2 + 2?"
ProfileFunction = Callable[[FrameType, str, Any], None]


class Trip(NamedTuple):
    """The modules that a call passed through, and the number of calls from one into another, in all threads."""

    modules: set[str]
    changes: int


def count_trip(call: Callable[[], object]) -> Trip:
    """Profile a call in this thread, in the background loop, and in its executor."""
    modules: set[str] = set()
    last: dict[int, str] = {}
    changes = 0

    def record(frame: FrameType, event: str, argument: object) -> None:
        nonlocal changes
        path = frame.f_code.co_filename
        if event not in ("call", "return") or not path.startswith(f"{PACKAGE}{os.sep}") or _is_of_fake(frame):
            return
        module, thread = path[len(str(PACKAGE)) + 1 :], threading.get_ident()
        if event == "call":
            modules.add(module)
            changes += last.get(thread) != module
        last[thread] = module

    async def set_profile_in_all_threads(profile: ProfileFunction | None) -> None:
        """Set the profile function in the background loop's thread and in its executor's threads, started first."""
        started = threading.Barrier(EXECUTOR_THREADS)

        def in_thread() -> None:
            started.wait(10)
            sys.setprofile(profile)

        await asyncio.gather(*[asyncio.to_thread(in_thread) for _ in range(EXECUTOR_THREADS)])
        sys.setprofile(profile)

    threading.setprofile(record)
    background.run(set_profile_in_all_threads(record))
    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        background.run(set_profile_in_all_threads(None))
    return Trip(modules, changes)


def _is_of_fake(frame: FrameType | None) -> bool:
    """Whether a fake runs in this frame, or has called it."""
    while frame is not None and frame.f_code.co_filename not in FAKES:
        frame = frame.f_back
    return frame is not None


def invoke_trip() -> Trip:
    """Count a warm reply of scripted engines with the default policy."""
    llm = scripted_chat("First this.\n\nThen that.\n\nIt is 4.")
    assert llm.invoke(QUESTION).response_metadata["lookahead"]["accepted"] > 0
    return count_trip(lambda: llm.invoke(QUESTION))


def plan_execute_trip() -> Trip:
    """Count a warm run of `plan_execute` with a planner, a call, and a finisher."""
    script = {"You_solve": 'I calculate.\n\nPlan:\n1. calculator("2 + 2")', "You_answer": "It is 4."}
    graph = build_plan_execute(scripted_chat(scripted_replies(**script)), [calculator])

    def run() -> None:
        assert graph.invoke({"messages": [("human", QUESTION)]})["messages"][-1].text == "It is 4."

    run()
    return count_trip(run)


if __name__ == "__main__":
    for name, trip in (("llm.invoke", invoke_trip()), ("plan_execute", plan_execute_trip())):
        print(f"{name}: {len(trip.modules)} files, {trip.changes} changes of file", *sorted(trip.modules), sep="\n  ")
