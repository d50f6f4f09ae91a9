"""Plans of tool calls, and their lines: `2. calculator("$1 * 1.19")`, where `$1` is the result of call 1."""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, Self

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent.agents.prompts import (
    REPEATED,
    conversation_before,
    format_call,
    is_question,
    since_last_question,
)
from lookahead_agent.agents.turns import RETRIES
from lookahead_agent.agents.written_calls import (
    Parameters,
    map_references,
    map_texts,
    references,
    tokens,
    whole_reference,
)

MARKER = "Plan:"  # Ends the thoughts and begins the plan; after it only the target writes
MAX_VALUE_LENGTH = 500  # Maximum length of a result inside a longer argument

_ITEM = re.compile(r"^[ \t>*#-]*(\d{1,4})[.):][ \t]+", re.MULTILINE)
_BEFORE_NAME = r"[`*\s]*(?:[A-Za-z_]\w*\s*=\s*|\$\d+\s*=\s*)?"
# Ends a line's call: nothing more, a comment, or further lines that do not continue the call.
_AFTER_CALL = re.compile(r"[`*]*[.;,]?[`*]*[ \t]*(?:#[^\n]*)?(?:\s*\Z|\s*\n\s*[^\W\d_]|\s*\n\s*`)")
_PLACEHOLDER = re.compile(r"(?:\.{3}|…|\$\d+(?=\s*(?:\.{3}|…))|\s)*(?:\.{3}|…)(?:\.{3}|…|\s)*")
_GAP = re.compile(r"(?:\.{3}|…|<[^<>]*>|\$\d+(?=\s*(?:\.{3}|…))|\s)*(?:\.{3}|…|<[^<>]*>)\s*")
# The notice at the end of a truncated result; see `truncation_notice`.
_TRUNCATED = re.compile(r"\n… \(cut: [\d,]+ of [\d,]+ characters; [^\n]*\)\s*\Z")


@dataclass(frozen=True)
class PlanLine:
    """A line of a plan."""

    number: int  # from 1
    text: str  # as the planner wrote it, without the number
    tool: str | None = None  # name of the bound tool that the line calls; None: it calls none
    # By name; texts may hold $1, $2, and so on. None: they are incomplete or invalid, and a model writes them.
    arguments: dict[str, Any] | None = None
    empty: bool = False  # whether all arguments are placeholders, as in the form that the planner sees
    parameters: Parameters | None = field(default=None, compare=False, repr=False)  # of the tool

    @property
    def references(self) -> frozenset[int]:
        """Numbers of the earlier lines whose results the line references."""
        # Other numbers are amounts of money.
        return frozenset(number for number in self._numbers if 0 < number < self.number)

    @property
    def highest_reference(self) -> int:
        """The highest number after a dollar sign, or 0."""
        return max(self._numbers, default=0)

    @property
    def _numbers(self) -> frozenset[int]:
        return references(self.text if self.arguments is None else self.arguments)

    def without_references(self) -> str:
        """Return the text with "..." in place of references, which a model would copy into a call."""
        named = self.references
        return map_references(self.text, lambda number, text: "..." if number in named else text)

    def without_later_references(self, count: int) -> Self:
        """Return the line, without arguments if it references its own or a later one of `count` lines."""
        later = self._numbers & {*range(self.number, count + 1)}
        if not later or self.empty:
            return self
        text = map_references(self.text, lambda number, text: "..." if number in later else text)
        return replace(self, text=text, arguments=None)

    def filled(self, results: Mapping[int, str]) -> dict[str, Any] | None:
        """Return the arguments with results, by line number, in place of references.

        None: a model writes them. They are incomplete, or do not fit the tool's schema, or a truncated result or one of
        several lines would be inside a longer text.
        """
        if self.arguments is None:
            return None
        named = {number: results[number] for number in self.references if number in results}
        if any(_TRUNCATED.search(result) for result in named.values()):
            return None
        filled: dict[str, Any] = {}
        try:
            for name, value in self.arguments.items():
                texts, values = (map_texts(value, partial(_fill, named, read=read)) for read in (str, _json_or_text))
                # Results are texts. The schema says where a number, a list or an object is meant.
                is_text = self.parameters is None or self.parameters.accepts(name, texts)
                filled[name] = texts if is_text else values
        except _DoesNotFit:
            return None
        fits = self.parameters is None or self.parameters.fits(filled, with_references=False)
        return filled if fits else None


class _DoesNotFit(Exception):
    """A result cannot stand inside a text."""


def _fill(results: Mapping[int, str], text: str, *, read: Callable[[str], Any]) -> Any:
    whole = whole_reference(text)
    if whole is not None and whole in results:
        return read(results[whole])
    if not all(is_value(results[number]) for number in references(text) if number in results):
        raise _DoesNotFit
    return map_references(text, lambda number, reference: results.get(number, reference).strip())


def _json_or_text(result: str) -> Any:
    """Return the value that a result is in JSON; other results are texts."""
    try:
        return json.loads(result, parse_constant=_raise)
    except (ValueError, RecursionError):
        return result


def _raise(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def is_value(result: str) -> bool:
    """Whether a result is one value, which can be part of a text: a short line."""
    return len(result) <= MAX_VALUE_LENGTH and "\n" not in result.strip()


def plan_form(tools: Sequence[BaseTool]) -> str:
    """Return at most two lines of a plan with placeholder arguments, which show a model the form."""
    # A small model copies every line of the form, and would write unwanted files.
    first = next((tool for tool in tools if (tool.metadata or {}).get("readOnlyHint")), tools[0])
    others = [tool for tool in tools if tool is not first]
    lines = []
    for number, tool in enumerate([first, *others[-1:]], 1):
        parameters = Parameters.of(tool)
        text = '"..."' if tool is first else '"... $1 ..."'
        given = [f"{name}={text if parameters.is_text(name) else '...'}" for name in parameters.required]
        lines.append(f"{number}. {tool.name}({', '.join(given)})")
    return "\n".join(lines)


def parse_plan(text: str, tools: Mapping[str, BaseTool]) -> list[PlanLine]:
    """Parse the numbered lines after a reply's first marker, without copied lines of the form; `tools` are by name."""
    _, _, plan = text.partition(MARKER)
    starts: list[re.Match[str]] = []
    quoted: Iterator[tuple[int, int]] = iter(())
    begin = end = 0  # of the last text in triple quotes
    for match in _ITEM.finditer(plan):
        if int(match[1]) != len(starts) + 1:
            continue
        while end <= match.start() and (span := next(quoted, None)) is not None:
            begin, end = span
        # A number inside the quotes of a multi-line call begins no line of the plan.
        if not begin < match.start() < end:
            starts.append(match)
            begin = end = 0
            quoted = _long_texts(plan, match.end(), tools)
    ends = [*(match.start() for match in starts[1:]), len(plan)]
    lines = [
        _read_line(number, plan[match.end() : end].strip(), tools)
        for number, (match, end) in enumerate(zip(starts, ends, strict=False), 1)
    ]
    lines = [line.without_later_references(len(lines)) for line in lines]
    # A small model copies lines of the form for which it needs no call.
    named = {number for line in lines if not line.empty for number in line.references}
    kept = [line for line in lines if not line.empty or line.number in named]
    return kept or lines


def _long_texts(plan: str, at: int, tools: Mapping[str, BaseTool]) -> Iterator[tuple[int, int]]:
    """Yield where texts in triple quotes are in the call at a place of a plan, if there is one."""
    if (found := _call_pattern((*tools,)).match(plan, at)) is not None:
        yield from ((token.start, token.end) for token in tokens(plan, found.end()) if token.is_long_text)


@lru_cache(maxsize=256)
def _call_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return the pattern of the beginning of a call, up to its bracket; the group is the tool's name."""
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"{_BEFORE_NAME}({listed})[`*]*\s*\(")


def _read_line(number: int, text: str, tools: Mapping[str, BaseTool]) -> PlanLine:
    found = _call_pattern((*tools,)).match(text)
    if found is None:
        return PlanLine(number, text)
    parameters = Parameters.of(tools[found[1]])
    line = PlanLine(number, text, found[1], parameters=parameters)
    try:
        arguments, end = parameters.read(text, found.end(), number - 1)
    except ValueError:
        return line
    empty = bool(arguments) and all(_is_gap(value, _PLACEHOLDER) for value in arguments.values())
    complete = not any(_is_gap(value, _GAP) for value in arguments.values()) and _AFTER_CALL.match(text, end)
    return replace(line, arguments=arguments if complete and parameters.fits(arguments) else None, empty=empty)


def _is_gap(value: Any, gap: re.Pattern[str]) -> bool:
    """Whether a value is left open, or a part of it is."""
    if isinstance(value, (list, dict)):
        return any(_is_gap(part, gap) for part in (value.values() if isinstance(value, dict) else value))
    return value is ... or (isinstance(value, str) and gap.fullmatch(value) is not None)


# Plans, and the results of their lines

_CALL_ID = re.compile(r"plan-(\d+)-(\d+)-[0-9a-f]{8}")


def plan_call(plan: int, line: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a tool call whose id encodes its plan and line."""
    return ToolCall(name=name, args=arguments, id=f"plan-{plan}-{line}-{uuid.uuid4().hex[:8]}", type="tool_call")


EXECUTED = "executed"
"""Key in `additional_kwargs` of a result: the call that ran in place of the model's, and its own text."""


def exact_results(messages: Iterable[BaseMessage]) -> dict[str, str]:
    """Return the texts of results by call id, without notes to the model, however much a prompt shows of them."""
    return {
        message.tool_call_id: message.additional_kwargs.get(EXECUTED, {}).get("text", message.text)
        for message in messages
        if isinstance(message, ToolMessage)
    }


@dataclass
class PlanRun:
    """One plan with the attempts of its lines, by line number."""

    lines: list[PlanLine]
    # Calls with their results; the status is "error" if the tool failed or a person rejected the call.
    attempts: dict[int, list[tuple[ToolCall, ToolMessage]]] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)  # how often a model failed to write the line's call
    exact: Mapping[str, str] = field(default_factory=dict)  # texts of results by call id, where prompts show less

    @property
    def results(self) -> dict[int, str]:
        """Results of the successful lines, by number."""
        last = {number: tries[-1][1] for number, tries in self.attempts.items()}
        return {
            number: self.exact.get(result.tool_call_id, result.text)
            for number, result in last.items()
            if result.status != "error"
        }

    @property
    def failed(self) -> bool:
        """Whether a line has no successful result."""
        return not {line.number for line in self.lines} <= self.results.keys()

    def tries(self, line: PlanLine) -> int:
        """Return the number of attempts for a line."""
        return len(self.attempts.get(line.number, ())) + self.unwritten.get(line.number, 0)

    def shown(self, without: PlanLine | None = None) -> str:
        """Format the results as blocks for a model; `without` leaves out that line and all lines without a call."""
        blocks = []
        for line in self.lines:
            if attempts := self.attempts.get(line.number, []):
                call, result = attempts[-1]
                failed = "failed: " if result.status == "error" else ""
                block = f"{format_call(call['name'], call['args'])}\n{failed}{result.text}"
            else:
                block = f"{line.text}\n(not carried out)"
            if without is None or (line != without and attempts):
                blocks.append(f"[{line.number}] {block}")
        return "\n\n".join(blocks) or "none"


@dataclass(frozen=True)
class Conversation:
    """The question of a run, the questions and answers before it, and the plans after it."""

    question: str
    before: list[AnyMessage]
    plans: list[PlanRun]

    @classmethod
    def read(
        cls, messages: Sequence[AnyMessage], tools: Mapping[str, BaseTool], exact: Mapping[str, str] | None = None
    ) -> Self:
        """Parse the questions, answers and plans in messages.

        Args:
            messages: The conversation, with the messages of the run.
            tools: By name.
            exact: Texts of results by call id (`exact_results`), where the messages show less of them.
        """
        now = since_last_question(messages)
        question = "\n\n".join(message.text.strip() for message in now if is_question(message))
        result = cls(question, conversation_before(messages[: len(messages) - len(now)]), [])
        calls: dict[str, ToolCall] = {}
        for message in now[1:]:
            if isinstance(message, AIMessage):
                if message.name == "planner":
                    # Without a plan, the question is the only line, and a model has to write its call.
                    lines = parse_plan(message.text, tools) or [PlanLine(1, result.question)]
                    result.plans.append(PlanRun(lines, exact=exact or {}))
                elif message.name == "executor" and not message.tool_calls and result.plans:
                    number, unwritten = int(message.additional_kwargs.get("line", 0)), result.plans[-1].unwritten
                    unwritten[number] = unwritten.get(number, 0) + 1
                calls |= {call["id"]: call for call in message.tool_calls if call["id"]}
            elif isinstance(message, ToolMessage) and (found := _CALL_ID.fullmatch(message.tool_call_id)):
                run, line = result.plans[int(found[1]) - 1], int(found[2])
                if REPEATED in message.additional_kwargs:  # no further attempt is of use
                    run.unwritten[line] = RETRIES + 1
                else:
                    call = calls[message.tool_call_id]
                    if executed := message.additional_kwargs.get(EXECUTED):
                        call = ToolCall(name=executed["name"], args=executed["args"], id=call["id"], type="tool_call")
                    run.attempts.setdefault(line, []).append((call, message))
        return result
