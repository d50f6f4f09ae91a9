"""OpenAI's SDK and `ChatOpenAI` work with this server as with OpenAI's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

from tests.unit.chat import scripted_chat
from tests.unit.serving import serving

REPLY = "First this.\n\nThen that.\n\nIt is 4."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


class Answer(BaseModel):
    """An answer."""

    number: int


class Step(BaseModel):
    """One step of an answer."""

    explanation: str
    output: str


class Worked(BaseModel):
    """An answer and how it was found."""

    steps: list[Step]
    number: int


WORKED = Worked(steps=[Step(explanation="Two and two.", output="4")], number=4)


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def reply_to(prompt: str) -> str:
    if "with steps" in prompt:
        return '{"steps": [{"explanation": "Two and two.", "output": "4"}], "number": 4}'
    if "in JSON" in prompt:
        return '{"number": 4}'
    if "must call" in prompt:
        return '{"name": "add", "arguments": {"a": 1, "b": 2}}'
    return "I add.\n\n" + CALL if "tools:" in prompt and "tool: 3" not in prompt else REPLY


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(scripted_chat(reply_to), api_key="secret") as (address, _):
        yield address + "/v1"


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        yield client


@pytest.fixture
def chat(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="secret", model="qwen2.5-coder-1.5b", max_retries=0)  # type: ignore[arg-type]


MODEL = "qwen2.5-coder-1.5b"


def test_openai_sdk_chats_streams_and_sets_a_policy(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}], seed=1)
    assert reply.choices[0].message.content == REPLY
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage is not None
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], extra_body={"policy": "off"}
    )
    assert reply.model_extra is not None
    assert reply.model_extra["lookahead"][0]["policy"] == "off"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_sdk_calls_a_tool_and_returns_its_result(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        with client.chat.completions.stream(
            model=MODEL, messages=[{"role": "user", "content": "1 + 2?"}], tools=[TOOL]
        ) as events:
            message = events.get_final_completion().choices[0].message
    else:
        message = (
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "1 + 2?"}], tools=[TOOL])
            .choices[0]
            .message
        )
    assert message.content == "I add."
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    answer = client.chat.completions.create(
        model=MODEL,
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": message.content, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": "3"},
        ],
    )
    assert answer.choices[0].message.content == REPLY


def test_openai_sdk_forces_a_tool_and_parses_structured_output(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "You must call."}], tools=[TOOL], tool_choice="required"
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Answer in JSON."}], response_format=Answer
    )
    assert parsed.choices[0].message.parsed == Answer(number=4)


def test_openai_sdk_parses_nested_models_and_tool_arguments(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=user("4 with steps"), response_format=Worked)
    assert parsed.choices[0].message.parsed == WORKED
    with client.chat.completions.stream(model=MODEL, messages=user("4 with steps"), response_format=Worked) as events:
        assert {event.type for event in events} >= {"content.delta", "content.done"}
        assert events.get_final_completion().choices[0].message.parsed == WORKED
    called = client.chat.completions.parse(
        model=MODEL, messages=user("1 + 2?"), tools=[openai.pydantic_function_tool(Summands, name="add")]
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Summands(a=1, b=2)


class Summands(BaseModel):
    """Add."""

    a: int
    b: int


async def test_async_openai_sdk_chats_and_streams(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="secret", max_retries=0) as client:
        replies = await asyncio.gather(
            *(client.chat.completions.create(model=MODEL, messages=user("?")) for _ in range(4))
        )
        assert [reply.choices[0].message.content for reply in replies] == [REPLY] * 4
        events = await client.chat.completions.create(model=MODEL, messages=user("?"), stream=True)
        assert "".join([event.choices[0].delta.content or "" async for event in events if event.choices]) == REPLY


def test_rejected_requests_raise_errors_of_the_sdk_with_a_reason(client: openai.OpenAI, url: str) -> None:
    with pytest.raises(openai.NotFoundError, match=r"answers POST /v1/chat/completions"):
        client.moderations.create(input="?")
    with pytest.raises(openai.NotFoundError, match=r"answers POST /v1/chat/completions"):
        client.embeddings.create(model=MODEL, input="?")
    with pytest.raises(openai.BadRequestError, match="temperature") as raised:
        client.chat.completions.create(model=MODEL, messages=user("?"), temperature=9)
    assert raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model=MODEL, messages=[])
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.chat.completions.create(model=MODEL, messages=user("?"), stream=True, logprobs=True)
    with pytest.raises(openai.AuthenticationError, match="API key") as refused:
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).chat.completions.create(
            model=MODEL, messages=user("?")
        )
    assert refused.value.type == "authentication_error"


def test_openai_sdk_lists_models_completes_texts_and_raises_errors(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.completions.create(model=MODEL, prompt="assistant: ", max_tokens=50).choices[0].text == REPLY
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "?"}])
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}], logprobs=True)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


def test_chat_openai_invokes_streams_and_calls_tools(chat: ChatOpenAI) -> None:
    assert chat.invoke("?").text == REPLY
    assert "".join(chunk.text for chunk in chat.stream("?")) == REPLY
    bound = chat.bind_tools([add])
    message = bound.invoke("1 + 2?")
    assert message.tool_calls[0]["args"] == {"a": 1, "b": 2}
    history = [HumanMessage("1 + 2?"), message, ToolMessage("3", tool_call_id=message.tool_calls[0]["id"])]
    assert bound.invoke(history).text == REPLY
    total = None
    for chunk in bound.stream("1 + 2?"):
        total = chunk if total is None else total + chunk  # type: ignore[assignment]
    assert total is not None
    assert total.tool_calls[0]["name"] == "add"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_chat_openai_structured_output(chat: ChatOpenAI, method: str) -> None:
    structured = chat.with_structured_output(Answer, method=method)  # type: ignore[arg-type]
    if method == "function_calling":
        with serving(scripted_chat('{"name": "Answer", "arguments": {"number": 4}}')) as (url, _):
            llm = ChatOpenAI(base_url=url + "/v1", api_key="x", model=MODEL)  # type: ignore[arg-type]
            assert llm.with_structured_output(Answer, method="function_calling").invoke("?") == Answer(number=4)
    else:
        assert structured.invoke("Answer in JSON.") == Answer(number=4)


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
@pytest.mark.parametrize("stream", [False, True])
def test_chat_openai_structured_output_with_include_raw(method: str, stream: bool) -> None:
    with serving(scripted_chat(summands)) as (address, _):
        llm = ChatOpenAI(base_url=address + "/v1", api_key="x", model=MODEL)  # type: ignore[arg-type]
        structured = llm.with_structured_output(Summands, method=method, include_raw=True)  # type: ignore[arg-type]
        found: dict[str, object] = {}
        if stream:
            for part in structured.stream("1 + 2, in JSON"):
                found |= part
        else:
            found |= structured.invoke("1 + 2, in JSON")
    assert found["parsing_error"] is None
    assert found["parsed"] == Summands(a=1, b=2)


def summands(prompt: str) -> str:
    """JSON of the schema, or the forced call."""
    arguments = '{"a": 1, "b": 2}'
    return f'{{"name": "Summands", "arguments": {arguments}}}' if "tools:" in prompt else arguments


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_on_chat_openai_calls_its_tool_and_answers(chat: ChatOpenAI, stream: bool) -> None:
    agent = create_agent(chat, [add])
    question = {"messages": [("user", "1 + 2?")]}
    if stream:
        shown = [part for part, _ in agent.stream(question, stream_mode="messages") if part.type == "AIMessageChunk"]  # type: ignore[union-attr]
        assert "".join(part.text for part in shown).endswith(REPLY)
        return
    messages = agent.invoke(question)["messages"]
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    assert messages[1].tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert messages[2].text == "3"
    assert messages[3].text == REPLY


def test_chat_openai_reports_the_same_usage_with_and_without_streaming(chat: ChatOpenAI) -> None:
    usage = chat.invoke("?").usage_metadata
    assert usage is not None
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 0
    streamed = [chunk.usage_metadata for chunk in chat.stream("?", stream_usage=True) if chunk.usage_metadata]
    assert [each["total_tokens"] for each in streamed] == [usage["total_tokens"]]
