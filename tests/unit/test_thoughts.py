"""Thinking in replies: where it begins and ends, its token count, and stop strings."""

from __future__ import annotations

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.decoding.thinking import ThinkingState
from lookahead_agent.engines.chat_template import ThinkingTags
from tests.unit.replies import TAGS, read, reply_content
from tests.unit.serving import serving
from tests.unit.test_streams import chat, summed

CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'

TAGS_IN_CODE = "`<think>b</think>` and\n```\n<think>\n```\n"


@pytest.mark.parametrize(
    ("text", "inside", "thinking", "answer"),
    [
        ("<think>\nI think.\n\nSo.\n</think>\n\nIt is 4.\n", False, "I think.\n\nSo.", "It is 4.\n"),
        ("I think.</think>It is 4.", True, "I think.", "It is 4."),
        ("<think>\n\n</think>\n\nIt is 4.", False, "", "It is 4."),
        ("\n<think>I never end", False, "I never end", ""),
        ("I never end </thi", True, "I never end </thi", ""),
        ("<thin air", False, "", "<thin air"),
        (" so it is", False, "", " so it is"),
        ("hm</think>Answer", False, "hm", "Answer"),
        (f"Or {CALL}?\n</think>\nAnswer", False, f"Or {CALL}?", "Answer"),
        ("It is <think> 4.", False, "", "It is <think> 4."),
        ("<think>a</think>First. <think>b</think>Second.", False, "a\n\nb", "First. Second."),
        ("<think>a</think>First.\n<think>\n\n</think>\nSecond.", False, "a", "First.\n\nSecond."),
        ("First.<think>a</think>Second.</think>", False, "a", "First.Second.</think>"),
        (f"<think>a</think>{TAGS_IN_CODE}", False, "a", TAGS_IN_CODE),
        ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
        (f"<think>{CALL}</think>None.", False, CALL, "None."),
    ],
)
def test_thinking_and_answer_are_separated_however_the_text_is_split(
    text: str, inside: bool, thinking: str, answer: str
) -> None:
    reply = read(text, tags=TAGS, inside=inside)
    assert (reply.thinking, reply.parsed.content, reply.parsed.tool_calls) == (thinking, answer, [])
    assert reply_content(read(text, range(len(text)), tags=TAGS, inside=inside)) == reply_content(reply)


def test_truncated_thinking_is_not_part_of_the_answer() -> None:
    reply = read(f"<think>a</think>First.\n<think>Or {CALL}", tags=TAGS, truncated=True)
    assert (reply.thinking, reply.parsed.content, reply.parsed.tool_calls) == (f"a\n\nOr {CALL}", "First.\n", [])


def test_thinking_tags_in_tool_arguments_stay_in_the_arguments() -> None:
    call = '<tool_call>{"name": "remove", "arguments": {"path": "<think>a</think>"}}</tool_call>'
    for text in (f"<think>b</think>{call}", call):
        assert [call["args"] for call in read(text, tags=TAGS).parsed.tool_calls] == [{"path": "<think>a</think>"}]


@pytest.mark.parametrize(
    ("tags", "after", "beginning"),
    [(ThinkingTags(always=False), False, "thinks only sometimes"), (TAGS, True, "the prompt has closed it")],
)
def test_text_before_a_stray_closing_tag_is_part_of_the_answer(tags: ThinkingTags, after: bool, beginning: str) -> None:
    text = f"{beginning}</think>Answer"
    assert read(text, tags=tags, after=after).parsed.content == text
    assert read(text, tags=None).parsed.content == text


STEPS = "<think>\nI think; yes.\n\nSo; I do.\n</think>\n\nIt is 4; no.\n\nReally; yes."
MODES = {
    "off": {"policy": "off"},
    "steps": {"policy": "balanced:depth=3"},
    "lines": {"policy": r"balanced:depth=3:delimiter=/\n+/"},
    "rounds": {"policy": "balanced:depth=2:synchronous=true"},
    "tree": {"policy": "balanced:depth=2:width=2"},
    "seeded": {"policy": "off", "seed": 1, "temperature": 0.7},
    "seeded steps": {"policy": "exact", "seed": 1, "temperature": 0.7},
    "short steps": {"policy": "balanced:depth=3:max_step_tokens=3"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("stop", [[";"], ["\n"], ["\n\n", "; no"], ["never"], ["</think>"], ["I think", "It is"]])
def test_stop_strings_end_the_answer_but_never_the_thinking(mode: str, opened: bool, stop: list[str]) -> None:
    text = STEPS.removeprefix("<think>\n") if opened else STEPS
    answer = "" if stop == ["</think>"] else STEPS.partition("</think>")[2]
    for string in stop:
        answer = answer.partition(string)[0]
    llm = chat(text, tags=TAGS, opened=opened, **MODES[mode])
    message = llm.invoke("q", stop=stop)
    assert message.additional_kwargs["reasoning_content"] == "I think; yes.\n\nSo; I do."
    assert message.text == answer.lstrip()
    assert summed(llm.stream("q", stop=stop)).text == answer.lstrip()
    assert message.response_metadata["finish_reason"] == "stop"


def test_stop_strings_never_end_the_thinking_before_structured_output() -> None:
    llm = chat('<think>\nI; think.</think>{"a":";"}', tags=TAGS, policy="off")
    response_format = {"type": "json_object"}
    message = llm.invoke("q", stop=["I;"], response_format=response_format)
    assert message.additional_kwargs["reasoning_content"] == "I; think."
    assert message.text == '{"a":";"}'


@given(st.text("<think>/ ab", max_size=40), st.booleans(), st.data())
def test_thinking_state_is_independent_of_where_the_text_is_split(text: str, inside: bool, data: st.DataObject) -> None:
    state = initial = ThinkingState(TAGS, inside)
    splits = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    answers: list[bool] = []
    for begin, end in zip([0, *splits], [*splits, len(text)], strict=True):
        answers += [state.is_answer(text[begin:end], index, index + 1) for index in range(end - begin)]
        state = state.then(text[begin:end])
    assert state.inside == initial.then(text).inside
    # Within a tag, the state is known only at its end.
    tags = [(begin, begin + len(tag)) for tag in (TAGS.open, TAGS.close) for begin in _occurrences(text, tag)]
    outside = [index for index in range(len(text)) if not any(begin <= index < end for begin, end in tags)]
    assert [answers[index] for index in outside] == [initial.is_answer(text, index, index + 1) for index in outside]


def _occurrences(text: str, tag: str) -> list[int]:
    return [index for index in range(len(text)) if text.startswith(tag, index)]


@pytest.mark.parametrize(
    ("text", "opened", "tokens"),
    [
        ("<think>one two three</think>Answer one", False, 3),
        ("one two three</think>Answer one", True, 3),
        ("<think>one two three", False, 3),
        ("one two</think>Answer", False, 2),
        ("<think>one</think>Answer<think>two three</think>", False, 3),
        ("Answer one two", False, 0),
    ],
)
def test_usage_counts_the_tokens_of_thinking(text: str, opened: bool, tokens: int) -> None:
    llm = chat(text, tags=TAGS, opened=opened)
    message = llm.invoke("q")
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_token_details"] == {"reasoning": tokens}
    assert summed(llm.stream("q")).usage_metadata == message.usage_metadata


def test_usage_counts_thinking_before_structured_output() -> None:
    llm = chat('one two\nthree</think>{"a":1}', tags=TAGS, opened=True)
    message = llm.invoke("q", response_format={"type": "json_object"})
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_token_details"] == {"reasoning": 3}


def test_server_usage_sums_the_thinking_of_all_choices() -> None:
    with serving(chat("<think>one two three</think>Answer", tags=TAGS)) as (url, _):
        body = {"messages": [{"role": "user", "content": "q"}], "n": 2}
        usage = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["usage"]
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 6}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        streamed = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).text
        assert '"completion_tokens_details": {"reasoning_tokens": 6}' in streamed
