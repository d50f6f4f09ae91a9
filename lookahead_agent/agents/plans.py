"""Plans of tool calls, and their lines: `2. calculator("$1 * 1.19")`, where `$1` is the result of call 1."""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent.agents.run_record import REPEATED, conversation_before, is_question, own_words, since_last_question
from lookahead_agent.agents.turns import RETRIES, plan_line
from lookahead_agent.agents.written_calls import (
    Gap,
    Parameters,
    format_call,
    map_references,
    map_texts,
    references,
    tokens,
    whole_reference,
)
from lookahead_agent.generation.tool_calls import parse_strict_json
from lookahead_agent.system.texts import TRUNCATED

MARKER = "Plan:"  # Ends the thoughts and begins the plan; after it only the target writes
MAX_VALUE_LENGTH = 500  # Maximum length of a result inside a longer argument

SHOWN_LENGTH = 1_000  # Longest earlier result where a call is written, in characters

_ITEM = re.compile(r"^[ \t>*#-]*(\d{1,4})[.):][ \t]+", re.MULTILINE)
_BEFORE_NAME = r"[`*\s]*(?:[A-Za-z_]\w*\s*=\s*|\$\d+\s*=\s*)?"
# Ends a line's call: nothing more, a comment, a blank line, or further lines that do not continue the call.
_AFTER_CALL = re.compile(r"[`*]*[.;,]?[`*]*[ \t]*(?:#[^\n]*)?(?:\s*\Z|[ \t]*\n[ \t]*\n|\s*\n\s*[^\W\d_]|\s*\n\s*`)")
# The beginning of a block under a call: code or a text in a fence.
_OPENING = re.compile(
    r"[`*]*[.;,:]?[`*]*[ \t]*(?:#[^\n]*)?\n(?:[ \t]*\n)*"
    r"(?P<indent>[ \t]*)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[^`\n]*)(?=\n)"
)
_CLOSING = re.compile(r"\n[ \t]*(`{3,}|~{3,})[ \t]*(?=\n|\Z)")
_FENCE = re.compile(r"^[ \t]*(?:`{3,}|~{3,})", re.MULTILINE)
_AFTER_BLOCK = re.compile(r"\s*\Z|\s*\n\s*[^\W\d_]")  # nothing more, or a text that begins no other block
CODE = frozenset({"code", "script", "program", "snippet", "source_code", "sql", "statement"})
"""Names of arguments for which the form of a plan has a block."""

_ANY_NUMBER = 10_000  # Number of a line that may refer to any result
_GAP = re.compile(r"(?:\.{3}|…|<[^<>]*>|\$\d+(?=\s*(?:\.{3}|…))|\s)*(?:\.{3}|…|<[^<>]*>)\s*")


@dataclass(frozen=True)
class PlanLine:
    """A line of a plan."""

    number: int  # the line's number, from 1
    text: str  # the line as the planner wrote it, without the number
    tool: str | None = None  # name of the bound tool that the line calls; None: it calls none
    # Texts may hold $1, $2, and so on. None: the arguments are incomplete or invalid, and a model writes them.
    arguments: dict[str, Any] | None = None
    parameters: Parameters | None = field(default=None, compare=False, repr=False)  # Parameters of the tool

    @property
    def is_complete(self) -> bool:
        """Whether no argument is missing or left open, and the tool's schema accepts all."""
        if self.arguments is None or any(map(_is_gap, self.arguments.values())):
            return False
        return self.parameters is None or self.parameters.fits(self.arguments)

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

    def without_references(self, results: Mapping[int, str]) -> str:
        """Return the text without `$1`, which a model would copy into a call.

        A result of one value stands in its place, and `<result 1>` for other results.
        """
        named = self.references

        def replacement(number: int, reference: str) -> str:
            if number not in named:
                return reference
            result = results.get(number, "")
            return result.strip() if is_value(result) and result.strip() else f"<result {number}>"

        return map_references(self.text, replacement)

    def without_unknown_references(self, unknown: Container[int]) -> Self:
        """Return the line, without arguments if it references one of the `unknown` numbers."""
        if not any(number in unknown for number in self._numbers):
            return self
        text = map_references(self.text, lambda number, text: "<unknown>" if number in unknown else text)
        return replace(self, text=text, arguments=None)

    @property
    def call(self) -> str:
        """The call as a text, which equal calls share."""
        return self.text if self.tool is None or self.arguments is None else format_call(self.tool, self.arguments)

    def fill(self, results: Mapping[int, str]) -> dict[str, Any] | None:
        """Return the arguments with results, by line number, in place of references.

        None: a model writes them. They are incomplete, or do not fit the tool's schema, or a truncated result or one of
        several lines would be inside a longer text.
        """
        if self.arguments is None:
            return None
        named = {number: results[number] for number in self.references if number in results}
        if any(TRUNCATED.search(result) for result in named.values()):
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
        return parse_strict_json(result)
    except ValueError:
        return result


def is_value(result: str) -> bool:
    """Whether a result is one value, which can be part of a text: a short line."""
    return len(result) <= MAX_VALUE_LENGTH and "\n" not in result.strip()


def plan_form(tools: Sequence[BaseTool]) -> str:
    """Return the first calls of a plan with placeholder arguments, which show a model the form.

    They are one call, and one of a tool that takes code, if another one does. Its code is in a block.
    """
    # A small model copies lines that it does not need: with a second tool of another kind in the form, most plans had
    # a call of it. It would write unwanted files too. An example with tools that it does not have is copied whole.
    first = next((tool for tool in tools if (tool.metadata or {}).get("readOnlyHint")), tools[0])
    with_code = [tool for tool in tools if _code_argument(Parameters.of(tool))]
    second = with_code[:1] if first not in with_code else []
    lines = []
    for number, tool in enumerate([first, *second], 1):
        parameters = Parameters.of(tool)
        code = _code_argument(parameters)
        given = []
        for name in parameters.required_names:
            if name != code:
                quote = '"' if parameters.is_text(name) else ""
                given.append(f"{name}={quote}<{name}>{quote}")
        block = f"\n```\n<{code}>\n```" if code else ""
        lines.append(f"{number}. {tool.name}({', '.join(given)}){block}")
    return "\n".join(lines)


def _code_argument(parameters: Parameters) -> str | None:
    names = [name for name in parameters.required_names if name in CODE and parameters.is_text(name)]
    return names[0] if len(names) == 1 else None


def parse_plan(text: str, tools: "PlanTools | Mapping[str, BaseTool]", known: int = 0) -> list[PlanLine]:
    """Parse the numbered calls after a reply's first marker.

    Args:
        text: The reply.
        tools: The tools that the calls may name, by name; `PlanTools` reads each schema once for several plans.
        known: Number of results of earlier plans. If the calls are numbered after them, the calls may refer to them.
    """
    tools = tools if isinstance(tools, PlanTools) else PlanTools(tools)
    _, _, plan = text.partition(MARKER)
    starts = _find_starts(plan, tools, known)
    before = known if starts and starts[0].number == known + 1 else 0  # number before the first line
    ends = [*(start.place for start in starts[1:]), len(plan)]
    lines: list[PlanLine] = []
    texts, calls = set[str](), set[str]()
    in_order = len(starts)  # number of lines before the first one with another number than its own
    for start, end in zip(starts, ends, strict=False):
        number, text = before + len(lines) + 1, plan[start.end : end].strip()
        may_repeat = start.number != number and (len(lines) < in_order or "$" not in text)
        if may_repeat and text in texts:
            continue
        line = _read_line(number, text, tools, start.in_fence)
        if may_repeat and line.call in calls:
            continue  # a model that begins its plan again repeats it
        in_order = in_order if start.number == number else min(in_order, len(lines))
        lines.append(line)
        texts.add(text)
        calls.add(line.call)
    # From there on, a reference to one of the plan's numbers may mean several results.
    last = before + len(lines)
    ambiguous = {*range(before + 1, last + 1), *(start.number for start in starts)}
    return [
        line.without_unknown_references(range(line.number, last + 1) if place < in_order else ambiguous)
        for place, line in enumerate(lines)
    ]


class PlanTools:
    """The tools of an agent's plans.

    Args:
        tools: By name.

    Attributes:
        begins_call: The pattern of the beginning of a call, up to its bracket; the group is the tool's name.
    """

    def __init__(self, tools: Mapping[str, BaseTool]) -> None:
        self._tools, self._parameters = tools, dict[str, Parameters]()
        self.begins_call = _call_pattern((*tools,))

    def parameters(self, name: str) -> Parameters:
        """Return a tool's parameters; each turn parses the plans again, and a long plan has many calls of a tool."""
        if name not in self._parameters:
            self._parameters[name] = Parameters.of(self._tools[name])
        return self._parameters[name]


class _LineStart(NamedTuple):
    """The beginning of a line of a plan."""

    number: int  # the number that the line has in the text
    place: int
    end: int  # place after the number
    in_fence: bool  # whether the line is in a fence, which a fence without a language closes


def _find_starts(plan: str, tools: PlanTools, known: int) -> list[_LineStart]:
    """Find the numbers that begin lines: those in order, and any that begins a tool's call."""
    starts: list[_LineStart] = []
    skipped: Iterator[_LineSpan] = iter(())
    span = _LineSpan(0, 0)  # the last part of a line that has several lines itself
    counted, following = 0, 1  # place up to which fences are counted; the next number in order
    blocks = _Blocks(plan)
    for match in _ITEM.finditer(plan):
        number, is_call = int(match[1]), tools.begins_call.match(plan, match.end()) is not None
        if not starts and number == known + 1:
            following = number
        if number != following and not is_call:
            continue
        while span.end <= match.start() and (found := next(skipped, None)) is not None:
            span = found
            if span.begin < span.end and not span.may_have_calls:
                blocks.count_fences(counted, span.begin)
                counted = span.end
        # A number inside a text of several lines begins no line of the plan.
        if span.begin < match.start() < span.end and not (is_call and span.may_have_calls):
            continue
        blocks.count_fences(counted, match.start())
        counted, following = match.end(), following + (number == following)
        starts.append(_LineStart(number, match.start(), match.end(), blocks.in_fence))
        skipped = _long_texts(plan, match.end(), tools, blocks)
        span = _LineSpan(0, 0)
    return starts


class _Blocks:
    """The blocks under the calls of a text.

    Attributes:
        in_fence: Whether the calls themselves are in a fence, which a fence without a language closes.
    """

    def __init__(self, text: str, in_fence: bool = False) -> None:
        self._text, self.in_fence = text, in_fence
        self._last = {match[1]: match.start() for match in _CLOSING.finditer(text)}  # last closing fences

    def count_fences(self, begin: int, end: int) -> None:
        """Read the fences between two places."""
        self.in_fence ^= len(_FENCE.findall(self._text, begin, end)) % 2 == 1

    def find_opening(self, at: int) -> re.Match[str] | None:
        """Return the beginning of the block under a call that ends at a place."""
        found = _OPENING.match(self._text, at)
        return found if found is not None and (found["language"].strip() or not self.in_fence) else None

    def find_closing(self, opening: re.Match[str]) -> re.Match[str] | None:
        """Return the end of a block; None: it has none."""
        if self._last.get(opening["fence"], -1) < opening.end():  # searches after many openings take quadratic time
            return None
        found = _CLOSING.finditer(self._text, opening.end())
        return next(match for match in found if match[1] == opening["fence"])


class _LineSpan(NamedTuple):
    """A part of a line that has several lines itself, such as a text in triple quotes."""

    begin: int
    end: int
    may_have_calls: bool = False  # whether this is a block that does not belong to the call above it


def _long_texts(plan: str, at: int, tools: PlanTools, blocks: _Blocks) -> Iterator[_LineSpan]:
    """Yield where texts of several lines are in the call at a place of a plan, and under it.

    Empty spans say how far the call has been read, so that an open call is not read to the end of the plan.
    """
    if (found := tools.begins_call.match(plan, at)) is None:
        return
    end = found.end()
    for token in tokens(plan, end):
        end = token.end
        yield _LineSpan(token.start if token.is_long_text else end, end)
    if (opening := blocks.find_opening(end)) is None:
        return
    line, missing, _ = _read_call(plan[at:end], tools, _ANY_NUMBER)
    if (closing := blocks.find_closing(opening)) is not None:
        yield _LineSpan(end, closing.end(), missing is None and line.is_complete)
    elif missing is not None:
        yield _LineSpan(end, len(plan))  # the rest is the argument that the call lacks


@lru_cache(maxsize=256)
def _call_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(rf"{_BEFORE_NAME}({listed})[`*]*\s*\(")


def _read_line(number: int, text: str, tools: PlanTools, in_fence: bool) -> PlanLine:
    line, missing, end = _read_call(text, tools, number)
    if line.parameters is None:
        return line
    arguments, after, blocks = line.arguments, _AFTER_CALL, _Blocks(text, in_fence)
    opening = blocks.find_opening(end)
    closing = blocks.find_closing(opening) if missing is not None and opening is not None else None
    if arguments is not None and missing is not None and opening is not None and closing is not None:
        rows = text[opening.end() : closing.start()].split("\n")[1:]
        block = "\n".join(row.removeprefix(opening["indent"]) for row in rows)
        arguments, end, opening = arguments | {missing: block}, closing.end(), None
        after = _AFTER_CALL if in_fence else _AFTER_BLOCK
    if after.match(text, end) is None:
        return replace(line, arguments=None)
    line = replace(line, arguments=arguments)
    # A small model goes on after its plan, as with results that it makes up. They are not part of the call.
    line = replace(line, text=text if opening is not None and not line.is_complete else text[:end])
    return line if line.is_complete else replace(line, arguments=None)


def _read_call(text: str, tools: PlanTools, number: int) -> tuple[PlanLine, str | None, int]:
    """Read the call at the beginning of a line: its arguments, the one that it lacks, and where it ends."""
    if (found := tools.begins_call.match(text)) is None:
        return PlanLine(number, text), None, 0
    parameters = tools.parameters(found[1])
    line = PlanLine(number, text, found[1], parameters=parameters)
    try:
        arguments, end = parameters.read(text, found.end(), number - 1)
    except ValueError:
        *_, last = (found.end(), *(token.end for token in tokens(text, found.end())))
        return line, None, last
    return replace(line, arguments=arguments), parameters.find_missing_text(arguments), end


def _is_gap(value: Any) -> bool:
    """Whether a value is left open, or a part of it is."""
    if isinstance(value, (list, dict)):
        return any(map(_is_gap, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Gap) or (isinstance(value, str) and _GAP.fullmatch(value) is not None)


# Plans, and the results of their lines

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
    # Results of earlier plans by number, if this plan's calls are numbered after them.
    known: Sequence[tuple[ToolCall, ToolMessage]] = ()

    @property
    def results(self) -> dict[int, str]:
        """Results of the successful lines and of earlier plans, by number."""
        last = dict(enumerate(self.known, 1)) | {number: tries[-1] for number, tries in self.attempts.items()}
        return {
            number: self.exact.get(result.tool_call_id, result.text)
            for number, (_, result) in last.items()
            if result.status != "error"
        }

    @property
    def has_failed(self) -> bool:
        """Whether a line has no successful result."""
        return not {line.number for line in self.lines} <= self.results.keys()

    def tries(self, line: PlanLine) -> int:
        """Return the number of attempts for a line."""
        return len(self.attempts.get(line.number, ())) + self.unwritten.get(line.number, 0)

    def format_results(self, line: PlanLine, most: int, most_named: int) -> str:
        """Format the other results for a model that writes the call of a line, without the words of its own failure.

        Each is shortened to `most` characters, or to `most_named` if the line references it.
        """
        last = dict(enumerate(self.known, 1)) | {number: tries[-1] for number, tries in self.attempts.items()}
        blocks = [
            _block_of(number, *entry, most_named if number in line.references else most)
            for number, entry in sorted(last.items())
            if number != line.number and not (entry[1].status == "error" and words(entry) == self.words(line))
        ]
        return "\n\n".join(blocks)

    def words(self, line: PlanLine) -> str | None:
        """Return the tool's words about the last failure of a line; None: it has not failed."""
        attempts = self.attempts.get(line.number)
        return words(attempts[-1]) if attempts else None


def words(entry: tuple[ToolCall, ToolMessage]) -> str:
    """Return the tool's own words about a failed call."""
    return own_words(entry[1].text)[0]


def _block_of(number: int, call: ToolCall, result: ToolMessage, most: int | None = None) -> str:
    text = f"failed: {words((call, result))}" if result.status == "error" else str(result.text)
    return f"[{number}] {format_call(call['name'], call['args'])}\n{text if most is None else shorten(text, most)}"


def shorten(text: str, most: int) -> str:
    """Return a text in about `most` characters: its beginning and its end, and how much is left out between them."""
    if len(text) <= most:
        return text
    head, tail = text[: most * 2 // 3], text[-(most // 3) :]
    # Whole lines, where they are short.
    head = head[: head.rfind("\n") + 1] if "\n" in head[-200:] else head
    tail = tail[tail.find("\n") + 1 :] if "\n" in tail[:200] else tail
    left_out = len(text) - len(head) - len(tail)
    return f"{head.rstrip()}\n[{left_out:,} of {len(text):,} characters are left out here]\n{tail.lstrip()}"


def results_of(plans: Sequence[PlanRun]) -> list[tuple[ToolCall, ToolMessage]]:
    """Return the calls of plans that have results, each once, with its latest result."""
    latest = {
        format_call(call["name"], call["args"]): (call, result)
        for run in plans
        for _, (*_, (call, result)) in sorted(run.attempts.items())
        if result.status != "error"
    }
    return [*latest.values()]


def format_plans(plans: Sequence[PlanRun], most: int | None = None, *, without: str | None = None) -> str:
    """Format what plans have tried: the results, numbered from 1, then failed calls with the tools' words, each once.

    A plan without a failure stands for what failed in the plans before it. `without` are words that are left out.
    """
    blocks = [_block_of(number, *entry, most) for number, entry in enumerate(results_of(plans), 1)]
    failed: dict[str, list[str]] = {}  # calls by the words of their tool
    for run in plans if plans and plans[-1].has_failed else ():
        for line in run.lines:
            tries = run.attempts.get(line.number, [])
            if tries and tries[-1][1].status != "error":
                continue
            if not tries:
                failed.setdefault("(not carried out)", []).append(line.text)
            for entry in tries:
                if words(entry) != without:
                    reason = shorten(f"failed: {words(entry)}", SHOWN_LENGTH)
                    failed.setdefault(reason, []).append(format_call(entry[0]["name"], entry[0]["args"]))
    for reason, calls in failed.items():
        blocks.append("\n".join([*(f"- {call}" for call in dict.fromkeys(calls)), reason]))
    return "\n\n".join(blocks) or "none"


@dataclass(frozen=True)
class Conversation:
    """The question of a run, the questions and answers before it, and the plans after it."""

    question: str
    before: list[AnyMessage]
    plans: list[PlanRun]

    @classmethod
    def read(cls, messages: Sequence[AnyMessage], tools: PlanTools, exact: Mapping[str, str] | None = None) -> Self:
        """Parse the questions, answers and plans in messages.

        Args:
            messages: The conversation, with the messages of the run.
            tools: The tools that the plans' calls may name.
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
                    known = results_of(result.plans)
                    lines = parse_plan(message.text, tools, len(known)) or [PlanLine(1, result.question)]
                    run = PlanRun(lines, exact=exact or {}, known=known if lines[0].number > 1 else ())
                    result.plans.append(run)
                elif message.name == "executor" and not message.tool_calls and result.plans:
                    number, unwritten = int(message.additional_kwargs.get("line", 0)), result.plans[-1].unwritten
                    unwritten[number] = unwritten.get(number, 0) + 1
                calls |= {call["id"]: call for call in message.tool_calls if call["id"]}
            elif isinstance(message, ToolMessage) and (found := plan_line(message.tool_call_id)):
                run, line = result.plans[found.plan - 1], found.line
                if REPEATED in message.additional_kwargs:  # no further attempt is of use
                    run.unwritten[line] = RETRIES + 1
                else:
                    call = calls[message.tool_call_id]
                    if executed := message.additional_kwargs.get(EXECUTED):
                        call = ToolCall(name=executed["name"], args=executed["args"], id=call["id"], type="tool_call")
                    run.attempts.setdefault(line, []).append((call, message))
        return result
