"""Plans of tool calls, `2. calculator("$1 * 1.19")` with the result of call 1 in the place of `$1`, and their lines."""

import ast
import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from lookahead_agent.agents.prompts import call_text, this_question

MARKER = "Plan:"  # The text that ends the thoughts and begins the plan; behind it only the target writes
LONGEST_VALUE = 500  # Characters of a result that can be part of a longer argument

_ITEM = re.compile(r"^[ \t>*#-]*(\d{1,4})[.):][ \t]+", re.MULTILINE)
_CALL = re.compile(r"[`*_\s]*(?:[A-Za-z_]\w*\s*=\s*|\$\d+\s*=\s*)?([A-Za-z_]\w*)\(")
# Not the beginning of an amount of money with cents.
_REFERENCE = re.compile(r"\$\{?(\d{1,4})\b\}?(?![.,]\d)")
_LONE_REFERENCE = re.compile(rf"{_REFERENCE.pattern}(?=\s*[,)\]}}])")
_LEFT_OPEN = re.compile(r"\.{3}|…|<[^<>]*>|\$\d+(?=\s*(\.{3}|…))|\s")


@dataclass(frozen=True)
class PlanLine:
    """A line of a plan."""

    number: int  # from 1
    text: str  # as the planner wrote it
    tool: str | None = None  # name of the bound tool that it calls; None: it is not a call of one
    # The call's, by name; texts may hold $1, $2, and so on. None: they are left open or wrong, and a model writes them.
    arguments: dict[str, Any] | None = None
    empty: bool = False  # whether all arguments are left open, as in the form that the planner was shown

    @property
    def references(self) -> frozenset[int]:
        """Numbers of the earlier lines whose results the line names."""
        texts: list[str] = []
        _in_texts(self.text if self.arguments is None else self.arguments, texts.append)
        named = {int(number) for number in _REFERENCE.findall("\n".join(texts))}
        return frozenset(number for number in named if 0 < number < self.number)  # another is an amount of money

    def without_references(self) -> str:
        """The text with gaps in the place of references, which a model would copy into a call."""
        named = self.references
        return _REFERENCE.sub(lambda match: "..." if int(match[1]) in named else match[0], self.text)

    def filled(self, results: Mapping[int, str]) -> dict[str, Any] | None:
        """The arguments with results, by the number of their line, in the place of the numbers.

        None: a model writes them, for they are left open, or a result of several lines would stand in a longer text.
        """
        if self.arguments is None:
            return None
        fits = True

        def fill(text: str) -> Any:
            nonlocal fits
            whole = _REFERENCE.fullmatch(text.strip())
            if whole is not None and int(whole[1]) in results:
                return results[int(whole[1])]
            named = [int(number) for number in _REFERENCE.findall(text)]
            fits = fits and all(is_value(results[number]) for number in named if number in results)
            return _REFERENCE.sub(lambda match: results.get(int(match[1]), match[0]).strip(), text)

        arguments: dict[str, Any] = _in_texts(self.arguments, fill)
        return arguments if fits else None


def is_value(result: str) -> bool:
    """Whether a result is one value, which can be part of a text: a short line."""
    return len(result) <= LONGEST_VALUE and "\n" not in result.strip()


def plan_form(tools: Sequence[BaseTool]) -> str:
    """At most two lines of a plan with open arguments, which show a model the form."""
    # A small model copies every line that it is shown, and would write files that nobody asked for.
    first = next((tool for tool in tools if (tool.metadata or {}).get("readOnlyHint")), tools[0])
    others = [tool for tool in tools if tool is not first]
    lines = []
    for number, tool in enumerate([first, *others[-1:]], 1):
        schemas, required = _parameters(tool)
        text = '"..."' if tool is first else '"... $1 ..."'
        given = [f"{name}={text if schemas[name].get('type') == 'string' else '...'}" for name in required]
        lines.append(f"{number}. {tool.name}({', '.join(given)})")
    return "\n".join(lines)


def _parameters(tool: BaseTool) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Schemas of a tool's arguments by name, and the names of those that it needs."""
    parameters = convert_to_openai_tool(tool)["function"].get("parameters", {})
    return parameters.get("properties", {}), parameters.get("required", [])


def read_plan(text: str, tools: Mapping[str, BaseTool]) -> list[PlanLine]:
    """The numbered lines behind a reply's first marker, without those that only copy the form; `tools` are by name."""
    _, _, plan = text.partition(MARKER)
    starts: list[re.Match[str]] = []
    for match in _ITEM.finditer(plan):
        before = plan[starts[-1].end() : match.start()] if starts else ""
        call = _CALL.match(before)
        # A number within the quotes of a call that goes over several lines begins no line of the plan.
        is_open = call is not None and _closed(before[call.end() :]) is None and '"""' in before
        if int(match[1]) == len(starts) + 1 and not is_open:
            starts.append(match)
    ends = [*(match.start() for match in starts[1:]), len(plan)]
    lines = [
        _read_line(number, plan[match.end() : end].strip(), tools)
        for number, (match, end) in enumerate(zip(starts, ends, strict=False), 1)
    ]
    lines = [_without_later_references(line, len(lines)) for line in lines]
    # A small model copies lines of the form that it needs no call for.
    named = {number for line in lines if not line.empty for number in line.references}
    kept = [line for line in lines if not line.empty or line.number in named]
    return kept or lines


def _without_later_references(line: PlanLine, count: int) -> PlanLine:
    """The line, left open where it names its own result or a later one, which a model then writes."""
    later = {int(number) for number in _REFERENCE.findall(line.text)} & {*range(line.number, count + 1)}
    if not later or line.empty:
        return line
    text = _REFERENCE.sub(lambda match: "..." if int(match[1]) in later else match[0], line.text)
    return replace(line, text=text, arguments=None)


def _read_line(number: int, text: str, tools: Mapping[str, BaseTool]) -> PlanLine:
    found = _CALL.match(text)
    if found is None or found[1] not in tools:
        return PlanLine(number, text)
    schemas, required = _parameters(tools[found[1]])
    rest = text[found.end() :]
    inside = _closed(rest)
    if inside is None:  # such as an apostrophe in a text without quotes
        line = rest.split("\n", 1)[0].rstrip("`*_ ")
        inside = line[:-1] if line.endswith(")") else None
    given = _arguments(inside, list(schemas)) if inside is not None else None
    if given is None:
        return PlanLine(number, text, found[1])
    left_open = [value is ... or (isinstance(value, str) and not _LEFT_OPEN.sub("", value)) for value in given.values()]
    complete = set(required) <= given.keys() <= schemas.keys() and not any(left_open)
    return PlanLine(number, text, found[1], given if complete else None, empty=bool(given) and all(left_open))


def _closed(text: str) -> str | None:
    """The text up to the bracket that closes the call, as Python would read it; None: there is none."""
    # Line breaks inside of simple quotes become escapes, and references outside of quotes become texts.
    made: list[str] = []
    depth, quote, at = 1, "", 0
    while at < len(text):
        if quote and text[at] == "\\":
            made.append(text[at : at + 2])
            at += 2
        elif quote:
            ends = text.startswith(quote, at)
            made.append(quote if ends else "\\n" if text[at] == "\n" and len(quote) == 1 else text[at])
            at, quote = at + (len(quote) if ends else 1), "" if ends else quote
        elif text[at] in "\"'":
            quote = text[at] * 3 if text.startswith(text[at] * 3, at) else text[at]
            made.append(quote)
            at += len(quote)
        elif lone := _LONE_REFERENCE.match(text, at):
            made.append(json.dumps(lone[0]) if re.search(r"[,(=:\[]\s*$", "(" + "".join(made)) else lone[0])
            at = lone.end()
        else:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return "".join(made)
            made.append(text[at])
            at += 1
    return None


def _arguments(inside: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Arguments by name: Python literals; anything else is a text, as in `calculator(2 * 3)`."""
    code = f"f({inside})"
    try:
        call = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _one_text(inside, names)
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        return _one_text(inside, names)
    if len(call.args) > len(names):
        return None
    given = {name: _value(code, node) for name, node in zip(names, call.args, strict=False)}
    return given | {str(keyword.arg): _value(code, keyword.value) for keyword in call.keywords}


def _one_text(inside: str, names: Sequence[str]) -> dict[str, Any] | None:
    if not names:
        return None
    return {names[0]: re.sub(rf"^{re.escape(names[0])}\s*=\s*", "", inside.strip()).strip("\"'")}


def _value(code: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ast.get_source_segment(code, node)


def _in_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """The same value with each text in it changed, however deep in lists and dictionaries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_in_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: _in_texts(entry, change) for key, entry in value.items()}
    return value


# Plans, and the results of their lines

_CALL_ID = re.compile(r"plan-(\d+)-(\d+)-[0-9a-f]{8}")


def plan_call(plan: int, line: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    """A tool call whose identity says which line of which plan it carries out."""
    return ToolCall(name=name, args=arguments, id=f"plan-{plan}-{line}-{uuid.uuid4().hex[:8]}", type="tool_call")


@dataclass
class PlanRun:
    """One plan and what became of its lines, by their numbers."""

    lines: list[PlanLine]
    # Calls with their results, whose status is "error" where the tool failed, or a person rejected the call.
    attempts: dict[int, list[tuple[ToolCall, ToolMessage]]] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)  # how often a model wrote no call for the line

    @property
    def results(self) -> dict[int, str]:
        """Results of the lines that went well, by number."""
        last = {number: made[-1][1] for number, made in self.attempts.items()}
        return {number: result.text for number, result in last.items() if result.status != "error"}

    @property
    def failed(self) -> bool:
        """Whether not every line went well."""
        return not {line.number for line in self.lines} <= self.results.keys()

    def tries(self, line: PlanLine) -> int:
        """How often the line was tried."""
        return len(self.attempts.get(line.number, ())) + self.unwritten.get(line.number, 0)

    def shown(self, without: PlanLine | None = None) -> str:
        """The results as blocks, for a model; without a line and those behind it that were not carried out."""
        blocks = []
        for line in self.lines:
            if made := self.attempts.get(line.number, []):
                call, result = made[-1]
                failed = "failed: " if result.status == "error" else ""
                block = f"{call_text(call['name'], call['args'])}\n{failed}{result.text}"
            else:
                block = f"{line.text}\n(not carried out)"
            if without is None or (line != without and made):
                blocks.append(f"[{line.number}] {block}")
        return "\n\n".join(blocks) or "none"


@dataclass(frozen=True)
class Conversation:
    """The last question of messages, the questions and answers before it, and the plans behind it."""

    question: str
    before: list[AnyMessage]
    plans: list[PlanRun]

    @classmethod
    def read(cls, messages: Sequence[BaseMessage], tools: Mapping[str, BaseTool]) -> Self:
        """Read the questions, answers and plans in messages; `tools` are by name."""
        now = this_question(messages)
        before: list[AnyMessage] = [
            message
            for message in messages[: len(messages) - len(now)]
            if isinstance(message, (HumanMessage, SystemMessage))
            or (isinstance(message, AIMessage) and not message.tool_calls and message.name is None and message.text)
        ]
        said = cls(now[0].text.strip(), before, [])
        calls: dict[str, ToolCall] = {}
        for message in now[1:]:
            if isinstance(message, AIMessage):
                if message.name == "planner":
                    # Without a plan, the question is the one line, for which a model has to write a call.
                    said.plans.append(PlanRun(read_plan(message.text, tools) or [PlanLine(1, said.question)]))
                elif message.name == "executor" and not message.tool_calls and said.plans:
                    number, unwritten = int(message.additional_kwargs.get("line", 0)), said.plans[-1].unwritten
                    unwritten[number] = unwritten.get(number, 0) + 1
                calls |= {call["id"]: call for call in message.tool_calls if call["id"]}
            elif isinstance(message, ToolMessage) and (found := _CALL_ID.fullmatch(message.tool_call_id)):
                attempts = said.plans[int(found[1]) - 1].attempts.setdefault(int(found[2]), [])
                attempts.append((calls[message.tool_call_id], message))
        return said
