"""Plans of tool calls, `2. calculator("$1 + 60")` with the result of call 1, and calls that start early."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any

from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp
from typing_extensions import TypedDict

from lookahead_agent.agents.tool_use import ToolOutcome

logger = logging.getLogger(__name__)

_AT_ONCE = 8
"""Calls that run at the same time."""
_LINE = re.compile(r"\W{0,4}(\d{1,4})\W{1,4}([A-Za-z_]\w*)\((.*)\)\s*(?:#[^)]*)?\W*$")
# Not the beginning of an amount of money with cents.
_REFERENCE = re.compile(r"\$\{?(\d{1,4})\b\}?(?![.,]\d)")


class PlannedCall(TypedDict):
    """A tool call whose arguments may name the results of earlier ones.

    Attributes:
        plan: The plan's number: 1, and more where it was planned anew.
        number: Its number in that plan.
        tool: The tool's name.
        arguments: By name; texts may have $1, $2, … in them.
    """

    plan: int
    number: int
    tool: str
    arguments: dict[str, Any]


def read_call(line: str, tools: Mapping[str, BaseTool], plan: int = 1) -> PlannedCall | None:
    """The call in a line of a plan; None for a line that is something else, such as a thought.

    Arguments are Python literals, by name or in the tool's order. Anything else, as in `calculator(2 * 3)`, is a text.

    Args:
        line: One line.
        tools: Tools by name, for the names of arguments; a call may name another.
        plan: The plan's number.
    """
    found = _LINE.match(line.replace("`", ""))
    if found is None:
        return None
    number, tool, inside = int(found[1]), found[2], found[3].strip()
    names = list(tools[tool].args) if tool in tools else []
    return PlannedCall(plan=plan, number=number, tool=tool, arguments=_arguments(inside, names))


def _arguments(inside: str, names: Sequence[str]) -> dict[str, Any]:
    code = f"f({_quoted(inside)})"
    try:
        call = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {_name(names, 0): inside.strip("\"'")}
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        return {_name(names, 0): inside}
    given = {_name(names, place): _value(code, node) for place, node in enumerate(call.args)}
    return given | {str(keyword.arg): _value(code, keyword.value) for keyword in call.keywords}


def _quoted(inside: str) -> str:
    """With references outside of texts made texts: $1 is no Python."""
    parts = re.split(r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')""", inside)
    lone = re.compile(rf"(?<![\w.*/+-])\s*{_REFERENCE.pattern}\s*(?=,|$)")
    return "".join(
        part if place % 2 else lone.sub(lambda match: json.dumps(match[0].strip()), part)
        for place, part in enumerate(parts)
    )


def _name(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else f"argument {place + 1}"


def _value(code: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ast.get_source_segment(code, node)


def references(call: PlannedCall) -> set[int]:
    """The numbers of the calls whose results a call needs: earlier ones; a higher number is taken for dollars."""
    named = {int(number) for text in _texts(call["arguments"]) for number in _REFERENCE.findall(text)}
    return {number for number in named if 0 < number < call["number"]}


def fill_references(call: PlannedCall, results: Mapping[int, str]) -> PlannedCall:
    """The call with results in the place of their numbers: those of the calls that it `references`, and no others."""

    def fill(text: str) -> str:
        return _REFERENCE.sub(lambda match: results.get(int(match[1]), match[0]), text)

    return {**call, "arguments": in_texts(call["arguments"], fill)}


def in_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The same value with each text in it changed, however deep in lists and dictionaries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [in_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: in_texts(entry, change) for key, entry in value.items()}
    return value


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [text for entry in value for text in _texts(entry)] if isinstance(value, (list, tuple)) else []


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
