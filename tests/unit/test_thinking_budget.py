"""A budget of thinking tokens: the decoder closes the thinking, and the answer follows."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel, ValidationError

from lookahead_agent import ChatLookahead
from lookahead_agent.decoding import DecodingSettings, ReplyRequest, lookahead
from lookahead_agent.decoding.prefixes import Prefixes
from lookahead_agent.decoding.request import Regions
from lookahead_agent.decoding.step import Node, Step, StepEnd
from lookahead_agent.decoding.thinking import ThinkingState, closing_tokens
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.errors import ConfigurationError, PolicyError
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.unit.scripts import ScriptedVerifier
from tests.unit.serving import serving
from tests.unit.test_draft_follower import SharedDraftScript
from tests.virtual_time import run_in_virtual_time

TAGS = ThinkingTags(separator="\n\n")
ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)
CLOSE = "</think>\n\n"
THOUGHTS = "one two three\n\nfour five six\n\nseven eight nine"
ANSWER = "It is 4.\n\nReally."


def writes(thoughts: str, answer: str) -> Any:
    """A script that thinks, whatever the length of its thinking, and answers once the thinking is closed."""

    def script(_: str, reply: str) -> list[ScriptedStep]:
        begun, separator, answered = reply.partition("</think>")
        if not separator:
            opening = "<think>\n" if begun.startswith("<think>\n") else "<think>"  # the prompt's, or its own
            whole = opening + thoughts + "</think>\n\n" + answer
            assert whole.startswith(begun), (whole, begun)
            return [ScriptedStep(whole[len(begun) :], 0.1)]
        rest = answer[len(answered.removeprefix("\n\n")) :] if answered.startswith("\n\n") else f"\n\n{answer}"
        return [ScriptedStep(rest, 0.1)]

    return script


def chat(thoughts: str = THOUGHTS, answer: str = ANSWER, *, opened: bool = False, **fields: Any) -> Any:
    tokenizer = ScriptedTokenizer(TAGS, opens_thinking=opened)
    engines = [ScriptedEngine(tokenizer, writes(thoughts, answer)) for _ in range(2)]
    return ChatLookahead(engines=EngineSet(*engines), **{"policy": "off", **fields})


def figures(message: Any) -> tuple[str, str, int, bool]:
    """The thinking, the answer, the number of thinking tokens, and whether the budget ended the thinking."""
    thinking = message.additional_kwargs.get("reasoning_content", "")
    used = message.usage_metadata["output_token_details"]["reasoning"]
    return thinking, message.text, used, message.response_metadata["lookahead"]["thinking_ended_by_budget"]


THINKING = {0: "", 1: "one", 4: "one two three", 5: "one two three\n\nfour", 11: THOUGHTS, 12: THOUGHTS, None: THOUGHTS}


@pytest.mark.parametrize("policy", ["off", "exact:depth=3", "exact:depth=2:synchronous=true", "strict:depth=3"])
@pytest.mark.parametrize("opened", [False, True])
def test_budget_closes_the_thinking_and_the_answer_follows(policy: str, opened: bool) -> None:
    llm = chat(opened=opened, policy=policy)
    for budget, thinking in THINKING.items():
        message = llm.invoke("q", thinking_tokens=budget)
        used = 11 if budget is None else min(budget, 11)
        assert figures(message) == (thinking, ANSWER, used, budget is not None and budget <= 11)
        metadata = message.response_metadata["lookahead"]
        assert metadata["thinking_tokens"] == budget
        assert message.response_metadata["finish_reason"] == "stop"
        committed = sum(counts["committed"] for counts in metadata["tokens"].values())
        written = 2 if metadata["thinking_ended_by_budget"] and not (opened and budget == 0) else 0
        assert committed + written == message.usage_metadata["output_tokens"]


WORDS = st.sampled_from(["a", " b", " c", "\n\n", "`", "```\n", "\n", "<think>", "</think>", "."])
TEXTS = st.lists(WORDS, max_size=14).map("".join)


def steps_of(text: str, seconds: float = 0.1) -> Any:
    """A script that goes on with a text where the reply ends, by the number of the reply's tokens that it has."""
    pieces = ScriptedTokenizer._PIECE.findall(text)

    def script(_: str, reply: str) -> list[ScriptedStep]:
        return [ScriptedStep("".join(pieces[len(ScriptedTokenizer._PIECE.findall(reply)) :]), seconds)]

    return script


def decode(
    text: str, draft: str | None, budget: int, *, opened: bool, shared: bool = True, **options: Any
) -> tuple[str, list[str], str]:
    """Decode a reply; return its text, the texts of its tokens, and its finish reason."""
    tokenizer = ScriptedTokenizer(TAGS)
    other = tokenizer if shared else ScriptedTokenizer(TAGS)
    prompt = "q<think>\n" if opened else "q"
    ids, draft_ids = tokenizer.encode(prompt), other.encode(prompt)
    request = ReplyRequest(
        tuple(ids),
        Sampling(options.pop("max_tokens", 1000), stop=options.pop("stop", ())),
        regions=Regions(thinking=TAGS, answer_from_target=options.pop("answer_from_target", False)),
        draft_prompt_ids=None if shared else tuple(draft_ids),
        thinking_tokens=budget,
    )
    target = SharedDraftScript(tokenizer, steps_of(text), len(ids), tokens_per_delta=options.pop("tokens_per_delta", 1))
    drafting = ScriptedEngine(other, steps_of(draft, 0.01), len(draft_ids)) if draft is not None else None
    verifier = options.pop("verifier", ExactVerifier())
    reply = run_in_virtual_time(lookahead(request, target, drafting, verifier, DecodingSettings(**options)))
    report, texts = reply.report, {token: tokenizer.decode((token,)) for token in reply.token_ids}
    assert report.target_tokens.total == target.generated
    assert target.in_flight == 0
    assert (
        report.target_tokens.committed + report.draft_tokens.committed + report.closing_tokens == len(reply.token_ids)
        or not shared
    )
    inside, count = opened, 0
    for token in reply.token_ids:  # no tag counts, wherever it is
        inside = texts[token] == "<think>" or (inside and texts[token] != "</think>")
        count += inside and texts[token] not in ("<think>", "</think>")
    assert count <= budget or "`" in text, "a tag in code opens no thinking"
    return reply.text, [texts[token] for token in reply.token_ids], reply.finish_reason


@settings(max_examples=60, deadline=None)
@given(
    TEXTS,
    TEXTS,
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
    st.integers(1, 3),
    st.integers(1, 2),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([1000, 6]),
    st.sampled_from([(), (".",)]),
    st.booleans(),
)
@example("a b c\n\n b.", " b c b c\n\na", 2, True, False, 2, 1, False, 1, 1000, (), False)
def test_steps_and_drafts_change_no_reply_with_a_budget(
    text: str,
    draft: str,
    budget: int,
    opened: bool,
    shared: bool,
    depth: int,
    width: int,
    synchronous: bool,
    tokens_per_delta: int,
    max_tokens: int,
    stop: tuple[str, ...],
    answer_from_target: bool,
) -> None:
    # A prompt that opens the thinking leaves at least one token of it.
    limits: dict[str, Any] = {
        "opened": opened,
        "max_tokens": max_tokens,
        "stop": stop,
        "answer_from_target": answer_from_target,
    }
    budget = max(budget, opened)
    alone = decode(text, None, budget, **limits)
    shape: dict[str, Any] = {
        "depth": depth,
        "width": width,
        "synchronous": synchronous,
        "tokens_per_delta": tokens_per_delta,
    }
    assert decode(text, draft or text, budget, shared=shared, **shape, **limits) == alone
    # Whatever the verifier accepts, the budget holds.
    decode(text, draft or text, budget, shared=shared, verifier=ACCEPT_ALL, **shape, **limits)
    assert len(alone[1]) <= max_tokens


def test_accepted_draft_steps_count_and_none_uses_the_budget_up() -> None:
    llm = chat(policy="exact:depth=3")
    metadata = llm.invoke("q", thinking_tokens=9).response_metadata["lookahead"]
    assert metadata["accepted"] >= 2, "the two whole steps of the thinking, at least"
    assert figures(llm.invoke("q", thinking_tokens=9))[0] == "one two three\n\nfour five six\n\nseven"


def test_limit_of_the_reply_goes_before_the_budget() -> None:
    message = chat().invoke("q", thinking_tokens=8, max_tokens=5)
    assert figures(message) == ("one two three\n\n".strip(), "", 4, False)
    assert message.response_metadata["finish_reason"] == "length"
    for room, answer in ((10, ""), (11, ""), (12, "It"), (13, "It is")):
        message = chat().invoke("q", thinking_tokens=8, max_tokens=room)
        assert (message.text, message.usage_metadata["output_tokens"]) == (answer, room)
        assert message.response_metadata["finish_reason"] == "length"


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("budget", [0, 2])
def test_budget_before_a_form_a_tool_call_and_a_stop_text(budget: int, opened: bool) -> None:
    thinking = "one two" if budget else ""

    class Number(BaseModel):
        number: int

    form = chat(answer='{"number":4}', opened=opened)
    result = form.with_structured_output(Number, include_raw=True, thinking_tokens=budget).invoke("q")
    assert result["parsed"] == Number(number=4)
    assert figures(result["raw"])[0::2] == (thinking, budget)
    assert result["raw"].response_metadata["lookahead"]["thinking_ended_by_budget"]

    @tool
    def add(a: int) -> int:
        """Add."""
        return a

    calls = chat(answer='<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', opened=opened)
    for choice in (None, "add"):
        if choice is not None:
            calls = chat(answer='{"name":"add","arguments":{"a":1}}', opened=opened)
        message = calls.bind_tools([add], tool_choice=choice).invoke("q", thinking_tokens=budget)
        assert [call["args"] for call in message.tool_calls] == [{"a": 1}]
        assert figures(message)[0::2] == (thinking, budget)
    message = chat(opened=opened).invoke("q", stop=["two", " is"], thinking_tokens=budget)
    assert figures(message) == (thinking, "It", budget, True)


def test_streams_choices_and_later_replies_have_the_same_budget() -> None:
    llm = chat(thinking_tokens=2)
    chunks = list(llm.stream("q"))
    assert "".join(chunk.additional_kwargs.get("reasoning_content", "") for chunk in chunks) == "one two"
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert {figures(each) for each in llm.batch(["q", "r"])} == {("one two", ANSWER, 2, True)}
    assert figures(llm.invoke("q", thinking_tokens=1))[0] == "one", "the call's budget goes first"
    first = llm.invoke("q")
    assert figures(llm.invoke(["q", first, HumanMessage("again")])) == ("one two", ANSWER, 2, True)


def test_model_may_close_its_thinking_early_and_think_again() -> None:
    text = "<think>a b</think>\n\nSo `<think>` is it.<think>c d e</think>f"
    engine = ScriptedEngine(ScriptedTokenizer(TAGS), steps_of(text))
    llm = ChatLookahead(engines=EngineSet(engine), policy="off")
    assert figures(llm.invoke("q", thinking_tokens=6)) == ("a b\n\nc d e", "So `<think>` is it.f", 5, False)
    assert figures(llm.invoke("q", thinking_tokens=4)) == ("a b\n\nc d", "So `<think>` is it.\n\nf", 4, True)


def test_nodes_have_budgets_of_their_own() -> None:
    llm = chat(thinking_tokens={"planner": 2, "write*": 0})

    def node(name: str) -> Any:
        return lambda state: {"messages": [llm.invoke(state["messages"][:1])]}

    graph = StateGraph(MessagesState)
    previous = START
    for name in ("planner", "writer", "other"):
        graph.add_node(name, node(name))
        graph.add_edge(previous, name)
        previous = name
    compiled = graph.compile()
    _, *replies = compiled.invoke({"messages": [HumanMessage("q")]})["messages"]
    assert [figures(each)[0] for each in replies] == ["one two", "", THOUGHTS]
    assert figures(llm.invoke("q", node="planner"))[0] == "one two"
    llm.check_policies(compiled)
    with pytest.raises(PolicyError, match=r"thinking_tokens\['planer'\] matches no node"):
        chat(thinking_tokens={"planer": 2}).check_policies(compiled)
    keys = {llm._get_llm_string(node=name) for name in ("planner", "writer", "other")}
    assert len(keys) == 3, "a cache keeps the replies of these nodes apart"


@pytest.mark.parametrize("value", [-1, True, 1.5, "many", 2**31])
def test_budget_is_a_count_of_tokens(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="thinking_tokens"):
        chat().invoke("q", thinking_tokens=value)
    for field in (value, {"planner": value}):
        with pytest.raises(ValidationError, match="thinking_tokens"):
            chat(thinking_tokens=field)


@pytest.mark.parametrize(("thinking", "budget"), [(False, 5), (True, 0)])
def test_switch_and_budget_contradict_each_other_only_side_by_side(thinking: bool, budget: int) -> None:
    with pytest.raises(ConfigurationError, match=f"thinking={thinking} contradicts thinking_tokens={budget}"):
        CallOptions.read({"thinking": thinking, "thinking_tokens": budget})
    with pytest.raises(ValidationError, match="contradicts"):
        chat(thinking=thinking, thinking_tokens=budget)
    assert chat(thinking=True, thinking_tokens={"a": 0, "b": 5}).thinking
    request = chat(thinking_tokens=budget).request([HumanMessage("q")], CallOptions.read({"thinking": thinking}))
    assert (request.thinking_tokens, request.template_arguments) == (budget, {"enable_thinking": thinking})


def test_model_without_thinking_is_an_error_and_text_without_messages_has_no_budget() -> None:
    llm = ChatLookahead(engines=EngineSet(ScriptedEngine(ScriptedTokenizer(), writes("", "a"))), thinking_tokens=5)
    with pytest.raises(ConfigurationError, match="thinking_tokens is for models that think"):
        llm.invoke("q")
    assert chat(thinking_tokens=5).request("some text", CallOptions()).thinking_tokens is None


def test_request_of_the_server_has_a_budget_under_both_names() -> None:
    with serving(chat()) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def create(**body: Any) -> Any:
            messages: Any = [{"role": "user", "content": "q"}]
            return client.chat.completions.create(model="qwen2.5-coder-1.5b", messages=messages, extra_body=body)

        for name in ("thinking_tokens", "thinking_token_budget"):
            reply = create(**{name: 2, "n": 2})
            assert [each.message.content for each in reply.choices] == [ANSWER] * 2
            assert [each.message.reasoning_content for each in reply.choices] == ["one two"] * 2
            assert reply.usage.completion_tokens_details.reasoning_tokens == 4
            assert [each["thinking_ended_by_budget"] for each in reply.lookahead] == [True, True]
        assert create(thinking_tokens=0).choices[0].message.reasoning_content is None
        assert create(thinking_token_budget=-1).choices[0].message.reasoning_content == THOUGHTS
        for body in ({"thinking_tokens": -1}, {"thinking_tokens": 1, "thinking_token_budget": 1}):
            with pytest.raises(openai.BadRequestError, match="thinking_tokens"):
                create(**body)


def test_closing_completes_a_tag_of_several_tokens_that_the_model_has_begun() -> None:
    tokenizer = ScriptedTokenizer()
    tags = ThinkingTags("[think]", "[/think]", separator="\n\n")  # the pattern of the tokenizer splits these tags
    assert len(tokenizer.encode(tags.close)) > 1
    state = ThinkingState(tags, True).then("so [/")
    assert tokenizer.decode(closing_tokens(tokenizer, state)) == "think]\n\n"
    assert tokenizer.decode(closing_tokens(tokenizer, ThinkingState(TAGS, True).then("a <"))) == CLOSE


@pytest.mark.parametrize(("room", "end"), [(0, StepEnd.BUDGET), (1, StepEnd.DELIMITER), (2, StepEnd.DELIMITER)])
def test_a_step_in_the_drafts_tokens_ends_as_it_did_unless_the_reply_is_full(room: int, end: StepEnd) -> None:
    target, draft = ScriptedTokenizer(TAGS), ScriptedTokenizer(TAGS)
    prompt, text = target.encode("q<think>\n"), "one two\n\n"
    request = ReplyRequest(
        tuple(prompt),
        Sampling(len(target.encode(text)) + room),
        regions=Regions(thinking=TAGS),
        draft_prompt_ids=tuple(draft.encode("q<think>\n")),
        thinking_tokens=100,
    )
    step = Step(tuple(draft.encode(text)), text, StepEnd.DELIMITER)
    converted = Prefixes(request, target, draft, None).from_draft(0, Node(0), step)
    assert (converted.token_ids, converted.end) == (tuple(target.encode(text)), end)
