"""`InvalidToolCallMiddleware`: the model gets the parse error of a tool call and retries, within limits."""

from __future__ import annotations

from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead, InvalidToolCallMiddleware
from tests.unit.chat import scripted_chat

INVALID = '<tool_call>{"name": "look_up", "arguments": {"word": "a" "b"}}</tool_call>'
VALID = '<tool_call>{"name": "look_up", "arguments": {"word": "tea"}}</tool_call>'
looked_up: list[str] = []


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    looked_up.append(word)
    return f"{word} is a drink"


@pytest.fixture(autouse=True)
def _clear_looked_up() -> None:
    looked_up.clear()


class Agent:
    """Runs an agent by `invoke`, `ainvoke`, `stream` or `astream` and returns its messages."""

    def __init__(self, llm: ChatLookahead, *middleware: AgentMiddleware[Any, Any, Any]) -> None:
        self.graph: Any = create_agent(llm, [look_up], middleware=middleware)

    async def run(self, method: str) -> list[Any]:
        question = {"messages": [HumanMessage("What is tea?")]}
        if method == "invoke":
            return list(self.graph.invoke(question)["messages"])
        if method == "ainvoke":
            return list((await self.graph.ainvoke(question))["messages"])
        messages: list[Any] = []
        if method == "stream":
            for state in self.graph.stream(question, stream_mode="values"):
                messages = state["messages"]
        else:
            async for _, state in self.graph.astream(question, stream_mode=["values", "messages"]):
                messages = state["messages"] if isinstance(state, dict) else messages
        return messages


def scripted(*replies: str) -> ChatLookahead:
    return scripted_chat(lambda prompt: replies[min(prompt.count("\ntool: "), len(replies) - 1)], policy="off")


METHODS = ["invoke", "ainvoke", "stream", "astream"]


@pytest.mark.parametrize("method", METHODS)
async def test_agent_returns_parse_errors_to_the_model_until_a_call_is_valid(method: str) -> None:
    llm = scripted(INVALID, INVALID, VALID, "Tea is a drink.")
    messages = await Agent(llm, InvalidToolCallMiddleware()).run(method)
    assert messages[-1].text == "Tea is a drink."
    assert looked_up == ["tea"]
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [message.status for message in results] == ["error", "error", "success"]
    assert results[0].tool_call_id == messages[1].invalid_tool_calls[0]["id"]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("retries", [0, 1, 3])
async def test_agent_stops_after_max_retries_with_a_message(method: str, retries: int) -> None:
    messages = await Agent(scripted(INVALID), InvalidToolCallMiddleware(max_retries=retries)).run(method)
    attempts = [message for message in messages if isinstance(message, AIMessage) and message.invalid_tool_calls]
    assert len(attempts) == retries + 1
    assert f"{retries + 1} replies in a row had tool calls that could not be read" in messages[-1].text
    assert looked_up == []


async def test_a_valid_call_resets_the_retry_count() -> None:
    llm = scripted(INVALID, VALID, INVALID, VALID, INVALID, "Tea is a drink.")
    messages = await Agent(llm, InvalidToolCallMiddleware(max_retries=1)).run("invoke")
    assert messages[-1].text == "Tea is a drink."
    assert looked_up == ["tea", "tea"]


@pytest.mark.parametrize("method", METHODS)
async def test_agent_runs_valid_calls_and_returns_errors_for_invalid_ones(method: str) -> None:
    messages = await Agent(scripted(INVALID + VALID, "", "Tea is a drink."), InvalidToolCallMiddleware()).run(method)
    assert looked_up == ["tea"]
    assert messages[-1].text == "Tea is a drink."
    assert sorted(each.status for each in messages if isinstance(each, ToolMessage)) == ["error", "success"]


async def test_middleware_leaves_valid_calls_unchanged_and_refuses_negative_retries() -> None:
    messages = await Agent(scripted(VALID, "Tea is a drink."), InvalidToolCallMiddleware()).run("invoke")
    assert len(messages) == 4
    with pytest.raises(ValueError, match="at least 0"):
        InvalidToolCallMiddleware(max_retries=-1)
