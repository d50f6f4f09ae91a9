from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from pydantic import ValidationError

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.decoding import DecodingSettings, StepEvent
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError, LookaheadError, PolicyError
from lookahead_agent.generation.backend import ChatReply, TextDelta
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.generator import decoding_settings
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system import background
from tests.unit.chat import EqualTextEmbedder, reply_script, scripted_chat, scripted_engines
from tests.waiting import wait_until

REPLY = "First this.\n\nThen that.\n\nIt is 4."
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def test_invoke_returns_text_usage_and_metadata() -> None:
    message = scripted_chat(REPLY).invoke("What is it?")
    assert message.text == REPLY
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0
    metadata = message.response_metadata
    assert metadata["finish_reason"] == "stop"
    lookahead = metadata["lookahead"]
    assert lookahead["policy"] == "balanced"
    assert lookahead["node"] is None
    assert lookahead["steps"] == lookahead["accepted"] == 3
    assert lookahead["acceptance_rate"] == 1
    assert lookahead["verifier_calls"] >= 3
    for role in ("target", "draft"):
        assert set(lookahead["tokens"][role]) == {"committed", "rejected", "aborted", "speculative"}
    assert set(lookahead["seconds"]) == {
        "total",
        "prompt",
        "writing",
        "draft",
        "draft_prompt",
        "draft_writing",
        "target",
        "verifier",
        "waiting",
    }
    assert lookahead["speculation_disabled"] is None


async def test_concurrent_ainvoke_calls_return_their_own_replies() -> None:
    llm = scripted_chat(lambda prompt: "It is " + prompt.strip()[-1] + ".")
    replies = await asyncio.gather(*(llm.ainvoke(f"number {i}") for i in range(8)))
    assert [reply.text for reply in replies] == [f"It is {i}." for i in range(8)]


def test_stream_yields_a_chunk_per_step() -> None:
    chunks = list(scripted_chat(REPLY).stream("What is it?"))
    assert [chunk.text for chunk in chunks if chunk.text] == ["First this.\n\n", "Then that.\n\n", "It is 4."]
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole = whole + chunk
    assert whole.response_metadata["lookahead"]["steps"] == 3
    assert whole.usage_metadata is not None


async def test_astream_yields_the_whole_reply() -> None:
    texts = [chunk.text async for chunk in scripted_chat(REPLY).astream("What is it?")]
    assert "".join(texts) == REPLY


async def test_sync_calls_work_in_a_running_event_loop_and_in_a_thread() -> None:
    llm = scripted_chat(REPLY)
    assert llm.invoke("What is it?").text == REPLY
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.append(llm.invoke("What is it?").text))
    thread.start()
    thread.join()
    assert texts == [REPLY]


def test_stop_and_max_tokens_truncate_the_reply() -> None:
    llm = scripted_chat(REPLY)
    assert llm.invoke("?", stop=["that"]).text == "First this.\n\nThen "
    assert scripted_chat(REPLY, stop="that").invoke("?").text == "First this.\n\nThen "
    short = llm.invoke("?", max_tokens=3)
    assert short.response_metadata["finish_reason"] == "length"
    assert short.usage_metadata is not None
    assert short.usage_metadata["output_tokens"] == 3


def test_sampling_parameters_reach_both_engines() -> None:
    llm = scripted_chat(REPLY, temperature=0.5, top_p=0.9, top_k=7, seed=1)
    llm.invoke("?")
    llm.invoke("?", temperature=0.25, top_p=0.8, top_k=3)
    assert llm.engines is not None
    for engine in (llm.engines.target, llm.engines.draft):
        assert isinstance(engine, ScriptedEngine)
        values = {(s.temperature, s.top_p, s.top_k) for _, s in engine.requests}
        assert values == {(0.5, 0.9, 7), (0.25, 0.8, 3)}
        assert all(s.seed is not None for _, s in engine.requests)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"max_tokens": 0}, {"seed": "x"}]
)
def test_out_of_range_values_are_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        scripted_chat(REPLY, **options)
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        scripted_chat(REPLY).invoke("?", **options)


def test_unknown_arguments_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="beam_width"):
        scripted_chat(REPLY).invoke("?", beam_width=3)
    with pytest.raises(ValidationError):
        scripted_chat(REPLY, beam_width=3)


def test_unknown_policies_are_rejected_by_the_constructor() -> None:
    with pytest.raises(PolicyError, match="lenient"):
        scripted_chat(REPLY, policy="lenient")
    with pytest.raises(PolicyError, match="lenient"):
        scripted_chat(REPLY, policies={"planner": "lenient"})


def test_messages_reach_the_chat_template() -> None:
    prompts: list[str] = []

    def target(prompt: str) -> str:
        prompts.append(prompt)
        return "Yes."

    scripted_chat(target, policy="off").invoke(
        [
            SystemMessage("Be brief."),
            HumanMessage([{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]),
            AIMessage("", tool_calls=[{"name": "add", "args": {"a": 1}, "id": "1"}]),
            ToolMessage("3", tool_call_id="1"),
        ]
    )
    assert "system: Be brief." in prompts[0]
    assert "user: Hello \nthere" in prompts[0]
    assert "tool: 3" in prompts[0]


def test_image_content_is_rejected() -> None:
    image = HumanMessage([{"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}])
    with pytest.raises(ConfigurationError, match="only text"):
        scripted_chat(REPLY).invoke([image])


def test_prompt_beyond_the_context_length_is_rejected() -> None:
    tokenizer = ScriptedTokenizer()
    engine = ScriptedEngine(tokenizer, [ScriptedStep("x")], context_length=4)
    with pytest.raises(ContextLengthError, match="shorten"):
        ChatLookahead(engines=EngineSet(engine), policy="off").invoke("one two three four five")


@pytest.mark.parametrize("words", [60, 100_000])
async def test_agents_of_langchain_recognize_a_prompt_beyond_the_context_length(words: int) -> None:
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("x")], context_length=50)
    llm, question = ChatLookahead(engines=EngineSet(engine), policy="off"), "word " * words
    with pytest.raises(ContextOverflowError) as error:
        llm.invoke(question)
    assert isinstance(error.value, ContextLengthError)
    with pytest.raises(ContextOverflowError):
        list(llm.stream(question))
    with pytest.raises(ContextOverflowError):
        await llm.ainvoke(question)
    with pytest.raises(ContextOverflowError):
        [chunk async for chunk in llm.astream(question)]


def test_an_agent_summarizes_a_conversation_that_is_too_long() -> None:
    llm = ChatLookahead(engines=scripted_engines("Short.", context_length=2000), policy="off", max_tokens=20)
    middleware = SummarizationMiddleware(
        llm, trigger=("messages", 10), keep=("messages", 2), trim_tokens_to_summarize=None
    )
    agent: Any = create_agent(llm, [], middleware=[middleware])
    history = [(HumanMessage, AIMessage)[turn % 2]("word " * 200) for turn in range(20)]
    assert agent.invoke({"messages": [*history, HumanMessage("And now?")]})["messages"][-1].text == "Short."


EMPTY: list[Any] = [
    *[
        "",
        " ",
        "\n\t",
        "\u200b",
        "\ufeff\x00 \u2028",
        [],
        [SystemMessage("s")],
        [HumanMessage("")],
        [HumanMessage([])],
        [HumanMessage([""])],
    ],
    *[[HumanMessage([{"type": "text", "text": text}])] for text in ("", " \n")],
    *[[{"role": "user", "content": content}] for content in (None, "", [])],
    *[[("user", "")], [("system", "s"), ("user", " ")], [AIMessage("")], [ToolMessage("r", tool_call_id="1")]],
    [HumanMessage("q"), AIMessage("a", response_metadata={"finish_reason": "stop"}), HumanMessage("")],
]


@pytest.mark.parametrize("question", EMPTY)
async def test_an_empty_question_is_an_error_before_the_engines_get_a_request(question: Any) -> None:
    llm = scripted_chat(REPLY, policy="off")
    with pytest.raises(ConfigurationError, match="no message to reply to"):
        llm.invoke(question)
    with pytest.raises(ConfigurationError, match="no message to reply to"):
        list(llm.stream(question))
    with pytest.raises(ConfigurationError, match="no message to reply to"):
        llm.batch([question])
    with pytest.raises(ConfigurationError, match="no message to reply to"):
        await llm.ainvoke(question)
    with pytest.raises(ConfigurationError, match="no message to reply to"):
        [chunk async for chunk in llm.astream(question)]
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    assert llm.engines.target.requests == []


def test_a_history_whose_question_was_removed_is_no_empty_question() -> None:
    call = AIMessage("", tool_calls=[{"name": "add", "args": {}, "id": "1", "type": "tool_call"}])
    for messages in (
        [call, ToolMessage("3", tool_call_id="1")],
        [HumanMessage("q"), call, ToolMessage("", tool_call_id="1")],
        [SystemMessage("s"), AIMessage("Once upon")],
    ):
        assert scripted_chat(REPLY, policy="off").invoke(messages).text
    scripted_chat(REPLY, policy="off").warm([SystemMessage("s"), HumanMessage("")])


@pytest.mark.parametrize("value", [None, {"messages": []}, [("nobody", "x")], [{"content": "x"}], [None], b"x"])
def test_a_value_of_another_type_is_an_error_in_one_line_with_advice(value: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"\Athis is not an input of a chat model: .*; give a text.*messages\Z"
    ):
        scripted_chat(REPLY).invoke(value)


async def test_a_prompt_that_cannot_be_read_ahead_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class LostEngines(EngineSet):
        def choose_mode(self, *args: Any, **options: Any) -> Any:
            raise SystemExit("no mode")

    ChatLookahead(engines=LostEngines(ScriptedEngine(ScriptedTokenizer(), [])), policy="off").warm("the beginning")
    await wait_until(lambda: bool(caplog.messages))
    assert caplog.messages == ["a prompt is not read ahead: it raised SystemExit: no mode, which would end the program"]


class FilteringEngine(ScriptedEngine):
    """An engine whose replies end with a reason of the server."""

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        yield Delta(tuple(self.tokenizer.encode("It is")))
        yield Delta((), None, "content_filter")


@pytest.mark.parametrize("policy", ["off", "exact:depth=2"])
def test_a_reason_of_the_engine_reaches_the_user(policy: str) -> None:
    tokenizer = ScriptedTokenizer()
    engines = EngineSet(FilteringEngine(tokenizer, []), ScriptedEngine(tokenizer, [ScriptedStep("It was so.")]))
    llm = ChatLookahead(engines=engines, policy=policy)
    message = llm.invoke("?")
    assert (message.text, message.response_metadata["finish_reason"]) == ("It is", "content_filter")
    assert [chunk.response_metadata.get("finish_reason") for chunk in llm.stream("?")][-1] == "content_filter"


def test_target_failure_raises_an_engine_error() -> None:
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("x", error="no memory")])
    with pytest.raises(EngineError, match="no memory"):
        ChatLookahead(engines=EngineSet(engine), policy="off").invoke("?")


def test_draft_failure_is_reported_and_the_target_writes_the_reply() -> None:
    tokenizer = ScriptedTokenizer()
    target = ScriptedEngine(tokenizer, [ScriptedStep(REPLY, 0.1)])
    draft = ScriptedEngine(tokenizer, [ScriptedStep("x", error="no memory")])
    message = ChatLookahead(engines=EngineSet(target, draft, EqualTextEmbedder())).invoke("?")
    assert message.text == REPLY
    assert message.response_metadata["lookahead"]["speculation_disabled"] == "no memory"


def test_tool_call_is_parsed_and_written_by_the_target() -> None:
    llm = scripted_chat("I add the numbers.\n\n" + CALL).bind_tools([add])
    message = llm.invoke("1 + 2?")
    assert message.text == "I add the numbers."
    assert message.tool_calls[0]["args"] == {"a": 1, "b": 2}
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert message.response_metadata["lookahead"]["accepted"] == 1, "the target writes the call"


def test_streamed_text_has_no_tool_call_markup() -> None:
    whole: AIMessageChunk | None = None
    for chunk in scripted_chat("I add.\n\n" + CALL).bind_tools([add]).stream("1 + 2?"):
        assert "tool_call" not in chunk.text
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "add"


def test_malformed_tool_call_is_an_invalid_tool_call() -> None:
    llm = scripted_chat("<tool_call>{oops</tool_call>").bind_tools([add])
    assert llm.invoke("?").invalid_tool_calls[0]["args"] == "{oops"


def test_tool_choice_forces_or_forbids_a_call() -> None:
    llm = scripted_chat('{"name":"add","arguments":{"a":1,"b":2}}')
    for choice in ("any", "required", True, "add", {"type": "function", "function": {"name": "add"}}):
        assert llm.bind_tools([add], tool_choice=choice).invoke("?").tool_calls
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    assert all(sampling.structured for _, sampling in llm.engines.target.requests)
    assert not llm.bind_tools([add], tool_choice="none").invoke("?").tool_calls
    with pytest.raises(ConfigurationError, match="subtract"):
        llm.bind_tools([add], tool_choice="subtract")


def test_forced_call_sends_no_request_to_the_draft() -> None:
    llm = scripted_chat('{"name":"add","arguments":{"a":1,"b":2}}')
    llm.bind_tools([add], tool_choice="any").invoke("?")
    assert llm.engines is not None
    assert isinstance(llm.engines.draft, ScriptedEngine)
    assert llm.engines.draft.requests == []


class State(TypedDict, total=False):
    answers: list[AIMessage]


def graph_with(llm: ChatLookahead, nodes: Sequence[str], asynchronous: bool = False) -> Any:
    graph = StateGraph(State)

    def node(state: State) -> State:
        return {"answers": [*state.get("answers", []), llm.invoke("What is it?")]}

    async def anode(state: State) -> State:
        return {"answers": [*state.get("answers", []), await llm.ainvoke("What is it?")]}

    for name in nodes:
        graph.add_node(name, anode if asynchronous else node)
    for first, second in zip([START, *nodes], [*nodes, END], strict=True):
        graph.add_edge(first, second)
    return graph.compile()


POLICIES: dict[str, str | VerifierPolicy] = {"planner": "exact", "executor": "off"}


def nodes_and_policies(state: Any) -> list[tuple[str, str]]:
    metadata = [message.response_metadata["lookahead"] for message in state["answers"]]
    return [(entry["node"], entry["policy"]) for entry in metadata]


EXPECTED = [("planner", "exact"), ("executor", "off"), ("finisher", "balanced")]


def test_node_selects_the_policy() -> None:
    graph = graph_with(scripted_chat(REPLY, policies=POLICIES), ["planner", "executor", "finisher"])
    assert nodes_and_policies(graph.invoke({})) == EXPECTED


async def test_node_selects_the_policy_in_ainvoke() -> None:
    llm = scripted_chat(REPLY, policies=POLICIES)
    graph = graph_with(llm, ["planner", "executor", "finisher"], asynchronous=True)
    assert nodes_and_policies(await graph.ainvoke({})) == EXPECTED


def test_node_selects_the_policy_when_the_graph_streams_messages() -> None:
    graph = graph_with(scripted_chat(REPLY, policies=POLICIES), ["planner", "executor", "finisher"])
    events = list(graph.stream({}, stream_mode=["messages", "values"]))
    assert nodes_and_policies([event for mode, event in events if mode == "values"][-1]) == EXPECTED
    assert any(mode == "messages" for mode, _ in events)


def test_call_overrides_the_config_and_the_config_overrides_the_node() -> None:
    llm = scripted_chat(REPLY, policies=POLICIES)
    graph = graph_with(llm, ["planner"])
    assert nodes_and_policies(graph.invoke({}, {"configurable": {"lookahead_policy": "fast"}})) == [("planner", "fast")]
    message = llm.invoke("?", {"configurable": {"lookahead_policy": "fast"}}, policy="strict")
    assert message.response_metadata["lookahead"]["policy"] == "strict"
    assert llm.bind(policy="off").invoke("?").response_metadata["lookahead"]["policy"] == "off"


async def test_config_selects_the_policy_outside_a_graph() -> None:
    llm = scripted_chat(REPLY)
    config: RunnableConfig = {"configurable": {"lookahead_policy": "fast"}}
    last_chunks = {
        "stream": list(llm.stream("?", config))[-1],
        "astream": [chunk async for chunk in llm.astream("?", config)][-1],
    }
    replies = {
        "invoke": llm.invoke("?", config),
        "ainvoke": await llm.ainvoke("?", config),
        "batch": llm.batch(["?"], config)[0],
        "bind_tools": llm.bind_tools([]).invoke("?", config),
        "chain": (llm | (lambda message: message)).invoke("?", config),
        **last_chunks,
    }
    for name, message in replies.items():
        metadata = message.response_metadata["lookahead"]
        assert (metadata["policy"], metadata["selection_rule"]) == (
            "fast",
            'config["configurable"]["lookahead_policy"]',
        ), name
    with pytest.raises(PolicyError, match="no policy is called 'swift'"):
        llm.invoke("?", {"configurable": {"lookahead_policy": "swift"}})
    assert llm.bind(policy="off").invoke("?", config).response_metadata["lookahead"]["policy"] == "off"


def test_off_uses_no_draft_and_exact_rejects_different_tokens() -> None:
    llm = scripted_chat(REPLY, lambda _: "First this.\n\nThen  that.\n\nIt is 4.")
    metadata = {name: llm.invoke("?", policy=name).response_metadata["lookahead"] for name in ("off", "exact")}
    assert metadata["off"]["tokens"]["draft"] == {"committed": 0, "rejected": 0, "aborted": 0, "speculative": 0}
    assert metadata["exact"]["accepted"] == 2, "the second step differs in its tokens"


def test_token_ids_are_returned_only_on_request() -> None:
    assert "token_ids" not in scripted_chat(REPLY).invoke("?").response_metadata
    message = scripted_chat(REPLY, return_token_ids=True).invoke("?")
    assert message.usage_metadata is not None
    assert len(message.response_metadata["token_ids"]) == message.usage_metadata["output_tokens"]


@pytest.mark.parametrize("kinds", [(), (TextDelta,), (StepEvent,), (TextDelta, StepEvent)])
def test_only_events_that_somebody_wants_leave_the_loop(kinds: tuple[type[TextDelta | StepEvent], ...]) -> None:
    llm = scripted_chat("First this.\n\nThen that.\n\nIt is 4.")
    request = llm.request([HumanMessage("What is 2 + 2?")], CallOptions())
    *events, reply = background.stream(partial(llm.backend.emit_reply, request, kinds=kinds))
    assert {type(event) for event in events} == set(kinds)
    assert isinstance(reply, ChatReply)
    assert reply.content == "First this.\n\nThen that.\n\nIt is 4."
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert text == (reply.content if TextDelta in kinds else "")


async def test_cancelled_call_aborts_its_engine_requests() -> None:
    tokenizer = ScriptedTokenizer()
    engines = EngineSet(
        ScriptedEngine(tokenizer, [ScriptedStep("x", hangs=True)]),
        ScriptedEngine(tokenizer, [ScriptedStep("x", hangs=True)]),
        EqualTextEmbedder(),
    )
    task = asyncio.create_task(ChatLookahead(engines=engines).ainvoke("?"))
    await wait_until(lambda: engines.target.in_flight > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: engines.target.in_flight == 0)


def test_policy_determines_the_decoding_settings() -> None:
    fields = {
        "verifier": "exact",
        "depth": 3,
        "width": 2,
        "draft_temperature": 0.3,
        "delimiter": ";",
        "max_step_tokens": 9,
        "hedge": False,
        "synchronous": True,
        "early": False,
        "verifier_timeout": 5.0,
        "draft_timeout": 6.0,
    }
    settings = decoding_settings(as_policy(fields))
    assert settings == DecodingSettings(**{name: value for name, value in fields.items() if name != "verifier"})  # type: ignore[arg-type]


THINKING = "<think>I think.\n\nSo I think.</think>\n\nIt is 4.\n\nReally."


@pytest.mark.parametrize(("answer_from_target", "answer"), [(True, "It is 4."), (False, "It is 5.")])
def test_answer_from_target_leaves_the_final_answer_to_the_target(answer_from_target: bool, answer: str) -> None:
    tokenizer = ScriptedTokenizer(thinking=ThinkingTags())
    target = ScriptedEngine(tokenizer, reply_script(lambda _: THINKING, seconds=0.05))
    draft = ScriptedEngine(tokenizer, reply_script(lambda _: THINKING.replace("4", "5")))
    llm = ChatLookahead(engines=EngineSet(target, draft, EqualTextEmbedder()))
    policy = {"verifier": "random", "probability": 1, "answer_from_target": answer_from_target}
    message = llm.invoke("What is it?", policy=policy)
    assert answer in message.text
    assert message.response_metadata["lookahead"]["accepted"] > 0


def test_fields_of_remote_models_are_checked_by_the_constructor() -> None:
    url = "http://target/v1"
    for fields, message in (
        ({"base_url": "target:8000"}, "http://"),
        ({"base_url": "ftp://target/v1"}, "ftp://"),
        ({"base_url": "a-key-in-the-wrong-place"}, r"with /v1\Z"),
        ({"base_url": "http://[::1/v1"}, "not a valid address"),
        ({"base_url": "http://name:secret@target/v1"}, "give api_key"),
        ({"api_key": "secret"}, "base_url"),
        ({"draft_api_key": "secret", "base_url": url}, "draft_url"),
        ({"base_url": url, "token_speculation": "ngram"}, "--speculative-config"),
        ({"base_url": url, "engine_args": {"dtype": "float32"}}, "dtype to the server"),
        ({"draft_url": url, "draft_engine_args": {"dtype": "float32"}}, "dtype to the server"),
        ({"tokenizer": "qwen2.5-coder-1.5b"}, "has its own"),
        ({"base_url": url, "model": "big"}, "big"),
        ({"embedding_url": url}, "embedding_model"),
        ({"judge_url": "http://judge/v1"}, "judge_model"),
        ({"judge_url": "judge:8000", "judge_model": "big"}, "http://"),
        ({"judge_api_key": "secret"}, "judge_url"),
        ({"judge_model": "no-such-model"}, "no-such-model"),
        ({"embedding_model": "no-such-model"}, "no-such-model"),
    ):
        with pytest.raises(LookaheadError, match=message):
            ChatLookahead(**fields)  # type: ignore[arg-type]
    # With a `tokenizer`, the server may give the model any name.
    ChatLookahead(base_url=url, model="big", tokenizer="qwen2.5-coder-1.5b", engine_args={"max_model_len": 4096})
    llm = ChatLookahead(judge_url="http://judge/v1", judge_model="big", judge_api_key="secret")  # type: ignore[arg-type]
    assert "secret" not in repr(llm)


@pytest.mark.parametrize("name", ["chat_template", "tools", "messages", "tokenize", "max_length", "nope"])
def test_template_arguments_must_be_variables_that_the_template_reads(name: str) -> None:
    llm = scripted_chat("It is 4.")
    with pytest.raises(ConfigurationError, match=f"reads no {name}"):
        llm.invoke("?", template_arguments={name: []})
    assert llm.invoke("?", template_arguments={"enable_thinking": False}).text == "It is 4."


def test_text_far_beyond_the_context_length_is_rejected() -> None:
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("x")], context_length=100)
    with pytest.raises(ContextLengthError, match="more than 100 tokens"):
        ChatLookahead(engines=EngineSet(engine), policy="off").invoke("word and, " * 100_000)


def test_a_target_that_stalls_fails_the_reply_by_default() -> None:
    engine = ScriptedEngine(ScriptedTokenizer(), [ScriptedStep("One ", hangs=True)])
    llm = ChatLookahead(engines=EngineSet(engine), policy="off", stall_timeout=0.1)
    with pytest.raises(EngineError, match="the target model timed out after"):
        llm.invoke("?")
    assert engine.in_flight == 0
    assert ChatLookahead(engines=EngineSet(engine)).request("?", CallOptions()).stall_timeout == 120
    behind_a_server = {"base_url": "http://server/v1", "use_daemon": False}
    for fields, expected in (({}, None), ({"stall_timeout": 30}, 30), ({"stall_timeout": None}, None)):
        llm = ChatLookahead(model="qwen2.5-coder-1.5b", **behind_a_server, **fields)  # type: ignore[arg-type]
        assert llm.request("?", CallOptions()).stall_timeout == expected
