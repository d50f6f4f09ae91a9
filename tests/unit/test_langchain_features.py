"""What users of LangChain's other models rely on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import AsyncCallbackHandler, BaseCallbackHandler
from langchain_core.language_models import FakeListChatModel
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage
from langchain_core.rate_limiters import InMemoryRateLimiter
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


def thinker() -> ChatLookahead:
    tokenizer = ScriptedTokenizer(ThinkingTags())
    target = ScriptedEngine(tokenizer, reply_script(lambda _: THOUGHT, seconds=0.05))
    return ChatLookahead(
        engines=EngineSet(target, ScriptedEngine(tokenizer, reply_script(lambda _: THOUGHT)), EqualTextEmbedder())
    )


def merged(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    return whole


def test_thinking_is_a_block_apart_from_the_answer() -> None:
    message = thinker().invoke("?")
    assert message.text == "It is 4."
    assert message.content_blocks == [
        {"type": "reasoning", "reasoning": "I think.\n\nSo I do."},
        {"type": "text", "text": "It is 4."},
    ]
    chunks = list(thinker().stream("?"))
    kinds = [block["type"] for chunk in chunks for block in chunk.content_blocks]
    assert kinds.count("reasoning") >= 2, "it is streamed as it is thought"
    assert merged(chunks).content_blocks[0] == message.content_blocks[0]
    assert merged(chunks).text == "It is 4."


def test_earlier_thinking_is_for_the_template_to_keep_or_drop() -> None:
    for earlier in (
        AIMessage("It is 4.", additional_kwargs={"reasoning_content": "I think."}),
        AIMessage([{"type": "reasoning", "reasoning": "I think."}, {"type": "text", "text": "It is 4."}]),
        AIMessage([{"type": "thinking", "thinking": "I think.", "signature": "x"}, "It is 4."]),
    ):
        messages = template_messages([HumanMessage("?"), earlier, HumanMessage("Sure?")])
        assert messages[1] == {"role": "assistant", "content": "It is 4.", "reasoning_content": "I think."}


def test_replies_in_content_blocks_can_be_replied_to() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    llm = scripted_chat("I add.\n\n" + call, output_version="v1").bind_tools([add])
    message = llm.invoke("1 + 2?")
    assert [block["type"] for block in message.content] == ["text", "tool_call"]  # type: ignore[index]
    (said,) = template_messages([message])
    assert said["content"] == "I add."
    assert said["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    assert llm.invoke([HumanMessage("1 + 2?"), message, add.invoke(message.tool_calls[0])]).tool_calls


class Listener(BaseCallbackHandler):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.tokens: list[str] = []

    def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        assert name == "lookahead_step"
        self.events.append(data)

    def on_llm_new_token(self, token: str, **_: Any) -> None:
        self.tokens.append(token)


class AsyncListener(AsyncCallbackHandler):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    async def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
        self.events.append(data)


def disagreeing() -> ChatLookahead:
    """The draft's second step is refused."""
    return scripted_chat(REPLY, lambda _: "First this.\n\nThen 7.\n\nIt is 4.", policy="exact")


def check_events(events: list[dict[str, Any]]) -> None:
    kinds = {event["kind"] for event in events}
    assert {"drafted", "accepted", "rejected", "committed"} <= kinds
    accepted = [event["text"] for event in events if event["kind"] in ("accepted", "committed")]
    assert "".join(accepted) == REPLY
    assert all(event["ended"] >= event["started"] >= 0 for event in events)
    (verdict,) = {event["verdict"] for event in events if event["kind"] == "accepted"}
    assert verdict is not None


async def test_step_events_reach_callbacks() -> None:
    listener = Listener()
    disagreeing().invoke("?", {"callbacks": [listener]})
    check_events(listener.events)
    async_listener = AsyncListener()
    await disagreeing().ainvoke("?", {"callbacks": [async_listener]})
    check_events(async_listener.events)


async def test_step_events_reach_those_who_stream_a_graph() -> None:
    graph = graph_of(disagreeing(), planner=True)
    events = [
        event["data"]
        async for event in graph.astream_events({"messages": [HumanMessage("?")]}, version="v2")
        if event["event"] == "on_custom_event"
    ]
    check_events(events)
    assert list(graph.stream({"messages": [HumanMessage("?")]}, stream_mode="custom")) == []
    llm = disagreeing()
    loud = graph_of(llm.model_copy(update={"stream_steps": True}), planner=True)
    streamed = loud.stream({"messages": [HumanMessage("?")]}, stream_mode="custom")
    check_events([event["lookahead_step"] for event in streamed])


def test_a_model_by_itself_tells_of_its_steps_in_a_chain() -> None:
    class Steps(BaseCallbackHandler):
        def __init__(self) -> None:
            self.events: list[dict[str, Any]] = []

        def on_custom_event(self, name: str, data: Any, **_: Any) -> None:
            self.events.append(data)

    steps = Steps()
    reply = RunnableLambda(disagreeing().invoke).invoke("?", {"callbacks": [steps]})
    check_events(steps.events)
    assert reply.text == REPLY
    assert reply.response_metadata["lookahead"]["policy"] == "exact"


def test_streaming_has_invoke_tell_callbacks_the_pieces() -> None:
    for streaming in (False, True):
        listener = Listener()
        scripted_chat(REPLY, streaming=streaming).invoke("?", {"callbacks": [listener]})
        assert "".join(listener.tokens) == (REPLY if streaming else "")


def test_a_cache_knows_policies_apart() -> None:
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return REPLY

    llm = scripted_chat(reply, cache=InMemoryCache(), policies={"planner": "exact", "executor": "off"}, policy="off")
    graph = graph_of(llm, planner=True)
    llm.invoke("What is it?")
    before = len(asked)
    assert llm.invoke("What is it?").text == REPLY
    assert len(asked) == before, "from the cache"
    message = graph.invoke({"messages": [HumanMessage("?")]})["messages"][-1]
    assert message.response_metadata["lookahead"]["policy"] == "exact"
    assert len(asked) > before, "a reply of another policy is another reply"


def test_configurable_fields_and_alternatives() -> None:
    llm = scripted_chat(REPLY)
    short = llm.configurable_fields(max_tokens=ConfigurableField("most"))
    config: RunnableConfig = {"configurable": {"most": 3}}
    assert short.invoke("?", config).usage_metadata["output_tokens"] == 3  # type: ignore[index]
    assert short.invoke("?").text == REPLY
    other = llm.configurable_alternatives(ConfigurableField("llm"), other=FakeListChatModel(responses=["Hm."]))
    assert other.with_config(configurable={"llm": "other"}).invoke("?").text == "Hm."
    assert other.invoke("?").text == REPLY


def test_fallbacks_and_rate_limits() -> None:
    broken = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("x", error="no memory")])
    llm = ChatLookahead(engines=EngineSet(broken), policy="off")
    with pytest.raises(EngineError):
        llm.invoke("?")
    assert llm.with_fallbacks([scripted_chat(REPLY)]).invoke("?").text == REPLY
    limiter = InMemoryRateLimiter(requests_per_second=1000)
    assert scripted_chat(REPLY, rate_limiter=limiter).invoke("?").text == REPLY


@pytest.mark.filterwarnings("ignore:The function `loads`")
def test_it_can_be_written_down_and_made_again() -> None:
    mine = VerifierPolicy(name="mine", verifier="exact", depth=7)
    llm = ChatLookahead(policies={"planner": mine}, temperature=0.5, judge_url="http://j/v1", judge_model="big")
    again = loads(dumps(llm), allowed_objects=[ChatLookahead], valid_namespaces=["lookahead_agent"])
    assert again.dict() == llm.dict()
    assert again.policies == {"planner": mine}
    secret = ChatLookahead(base_url="http://t/v1", api_key="hidden", policy="off")  # type: ignore[arg-type]
    assert "hidden" not in dumps(secret) + repr(secret) + str(secret.dict())


async def test_events_of_a_model_by_itself() -> None:
    events = [event async for event in scripted_chat(REPLY).astream_events("?", version="v2")]
    pieces = [event["data"]["chunk"].text for event in events if event["event"] == "on_chat_model_stream"]
    assert "".join(pieces) == REPLY


def many_at_once() -> tuple[ChatLookahead, list[int]]:
    """A model, and how many requests its target had at once."""
    tokenizer = ScriptedTokenizer()
    together: list[int] = []

    class Counting(ScriptedEngine):
        async def generate(self, *arguments: Any) -> Any:  # type: ignore[override]
            async for delta in super().generate(*arguments):
                together.append(self.in_flight)
                yield delta

    target = Counting(tokenizer, [ScriptedStep(REPLY, 0.3)])
    return ChatLookahead(engines=EngineSet(target), policy="off"), together


async def test_calls_at_once_share_a_batch() -> None:
    llm, together = many_at_once()
    await asyncio.gather(*(llm.ainvoke(f"number {n}") for n in range(16)))
    assert max(together) == 16
    llm, together = many_at_once()
    assert len(await llm.abatch([f"number {n}" for n in range(32)])) == 32
    assert max(together) == 32
    llm, together = many_at_once()
    llm.batch([f"number {n}" for n in range(8)])
    assert max(together) >= 4


def test_parallel_tool_calls() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    llm = scripted_chat(call + "\n" + call)
    assert len(llm.bind_tools([add]).invoke("?").tool_calls) == 2
    assert len(llm.bind_tools([add], parallel_tool_calls=False).invoke("?").tool_calls) == 1
    listed = scripted_chat('[{"name":"add","arguments":{"a":1,"b":2}},{"name":"add","arguments":{"a":3,"b":4}}]')
    message = listed.bind_tools([add], tool_choice="any", parallel_tool_calls=True).invoke("?")
    assert [entry["args"]["a"] for entry in message.tool_calls] == [1, 3]
    assert len({entry["id"] for entry in message.tool_calls}) == 2
    assert listed.engines is not None
    assert isinstance(listed.engines.target, ScriptedEngine)
    assert listed.engines.target.requests[-1][1].structured["json"]["type"] == "array"  # type: ignore[index]
    results = [ToolMessage("3", tool_call_id=message.tool_calls[0]["id"], status="error")]
    assert llm.bind_tools([add]).invoke([HumanMessage("?"), message, *results]).tool_calls


def test_models_of_one_configuration_share_engines_and_the_last_one_ends_them() -> None:
    # Arguments that no other test has, whose models would keep the engines.
    alike = {"engine_args": {"max_num_seqs": 5}}
    first, second = ChatLookahead(**alike), ChatLookahead(temperature=0.5, **alike)  # type: ignore[arg-type]
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
    gone = weakref.ref(runtime)
    del first, second, runtime
    gc.collect()
    assert gone() is None
