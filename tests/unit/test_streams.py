"""Summed chunks equal the message of `invoke` in LangChain, in LangGraph and in clients of the server."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ToolMessage,
    message_chunk_to_message,
    messages_from_dict,
    messages_to_dict,
)
from langchain_core.output_parsers import PydanticToolsParser
from langchain_core.runnables import Runnable
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.events import as_chunk
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.scripted import reply_script
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.replies import TOOLS, replies_in
from tests.unit.serving import serving

EXAMPLES = int(os.environ.get("READER_EXAMPLES", "60"))
WHOLE = '<tool_call>\n{"name": "remove", "arguments": {"path": "/home/a/b.txt", "note": "one two three"}}\n</tool_call>'
HALF = '<tool_call>\n{"name": "remove", "arguments": "{\\"path\\": \\"/home/a"}\n</tool_call>'
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": (f"\nLet me see.\n{WHOLE}\nThat is all.\n", {}),
    "text as arguments, half": (f"I remove it. {HALF} Done.", {}),
    "cut off at max_tokens": (WHOLE, {"max_tokens": 30}),
    "cut off in the second": (f"{WHOLE}\n{WHOLE}", {"max_tokens": 80}),
    "cut off by stop": (WHOLE, {"stop": ["two"]}),
    "cut off after the tag": (WHOLE, {"max_tokens": 2}),
    "no arguments": ('<tool_call>{"name": "remove"}</tool_call>', {}),
    "bare": (WHOLE.split("\n")[1], {}),
    "bare, cut off": (WHOLE.split("\n")[1], {"max_tokens": 30}),
    "fenced": (f"```json\n{WHOLE.splitlines()[1]}\n```", {}),
    "NaN": ('<tool_call>{"name": "remove", "arguments": {"path": NaN}}</tool_call>', {}),
    "half a character": ('<tool_call>{"name": "remove", "arguments": {"path": "\\ud83d"}}</tool_call>', {}),
    "half a character in the text": ("One \ud83d two \ude00.", {}),
    "a call that is there and one that is not": (f"{WHOLE} {HALF}", {}),
    "an example": (f"`{WHOLE}` calls it.", {}),
    "only text": ("Hello  \n", {}),
    "nothing": ("", {}),
}
COMPLETE_CALLS = {"whole", "cut off in the second", "bare", "fenced", "a call that is there and one that is not"}


def chat(text: str, *, tags: ThinkingTags | None = None, opened: bool = False, interval: int = 1, **fields: Any) -> Any:
    """A scripted chat model that replies with `text`."""
    tokenizer = ScriptedTokenizer(tags, opens_thinking=opened)

    def reply(prompt: str) -> str:
        return "Done." if "removed" in prompt else text

    target = ScriptedEngine(tokenizer, reply_script(reply), tokens_per_delta=interval)
    draft = ScriptedEngine(tokenizer, reply_script(reply))
    return ChatLookahead(engines=EngineSet(target, draft), **{"policy": "off", **fields})


class RemoveTool:
    """An irreversible tool that records its arguments."""

    def __init__(self) -> None:
        self.executed: list[tuple[str, str]] = []

        @tool
        def remove(path: str = "/", note: str = "") -> str:
            """Remove a file."""
            self.executed.append((path, note))
            return "removed"

        self.tool = remove


def summed(chunks: Iterable[AIMessageChunk]) -> AIMessageChunk:
    whole: AIMessageChunk | None = None
    for chunk in chunks:
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def message_fields(message: AIMessage) -> dict[str, Any]:
    """The fields of a message that do not differ between calls."""
    invalid = [(call["name"], call["args"], call.get("error")) for call in message.invalid_tool_calls]
    return {
        "content": message.text,
        "calls": [(call["name"], call["args"]) for call in message.tool_calls],
        "invalid": invalid,
        "thinking": message.additional_kwargs.get("reasoning_content", ""),
        "finish_reason": message.response_metadata["finish_reason"],
        "usage": message.usage_metadata,
    }


async def asummed(llm: Runnable[LanguageModelInput, AIMessage]) -> AIMessageChunk:
    return summed([chunk async for chunk in llm.astream("q")])  # type: ignore[misc]


@pytest.mark.parametrize("case", CASES)
def test_invoke_stream_and_their_async_forms_return_the_same_message(case: str) -> None:
    text, options = CASES[case]
    tools = [RemoveTool().tool]
    llm = chat(text).bind_tools(tools, **options)
    message = llm.invoke("q")
    assert type(message) is AIMessage
    assert bool(message.tool_calls) == (case in COMPLETE_CALLS)
    others = [
        asyncio.run(llm.ainvoke("q")),
        summed(llm.stream("q")),
        asyncio.run(asummed(llm)),
        message_chunk_to_message(summed(llm.stream("q"))),
        chat(text, streaming=True).bind_tools(tools, **options).invoke("q"),
        chat(text, interval=3).bind_tools(tools, **options).invoke("q"),
        summed(chat(text, interval=1000).bind_tools(tools, **options).stream("q")),
        pickle.loads(pickle.dumps(summed(llm.stream("q")))),
        summed(chat(text, policy="balanced:depth=2").bind_tools(tools, **options).stream("q")),
    ]
    for other in others:
        assert message_fields(other) == message_fields(message)
    assert type(others[3]) is AIMessage
    assert type(others[4]) is AIMessage
    json.dumps(message_fields(message), ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("case", CASES)
def test_summed_chunks_never_complete_an_invalid_call(case: str) -> None:
    text, options = CASES[case]
    llm = chat(text).bind_tools([RemoveTool().tool], **options)
    calls = [(call["name"], call["args"]) for call in llm.invoke("q").tool_calls]
    plain = AIMessageChunk("")
    for chunk in llm.stream("q"):
        plain += AIMessageChunk(**{key: value for key, value in dict(chunk).items() if key != "type"})
    stored = messages_from_dict(messages_to_dict([summed(llm.stream("q"))]))[0]
    for other in (plain, AIMessageChunk("") + summed(llm.stream("q")), stored):
        assert isinstance(other, AIMessage)
        assert [(call["name"], call["args"]) for call in other.tool_calls] == calls
        assert len(other.invalid_tool_calls) == len(llm.invoke("q").invalid_tool_calls)


@pytest.mark.parametrize("arguments", ['{"path": "/home/a', "", "{}", "[]", "null", '{"path": "/home/a"}', None])
def test_a_chunk_of_an_invalid_call_never_becomes_a_valid_call(arguments: str | None) -> None:
    call = {"type": "invalid_tool_call", "id": "1", "name": "remove", "args": arguments, "error": "cut off"}
    chunk = as_chunk(AIMessage("", invalid_tool_calls=[call]))  # type: ignore[list-item]
    for whole in (chunk, AIMessageChunk("") + chunk, as_chunk(AIMessage("")) + chunk, chunk + as_chunk(AIMessage(""))):
        assert whole.tool_calls == []
        assert [invalid["id"] for invalid in whole.invalid_tool_calls] == ["1"]
    assert (as_chunk(AIMessage("")) + chunk).invalid_tool_calls == [call]


def graph_of(llm: Runnable[LanguageModelInput, AIMessage], remove_tool: RemoveTool) -> Any:
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([remove_tool.tool], handle_tool_errors=True))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    return graph.compile()


@pytest.mark.parametrize("case", CASES)
def test_a_graph_executes_the_same_tools_with_and_without_streaming(case: str) -> None:
    text, options = CASES[case]
    remove_tool = RemoveTool()
    graph = graph_of(chat(text).bind_tools([remove_tool.tool], **options), remove_tool)
    question = {"messages": [("user", "q")]}
    state = graph.invoke(question)
    executed, remove_tool.executed = remove_tool.executed, []
    assert executed == ([("/home/a/b.txt", "one two three")] if case in COMPLETE_CALLS else [])

    async def events() -> None:
        async for _ in graph.astream_events(question, version="v2"):
            pass

    runs: list[Callable[[], Any]] = [
        lambda: [*graph.stream(question, stream_mode=["messages", "values"])][-1][1],
        lambda: [*graph.stream(question, stream_mode=["messages", "updates", "values"])][-1][1],
        lambda: asyncio.run(events()),
    ]
    for run in runs:
        streamed = run()
        assert remove_tool.executed == executed
        remove_tool.executed = []
        if streamed is not None:
            kinds = [type(message) for message in streamed["messages"] if not isinstance(message, ToolMessage)]
            assert kinds == [type(message) for message in state["messages"] if not isinstance(message, ToolMessage)]
            assert message_fields(streamed["messages"][1]) == message_fields(state["messages"][1])


@pytest.mark.parametrize("case", CASES)
def test_streamed_content_blocks_of_output_version_v1_equal_those_of_invoke(case: str) -> None:
    text, options = CASES[case]
    llm = chat(text, output_version="v1").bind_tools([RemoveTool().tool], **options)
    message, streamed = llm.invoke("q"), summed(llm.stream("q"))

    def blocks(of: AIMessage) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in dict(block).items() if key not in ("id", "index")}
            for block in of.content_blocks
        ]

    assert blocks(streamed) == blocks(message)
    assert message_fields(streamed) == message_fields(message)


@pytest.mark.parametrize("forced", ['{"name":"remove","arguments":{"path":"/home/a/b.txt"}}'])
@pytest.mark.parametrize("limit", [5, 12, 14])
def test_a_truncated_forced_call_is_invalid(forced: str, limit: int) -> None:
    llm = chat(forced, max_tokens=limit).bind_tools([RemoveTool().tool], tool_choice="any")
    message = llm.invoke("q")
    assert message_fields(summed(llm.stream("q"))) == message_fields(message)
    assert (message.tool_calls, len(message.invalid_tool_calls)) == ([], 1)
    assert message.response_metadata["finish_reason"] == "length"


class Path(BaseModel):
    """Where a file is."""

    path: str
    note: str = ""


@pytest.mark.parametrize("limit", [6, 12, 14])
def test_structured_output_raises_on_a_truncated_call(limit: int) -> None:
    llm = chat('{"name":"Path","arguments":{"path":"/home/a/b.txt"}}', max_tokens=limit)
    bound = llm.with_structured_output(Path, method="function_calling")
    for generate in (lambda: bound.invoke("q"), lambda: list(bound.stream("q"))[-1]):
        with pytest.raises(OutputParserException, match="max_tokens cut it off"):
            generate()
    parser = PydanticToolsParser(tools=[Path], first_tool_only=True)
    assert (llm.bind_tools([Path], tool_choice="any") | parser).invoke("q") is None


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    replies_in("hermes"),
    st.sampled_from([None, 1, 5, 20]),
    st.sampled_from([1, 2, 1000]),
    st.sampled_from([None, ThinkingTags(), ThinkingTags(always=False)]),
    st.booleans(),
    st.sampled_from([[], ["a"], ["think"]]),
)
def test_the_stream_of_any_reply_sums_to_the_reply(
    text: str, limit: int | None, interval: int, tags: ThinkingTags | None, opened: bool, stop: list[str]
) -> None:
    options = {"stop": stop, **({} if limit is None else {"max_tokens": limit})}
    llm = chat(text, tags=tags, opened=opened).bind(tools=TOOLS, **options)
    message = llm.invoke("q")
    chunks = list(chat(text, tags=tags, opened=opened, interval=interval).bind(tools=TOOLS, **options).stream("q"))
    assert message_fields(summed(chunks)) == message_fields(message)
    ids = [call["id"] for call in (*message.tool_calls, *message.invalid_tool_calls)]
    assert len(set(ids)) == len(ids)
    json.dumps(message_fields(message), ensure_ascii=False, allow_nan=False).encode()


# Clients of the server


def test_clients_of_the_server_never_complete_an_invalid_call() -> None:
    for case, (text, options) in CASES.items():
        remove_tool = RemoveTool()
        direct = chat(text).bind_tools([remove_tool.tool], **options).invoke("q")
        with serving(chat(text)) as (url, _):
            body = {"messages": [{"role": "user", "content": "q"}], "tools": [REMOVE], **options}
            plain = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]
            streamed = _streamed(url, body)
            reason = direct.response_metadata["finish_reason"]
            expected = "tool_calls" if reason == "stop" and plain["message"]["tool_calls"] else reason
            assert streamed["finish_reason"] == plain["finish_reason"] == expected
            assert streamed["content"] == (plain["message"]["content"] or "") == direct.text
            assert streamed["tool_calls"] == _functions(plain["message"]["tool_calls"] or ())
            openai_llm = ChatOpenAI(base_url=f"{url}/v1", api_key="-", model="qwen2.5-coder-1.5b", max_retries=0)
            bound = openai_llm.bind_tools([remove_tool.tool]).bind(**options)
            for message in (bound.invoke("q"), summed(bound.stream("q"))):  # type: ignore[arg-type]
                assert [(call["name"], call["args"]) for call in message.tool_calls] == message_fields(direct)[
                    "calls"
                ], case
                assert len(message.invalid_tool_calls) == len(direct.invalid_tool_calls), case
                assert message.text == direct.text
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
            reply = client.chat.completions.create(model="qwen2.5-coder-1.5b", **body)
            for call in (reply.choices[0].message.tool_calls or [])[len(direct.tool_calls) :]:
                with pytest.raises(json.JSONDecodeError):
                    json.loads(call.function.arguments)


def test_openai_sdk_raises_a_length_error_on_a_truncated_call() -> None:
    strict = openai.pydantic_function_tool(Path, name="remove")
    with serving(chat(WHOLE)) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)
        request: Any = {
            "model": "qwen2.5-coder-1.5b",
            "messages": [{"role": "user", "content": "q"}],
            "tools": [strict],
        }
        with client.chat.completions.stream(**request) as events:
            done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [event.parsed_arguments for event in done] == [Path(path="/home/a/b.txt", note="one two three")]
        with (
            pytest.raises(openai.LengthFinishReasonError),
            client.chat.completions.stream(**request, max_tokens=30) as events,
        ):
            list(events)
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(**request, max_tokens=30)


REMOVE = {
    "type": "function",
    "function": {
        "name": "remove",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "note": {"type": "string"}}},
    },
}


def _functions(calls: Iterable[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def _streamed(url: str, body: dict[str, Any]) -> dict[str, Any]:
    text = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in event["choices"]]
    return {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "tool_calls": _functions(call for choice in choices for call in choice["delta"].get("tool_calls") or ()),
        "finish_reason": choices[-1]["finish_reason"],
    }
