"""One plan and what became of its lines, read from an agent's messages."""

import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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

from lookahead_agent.agents.plans import PlanLine, read_plan
from lookahead_agent.agents.prompts import call_text

_CALL_ID = re.compile(r"plan-(\d+)-(\d+)-[0-9a-f]{8}")


def plan_call(plan: int, line: int, name: str, arguments: dict[str, Any]) -> ToolCall:
    """A tool call whose identity says which line of which plan it carries out."""
    return ToolCall(name=name, args=arguments, id=f"plan-{plan}-{line}-{uuid.uuid4().hex[:8]}", type="tool_call")


@dataclass(frozen=True)
class Attempt:
    """A call that was made for a line of a plan, and its result."""

    call: ToolCall
    result: ToolMessage

    @property
    def failed(self) -> bool:
        """Whether the tool failed, or a person rejected the call."""
        return self.result.status == "error"


@dataclass
class PlanRun:
    """One plan and what became of its lines."""

    lines: list[PlanLine]
    attempts: dict[int, list[Attempt]] = field(default_factory=dict)  # by number of the line
    unwritten: dict[int, int] = field(default_factory=dict)  # how often a model wrote no call for the line

    @property
    def results(self) -> dict[int, str]:
        """Results of the lines that went well, by number."""
        return {number: made[-1].result.text for number, made in self.attempts.items() if not made[-1].failed}

    @property
    def failed(self) -> bool:
        """Whether not every line went well."""
        return any(line.number not in self.results for line in self.lines)

    def tries(self, line: PlanLine) -> int:
        """How often the line was tried."""
        return len(self.attempts.get(line.number, ())) + self.unwritten.get(line.number, 0)

    def shown(self, without: PlanLine | None = None) -> str:
        """The results as blocks, for a model; without a line and those behind it that were not carried out."""
        blocks = []
        for line in self.lines:
            if made := self.attempts.get(line.number, []):
                call, result = made[-1].call, ("failed: " if made[-1].failed else "") + made[-1].result.text
                block = f"{call_text(call['name'], call['args'])}\n{result}"
            else:
                block = f"{line.text}\n(not carried out)"
            if without is None or (line != without and made):
                blocks.append(f"[{line.number}] {block}")
        return "\n\n".join(blocks) or "none"


@dataclass(frozen=True)
class Conversation:
    """What the messages say: the last question, what was said before it, and the plans behind it."""

    messages: Sequence[BaseMessage]
    tools: Mapping[str, BaseTool]

    @cached_property
    def _asked(self) -> int:
        return max((at for at, message in enumerate(self.messages) if isinstance(message, HumanMessage)), default=0)

    @property
    def question(self) -> str:
        """The last question."""
        return self.messages[self._asked].text.strip()

    @cached_property
    def before(self) -> list[AnyMessage]:
        """Earlier questions and their answers."""
        return [
            message
            for message in self.messages[: self._asked]
            if isinstance(message, (HumanMessage, SystemMessage))
            or (isinstance(message, AIMessage) and not message.tool_calls and message.name is None and message.text)
        ]

    @cached_property
    def plans(self) -> list[PlanRun]:
        """The plans behind the last question."""
        runs: list[PlanRun] = []
        calls: dict[str, ToolCall] = {}
        for message in self.messages[self._asked + 1 :]:
            if isinstance(message, AIMessage):
                if message.name == "planner":
                    # Without a plan, the question is the one line, for which a model has to write a call.
                    lines = read_plan(message.text, self.tools) or [PlanLine(1, self.question)]
                    runs.append(PlanRun(lines))
                elif message.name == "executor" and not message.tool_calls and runs:
                    number = int(message.additional_kwargs.get("line", 0))
                    runs[-1].unwritten[number] = runs[-1].unwritten.get(number, 0) + 1
                calls |= {call["id"]: call for call in message.tool_calls if call["id"]}
            elif isinstance(message, ToolMessage) and (found := _CALL_ID.fullmatch(message.tool_call_id)):
                run, number = runs[int(found[1]) - 1], int(found[2])
                run.attempts.setdefault(number, []).append(Attempt(calls[message.tool_call_id], message))
        return runs
