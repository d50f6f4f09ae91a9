"""`/v1/responses` with OpenAI's SDK, OpenAI's agents and `ChatOpenAI`, and with clients that send what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.server.clients import Client
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.responses_request import ResponseRequestBody
from lookahead_agent.server.stored_responses import ResponseStore, StoredResponse
from tests.unit.chat import reply_script, scripted_chat
from tests.unit.serving import serving
from tests.unit.test_server import failing_chat, in_flight, slow_chat
from tests.waiting import wait_until

HTTP = httpx.Client()  # creating one takes a tenth of a second
MODEL = "qwen2.5-coder-1.5b"
PATH = "/v1/responses"
REPLY = "It is.\n\nFour."
ARGUMENTS = '{"a": 1, "b": 2}'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOL: Any = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "add", "arguments": ARGUMENTS}
OUTPUT: dict[str, Any] = {"type": "function_call_output", "call_id": "c", "output": "3"}
USER: dict[str, Any] = {"role": "user", "content": "1 + 2?"}

set_tracing_disabled(True)


class Sum(BaseModel):
    """A sum."""

    number: int


def reply_to(prompt: str) -> str:
    """Call a tool if there are tools and no result of one, and think first."""
    if "tools:" in prompt and "tool: " not in prompt:
        name = "transfer_to_mathematician" if "transfer_to" in prompt else "add"
        arguments = "{}" if "transfer_to" in prompt else ARGUMENTS
        call = f'{{"name": "{name}", "arguments": {arguments}}}'
        return f"<think>Hm.</think>\n\nI call.\n\n<tool_call>\n{call}\n</tool_call>"
    return f"<think>So.\n\nIt is.</think>\n\n{REPLY}"


def thinking_chat(**fields: Any) -> ChatLookahead:
    engine = ScriptedEngine(
        ScriptedTokenizer(thinking=ThinkingTags()), reply_script(reply_to), prefix_cache=True, context_length=4000
    )
    return ChatLookahead(engines=EngineSet(engine), policy="off", **fields)


def prompts(llm: ChatLookahead) -> list[str]:
    assert llm.engines is not None
    engine = llm.engines.target
    assert isinstance(engine, ScriptedEngine)
    return [engine.tokenizer.decode(list(ids)) for ids, _ in engine.requests]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(thinking_chat(policies={"planner": "exact"}), api_key=["secret", "other"]) as (address, _):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="secret", max_retries=0) as client:
        yield client


def post(url: str, body: Any, key: str = "secret") -> httpx.Response:
    return HTTP.post(url + PATH, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def shape(response: Response) -> list[str]:
    return [item.type for item in response.output]


# OpenAI's SDK


def test_a_response_has_items_usage_and_what_the_request_said(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="hi", instructions="Be kind.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=100,
        reasoning={"summary": None}, user="u", extra_headers={"X-Lookahead-Node": "planner"},
    )  # fmt: skip
    assert (response.status, response.output_text, shape(response)) == ("completed", REPLY, ["reasoning", "message"])
    assert response.id.startswith("resp_")
    reasoning = response.output[0]
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert [part.text for part in reasoning.content] == ["So.\n\nIt is."]
    assert (response.instructions, response.metadata, response.user) == ("Be kind.", {"a": "b"}, "u")
    assert (response.temperature, response.max_output_tokens) == (0.5, 100)
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert response.model_extra is not None
    assert response.model_extra["lookahead"]["policy"] == "exact"
    assert client.responses.retrieve(response.id) == response
    again = client.responses.create(model=MODEL, input="hi", instructions="Be kind.")
    assert again.usage is not None
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_events_have_the_order_of_the_api_and_end_with_the_response(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model=MODEL, input="1 + 2?", tools=[TOOL], stream=True))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict(), strict=False)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for last, kind in zip(["", *kinds], kinds, strict=False) if kind != last] == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    last = events[-1]
    assert last.type == "response.completed"
    assert shape(last.response) == ["reasoning", "message", "function_call"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == last.response.output_text == "I call."
    indices = {event.output_index for event in events if event.type == "response.function_call_arguments.done"}
    assert indices == {2}
    assert client.responses.retrieve(last.response.id) == last.response


def test_the_thinking_is_the_summary_if_one_is_asked_for(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input="hi", reasoning={"summary": "auto"}) as stream:
        kinds = {event.type for event in stream}
        item = stream.get_final_response().output[0]
    assert item.type == "reasoning"
    assert ([part.text for part in item.summary], item.content) == (["So.\n\nIt is."], [])
    assert {"response.reasoning_summary_text.delta", "response.reasoning_summary_part.done"} <= kinds
    assert "response.reasoning_text.delta" not in kinds


@pytest.mark.parametrize("stored", [True, False])
def test_a_tool_and_its_output_by_previous_response_or_by_items(client: openai.OpenAI, stored: bool) -> None:
    with client.responses.stream(model=MODEL, input="1 + 2?", tools=[TOOL], store=stored) as stream:
        first = stream.get_final_response()
    call = first.output[-1]
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 1, "b": 2}
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    if stored:
        second = client.responses.create(model=MODEL, previous_response_id=first.id, input=[output], tools=[TOOL])
    else:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        items: Any = [USER, *(item.to_dict() for item in first.output), output]
        second = client.responses.create(model=MODEL, input=items, tools=[TOOL], store=False)
    assert second.output_text == REPLY


@pytest.fixture(scope="module")
def forms_url() -> Iterator[str]:
    with serving(scripted_chat('{"number": 4}')) as (address, _):
        yield address


def test_forms_are_parsed_into_models_also_in_streams(forms_url: str) -> None:
    client = openai.OpenAI(base_url=forms_url + "/v1", api_key="-", max_retries=0)
    assert client.responses.parse(model=MODEL, input="in JSON", text_format=Sum).output_parsed == Sum(number=4)
    with client.responses.stream(model=MODEL, input="in JSON", text_format=Sum) as stream:
        assert stream.get_final_response().output_parsed == Sum(number=4)
    response = client.responses.create(model=MODEL, input="in JSON", text={"format": {"type": "json_object"}})
    assert json.loads(response.output_text) == {"number": 4}


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_without_tokens_left_is_incomplete(client: openai.OpenAI, stream: bool) -> None:
    if stream:
        *_, last = client.responses.create(model=MODEL, input="hi", max_output_tokens=9, stream=True)
        assert last.type == "response.incomplete"
        response = last.response
    else:
        response = client.responses.create(model=MODEL, input="hi", max_output_tokens=9)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].status == "incomplete"  # type: ignore[union-attr]


def test_errors_of_the_sdk_name_the_field_and_the_response(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="web_search") as refused:
        client.responses.create(model=MODEL, input="hi", tools=[{"type": "web_search"}])
    assert refused.value.param == "tools.0"
    with pytest.raises(openai.NotFoundError, match="no response 'resp_x'") as missing:
        client.responses.create(model=MODEL, input="hi", previous_response_id="resp_x")
    assert (missing.value.param, missing.value.code) == ("previous_response_id", "previous_response_not_found")
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        client.responses.create(model="gpt-9", input="hi")


def test_an_error_within_a_stream_is_a_failed_response() -> None:
    with serving(failing_chat("cannot read /srv/models/secret-name")) as (url, _):
        client = openai.OpenAI(base_url=url + "/v1", api_key="-", max_retries=0)
        *_, last = client.responses.create(model=MODEL, input="hi", stream=True)
        assert last.type == "response.failed"
        assert last.response.error is not None
        assert last.response.error.code == "server_error"
        assert "secret" not in last.to_json()
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model=MODEL, input="hi")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(last.response.id)


def test_the_effort_switches_thinking_on_or_off() -> None:
    for effort, expected in (("none", {"enable_thinking": False}), ("low", {"enable_thinking": True}), (None, {})):
        body = ResponseRequestBody.model_validate({"input": "hi", "reasoning": {"effort": effort}})
        assert body.chat_body([]).chat_template_kwargs == expected
    for fields, budget in (({"thinking_tokens": 0}, 0), ({"thinking_token_budget": 8}, 8), ({}, None)):
        body = ResponseRequestBody.model_validate({"input": "hi", **fields})
        assert body.chat_body([]).thinking_tokens == budget


# OpenAI's agents


@function_tool(name_override="add")
def add_in_agent(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.mark.parametrize("stream", [False, True])
async def test_openai_agents_hand_off_call_tools_and_continue(stream: bool) -> None:
    llm = thinking_chat()
    with serving(llm) as (url, _):
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="-", max_retries=0) as client:
            model = OpenAIResponsesModel(MODEL, openai_client=client)
            settings = ModelSettings(temperature=0)
            adder = Agent(name="Adder", model=model, model_settings=settings, tools=[add_in_agent])
            mathematician = Agent(name="Mathematician", instructions="Add.", model=model, model_settings=settings)
            triage = Agent(name="Triage", model=model, handoffs=[mathematician])
            last: str | None = None
            for agent, question in ((adder, "1 + 2?"), (triage, "1 + 3?"), (mathematician, "And now?")):
                if stream:
                    result: Any = Runner.run_streamed(agent, question, previous_response_id=last)
                    deltas = [e.data async for e in result.stream_events() if e.type == "raw_response_event"]
                    assert "response.completed" in {event.type for event in deltas}
                else:
                    result = await Runner.run(agent, question, previous_response_id=last)
                assert result.final_output == REPLY
                last = result.last_response_id if agent is triage else None
            assert result.last_agent is mathematician
        shown = prompts(llm)[-1]
        assert "1 + 3?" in shown
        assert shown.endswith("user: And now?\nassistant: ")


# LangChain


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def chat_openai(url: str, **fields: Any) -> ChatOpenAI:
    fields = {"use_responses_api": True, "max_retries": 0} | fields
    return ChatOpenAI(base_url=url + "/v1", api_key="secret", model=MODEL, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["v0", "responses/v1", "v1"])
def test_chat_openai_invokes_streams_and_calls_tools(url: str, version: str) -> None:
    llm = chat_openai(url, output_version=version)
    message = llm.invoke("hi")
    assert message.text == REPLY
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_token_details"]["reasoning"] > 0
    assert "".join(chunk.text for chunk in llm.stream("hi")) == REPLY
    bound = llm.bind_tools([add])
    total: Any = None
    for chunk in bound.stream("1 + 2?"):
        total = chunk if total is None else total + chunk
    for call in (bound.invoke("1 + 2?"), total):
        assert isinstance(call, AIMessage)
        assert [(each["name"], each["args"]) for each in call.tool_calls] == [("add", {"a": 1, "b": 2})]
        history = [HumanMessage("1 + 2?"), call, ToolMessage("3", tool_call_id=call.tool_calls[0]["id"])]
        assert bound.invoke(history).text == REPLY
    shown = chat_openai(url, reasoning={"summary": "auto"}, output_version="v1")
    streamed: Any = None
    for chunk in shown.stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    for message in (shown.invoke("hi"), streamed):
        assert [block["reasoning"] for block in message.content_blocks if block["type"] == "reasoning"] == [
            "So.\n\nIt is."
        ]


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_chat_openai_structured_output(forms_url: str, method: Any) -> None:
    assert chat_openai(forms_url).with_structured_output(Sum, method=method).invoke("in JSON") == Sum(number=4)


def test_chat_openai_continues_the_previous_response(url: str) -> None:
    llm = chat_openai(url, use_previous_response_id=True, output_version="responses/v1")
    question = HumanMessage("1 + 2?")
    call = llm.bind_tools([add]).invoke([question])
    result = ToolMessage("3", tool_call_id=call.tool_calls[0]["id"])
    answer = llm.invoke([question, call, result])
    assert answer.text == REPLY
    previous = HTTP.get(
        f"{url}{PATH}/{answer.response_metadata['id']}", headers={"Authorization": "Bearer secret"}
    ).json()["previous_response_id"]
    assert previous == call.response_metadata["id"]


# Conversations


def test_a_continued_conversation_has_its_items_and_not_its_instructions() -> None:
    llm = thinking_chat()
    with serving(llm) as (url, _):
        first = post(url, {"input": "a", "instructions": "Be kind."}).json()
        second = post(url, {"input": "b", "previous_response_id": first["id"]}).json()
        assert HTTP.delete(f"{url}{PATH}/{first['id']}").json() == {
            "id": first["id"], "object": "response", "deleted": True,
        }  # fmt: skip
        assert HTTP.get(f"{url}{PATH}/{first['id']}").status_code == 404
        third = post(url, {"input": "c", "previous_response_id": second["id"], "instructions": "Be brief."}).json()
        twice = post(url, {"input": "c", "previous_response_id": second["id"], "instructions": "Be brief."}).json()
        assert third["status"] == twice["status"] == "completed"
        assert third["id"] != twice["id"]
    one, two, three, *_ = dict.fromkeys(prompts(llm))
    assert one == "system: Be kind.\nuser: a\nassistant: "
    assert two == f"user: a\nassistant: {REPLY}\nuser: b\nassistant: "
    assert three == f"system: Be brief.\nuser: a\nassistant: {REPLY}\nuser: b\nassistant: {REPLY}\nuser: c\nassistant: "


def test_clients_have_their_own_bounded_responses() -> None:
    fields: dict[str, Any] = {"stored_responses": 6, "stored_bytes": 60_000}
    with serving(scripted_chat("Fine."), api_key=["secret", "other"], **fields) as (url, _):

        def status(response_id: str, key: str = "secret") -> int:
            return HTTP.get(f"{url}{PATH}/{response_id}", headers={"Authorization": f"Bearer {key}"}).status_code

        kept = post(url, {"input": "hi"}, "other").json()["id"]
        ids = [post(url, {"input": "hi"}).json()["id"] for _ in range(5)]
        assert [status(each) for each in ids] == [404, 404, 200, 200, 200], "half of six for each key"
        assert [status(kept, "other"), status(kept), status(ids[-1], "other")] == [200, 404, 404]
        refused = post(url, {"input": "hi", "previous_response_id": ids[-1]}, "other")
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "previous_response_id")
        assert HTTP.get(f"{url}{PATH}/{kept}").status_code == 401
        long = post(url, {"input": "word " * 7000}).json()
        assert (long["status"], long["store"], status(long["id"])) == ("completed", False, 404)
        for odd in ("..%2f..%2fetc", "%00", "é", "resp_'\"<>", "a" * 5000, "%f0%9f%98%80", "a b"):
            assert status(odd) == 404
        for query in ("stream=true", "starting_after=5", "include[]=x"):
            response = HTTP.get(f"{url}{PATH}/{ids[-1]}?{query}", headers={"Authorization": "Bearer secret"})
            assert (response.status_code, response.json()["error"]["param"]) == (400, query.split("=")[0])
    with serving(scripted_chat("Fine."), stored_responses=0) as (url, _):
        assert post(url, {"input": "hi"}).json()["store"] is False
        assert post(url, {"input": "hi", "store": True}).status_code == 400


def test_the_store_is_bounded_by_number_and_length() -> None:
    store, clients = ResponseStore(1000, 1000 * 20, 2), [Client(has_key=True), Client(has_key=True)]
    for client in clients:
        for number in range(1000):
            assert store.put(client, str(number), StoredResponse("x" * 10, "y" * 10))
    assert [store.count(client) for client in clients] == [500, 500]
    assert store.get(clients[0], "500").size == 20
    assert store.put(clients[0], "long", StoredResponse("x" * 5000, ""))
    assert store.count(clients[0]) == 251
    assert not store.put(clients[0], "longer", StoredResponse("x" * 10_001, ""))
    store.delete(clients[0], "long")
    assert store.count(clients[0]) == 250
    for missing in ("long", "0"):
        with pytest.raises(RefusedError, match="no response"):
            store.delete(clients[0], missing)
    with pytest.raises(RefusedError, match="no response"):
        store.delete(Client(has_key=True), "250")  # of a client that has stored nothing


async def test_a_stream_that_is_hung_up_ends_and_is_not_stored() -> None:
    llm = slow_chat()
    with serving(llm) as (url, writer):
        ids: list[str] = []
        async with httpx.AsyncClient(timeout=60) as client:

            async def read() -> None:
                async with client.stream("POST", url + PATH, json={"input": "?", "stream": True}) as response:
                    async for line in response.aiter_lines():
                        if line.startswith("data: ") and not ids:
                            ids.append(json.loads(line.removeprefix("data: "))["response"]["id"])

            task = asyncio.create_task(read())
            await wait_until(lambda: bool(ids))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await wait_until(lambda: in_flight(llm) == 0 and writer.admission.running == 0)
            assert (await client.get(f"{url}{PATH}/{ids[0]}")).status_code == 404


async def test_responses_share_the_queue_of_the_other_endpoints() -> None:
    llm = slow_chat()
    with serving(llm, concurrent=1, queue=0) as (url, writer):
        async with httpx.AsyncClient(timeout=60) as client:
            task = asyncio.create_task(client.post(url + PATH, json={"input": "?"}))
            await wait_until(lambda: writer.admission.running == 1)
            for stream in (False, True):
                refused = await client.post(url + PATH, json={"input": "?", "stream": stream})
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
                assert int(refused.headers["Retry-After"]) >= 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await wait_until(lambda: in_flight(llm) == 0)


# What is wrong


def items(*items: Any) -> dict[str, Any]:
    return {"input": [USER, *items]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({}, "input", "required"),
    ({"input": []}, "input", "1 to"),
    ({"input": 5}, "input", "a text"),
    ({"input": "hi", "messages": [USER]}, "messages", "here it is input"),
    ({"input": "hi", "max_tokens": 5}, "max_tokens", "max_output_tokens"),
    ({"input": "hi", "response_format": {"type": "text"}}, "response_format", "text.format"),
    ({"input": "hi", "n": 2}, "n", "one reply"),
    ({"input": "hi", "max_output_tokens": 0}, "max_output_tokens", "greater"),
    ({"input": "hi", "background": True}, "background", "False"),
    ({"input": "hi", "conversation": "conv_1"}, "", "'conversation'"),
    ({"input": "hi", "prompt": {"id": "pmpt_1"}}, "", "'prompt'"),
    ({"input": "hi", "max_tool_calls": 5}, "", "'max_tool_calls'"),
    ({"input": "hi", "truncation": "auto"}, "truncation", "disabled"),
    ({"input": "hi", "service_tier": "flex"}, "service_tier", "auto"),
    ({"input": "hi", "top_logprobs": 3}, "top_logprobs", "0"),
    ({"input": "hi", "include": ["message.output_text.logprobs"]}, "include.0", "encrypted"),
    ({"input": "hi", "metadata": {"a": 5}}, "metadata.a", "string"),
    ({"input": "hi", "metadata": {str(number): "a" for number in range(17)}}, "metadata", "16"),
    ({"input": "hi", "tools": [{"type": "file_search"}]}, "tools.0", "file_search"),
    ({"input": "hi", "tools": [TOOL | {"defer_loading": True}]}, "tools.0", "defer_loading"),
    ({"input": "hi", "tools": [TOOL | {"beams": 1}]}, "tools.0", "beams"),
    ({"input": "hi", "tools": [TOOL | {"name": "a b"}]}, "tools.0.function.name", "pattern"),
    ({"input": "hi", "tools": [{"type": "function"}]}, "tools.0.name", "required"),
    ({"input": "hi", "tools": "add"}, "tools", "list"),
    ({"input": "hi", "tool_choice": "required"}, "", "requests with tools"),
    ({"input": "hi", "tools": [TOOL], "tool_choice": {"type": "function", "name": "sub"}}, "", "not one of the tools"),
    ({"input": "hi", "tools": [TOOL], "tool_choice": {"type": "web_search"}}, "", "tool_choice"),
    *(
        ({"input": "hi", "tools": [TOOL], "tool_choice": choice}, "", "tool_choice")
        for choice in (
            {"type": "function", "function": {"name": "add"}}, {"type": "function", "name": 3}, {"type": "required"},
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}},
        )
    ),
    ({"input": "hi", "text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ({"input": "hi", "text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
    ({"input": "hi", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema", "required"),
    ({"input": "hi", "text": {"format": {"type": "text", "a": 1}}}, "text.format", "json_schema"),
    ({"input": "hi", "text": {"grammar": "a"}}, "text", "format"),
    ({"input": "hi", "reasoning": {"summary": "concise"}}, "reasoning.summary", "detailed"),
    ({"input": "hi", "reasoning": {"effort": "huge"}}, "reasoning.effort", "low"),
    ({"input": "hi", "reasoning": {"tokens": 5}}, "reasoning", "tokens"),
    ({"input": "hi", "stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options", ""),
    ({"input": "hi", "policy": "lenient"}, "policy", "and none of a client's own"),
    (items(5), "input.1", "object"),
    (items({}), "input.1", "no type"),
    (items({"type": "item_reference", "id": "msg_1"}), "input.1", "item_reference"),
    (items({"type": "web_search_call", "id": "a"}), "input.1", "web_search_call"),
    (items({"type": 5}), "input.1", "5"),
    (items({"type": "message", "role": "user"}), "input.1", "role"),
    (items({"role": "robot", "content": "a"}), "input.1", "no type"),
    (items({"role": "user", "content": 5}), "input.1.content", "text"),
    (items({"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}), "input.1.content.0", "input_image"),
    (items({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}), "input.1.content.0", "input_file"),
    (items({"role": "user", "content": [{"type": "input_text", "text": 5}]}), "input.1.content.0", "a text"),
    (items({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}), "input.1.content.0", "refusal"),
    (items({"type": "reasoning", "content": "a"}), "input.1.content", "list"),
    (items({"type": "reasoning", "summary": [5]}), "input.1.summary.0", "text"),
    (items(OUTPUT), "input.1.call_id", "no function_call before it"),
    (items(CALL, CALL), "input.2.call_id", "a call before it"),
    (items(CALL, OUTPUT, OUTPUT), "input.3.call_id", "waits for an output"),
    (items(CALL | {"call_id": 5}), "input.1", "call_id"),
    (items(CALL | {"call_id": ""}), "input.1.call_id", "call_id"),
    (items(CALL | {"arguments": {"a": 1}}), "input.1", "arguments"),
    (items(CALL, OUTPUT | {"output": [{"type": "input_image"}]}), "input.2.output.0", "input_image"),
    (items(CALL, OUTPUT | {"output": None}), "input.2.output", "text"),
    ({"input": "hi", "previous_response_id": 5}, "previous_response_id", "string"),
]  # fmt: skip


def test_each_wrong_request_gets_one_clear_error() -> None:
    with serving(thinking_chat()) as (url, _), httpx.Client(base_url=url, timeout=30) as client:
        for body, param, message in WRONG:
            response = client.post(PATH, json=body)
            error = response.json()["error"]
            assert response.status_code == 400, (body, error)
            assert (error["param"] or "").lower().startswith(param), (body, error)
            assert message in error["message"], (body, error)
        for raw in (
            b'{"input": NaN}',
            b'{"input": "a", "temperature": NaN}',
            b'{"input": ' + b"[" * 500 + b"]" * 500 + b"}",
        ):
            response = client.post(PATH, content=raw, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
        assert client.post(PATH, json={"input": "x" * (5 << 20)}).status_code == 413
        long = client.post(PATH, json={"input": "word " * 5000})
        assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
        missing = client.post(PATH, json={"input": "hi", "previous_response_id": "resp_\x00/.."})
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "previous_response_id")


def test_histories_of_other_clients_are_read() -> None:
    llm = thinking_chat()
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]}
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "A.", "annotations": []}],
    }
    history = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
        *(USER, reasoning, said, CALL, {**CALL, "call_id": "d"}),
        *(OUTPUT, {**OUTPUT, "call_id": "d", "output": [{"type": "input_text", "text": "4"}]}),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final_answer"},
        *(CALL, OUTPUT, {"role": "user", "content": [{"type": "input_text", "text": "Why?"}]}),
    ]
    with serving(llm) as (url, _):
        assert post(url, {"input": history, "store": None, "tools": None}).json()["status"] == "completed"
    assert prompts(llm)[-1] == (
        "system: Be kind.\nuser: 1 + 2?\nassistant: A.\ntool: 3\ntool: 4\nassistant: No.\ntool: 3\n"
        "user: Why?\nassistant: "
    )


def test_calls_that_cannot_be_read_are_items_too() -> None:
    broken = '<tool_call>\n{"name": "add", "arguments": {"a": \n</tool_call>'
    with serving(scripted_chat(lambda _: broken)) as (url, _):
        response = post(url, {"input": "hi", "tools": [TOOL]}).json()
        (item,) = response["output"]
        assert (item["type"], item["status"]) == ("function_call", "completed")
        with pytest.raises(ValueError, match="Expecting"):
            json.loads(item["arguments"])
        output = {"type": "function_call_output", "call_id": item["call_id"], "output": "unreadable"}
        again = post(url, {"input": [output], "previous_response_id": response["id"], "tools": [TOOL]})
        assert again.status_code == 200


def test_an_empty_reply_is_an_empty_message() -> None:
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("")])
    with serving(ChatLookahead(engines=EngineSet(engine), policy="off")) as (url, _):
        (item,) = post(url, {"input": "hi"}).json()["output"]
    assert (item["type"], item["content"][0]["text"]) == ("message", "")
