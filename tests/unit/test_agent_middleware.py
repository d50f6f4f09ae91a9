"""Middleware of agents: node names, thoughts, call limits, failed tool calls, and results beyond the context."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, ToolRetryMiddleware
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command
from pydantic import Field

from graphs.plan_execute import build_plan_execute
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.prompts import describe_tools, lookahead_settings, result_blocks
from lookahead_agent.agents.thinking import ThinkingMiddleware
from lookahead_agent.agents.tool_results import FitContextMiddleware, ToolResultMiddleware, describe_block
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import scripted_chat

QUESTION = {"messages": [("human", "What is tea?")]}
FINAL = "You answer a question from the results"
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


look_up.metadata = {"readOnlyHint": True}


@pytest.fixture(autouse=True)
def _clear_looked_up() -> None:
    looked_up.clear()


def call(**arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': 'look_up', 'arguments': arguments})}</tool_call>"


def agent(replies: Any, *extra: AgentMiddleware[Any, Any, Any], **options: Any) -> Any:
    llm = replies if isinstance(replies, ChatLookahead) else scripted_chat(scripted_replies(**replies), policy="off")
    saver = options.pop("checkpointer", None)
    middleware = [*standard_middleware(llm, [look_up], **options), *extra]
    return create_agent(llm, [look_up], system_prompt="You solve.", middleware=middleware, checkpointer=saver)


async def run(graph: Any, asynchronous: bool, question: Any = QUESTION, config: Any = None) -> list[AnyMessage]:
    state = await graph.ainvoke(question, config) if asynchronous else graph.invoke(question, config)
    messages: list[AnyMessage] = state["messages"]
    assert isinstance(messages[-1], AIMessage)
    assert not messages[-1].tool_calls
    return messages


def results(messages: Sequence[AnyMessage]) -> list[ToolMessage]:
    return [message for message in messages if isinstance(message, ToolMessage)]


def test_lookahead_settings_are_empty_for_other_chat_models() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "off"})
    assert lookahead_settings(llm, node="planner") == {"node": "planner"}
    assert lookahead_settings(llm.bind(stop=["\n"]), node="planner") == {"node": "planner"}
    with_markers = lookahead_settings(llm, node="planner", action_markers=["Plan:"])
    assert with_markers == {"node": "planner", "action_markers": ("Plan:",)}
    assert lookahead_settings(FakeListChatModel(responses=["4"]), node="planner", action_markers=["Plan:"]) == {}


def test_node_of_a_call_selects_its_policy() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "off"})
    meta = llm.bind(**lookahead_settings(llm, node="planner")).invoke("What is 2 + 2?").response_metadata["lookahead"]
    assert (meta["node"], meta["policy"]) == ("planner", "off")


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_repeated_tool_call_runs_once_and_ends_the_loop(asynchronous: bool) -> None:
    graph = agent({FINAL: "Tea is a drink.", "You solve": call(word="tea")})
    messages = await run(graph, asynchronous)
    assert messages[-1].text == "Tea is a drink."
    assert looked_up == ["tea"]
    first, second = results(messages)
    assert first.text == "tea is a drink"
    assert second.status == "error"
    assert result_blocks(messages) == '[1] look_up(word="tea")\ntea is a drink', "the finisher sees one result"


def test_words_of_failed_calls_are_in_a_prompt_once_and_the_arguments_follow_the_last_failure() -> None:
    explanation = "\n\nThe tool is:\n- sql(statement: string): Ask."
    made = [
        ("SELECT a", "no such column", "error"),
        ("SELECT 1", "1", "success"),
        ("SELECT b", "no such column", "error"),
    ]
    messages: list[AnyMessage] = [HumanMessage("How many?")]
    for number, (statement, text, status) in enumerate(made):
        made_call = {"name": "sql", "args": {"statement": statement}, "id": str(number), "type": "tool_call"}
        text += explanation if status == "error" else ""
        messages += [AIMessage("", tool_calls=[made_call]), ToolMessage(text, tool_call_id=str(number), status=status)]
    blocks = (
        '[1] sql(statement="SELECT 1")\n1\n\n'
        '[2] sql(statement="SELECT a") failed\nsql(statement="SELECT b") failed\nno such column'
    )
    assert result_blocks(messages) == blocks, "a finisher needs no arguments"
    assert result_blocks(messages, explained=True) == blocks + explanation
    assert result_blocks(messages[:-2], explained=True).endswith('[2] sql(statement="SELECT 1")\n1')
    assert result_blocks(messages[:1], explained=True) == "none"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_failed_tool_call_is_not_repeated_later(asynchronous: bool) -> None:
    words = ["nothing", "tea", "nothing", "tea"]

    def reply(prompt: str) -> str:
        return "Tea is a drink." if FINAL in prompt else call(word=words[prompt.count("tool: ")])

    graph = agent(scripted_chat(reply, policy="off"))
    messages = await run(graph, asynchronous)
    assert looked_up == ["nothing", "tea"]
    assert [result.status for result in results(messages)] == ["error", "success", "error"]
    assert messages[-1].text == "Tea is a drink."


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_run_at_its_model_call_limit_ends_with_an_answer(asynchronous: bool) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "A and b are drinks; c is missing." if FINAL in prompt else call(word="abcdefg"[prompt.count("tool: ")])

    messages = await run(agent(scripted_chat(reply, policy="off"), model_calls=3), asynchronous)
    assert messages[-1].text == "A and b are drinks; c is missing."
    assert looked_up == ["a", "b"]
    assert len(set(prompts)) == 3
    last = next(prompt for prompt in prompts if FINAL in prompt)
    assert 'What is tea?\n\nResults:\n\n[1] look_up(word="a")\na is a drink\n\n[2] look_up(word="b")' in last
    assert messages[-1].response_metadata["lookahead"]["node"] == "finisher"
    assert messages[1].response_metadata["lookahead"]["node"] == "actor"  # type: ignore[union-attr]


def test_model_call_limit_restarts_with_each_question_of_a_thread() -> None:
    script = {FINAL: "No.", "You solve": [call(word="a"), "It is a.", call(word="b"), "It is b."]}
    graph = agent(script, model_calls=3, checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert graph.invoke(QUESTION, config)["messages"][-1].text == "It is a."
    assert graph.invoke(QUESTION, config)["messages"][-1].text == "It is b."
    assert looked_up == ["a", "b"]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_empty_reply_is_replaced_by_the_finisher_or_by_the_results(asynchronous: bool) -> None:
    messages = await run(agent({FINAL: "Nothing is known.", "You solve": " "}), asynchronous)
    assert messages[-1].text == "Nothing is known."
    without_answer = await run(agent({FINAL: " ", "You solve": [call(word="tea"), " "]}), asynchronous)
    assert without_answer[-1].text == 'The model wrote no answer. Results:\n\n[1] look_up(word="tea")\ntea is a drink'


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_failed_call_returns_its_error_and_the_tool_signature_for_a_retry(asynchronous: bool) -> None:
    calls = [call(word="nothing"), call(word="broken"), call(term="tea")]
    messages = await run(
        agent({FINAL: "It is unknown.", "You solve": [*calls[:2], call(word="tea"), "Tea!"]}), asynchronous
    )
    assert messages[-1].text == "Tea!"
    first, second, third = results(messages)
    assert first.text.startswith("there is no such word\n\nThe tool is:\n- look_up(word: string, most: integer = 3)")
    assert second.text.startswith("KeyError: 'inner'")
    assert (first.status, second.status, third.status) == ("error", "error", "success")
    given_up = await run(agent({FINAL: "It is unknown.", "You solve": calls}), asynchronous)
    assert given_up[-1].text == "It is unknown."
    assert "term" in results(given_up)[-1].text
    assert [message.status for message in results(given_up)] == ["error"] * 3


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_connection_error_is_retried_and_custom_middleware_gets_the_original_error(asynchronous: bool) -> None:
    messages = await run(agent({FINAL: "No.", "You solve": [call(word="flaky"), "Found."]}), asynchronous)
    assert (messages[-1].text, looked_up) == ("Found.", ["flaky", "flaky"])
    looked_up.clear()
    retry = ToolRetryMiddleware(max_retries=1, initial_delay=0, on_failure="error")
    script = {FINAL: "No.", "You solve": [call(word="broken"), "It cannot be found."]}
    await run(agent(script, middleware=[retry]), asynchronous)
    assert looked_up == ["broken", "broken"], "custom middleware gets the original error"


async def test_cancelled_error_in_a_tool_is_a_failed_call() -> None:
    messages = await run(agent({FINAL: "No.", "You solve": [call(word="cancelled"), "It was cancelled."]}), True)
    assert results(messages)[0].text.startswith("CancelledError")


def test_unknown_ask_before_tools_and_a_zero_call_limit_are_rejected() -> None:
    llm = scripted_chat("Hello.")
    with pytest.raises(ValueError, match="ask_before names tools that there are not: send"):
        standard_middleware(llm, [look_up], ask_before=["send"])
    with pytest.raises(ValueError, match="model_calls"):
        standard_middleware(llm, [look_up], model_calls=0)


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ("as is", "as is"),
        ({"type": "text", "text": "a"}, "a"),
        ({"type": "text-plain", "text": "a", "mime_type": "text/plain"}, "a"),
        ({"type": "json", "json": {"n": [1]}}, '{"n": [1]}'),
        ({"type": "non_standard", "value": {"n": 1}}, '{"n": 1}'),
        ({"type": "image", "base64": "AA==", "mime_type": "image/png"}, "(image of the type image/png is left out"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "(image is left out"),
        ({"type": "image_url", "image_url": "https://example.org/a"}, "(image at https://example.org/a is left out"),
        (
            {"type": "file", "base64": "AA==", "mime_type": "application/pdf"},
            "(file of the type application/pdf is left",
        ),
        ({"type": "audio", "base64": "AA=="}, "(audio is left out: the model reads text only)"),
        ({"type": "video", "url": "https://example.org/v"}, "(video at https://example.org/v is left out"),
        ({"type": "document", "source": {"type": "text", "data": "a"}}, "a"),
        ({"type": "document", "source": {"type": "base64", "data": "AA=="}}, "(document is left out"),
        (
            {"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "a"}]},
            "T\nS\na",
        ),
        ({"n": 1}, '{"n": 1}'),
    ],
)
def test_part_of_a_result_has_a_text(block: Any, text: str) -> None:
    assert describe_block(block).startswith(text)


def test_results_in_blocks_are_truncated_as_texts_are_and_say_what_is_left_out() -> None:
    image = {"type": "image", "base64": "A" * 100_000, "mime_type": "image/png"}
    content: Any = [{"type": "text", "text": "leaf " * 20_000}, image, {"type": "json", "json": {"n": "x" * 100_000}}]
    message = ToolMessage(content, tool_call_id="1")
    text_only = ToolResultMiddleware(scripted_chat("x", policy="off"))
    other = ToolResultMiddleware(FakeListChatModel(responses=["x"]))
    request: Any = SimpleNamespace(tool=None, override=lambda **_: request)
    for result in (
        text_only.wrap_tool_call(request, lambda _: message),
        asyncio.run(text_only.awrap_tool_call(request, AsyncMock(return_value=message))),
        text_only.wrap_tool_call(request, lambda _: Command(update={"messages": [message], "n": 1})).update["messages"][
            0
        ],  # type: ignore[union-attr, index]
    ):
        assert isinstance(result, ToolMessage)
        assert isinstance(result.content, str)
        assert len(result.content) <= 50_000
        assert "(cut: " in result.content
    seen = other.wrap_tool_call(request, lambda _: message)
    assert isinstance(seen, ToolMessage)
    assert seen.content[1:] == [image], "a model that may read pictures gets them"
    assert len(seen.text) <= 50_000
    short = ToolMessage([{"type": "text", "text": "7 %"}, image], tool_call_id="1")
    (converted,) = [text_only.wrap_tool_call(request, lambda _: short)]
    assert isinstance(converted, ToolMessage)
    assert converted.content == "7 %\n(image of the type image/png is left out: the model reads text only)"


@pytest.mark.parametrize("content", ["", " \n", [], [{"type": "text", "text": ""}]])
def test_an_empty_result_says_so(content: Any) -> None:
    request: Any = SimpleNamespace(tool=None, override=lambda **_: request)
    for llm in (scripted_chat("x", policy="off"), FakeListChatModel(responses=["x"])):
        seen = ToolResultMiddleware(llm).wrap_tool_call(request, lambda _: ToolMessage(content, tool_call_id="1"))
        assert isinstance(seen, ToolMessage)
        assert seen.text == "(the result is empty)"


def test_long_result_is_truncated_with_a_note() -> None:
    llm = scripted_chat(
        scripted_replies(**{FINAL: "No.", "You solve": [call(word="long"), "It is long."]}), policy="off"
    )
    messages = agent(llm).invoke(QUESTION)["messages"]
    (result,) = results(messages)
    context_length = llm.profile["max_input_tokens"]  # type: ignore[index]
    assert llm.get_num_tokens(result.text) < context_length / 3
    assert "(cut: " in result.text
    assert "500,000 characters" in result.text or "50,000" in result.text


def test_conversation_is_edited_until_it_fits_the_context() -> None:
    llm = scripted_chat("Hello.")
    edit = FitContextMiddleware(llm)
    context_length = llm.profile["max_input_tokens"]  # type: ignore[index]
    text = "leaf " * (context_length // 4)

    def turn(number: int) -> list[AnyMessage]:
        tool_call = {"name": "look_up", "args": {"word": str(number)}, "id": str(number), "type": "tool_call"}
        return [AIMessage("", tool_calls=[tool_call]), ToolMessage(text, tool_call_id=str(number), name="look_up")]

    before: list[AnyMessage] = [HumanMessage("First?"), *turn(1), AIMessage("So it is."), HumanMessage("Second?")]
    for conversation in (
        [*before, *turn(2), *turn(3), *turn(4), *turn(5), *turn(6)],
        [*before, *[message for number in range(2, 9) for message in turn(number)], AIMessage("I see. " + text)],
    ):
        edited = list(conversation)
        edit.apply(edited, count_tokens=lambda messages: llm.get_num_tokens_from_messages([*messages]))
        assert llm.get_num_tokens_from_messages(edited) < context_length
        assert "Second?" in [message.text for message in edited]
        assert [message.tool_call_id for message in results(edited)][-1] == results(conversation)[-1].tool_call_id
    short: list[AnyMessage] = [HumanMessage("First?"), *turn(1)]
    edit.apply(short, count_tokens=lambda messages: llm.get_num_tokens_from_messages([*messages]))
    assert [message.text for message in short] == ["First?", "", text], "a conversation that fits is unchanged"


class CountingChat(FakeListChatModel):
    """A model with one token per character, which records what it counts."""

    counted: list[str] = Field(default_factory=list)
    whole: list[int] = Field(default_factory=list)

    def get_num_tokens(self, text: str) -> int:
        self.counted.append(text)
        return len(text)

    def get_num_tokens_from_messages(self, messages: list[Any], tools: Any = None) -> int:
        self.whole.append(len(messages))
        return sum(len(message.text) for message in messages)


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_only_new_messages_are_counted_while_a_conversation_fits(asynchronous: bool) -> None:
    llm = CountingChat(responses=["x"], profile={"max_input_tokens": 4_000, "max_output_tokens": 100})
    edit, seen = FitContextMiddleware(llm, exact=True), AsyncMock() if asynchronous else Mock()

    async def turn(*messages: AnyMessage) -> list[AnyMessage]:
        request = ModelRequest(model=llm, messages=[*messages])
        llm.counted.clear()
        llm.whole.clear()
        if asynchronous:
            await edit.awrap_model_call(request, seen)
        else:
            edit.wrap_model_call(request, seen)
        passed: list[AnyMessage] = seen.call_args[0][0].messages
        return passed

    question, reply = HumanMessage("é" * 1_500), AIMessage("é" * 1_600)
    assert await turn(HumanMessage("short")) == [HumanMessage("short")]
    assert (llm.counted, llm.whole) == ([], []), "a token has at least one byte"
    assert await turn(question) == [question]
    assert llm.counted == []
    assert await turn(question, reply) == [question, reply]
    assert (llm.counted, llm.whole) == ([question.text, reply.text], [])
    result = ToolMessage("e" * 100, tool_call_id="1")
    assert await turn(question, reply, result) == [question, reply, result]
    assert (llm.counted, llm.whole) == ([result.text], []), "the others were counted before"
    long = ToolMessage("e" * 2_000, tool_call_id="2")
    assert len((await turn(question, reply, result, long))[-1].text) < 2_000
    assert (llm.counted, bool(llm.whole)) == ([long.text], True)


def test_run_with_more_results_than_fit_still_ends_with_an_answer() -> None:
    def reply(prompt: str) -> str:
        turn = prompt.count("tool: ")
        return "Leaves." if FINAL in prompt or turn == 9 else call(word="long", most=turn)

    messages = agent(scripted_chat(reply, policy="off")).invoke(QUESTION)["messages"]
    assert messages[-1].text == "Leaves."
    assert len(results(messages)) == 9


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_thinking_middleware_writes_a_thought_before_each_turn(asynchronous: bool) -> None:
    prompts: list[str] = []
    script = {"You think": "Look tea up.", FINAL: "No.", "You solve": [call(word="tea"), "Tea is a drink."]}
    scripted_reply = scripted_replies(**script)

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return scripted_reply(prompt)

    llm = scripted_chat(reply, policies={"thinker": "exact", "*": "off"})
    messages = await run(agent(llm, ThinkingMiddleware()), asynchronous)
    assert messages[1].text == "Look tea up."
    assert [tool_call["args"] for tool_call in messages[1].tool_calls] == [{"word": "tea"}]  # type: ignore[union-attr]
    assert messages[-1].text == "Tea is a drink."
    assert messages[-1].additional_kwargs["reasoning_content"] == "Look tea up."
    thinkers = [prompt for prompt in dict.fromkeys(prompts) if "You think" in prompt]
    assert len(thinkers) == 2
    assert describe_tools([look_up]) in thinkers[0]
    assert '[1] look_up(word="tea")\ntea is a drink' in thinkers[1]


NESTED = {
    "type": "object",
    "required": ["filter", "lines"],
    "properties": {
        "filter": {"$ref": "#/$defs/Filter"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/Line"}, "description": "What is\n  ordered."},
        "mode": {"anyOf": [{"enum": ["fast", "full"]}, {"type": "null"}], "default": "full"},
        "prices": {"type": "object", "additionalProperties": {"type": ["number", "null"]}},
        "many": {"enum": list(range(40))},
        "node": {"$ref": "#/$defs/Node"},
    },
    "$defs": {
        "Filter": {
            "type": "object",
            "required": ["state"],
            "properties": {
                "state": {"enum": ["open", "done"], "description": "State of the order."},
                "since": {"type": "string", "description": "A date, as in 2024-01-31."},
            },
        },
        "Line": {
            "type": "object", "required": ["id"],
            "properties": {"id": {"type": "integer", "description": "Its number."}},
        },
        "Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}},
    },
}  # fmt: skip


def order_tool(schema: Any, called: list[dict[str, Any]] | None = None) -> StructuredTool:
    def order(**given: Any) -> str:
        if called is not None:
            called.append(given)
        return "ordered"

    return StructuredTool(name="order", description="Order.", args_schema=schema, func=order)


def test_nested_arguments_are_described_with_types_enums_and_descriptions() -> None:
    described = describe_tools([order_tool(NESTED)])
    many = " | ".join(map(str, range(30)))
    assert described == "\n  ".join(
        [
            '- order(filter: {"state": "open" | "done", "since": string (optional)}, '
            'lines: list of {"id": integer}, mode: "fast" | "full" | null = "full", '
            f"prices: object of number | null = null, many: {many} | 10 more values = null, "
            'node: {"next": any (optional)} = null): Order.',
            "filter.state: State of the order.",
            "filter.since: A date, as in 2024-01-31.",
            "lines: What is ordered.",
            "lines.id: Its number.",
        ]
    )


def test_a_line_of_a_plan_has_nested_arguments() -> None:
    given = {"filter": {"state": "open", "since": "2024-01-31"}, "lines": [{"id": 1}, {"id": 2}], "mode": None}
    called: list[dict[str, Any]] = []
    line = 'order(filter={"state": "open", "since": "2024-01-31"}, lines=[{"id": 1}, {"id": 2}], mode=null)'
    llm = scripted_chat(
        lambda prompt: f"I order.\n\nPlan:\n1. {line}" if "You solve problems" in prompt else "Done.", policy="off"
    )
    assert build_plan_execute(llm, [order_tool(NESTED, called)]).invoke({"messages": [("human", "?")]})
    assert called == [given]


ODD_SCHEMAS: list[Any] = [
    {}, {"properties": None, "required": None}, {"type": None}, {"$ref": "#/$defs/A", "$defs": {"A": {}}},
    *({"type": "object", "properties": {"x": part}} for part in (
        True, False, None, {}, {"enum": None}, {"anyOf": None}, {"anyOf": [True, {"type": "null"}]}, {"items": None},
        {"type": "object", "properties": None, "required": None}, {"type": "array", "items": True},
        {"description": None}, {"enum": []}, {"anyOf": []}, {"required": True}, {"type": []}, {"default": math.nan},
        {"$ref": None},
    )),
    {"type": ["object", "null"], "properties": {"x": {}}, "required": True},
    {"type": "object", "properties": {"$ref": {"type": "string"}}},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/a~1b%20c"}}, "$defs": {"a/b c": {"type": "string"}}},
]  # fmt: skip


def test_odd_schemas_are_described_and_called() -> None:
    for schema in ODD_SCHEMAS:
        called: list[dict[str, Any]] = []
        order = order_tool(schema, called)
        assert describe_tools([order]).endswith("): Order."), schema
        llm = scripted_chat(
            lambda prompt: "I order.\n\nPlan:\n1. order()" if "You solve problems" in prompt else "Done.", policy="off"
        )
        build_plan_execute(llm, [order]).invoke({"messages": [("human", "?")]})
        assert called == [{}], schema
        # Checks the form of a call.
        options = CallOptions(tools=[order], tool_choice="any")
        assert options.tools[0]["function"]["parameters"]["type"] == "object"


def test_fields_of_a_schema_in_parts_are_described() -> None:
    one, two = ({"type": "object", "properties": {name: {"type": "string"}}, "required": [name]} for name in "ab")
    for schema, signature in (
        ({"allOf": [one, two]}, "order(a: string, b: string): Order."),
        ({"anyOf": [one, two]}, "order(a: string = null, b: string = null): Order."),
        ({"type": "object", "properties": {"x": {"allOf": [one, two]}}}, 'order(x: {"a": string, "b": string} = null)'),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"oneOf": [one]}}}, "order(a: string = null): Order."),
    ):
        assert signature in describe_tools([order_tool(schema, [])])


def test_describe_tools_lists_signatures_and_docstrings() -> None:
    @tool
    def save(text: str, tags: list[str], mode: str | None = None) -> str:
        """Save a text.

        It goes into a file.
        """
        return text

    save_tool: BaseTool = save
    assert describe_tools([save_tool]) == (
        "- save(text: string, tags: list of string, mode: string | null = null): Save a text.\n  It goes into a file."
    )
