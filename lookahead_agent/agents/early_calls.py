"""Tool calls that start as soon as what they need is there, while the plan is still being written."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType

from langgraph.errors import GraphBubbleUp
from typing_extensions import TypedDict

from lookahead_agent.agents.planned_calls import PlannedCall, fill_references, references
from lookahead_agent.agents.tool_use import ToolOutcome

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Calls that run at the same time."""


class CallResult(TypedDict):
    """The outcome of a planned call.

    Attributes:
        call: The call, with results of others in its arguments.
        output: What it returned, or what went wrong.
        failed: Whether something did.
    """

    call: PlannedCall
    output: str
    failed: bool


def ready_call(call: PlannedCall, results: Mapping[int, CallResult]) -> PlannedCall | None:
    """The call with what it needs, if all of that is there and well; else None."""
    numbers = references(call)
    if not numbers <= results.keys() or any(results[number]["failed"] for number in numbers):
        return None
    return fill_references(call, {number: results[number]["output"] for number in numbers})


class EarlyCalls:
    """Carries out calls in threads; a context manager, `with` or `async with`, at whose end all have ended.

    Args:
        carry_out: Carries out one call. A call that raises, or asks a person (LangGraph's `interrupt`), counts as not
            made: a node of the graph makes it, which can be tried again, and wait.
        most: Calls that may be started in all.
        later: Names of tools that are not called here.
    """

    def __init__(
        self,
        carry_out: Callable[[PlannedCall], ToolOutcome],
        *,
        most: int,
        later: Sequence[str] = (),
    ) -> None:
        self._carry_out = carry_out
        self._results: dict[int, CallResult] = {}
        self._left = most
        self._later = frozenset(later)
        self._waiting: list[PlannedCall] = []
        self._running = 0
        self._changed = threading.Condition()
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="early-call")

    def __enter__(self) -> EarlyCalls:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            if error is not None:
                self._left = 0  # what runs ends, and starts nothing any more
            self._changed.wait_for(lambda: self._running == 0)
        self._threads.shutdown()

    async def __aenter__(self) -> EarlyCalls:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.__exit__, kind, error, trace)

    def add(self, *calls: PlannedCall) -> None:
        """Take in the next calls of the plan."""
        with self._changed:
            self._waiting += calls
            self._start_ready()

    @property
    def results(self) -> list[CallResult]:
        """What has ended, in the order of the calls' numbers."""
        with self._changed:
            return [self._results[number] for number in sorted(self._results)]

    def _start_ready(self) -> None:
        for call in list(self._waiting):
            ready = ready_call(call, self._results)
            if self._left < 1 or ready is None or call["tool"] in self._later:
                continue
            self._waiting.remove(call)
            self._left -= 1
            self._running += 1
            try:
                # With the context of the node: tools are traced where they belong.
                self._threads.submit(copy_context().run, self._run, ready)
            except RuntimeError as error:  # no thread can be started: a node makes the call
                self._running -= 1
                logger.warning("call %d of %s is made later: %s", ready["number"], ready["tool"], error)

    def _run(self, call: PlannedCall) -> None:
        outcome: ToolOutcome | None = None
        try:
            outcome = self._carry_out(call)
        except GraphBubbleUp:
            logger.info("call %d asks a person: left to a node", call["number"])
        except Exception as error:
            logger.warning("call %d of %s is made again: %s", call["number"], call["tool"], error)
        finally:  # also after a SystemExit, or the node would wait for ever
            with self._changed:
                if outcome is not None:
                    self._results[call["number"]] = CallResult(call=call, output=outcome.output, failed=outcome.failed)
                self._running -= 1
                self._start_ready()
                self._changed.notify_all()
