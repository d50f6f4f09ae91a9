"""The official clients against the server: what works with OpenAI's works here."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionToolParam
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


def reply_to(prompt: str) -> str:
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


def test_openai_chat_and_stream(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}], seed=1)
    assert reply.choices[0].message.content == REPLY
    pieces = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = list(pieces)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == REPLY
    assert chunks[-1].usage is not None
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "?"}], extra_body={"policy": "off"}
    )
    assert reply.model_extra is not None
    assert reply.model_extra["lookahead"][0]["policy"] == "off"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools(client: openai.OpenAI, stream: bool) -> None:
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


def test_openai_forced_tools_and_structured_output(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "You must call."}], tools=[TOOL], tool_choice="required"
    )
    assert reply.choices[0].finish_reason == "tool_calls"
    parsed = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "Answer in JSON."}], response_format=Answer
    )
    assert parsed.choices[0].message.parsed == Answer(number=4)


def test_openai_models_completions_and_errors(client: openai.OpenAI, url: str) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.completions.create(model=MODEL, prompt="assistant: ", max_tokens=50).choices[0].text == REPLY
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "?"}])
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}], logprobs=True)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()


def test_chat_openai(chat: ChatOpenAI) -> None:
    assert chat.invoke("?").text == REPLY
    assert "".join(chunk.text for chunk in chat.stream("?")) == REPLY
    bound = chat.bind_tools([add])
    message = bound.invoke("1 + 2?")
    assert message.tool_calls[0]["args"] == {"a": 1, "b": 2}
    history = [HumanMessage("1 + 2?"), message, ToolMessage("3", tool_call_id=message.tool_calls[0]["id"])]
    assert bound.invoke(history).text == REPLY
    whole = None
    for chunk in bound.stream("1 + 2?"):
        whole = chunk if whole is None else whole + chunk  # type: ignore[assignment]
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "add"


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_chat_openai_structured_output(chat: ChatOpenAI, method: str) -> None:
    structured = chat.with_structured_output(Answer, method=method)  # type: ignore[arg-type]
    if method == "function_calling":
        with serving(scripted_chat('{"name": "Answer", "arguments": {"number": 4}}')) as (url, _):
            other = ChatOpenAI(base_url=url + "/v1", api_key="x", model=MODEL)  # type: ignore[arg-type]
            assert other.with_structured_output(Answer, method="function_calling").invoke("?") == Answer(number=4)
    else:
        assert structured.invoke("Answer in JSON.") == Answer(number=4)
