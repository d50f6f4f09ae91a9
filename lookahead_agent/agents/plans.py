"""Plans of tool calls, and their lines: `2. calculator("$1 * 1.19")`, where `$1` is the result of call 1."""

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

from lookahead_agent.agents.prompts import format_call, since_last_question

MARKER = "Plan:"  # Ends the thoughts and begins the plan; after it only the target writes
MAX_VALUE_LENGTH = 500  # Maximum length of a result inside a longer argument

_ITEM = re.compile(r"^[ \t>*#-]*(\d{1,4})[.):][ \t]+", re.MULTILINE)
_CALL = re.compile(r"[`*_\s]*(?:[A-Za-z_]\w*\s*=\s*|\$\d+\s*=\s*)?([A-Za-z_]\w*)\(")
# Does not match the beginning of an amount of money with cents.
_REFERENCE = re.compile(r"\$\{?(\d{1,4})\b\}?(?![.,]\d)")
_LONE_REFERENCE = re.compile(rf"{_REFERENCE.pattern}(?=\s*[,)\]}}])")
_GAP = re.compile(r"\.{3}|…|<[^<>]*>|\$\d+(?=\s*(\.{3}|…))|\s")


@dataclass(frozen=True)
class PlanLine:
    """A line of a plan."""

    number: int  # from 1
    text: str  # as the planner wrote it, without the number
    tool: str | None = None  # name of the bound tool that the line calls; None: it calls none
    # By name; texts may hold $1, $2, and so on. None: they are incomplete or invalid, and a model writes them.
    arguments: dict[str, Any] | None = None
    empty: bool = False  # whether all arguments are placeholders, as in the form that the planner sees

    @property
    def references(self) -> frozenset[int]:
        """Numbers of the earlier lines whose results the line references."""
        texts: list[str] = []
        _map_texts(self.text if self.arguments is None else self.arguments, texts.append)
        named = {int(number) for number in _REFERENCE.findall("\n".join(texts))}
        return frozenset(number for number in named if 0 < number < self.number)  # others are amounts of money

    def without_references(self) -> str:
        """Return the text with "..." in place of references, which a model would copy into a call."""
        named = self.references
        return _REFERENCE.sub(lambda match: "..." if int(match[1]) in named else match[0], self.text)

    def filled(self, results: Mapping[int, str]) -> dict[str, Any] | None:
        """Return the arguments with results, by line number, in place of references.

        None: a model writes them. They are incomplete, or a result of several lines would be inside a longer text.
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

        arguments: dict[str, Any] = _map_texts(self.arguments, fill)
        return arguments if fits else None


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
        schemas, required = _parameters(tool)
        text = '"..."' if tool is first else '"... $1 ..."'
        given = [f"{name}={text if schemas[name].get('type') == 'string' else '...'}" for name in required]
        lines.append(f"{number}. {tool.name}({', '.join(given)})")
    return "\n".join(lines)


def _parameters(tool: BaseTool) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the schemas of a tool's arguments by name, and the names of required arguments."""
    parameters = convert_to_openai_tool(tool)["function"].get("parameters", {})
    return parameters.get("properties", {}), parameters.get("required", [])


def parse_plan(text: str, tools: Mapping[str, BaseTool]) -> list[PlanLine]:
    """Parse the numbered lines after a reply's first marker, without copied lines of the form; `tools` are by name."""
    _, _, plan = text.partition(MARKER)
    starts: list[re.Match[str]] = []
    for match in _ITEM.finditer(plan):
        before = plan[starts[-1].end() : match.start()] if starts else ""
        call = _CALL.match(before)
        # A number inside the quotes of a multi-line call begins no line of the plan.
        is_open = call is not None and _until_closed(before[call.end() :]) is None and '"""' in before
        if int(match[1]) == len(starts) + 1 and not is_open:
            starts.append(match)
    ends = [*(match.start() for match in starts[1:]), len(plan)]
    lines = [
        _read_line(number, plan[match.end() : end].strip(), tools)
        for number, (match, end) in enumerate(zip(starts, ends, strict=False), 1)
    ]
    lines = [_without_later_references(line, len(lines)) for line in lines]
    # A small model copies lines of the form for which it needs no call.
    named = {number for line in lines if not line.empty for number in line.references}
    kept = [line for line in lines if not line.empty or line.number in named]
    return kept or lines


def _without_later_references(line: PlanLine, count: int) -> PlanLine:
    """Mark a line as incomplete if it references its own or a later result; a model then writes the call."""
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
    argument_text = _until_closed(rest)
    if argument_text is None:  # for example after an apostrophe in an unquoted text
        line = rest.split("\n", 1)[0].rstrip("`*_ ")
        argument_text = line[:-1] if line.endswith(")") else None
    arguments = _arguments(argument_text, list(schemas)) if argument_text is not None else None
    if arguments is None:
        return PlanLine(number, text, found[1])
    gaps = [value is ... or (isinstance(value, str) and not _GAP.sub("", value)) for value in arguments.values()]
    complete = set(required) <= arguments.keys() <= schemas.keys() and not any(gaps)
    return PlanLine(number, text, found[1], arguments if complete else None, empty=bool(arguments) and all(gaps))


def _until_closed(text: str) -> str | None:
    """Return the text up to the call's closing bracket, by Python's syntax; None: there is none."""
    # Line breaks in single-quoted strings become escapes, and references outside of strings become strings.
    pieces: list[str] = []
    depth, quote, at = 1, "", 0
    while at < len(text):
        if quote and text[at] == "\\":
            pieces.append(text[at : at + 2])
            at += 2
        elif quote:
            ends = text.startswith(quote, at)
            pieces.append(quote if ends else "\\n" if text[at] == "\n" and len(quote) == 1 else text[at])
            at, quote = at + (len(quote) if ends else 1), "" if ends else quote
        elif text[at] in "\"'":
            quote = text[at] * 3 if text.startswith(text[at] * 3, at) else text[at]
            pieces.append(quote)
            at += len(quote)
        elif lone := _LONE_REFERENCE.match(text, at):
            pieces.append(json.dumps(lone[0]) if re.search(r"[,(=:\[]\s*$", "(" + "".join(pieces)) else lone[0])
            at = lone.end()
        else:
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return "".join(pieces)
            pieces.append(text[at])
            at += 1
    return None


def _arguments(inside: str, names: Sequence[str]) -> dict[str, Any] | None:
    """Parse arguments by name: Python literals; anything else is a text, as in `calculator(2 * 3)`."""
    code = f"f({inside})"
    try:
        call = ast.parse(code, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _as_one_text(inside, names)
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        return _as_one_text(inside, names)
    if len(call.args) > len(names):
        return None
    arguments = {name: _value(code, node) for name, node in zip(names, call.args, strict=False)}
    return arguments | {str(keyword.arg): _value(code, keyword.value) for keyword in call.keywords}


def _as_one_text(inside: str, names: Sequence[str]) -> dict[str, Any] | None:
    if not names:
        return None
    return {names[0]: re.sub(rf"^{re.escape(names[0])}\s*=\s*", "", inside.strip()).strip("\"'")}


def _value(code: str, node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ast.get_source_segment(code, node)


def _map_texts(value: Any, change: Callable[[str], Any]) -> Any:
    """Apply `change` to each text in a value, at any depth of lists and dictionaries."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_map_texts(entry, change) for entry in value]
    if isinstance(value, dict):
        return {key: _map_texts(entry, change) for key, entry in value.items()}
    return value


# Plans, and the results of their lines

_CALL_ID = re.compile(r"plan-(\d+)-(\d+)-[0-9a-f]{8}")


def plan_call(plan: int, line: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    """Return a tool call whose id encodes its plan and line."""
    return ToolCall(name=name, args=arguments, id=f"plan-{plan}-{line}-{uuid.uuid4().hex[:8]}", type="tool_call")


@dataclass
class PlanRun:
    """One plan with the attempts of its lines, by line number."""

    lines: list[PlanLine]
    # Calls with their results; the status is "error" if the tool failed or a person rejected the call.
    attempts: dict[int, list[tuple[ToolCall, ToolMessage]]] = field(default_factory=dict)
    unwritten: dict[int, int] = field(default_factory=dict)  # how often a model failed to write the line's call

    @property
    def results(self) -> dict[int, str]:
        """Results of the successful lines, by number."""
        last = {number: tries[-1][1] for number, tries in self.attempts.items()}
        return {number: result.text for number, result in last.items() if result.status != "error"}

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
    """The last question of messages, the questions and answers before it, and the plans after it."""

    question: str
    before: list[AnyMessage]
    plans: list[PlanRun]

    @classmethod
    def read(cls, messages: Sequence[BaseMessage], tools: Mapping[str, BaseTool]) -> Self:
        """Parse the questions, answers and plans in messages; `tools` are by name."""
        now = since_last_question(messages)
        before: list[AnyMessage] = [
            message
            for message in messages[: len(messages) - len(now)]
            if isinstance(message, (HumanMessage, SystemMessage))
            or (isinstance(message, AIMessage) and not message.tool_calls and message.name is None and message.text)
        ]
        result = cls(now[0].text.strip(), before, [])
        calls: dict[str, ToolCall] = {}
        for message in now[1:]:
            if isinstance(message, AIMessage):
                if message.name == "planner":
                    # Without a plan, the question is the only line, and a model has to write its call.
                    result.plans.append(PlanRun(parse_plan(message.text, tools) or [PlanLine(1, result.question)]))
                elif message.name == "executor" and not message.tool_calls and result.plans:
                    number, unwritten = int(message.additional_kwargs.get("line", 0)), result.plans[-1].unwritten
                    unwritten[number] = unwritten.get(number, 0) + 1
                calls |= {call["id"]: call for call in message.tool_calls if call["id"]}
            elif isinstance(message, ToolMessage) and (found := _CALL_ID.fullmatch(message.tool_call_id)):
                attempts = result.plans[int(found[1]) - 1].attempts.setdefault(int(found[2]), [])
                attempts.append((calls[message.tool_call_id], message))
        return result
