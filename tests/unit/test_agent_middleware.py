"""Middleware of agents: the calls' names, thoughts, loops that end, tools that fail, and results that do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ToolRetryMiddleware
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, tool
from langgraph.checkpoint.memory import InMemorySaver

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.prompts import describe_tools, lookahead_settings, result_blocks
from lookahead_agent.agents.thinking import ThinkingMiddleware
from lookahead_agent.agents.tool_results import FitContextMiddleware
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import scripted_chat

ASKED = {"messages": [("human", "What is tea?")]}
LAST = "You answer a question from the results"
looked_up: list[str] = []


@tool
def look_up(word: str, most: int = 3) -> str:
    """Look a word up."""
    looked_up.append(word)
    if word == "nothing":
        raise ValueError("there is no such word")
    if word == "broken":
        raise KeyError("inner")
    if word == "flaky" and looked_up.count("flaky") == 1:
        raise ConnectionError("lost")
    if word == "cancelled":
        raise asyncio.CancelledError
    if word == "long":
        return "leaf " * 100_000
    return f"{word} is a drink"


@pytest.fixture(autouse=True)
def _nothing_looked_up() -> None:
    looked_up.clear()


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': arguments})}</tool_call>"


def agent(replies: Any, *more: AgentMiddleware[Any, Any, Any], **options: Any) -> Any:
    llm = replies if isinstance(replies, ChatLookahead) else scripted_chat(scripted_replies(**replies), policy="off")
    saver = options.pop("checkpointer", None)
    made = [*standard_middleware(llm, [look_up], **options), *more]
    return create_agent(llm, [look_up], system_prompt="You solve.", middleware=made, checkpointer=saver)


async def run(graph: Any, asynchronous: bool, given: Any = ASKED, config: Any = None) -> list[AnyMessage]:
    state = await graph.ainvoke(given, config) if asynchronous else graph.invoke(given, config)
    messages: list[AnyMessage] = state["messages"]
    assert isinstance(messages[-1], AIMessage)
    assert not messages[-1].tool_calls
    return messages


def results(messages: Sequence[AnyMessage]) -> list[ToolMessage]:
    return [message for message in messages if isinstance(message, ToolMessage)]


def test_only_a_lookahead_model_gets_a_calls_name() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "off"})
    assert lookahead_settings(llm, node="planner") == {"node": "planner"}
    assert lookahead_settings(llm.bind(stop=["\n"]), node="planner") == {"node": "planner"}
    marked = lookahead_settings(llm, node="planner", action_markers=["Plan:"])
    assert marked == {"node": "planner", "action_markers": ("Plan:",)}
    assert lookahead_settings(FakeListChatModel(responses=["4"]), node="planner", action_markers=["Plan:"]) == {}


def test_a_calls_name_chooses_its_policy() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "off"})
    said = llm.bind(**lookahead_settings(llm, node="planner")).invoke("What is 2 + 2?").response_metadata["lookahead"]
    assert (said["node"], said["policy"]) == ("planner", "off")


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_the_same_call_twice_is_made_once_and_ends_the_loop(asynchronous: bool) -> None:
    graph = agent({LAST: "Tea is a drink.", "You solve": call(word="tea")})
    messages = await run(graph, asynchronous)
    assert messages[-1].text == "Tea is a drink."
    assert looked_up == ["tea"]
    first, second = results(messages)
    assert first.text == "tea is a drink"
    assert second.status == "error"
    assert result_blocks(messages) == '[1] look_up(word="tea")\ntea is a drink', "the last turn sees one result"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_call_that_failed_is_not_made_again_later(asynchronous: bool) -> None:
    words = ["nothing", "tea", "nothing", "tea"]

    def reply(prompt: str) -> str:
        return "Tea is a drink." if LAST in prompt else call(word=words[prompt.count("tool: ")])

    graph = agent(scripted_chat(reply, policy="off"))
    messages = await run(graph, asynchronous)
    assert looked_up == ["nothing", "tea"]
    assert [result.status for result in results(messages)] == ["error", "success", "error"]
    assert messages[-1].text == "Tea is a drink."


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_run_at_its_limit_ends_with_an_answer(asynchronous: bool) -> None:
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return "A and b are drinks; c is missing." if LAST in prompt else call(word="abcdefg"[prompt.count("tool: ")])

    messages = await run(agent(scripted_chat(reply, policy="off"), model_calls=3), asynchronous)
    assert messages[-1].text == "A and b are drinks; c is missing."
    assert looked_up == ["a", "b"]
    assert len(set(asked)) == 3
    last = next(prompt for prompt in asked if LAST in prompt)
    assert 'What is tea?\n\nResults:\n\n[1] look_up(word="a")\na is a drink\n\n[2] look_up(word="b")' in last
    assert messages[-1].response_metadata["lookahead"]["node"] == "finisher"
    assert messages[1].response_metadata["lookahead"]["node"] == "actor"  # type: ignore[union-attr]


def test_limits_count_one_question_of_a_thread() -> None:
    script = {LAST: "No.", "You solve": [call(word="a"), "It is a.", call(word="b"), "It is b."]}
    graph = agent(script, model_calls=3, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert graph.invoke(ASKED, config)["messages"][-1].text == "It is a."
    assert graph.invoke(ASKED, config)["messages"][-1].text == "It is b."
    assert looked_up == ["a", "b"]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_empty_reply_is_no_answer(asynchronous: bool) -> None:
    messages = await run(agent({LAST: "Nothing is known.", "You solve": " "}), asynchronous)
    assert messages[-1].text == "Nothing is known."
    silent = await run(agent({LAST: " ", "You solve": [call(word="tea"), " "]}), asynchronous)
    assert silent[-1].text == 'The model wrote no answer. Results:\n\n[1] look_up(word="tea")\ntea is a drink'


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_failed_call_is_tried_again_with_its_error_and_the_tools_arguments(asynchronous: bool) -> None:
    wrong = [call(word="nothing"), call(word="broken"), call(term="tea")]
    messages = await run(agent({LAST: "It is unknown.", "You solve": [*wrong[:2], call(word="tea"), "Tea!"]}), True)
    assert messages[-1].text == "Tea!"
    first, second, third = results(messages)
    assert first.text.startswith("there is no such word\n\nThe tool is:\n- look_up(word: string, most: integer = 3)")
    assert second.text.startswith("KeyError: 'inner'")
    assert (first.status, second.status, third.status) == ("error", "error", "success")
    ended = await run(agent({LAST: "It is unknown.", "You solve": wrong}), asynchronous)
    assert ended[-1].text == "It is unknown."
    assert "term" in results(ended)[-1].text
    assert [message.status for message in results(ended)] == ["error"] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_lost_connection_is_tried_again_unless_a_person_approves_each_call(asynchronous: bool) -> None:
    messages = await run(agent({LAST: "No.", "You solve": [call(word="flaky"), "Found."]}), asynchronous)
    assert (messages[-1].text, looked_up) == ("Found.", ["flaky", "flaky"])
    looked_up.clear()
    retry = ToolRetryMiddleware(max_retries=1, initial_delay=0, on_failure="error")
    script = {LAST: "No.", "You solve": [call(word="broken"), "It cannot be found."]}
    await run(agent(script, middleware=[retry]), asynchronous)
    assert looked_up == ["broken", "broken"], "the caller's own middleware sees the error as it is raised"


async def test_a_tool_that_cancels_its_own_scope_failed() -> None:
    messages = await run(agent({LAST: "No.", "You solve": [call(word="cancelled"), "It was cancelled."]}), True)
    assert results(messages)[0].text.startswith("CancelledError")


def test_ask_before_names_tools() -> None:
    llm = scripted_chat("Hello.")
    with pytest.raises(ValueError, match="ask_before names tools that there are not: send"):
        standard_middleware(llm, [look_up], ask_before=["send"])
    with pytest.raises(ValueError, match="model_calls"):
        standard_middleware(llm, [look_up], model_calls=0)


def test_a_long_result_is_cut_with_a_word_about_it() -> None:
    llm = scripted_chat(
        scripted_replies(**{LAST: "No.", "You solve": [call(word="long"), "It is long."]}), policy="off"
    )
    messages = agent(llm).invoke(ASKED)["messages"]
    (result,) = results(messages)
    context = llm.profile["max_input_tokens"]  # type: ignore[index]
    assert llm.get_num_tokens(result.text) < context / 3
    assert "(cut: " in result.text
    assert "500,000 characters" in result.text or "50,000" in result.text


def test_a_conversation_that_does_not_fit_is_cut_until_it_does() -> None:
    llm = scripted_chat("Hello.")
    edit = FitContextMiddleware(llm)
    context = llm.profile["max_input_tokens"]  # type: ignore[index]
    text = "leaf " * (context // 4)

    def turn(number: int) -> list[AnyMessage]:
        called = {"name": "look_up", "args": {"word": str(number)}, "id": str(number), "type": "tool_call"}
        return [AIMessage("", tool_calls=[called]), ToolMessage(text, tool_call_id=str(number), name="look_up")]

    before: list[AnyMessage] = [HumanMessage("First?"), *turn(1), AIMessage("So it is."), HumanMessage("Second?")]
    for conversation in (
        [*before, *turn(2), *turn(3), *turn(4), *turn(5), *turn(6)],
        [*before, *[message for number in range(2, 9) for message in turn(number)], AIMessage("I see. " + text)],
    ):
        kept = list(conversation)
        edit.apply(kept, count_tokens=lambda messages: llm.get_num_tokens_from_messages([*messages]))
        assert llm.get_num_tokens_from_messages(kept) < context
        assert "Second?" in [message.text for message in kept]
        assert [message.tool_call_id for message in results(kept)][-1] == results(conversation)[-1].tool_call_id
    short: list[AnyMessage] = [HumanMessage("First?"), *turn(1)]
    edit.apply(short, count_tokens=lambda messages: llm.get_num_tokens_from_messages([*messages]))
    assert [message.text for message in short] == ["First?", "", text], "what fits is left as it is"


def test_no_run_ends_because_its_results_do_not_fit() -> None:
    def reply(prompt: str) -> str:
        turn = prompt.count("tool: ")
        return "Leaves." if LAST in prompt or turn == 9 else call(word="long", most=turn)

    messages = agent(scripted_chat(reply, policy="off")).invoke(ASKED)["messages"]
    assert messages[-1].text == "Leaves."
    assert len(results(messages)) == 9


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_a_thought_of_its_own_precedes_each_turn(asynchronous: bool) -> None:
    asked: list[str] = []
    script = {"You think": "Look tea up.", LAST: "No.", "You solve": [call(word="tea"), "Tea is a drink."]}
    follow = scripted_replies(**script)

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return follow(prompt)

    llm = scripted_chat(reply, policies={"thinker": "exact", "*": "off"})
    messages = await run(agent(llm, ThinkingMiddleware()), asynchronous)
    assert messages[1].text == "Look tea up."
    assert [called["args"] for called in messages[1].tool_calls] == [{"word": "tea"}]  # type: ignore[union-attr]
    assert messages[-1].text == "Tea is a drink."
    assert messages[-1].additional_kwargs["reasoning_content"] == "Look tea up."
    thinkers = [prompt for prompt in dict.fromkeys(asked) if "You think" in prompt]
    assert len(thinkers) == 2
    assert describe_tools([look_up]) in thinkers[0]
    assert '[1] look_up(word="tea")\ntea is a drink' in thinkers[1]


def test_tools_in_words() -> None:
    @tool
    def save(text: str, tags: list[str], mode: str | None = None) -> str:
        """Save a text.

        It goes into a file.
        """
        return text

    made: BaseTool = save
    assert describe_tools([made]) == (
        "- save(text: string, tags: list of string, mode: string | null = null): Save a text.\n  It goes into a file."
    )
