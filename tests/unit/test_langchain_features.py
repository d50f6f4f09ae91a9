"""LangChain features that users know from other chat models."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import ConfigurableField, RunnableConfig, RunnableLambda
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.chat.messages import template_messages
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.errors import EngineError
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import EqualTextEmbedder, reply_script, scripted_chat
from tests.unit.test_policy_choice import graph_of

REPLY = "First this.\n\nThen that.\n\nIt is 4."
THOUGHT = "<think>I think.\n\nSo I do.</think>\n\nIt is 4."


def thinking_chat() -> ChatLookahead:
    tokenizer = ScriptedTokenizer(ThinkingTags())
    target = ScriptedEngine(tokenizer, reply_script(lambda _: THOUGHT, seconds=0.05))
    return ChatLookahead(
        engines=EngineSet(target, ScriptedEngine(tokenizer, reply_script(lambda _: THOUGHT)), EqualTextEmbedder())
    )


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    message = chunks[0]
    for chunk in chunks[1:]:
        message = message + chunk
    return message


def test_thinking_is_a_content_block_of_its_own_and_streamed() -> None:
    message = thinking_chat().invoke("?")
    assert message.text == "It is 4."
    assert message.content_blocks == [
        {"type": "reasoning", "reasoning": "I think.\n\nSo I do."},
        {"type": "text", "text": "It is 4."},
    ]
    chunks = list(thinking_chat().stream("?"))
    block_types = [block["type"] for chunk in chunks for block in chunk.content_blocks]
    assert block_types.count("reasoning") >= 2, "thinking is streamed in several chunks"
    assert merged(chunks).content_blocks[0] == message.content_blocks[0]
    assert merged(chunks).text == "It is 4."


def test_thinking_of_earlier_replies_is_passed_to_the_template() -> None:
    for earlier in (
        AIMessage("It is 4.", additional_kwargs={"reasoning_content": "I think."}),
        AIMessage([{"type": "reasoning", "reasoning": "I think."}, {"type": "text", "text": "It is 4."}]),
        AIMessage([{"type": "thinking", "thinking": "I think.", "signature": "x"}, "It is 4."]),
    ):
        messages = template_messages([HumanMessage("?"), earlier, HumanMessage("Sure?")])
        assert messages[1] == {"role": "assistant", "content": "It is 4.", "reasoning_content": "I think."}


def test_replies_with_v1_content_blocks_are_accepted_in_the_history() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    llm = scripted_chat("I add.\n\n" + call, output_version="v1").bind_tools([add])
    message = llm.invoke("1 + 2?")
    assert [block["type"] for block in message.content] == ["text", "tool_call"]  # type: ignore[index]
    (converted,) = template_messages([message])
    assert converted["content"] == "I add."
    assert converted["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert llm.invoke([HumanMessage("1 + 2?"), message, add.invoke(message.tool_calls[0])]).tool_calls


class StepEventHandler(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.tokens: list[str] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        assert name == "lookahead_step"
        self.events.append(data)

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)


class AsyncStepEventHandler(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events.append(data)


def chat_with_rejected_draft() -> ChatLookahead:
    """A chat model whose verifier rejects the second draft step."""
    return scripted_chat(REPLY, lambda _: "First this.\n\nThen 7.\n\nIt is 4.", policy="exact")


def check_step_events(events: list[dict[str, Any]]) -> None:
    kinds = {event["kind"] for event in events}
    assert {"drafted", "accepted", "rejected", "committed"} <= kinds
    texts = [event["text"] for event in events if event["kind"] in ("accepted", "committed")]
    assert "".join(texts) == REPLY
    assert all(event["ended"] >= event["started"] >= 0 for event in events)
    (verdict,) = {event["verdict"] for event in events if event["kind"] == "accepted"}
    assert verdict is not None


async def test_step_events_reach_sync_and_async_callbacks() -> None:
    handler = StepEventHandler()
    chat_with_rejected_draft().invoke("?", {"callbacks": [handler]})
    check_step_events(handler.events)
    async_handler = AsyncStepEventHandler()
    await chat_with_rejected_draft().ainvoke("?", {"callbacks": [async_handler]})
    check_step_events(async_handler.events)


async def test_graph_emits_step_events_and_streams_them_with_stream_steps() -> None:
    graph = graph_of(chat_with_rejected_draft(), planner=True)
    events = [
        event["data"]
        async for event in graph.astream_events({"messages": [HumanMessage("?")]}, version="v2")
        if event["event"] == "on_custom_event"
    ]
    check_step_events(events)
    assert list(graph.stream({"messages": [HumanMessage("?")]}, stream_mode="custom")) == []
    llm = chat_with_rejected_draft()
    streaming_graph = graph_of(llm.model_copy(update={"stream_steps": True}), planner=True)
    streamed = streaming_graph.stream({"messages": [HumanMessage("?")]}, stream_mode="custom")
    check_step_events([event["lookahead_step"] for event in streamed])


def test_step_events_reach_the_callbacks_of_a_chain_outside_a_graph() -> None:
    class Handler(BaseCallbackHandler):
        def __init__(self) -> None:
            self.events: list[dict[str, Any]] = []

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            self.events.append(data)

    handler = Handler()
    reply = RunnableLambda(chat_with_rejected_draft().invoke).invoke("?", {"callbacks": [handler]})
    check_step_events(handler.events)
    assert reply.text == REPLY
    assert reply.response_metadata["lookahead"]["policy"] == "exact"


def test_invoke_sends_tokens_to_callbacks_only_with_streaming() -> None:
    for streaming in (False, True):
        handler = StepEventHandler()
        scripted_chat(REPLY, streaming=streaming).invoke("?", {"callbacks": [handler]})
        assert "".join(handler.tokens) == (REPLY if streaming else "")


def test_cache_distinguishes_policies() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return REPLY

    llm = scripted_chat(reply, cache=InMemoryCache(), policies={"planner": "exact", "executor": "off"}, policy="off")
    graph = graph_of(llm, planner=True)
    llm.invoke("What is it?")
    before = len(prompts)
    assert llm.invoke("What is it?").text == REPLY
    assert len(prompts) == before, "the reply comes from the cache"
    message = graph.invoke({"messages": [HumanMessage("?")]})["messages"][-1]
    assert message.response_metadata["lookahead"]["policy"] == "exact"
    assert len(prompts) > before, "the cached reply of another policy is not used"


def test_configurable_fields_and_alternatives_apply_to_one_call() -> None:
    llm = scripted_chat(REPLY)
    configurable = llm.configurable_fields(max_tokens=ConfigurableField("most"))
    config: RunnableConfig = {"configurable": {"most": 3}}
    assert configurable.invoke("?", config).usage_metadata["output_tokens"] == 3  # type: ignore[index]
    assert configurable.invoke("?").text == REPLY
    other = llm.configurable_alternatives(ConfigurableField("llm"), other=FakeListChatModel(responses=["Hm."]))
    assert other.with_config(configurable={"llm": "other"}).invoke("?").text == "Hm."
    assert other.invoke("?").text == REPLY


def test_fallback_replaces_a_failed_model() -> None:
    broken = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("x", error="no memory")])
    llm = ChatLookahead(engines=EngineSet(broken), policy="off")
    with pytest.raises(EngineError):
        llm.invoke("?")
    assert llm.with_fallbacks([scripted_chat(REPLY)]).invoke("?").text == REPLY


async def test_every_request_first_acquires_the_rate_limiter() -> None:
    target = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep(REPLY)])
    requests_before: list[int] = []

    class RecordingLimiter(BaseRateLimiter):
        def acquire(self, *, blocking: bool = True) -> bool:
            requests_before.append(len(target.requests))
            return True

        async def aacquire(self, *, blocking: bool = True) -> bool:
            return self.acquire(blocking=blocking)

    llm = ChatLookahead(engines=EngineSet(target), policy="off", rate_limiter=RecordingLimiter())
    llm.invoke("?")
    await llm.ainvoke("?")
    list(llm.stream("?"))
    assert requests_before == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:The function `loads`")
def test_serialization_restores_the_chat_model_and_leaves_out_its_api_key() -> None:
    own_policy = VerifierPolicy(name="mine", verifier="exact", depth=7)
    llm = ChatLookahead(policies={"planner": own_policy}, temperature=0.5, judge_url="http://j/v1", judge_model="big")
    restored = loads(dumps(llm), allowed_objects=[ChatLookahead], valid_namespaces=["lookahead_agent"])
    assert restored.dict() == llm.dict()
    assert restored.policies == {"planner": own_policy}
    secret = ChatLookahead(base_url="http://t/v1", api_key="hidden", policy="off")  # type: ignore[arg-type]
    assert "hidden" not in dumps(secret) + repr(secret) + str(secret.dict())


async def test_astream_events_yields_the_reply_outside_a_graph() -> None:
    events = [event async for event in scripted_chat(REPLY).astream_events("?", version="v2")]
    texts = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(texts) == REPLY


def chat_with_barrier(size: int) -> ChatLookahead:
    """A chat model whose target replies once it has `size` requests."""
    barrier = asyncio.Barrier(size)

    class WaitingEngine(ScriptedEngine):
        async def generate(self, *arguments: Any) -> Any:  # type: ignore[override]
            async with asyncio.timeout(20):
                await barrier.wait()
            async for delta in super().generate(*arguments):
                yield delta

    return ChatLookahead(engines=EngineSet(WaitingEngine(ScriptedTokenizer(), [ScriptedStep(REPLY)])), policy="off")


async def test_concurrent_calls_share_a_batch() -> None:
    questions = [f"number {n}" for n in range(32)]
    replies = await asyncio.gather(*map(chat_with_barrier(16).ainvoke, questions[:16]))
    replies += await chat_with_barrier(32).abatch(questions)
    replies += chat_with_barrier(8).batch(questions[:8], {"max_concurrency": 8})
    assert [reply.text for reply in replies] == [REPLY] * 56


def test_parallel_tool_calls_can_be_disabled_or_forced() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    llm = scripted_chat(call + "\n" + call)
    assert len(llm.bind_tools([add]).invoke("?").tool_calls) == 2
    assert len(llm.bind_tools([add], parallel_tool_calls=False).invoke("?").tool_calls) == 1
    array_llm = scripted_chat('[{"name":"add","arguments":{"a":1,"b":2}},{"name":"add","arguments":{"a":3,"b":4}}]')
    message = array_llm.bind_tools([add], tool_choice="any", parallel_tool_calls=True).invoke("?")
    assert [entry["args"]["a"] for entry in message.tool_calls] == [1, 3]
    assert len({entry["id"] for entry in message.tool_calls}) == 2
    assert array_llm.engines is not None
    assert isinstance(array_llm.engines.target, ScriptedEngine)
    assert array_llm.engines.target.requests[-1][1].structured["json"]["type"] == "array"  # type: ignore[index]
    results = [ToolMessage("3", tool_call_id=message.tool_calls[0]["id"], status="error")]
    assert llm.bind_tools([add]).invoke([HumanMessage("?"), message, *results]).tool_calls


def test_models_of_one_configuration_share_a_runtime_until_the_last_is_closed() -> None:
    # No other test has these arguments: its models would keep the runtime alive.
    shared_arguments = {"engine_args": {"max_num_seqs": 5}}
    first, second = ChatLookahead(**shared_arguments), ChatLookahead(temperature=0.5, **shared_arguments)  # type: ignore[arg-type]
    other = ChatLookahead(engine_args={"max_num_seqs": 3})
    assert first.backend.runtime is second.backend.runtime
    assert other.backend.runtime is not first.backend.runtime
    runtime = first.backend.runtime
    assert runtime is not None
    closed: list[bool] = []
    runtime.close = lambda: closed.append(True)  # type: ignore[method-assign]
    first.close()
    assert closed == []
    second.close()
    assert closed == [True]
    reference = weakref.ref(runtime)
    del first, second, runtime
    gc.collect()
    assert reference() is None


class Ended(BaseException):
    """An exception that a callback of a user may raise, as KeyboardInterrupt is."""


def foreign_code(kind: str, others: ChatLookahead, release: threading.Event) -> None:
    """Do what a user's callback or middleware may do: block, raise, or ask a model."""
    if kind == "blocks":
        release.wait(60)
    elif kind == "raises":
        raise Ended
    else:
        assert others.invoke("q").text == REPLY


class Handler(BaseCallbackHandler):
    """Runs foreign code at the first token or at the first step."""

    raise_error = True

    def __init__(self, event: str, run: Callable[[], None]) -> None:
        setattr(self, event, lambda *args, **kwargs: self._run())
        self._foreign: Callable[[], None] | None = run

    def _run(self) -> None:
        foreign, self._foreign = self._foreign, None
        if foreign is not None:
            foreign()


class Middleware(AgentMiddleware[Any, Any, Any]):
    """Runs foreign code in place of the model's call, and then that call."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._foreign = run

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self._foreign()
        return handler(request)


@pytest.mark.parametrize("kind", ["blocks", "raises", "asks a model"])
@pytest.mark.parametrize("place", ["on_llm_new_token", "on_custom_event", "middleware"])
async def test_a_callback_or_middleware_affects_no_run_but_its_own(kind: str, place: str) -> None:
    llm, release = scripted_chat(REPLY), threading.Event()

    def run() -> None:
        foreign_code(kind, llm, release)

    def ask(awaited: bool) -> str:
        if place == "middleware":
            agent: Any = create_agent(llm, [], middleware=[Middleware(run)])
            return str(agent.invoke({"messages": [("user", "q")]})["messages"][-1].text)
        chain: Any = RunnableLambda(lambda text: "".join(chunk.text for chunk in llm.stream(text)))
        if awaited:
            chain = RunnableLambda(lambda text: text) | RunnableLambda(llm.ainvoke)
            return str(asyncio.run(chain.ainvoke("q", {"callbacks": [Handler(place, run)]})).text)
        return str(chain.invoke("q", {"callbacks": [Handler(place, run)]}))

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ask, awaited) for awaited in (False, True)]
        try:
            for _ in range(2):
                assert (await asyncio.wait_for(llm.ainvoke("q"), 30)).text == REPLY
                assert (await asyncio.wait_for(asyncio.to_thread(llm.invoke, "q"), 30)).text == REPLY
            assert kind != "blocks" or not calls[0].done()
        finally:
            release.set()
        for call in calls[:1]:
            if kind == "raises":
                assert isinstance(call.exception(30), Ended)
            else:
                assert call.result(30) == REPLY
        await asyncio.to_thread(wait, calls, 30)
    assert llm.invoke("q").text == REPLY
