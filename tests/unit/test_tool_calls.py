"""Calls in Hermes' format, and what small models make of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from lookahead_agent.generation.tool_calls import ParsedReply, as_invalid_json, parse_constrained
from tests.unit.replies import TOOLS, read, said

CALL = '{"name": "add", "arguments": {"a": 1}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
ADD = ("add", {"a": 1})


def parsed(text: str, *, cut: bool = False) -> ParsedReply:
    """The reply, which reads the same at once and letter by letter."""
    whole = read(text, cut=cut)
    assert said(read(text, range(0, len(text), 1 + len(text) // 1000), cut=cut)) == said(whole)
    return whole.parsed


def calls(reply: ParsedReply) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in reply.tool_calls]


@pytest.mark.parametrize(
    ("text", "content", "count"),
    [
        (TAGGED, "", 1),
        (f"I add.\n{TAGGED}\n<tool_call>{CALL}</tool_call>", "I add.", 2),
        (f"{TAGGED}\nThat is all.", "That is all.", 1),
        (f"\nLet me see.\n{TAGGED}\nThat is all.\n", "\nLet me see.\n\nThat is all.", 1),
        (f"One. {TAGGED} Two. {TAGGED} Three.", "One.  Two.  Three.", 2),
        (f"<tool_call>{CALL}", "", 1),
        (f"<tool_call>{CALL}\n</tool_", "", 1),
        (f"<tool_call>{CALL}\n<tool_call>{CALL}", "", 2),
        (f"<tool_call>{CALL}\n{CALL}</tool_call>", "", 2),
        (f"<tool_call>[{CALL}, {CALL}]</tool_call> So.", "So.", 2),
        (CALL, "", 1),
        (f"Now:\n{CALL} Done.", "Now:\n Done.", 1),
        (f"[{CALL}, {CALL}]", "", 2),
        (f"```json\n{CALL}\n```", "", 1),
        (f"```\n{CALL}\n{CALL}\n```\nI add.", "I add.", 2),
        (f"So:```json\n{CALL}\n```", "So:", 1),
    ],
)
def test_calls_and_the_text_around_them(text: str, content: str, count: int) -> None:
    reply = parsed(text)
    assert (reply.content, calls(reply), reply.invalid_tool_calls) == (content, [ADD] * count, [])
    assert len({call["id"] for call in reply.tool_calls}) == count


@pytest.mark.parametrize(
    "text",
    [
        "Use <tool_call> tags to call a tool.",
        "Use <tool_call> and </tool_call>, as in <tool_call></tool_call>.",
        "<tool_call> is the opening tag and </tool_call> the closing one.",
        f"`<tool_call>{CALL}</tool_call>` calls it.",
        f"``<tool_call>`{CALL}`` calls it, and `{CALL}` does too.",
        f"`{TAGGED}` calls it.",
        f"You write\n```\n{TAGGED}\n```\nfor a call.",
        f"~~~xml\n{TAGGED}\n~~~",
        "Let me see. <tool_cal",
        "I end with <tool_call>",
        "</tool_call> closes it.\n",
        '```json\n{"name": "Ada", "arguments": {}}\n```',
        '{"name": "Ada", "age": 36}',
        '{"name": "add"}',
        "a < b, and <toolbox> ```json\n{}\n```\n",
        "\nHello  \n",
    ],
)
def test_an_answer_that_calls_nothing_is_text(text: str) -> None:
    assert parsed(text) == ParsedReply(text)


def test_an_example_in_a_fence_is_no_call_where_there_is_one() -> None:
    example = '```json\n{"name": "remove", "arguments": {"path": "/"}}\n```'
    for call in (CALL, TAGGED):
        reply = parsed(f"Not this:\n{example}\nbut {call}")
        assert (reply.content, calls(reply), reply.invalid_tool_calls) == (f"Not this:\n{example}\nbut", [ADD], [])
    tagged = parsed(f'{{"name": "remove", "arguments": {{}}}} or {TAGGED}')
    assert calls(tagged) == [ADD], "a call with tags is the model's own"


def test_tags_and_lines_in_a_text_of_the_arguments() -> None:
    text = '</tool_call>\n<tool_call>{"name": "now"}</tool_call> <think>\t'
    for written in (json.dumps({"path": text}), json.dumps({"path": text}).replace("\\n", "\n").replace("\\t", "\t")):
        for call in ("<tool_call>\n%s\n</tool_call>", "%s", "```json\n%s\n```"):
            reply = parsed(call % f'{{"name": "remove", "arguments": {written}}}')
            assert calls(reply) == [("remove", {"path": text})]
            assert not reply.invalid_tool_calls


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
def test_what_arguments_are_called(key: str) -> None:
    assert calls(parsed(f'<tool_call>{{"name": "add", "{key}": {{"a": 1}}}}</tool_call>')) == [ADD]
    assert calls(parsed(f'<tool_call>{{"name": "add", "{key}": "{{\\"a\\": 1}}"}}</tool_call>')) == [ADD]


def test_only_a_tool_without_parameters_is_called_without_arguments() -> None:
    assert calls(parsed('<tool_call>{"name": "now"}</tool_call>')) == [("now", {})]
    assert calls(parsed('<tool_call>{"name": "now", "arguments": null}</tool_call>')) == [("now", {})]
    assert calls(parsed('<tool_call>{"name": "remove", "arguments": {}}</tool_call>')) == [("remove", {})]
    assert parsed('<tool_call>{"name": "remove"}</tool_call>').invalid_tool_calls[0]["name"] == "remove"


def test_arguments_that_are_nested_as_deep_as_may_be() -> None:
    (call,) = parsed('<tool_call>{"name": "remove", "arguments": {"path": ' + "[" * 98 + "]" * 98 + "}}").tool_calls
    assert json.dumps(call["args"]).count("[") == 98


def test_a_tool_that_is_not_there_is_called_all_the_same() -> None:
    assert calls(parsed('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>')) == [("nobody", {})]


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "[1]",
        "[[]]",
        '{"arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"name": "remove", "arguments": [1]}',
        '{"name": "remove", "arguments": []}',
        '{"name": "remove", "arguments": ""}',
        '{"name": "remove", "arguments": null}',
        '{"name": "remove", "arguments": "{\\"path\\": \\"/home/a"}',
        '{"name": "remove", "arguments": {}, "parameters": {"path": "/home/a"}}',
        '{"name": "remove", "arguments": {}, "path": "/home/a"}',
        '{"name": "remove", "arguments": {"path": "/a", "path": "/b"}}',
        '{"name": "remove", "arguments": {"path": "he said "hi""}}',
        '{"name": "remove", "arguments": {"path": "/a"}}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": -Infinity}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": [{"b": "-1e400", "c": -1e400}]}}',
        '{"name": "add", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "remove", "arguments": {"path": "\\ud83d"}}',
        '{"name": "remove", "arguments": {"\\udc00": 1}}',
        '{"name": "\\ud83d", "arguments": {}}',
        '{"name": "remove", "arguments": {"path": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"name": "remove", "arguments": {"path": ' + "[" * 99 + "]" * 99 + "}}",
        '{"name": "add", "arguments": {"a": ' + "9" * 10_000 + "}}",
        f'{{"name": "add", "arguments": {{"a": {1 << 64}}}}}',
        f'{{"name": "add", "arguments": {{"a": [{-(1 << 63) - 1}]}}}}',
        "add(a=1)",
        "\n<function=add>\n",
    ],
)
def test_calls_that_cannot_be_read_are_reported(body: str) -> None:
    reply = parsed(f"First.\n<tool_call>{body}</tool_call>\nLast.")
    assert (reply.content, reply.tool_calls) == ("First.\n\nLast.", [])
    (invalid,) = reply.invalid_tool_calls
    assert invalid["args"] == body.strip()
    assert str(invalid["error"]).startswith("not a tool call: ")
    json.dumps(invalid, ensure_ascii=False).encode()


def test_whole_numbers_reach_as_far_as_checkpoints_carry_them() -> None:
    for number in ((1 << 64) - 1, -(1 << 63)):
        (call,) = parsed(f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>').tool_calls
        assert call["args"] == {"a": number}
        assert JsonPlusSerializer().loads_typed(JsonPlusSerializer().dumps_typed(call)) == call


@pytest.mark.parametrize("call", [TAGGED, CALL, f"```json\n{CALL}\n```", f"<tool_call>[{CALL}, {CALL}]</tool_call>"])
def test_a_call_that_is_cut_off_is_invalid(call: str) -> None:
    for end in range(call.index('"add"') + 5, call.index("}}") + 1):
        for cut in (True, False):
            reply = parsed(f"Well. {call[:end]}", cut=cut)
            assert (reply.content, reply.tool_calls) == ("Well.", []), call[:end]
            assert [invalid["name"] for invalid in reply.invalid_tool_calls] == ["add"]


def test_a_call_that_is_cut_off_leaves_those_before_it() -> None:
    for begun in (f"{TAGGED}\n<tool_call>\n", f"<tool_call>[{CALL}, ", f"<tool_call>{CALL}\n"):
        reply = parsed(begun + '{"name": "remove", "arguments": {"path": "/ho', cut=True)
        assert calls(reply) == [ADD]
        assert [invalid["name"] for invalid in reply.invalid_tool_calls] == ["remove"]
    assert len(parsed("So <tool_call>", cut=True).invalid_tool_calls) == 1


def test_what_is_unreadable_stays_so() -> None:
    for text in ("", " ", "{", '{"path": "/a', "[1", '"a', "1", "null", "true", "NaN", "-1"):
        assert as_invalid_json(text) == f"(unreadable) {text}"
    assert as_invalid_json("<tool_call>{") == "<tool_call>{"


@pytest.mark.parametrize(
    ("text", "names", "invalid"),
    [
        (CALL, ["add"], []),
        (f" [{CALL}, {CALL}]\n", ["add", "add"], []),
        ('{"name":"remove","arguments":{"path":"/ho', [], ["remove"]),
        (f'[{CALL}, {{"name":"remove","argu', ["add"], ["remove"]),
        (f"{CALL} and more", ["add"], [None]),
        ('{"name":"add","arguments":{"a":NaN}}', [], ["add"]),
        ("", [], [None]),
        ("Hello", [], [None]),
        ("{}", [], [None]),
        ("[]", [], [None]),
    ],
)
def test_a_reply_that_must_be_a_call(text: str, names: list[str], invalid: list[str | None]) -> None:
    reply = parse_constrained(text, TOOLS)
    assert reply.content == ""
    assert [call["name"] for call in reply.tool_calls] == names
    assert [call["name"] for call in reply.invalid_tool_calls] == invalid
