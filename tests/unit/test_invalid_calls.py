"""Calls that could not be read: the model is told what was wrong and tries again, within limits."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead, InvalidToolCallMiddleware
from tests.unit.chat import scripted_chat

UNREADABLE = '<tool_call>{"name": "look_up", "arguments": {"word": "a" "b"}}</tool_call>'
GOOD = '<tool_call>{"name": "look_up", "arguments": {"word": "tea"}}</tool_call>'
looked_up: list[str] = []


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append(word)
    return f"{word} is a drink"


@pytest.fixture(autouse=True)
def _nothing_looked_up() -> None:
    looked_up.clear()


def by_errors(*replies: str, calls: str = "You solve") -> Any:
    """Replies by how many errors and results the prompt tells of."""

    def reply(prompt: str) -> str:
        if calls not in prompt:
            return "I look it up."
        return replies[min(prompt.count("\ntool: "), len(replies) - 1)]

    return reply


class Agent:
    """An agent and what it says, called in each way that there is."""

    def __init__(self, llm: ChatLookahead, *middleware: AgentMiddleware[Any, Any, Any]) -> None:
        self.graph: Any = create_agent(llm, [look_up], middleware=middleware)

    async def said(self, way: str) -> list[Any]:
        question = {"messages": [HumanMessage("What is tea?")]}
        if way == "invoke":
            return list(self.graph.invoke(question)["messages"])
        if way == "ainvoke":
            return list((await self.graph.ainvoke(question))["messages"])
        messages: list[Any] = []
        if way == "stream":
            for state in self.graph.stream(question, stream_mode="values"):
                messages = state["messages"]
        else:
            async for _, state in self.graph.astream(question, stream_mode=["values", "messages"]):
                messages = state["messages"] if isinstance(state, dict) else messages
        return messages


def writes(*replies: str) -> ChatLookahead:
    return scripted_chat(lambda prompt: replies[min(prompt.count("\ntool: "), len(replies) - 1)], policy="off")


WAYS = ["invoke", "ainvoke", "stream", "astream"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_agent_tells_the_model_and_goes_on(way: str) -> None:
    llm = writes(UNREADABLE, UNREADABLE, GOOD, "Tea is a drink.")
    messages = await Agent(llm, InvalidToolCallMiddleware()).said(way)
    assert messages[-1].text == "Tea is a drink."
    assert looked_up == ["tea"]
    told = [message for message in messages if isinstance(message, ToolMessage)]
    assert [message.status for message in told] == ["error", "error", "success"]
    assert told[0].tool_call_id == messages[1].invalid_tool_calls[0]["id"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_an_agent_gives_up_after_its_retries_and_says_so(way: str, retries: int) -> None:
    messages = await Agent(writes(UNREADABLE), InvalidToolCallMiddleware(max_retries=retries)).said(way)
    tried = [message for message in messages if isinstance(message, AIMessage) and message.invalid_tool_calls]
    assert len(tried) == retries + 1
    assert f"{retries + 1} replies in a row had tool calls that could not be read" in messages[-1].text
    assert looked_up == []


async def test_an_agent_counts_from_the_last_call_that_could_be_read() -> None:
    llm = writes(UNREADABLE, GOOD, UNREADABLE, GOOD, UNREADABLE, "Tea is a drink.")
    messages = await Agent(llm, InvalidToolCallMiddleware(max_retries=1)).said("invoke")
    assert messages[-1].text == "Tea is a drink."
    assert looked_up == ["tea", "tea"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_agent_runs_the_calls_that_can_be_read_and_answers_the_others(way: str) -> None:
    messages = await Agent(writes(UNREADABLE + GOOD, "", "Tea is a drink."), InvalidToolCallMiddleware()).said(way)
    assert looked_up == ["tea"]
    assert messages[-1].text == "Tea is a drink."
    assert sorted(each.status for each in messages if isinstance(each, ToolMessage)) == ["error", "success"]


async def test_an_agent_without_unreadable_calls_is_left_alone() -> None:
    messages = await Agent(writes(GOOD, "Tea is a drink."), InvalidToolCallMiddleware()).said("invoke")
    assert len(messages) == 4
    with pytest.raises(ValueError, match="at least 0"):
        InvalidToolCallMiddleware(max_retries=-1)
