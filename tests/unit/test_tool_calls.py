"""Tool calls in the Hermes format, including the malformed calls of small models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from lookahead_agent.generation.tool_calls import ParsedReply, as_invalid_json, parse_constrained
from tests.unit.replies import TOOLS, read, reply_content

CALL = '{"name": "add", "arguments": {"a": 1}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
ADD = ("add", {"a": 1})


def parse(text: str, *, truncated: bool = False) -> ParsedReply:
    """Parse a reply; parsed in small deltas, it must give the same result."""
    reply = read(text, truncated=truncated)
    assert reply_content(read(text, range(0, len(text), 1 + len(text) // 1000), truncated=truncated)) == reply_content(
        reply
    )
    return reply.parsed


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
        (f"```json {{}}``` is empty.\n{TAGGED}", "```json {}``` is empty.", 1),
        (f"It begins with ``` and so on.\n{TAGGED}", "It begins with ``` and so on.", 1),
    ],
)
def test_calls_are_parsed_and_the_text_around_them_is_content(text: str, content: str, count: int) -> None:
    reply = parse(text)
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
def test_reply_without_a_call_is_content(text: str) -> None:
    assert parse(text) == ParsedReply(text)


def test_fenced_example_is_content_if_the_reply_also_has_a_call() -> None:
    example = '```json\n{"name": "remove", "arguments": {"path": "/"}}\n```'
    for call in (CALL, TAGGED):
        reply = parse(f"Not this:\n{example}\nbut {call}")
        assert (reply.content, calls(reply), reply.invalid_tool_calls) == (f"Not this:\n{example}\nbut", [ADD], [])
    tagged = parse(f'{{"name": "remove", "arguments": {{}}}} or {TAGGED}')
    assert calls(tagged) == [ADD], "a tagged call takes precedence over bare JSON"


def test_tags_and_raw_line_breaks_in_string_arguments_are_kept() -> None:
    text = '</tool_call>\n<tool_call>{"name": "now"}</tool_call> <think>\t'
    for arguments in (json.dumps({"path": text}), json.dumps({"path": text}).replace("\\n", "\n").replace("\\t", "\t")):
        for call_format in ("<tool_call>\n%s\n</tool_call>", "%s", "```json\n%s\n```"):
            reply = parse(call_format % f'{{"name": "remove", "arguments": {arguments}}}')
            assert calls(reply) == [("remove", {"path": text})]
            assert not reply.invalid_tool_calls


@pytest.mark.parametrize("key", ["arguments", "parameters", "args"])
def test_every_known_key_for_the_arguments_is_accepted(key: str) -> None:
    assert calls(parse(f'<tool_call>{{"name": "add", "{key}": {{"a": 1}}}}</tool_call>')) == [ADD]
    assert calls(parse(f'<tool_call>{{"name": "add", "{key}": "{{\\"a\\": 1}}"}}</tool_call>')) == [ADD]


def test_arguments_may_be_missing_only_if_the_tool_has_no_parameters() -> None:
    assert calls(parse('<tool_call>{"name": "now"}</tool_call>')) == [("now", {})]
    assert calls(parse('<tool_call>{"name": "now", "arguments": null}</tool_call>')) == [("now", {})]
    assert calls(parse('<tool_call>{"name": "remove", "arguments": {}}</tool_call>')) == [("remove", {})]
    assert parse('<tool_call>{"name": "remove"}</tool_call>').invalid_tool_calls[0]["name"] == "remove"


def test_arguments_nested_up_to_the_limit_are_parsed() -> None:
    (call,) = parse('<tool_call>{"name": "remove", "arguments": {"path": ' + "[" * 98 + "]" * 98 + "}}").tool_calls
    assert json.dumps(call["args"]).count("[") == 98


def test_call_of_an_unknown_tool_is_parsed() -> None:
    assert calls(parse('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>')) == [("nobody", {})]


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
def test_malformed_calls_are_reported_as_invalid(body: str) -> None:
    reply = parse(f"First.\n<tool_call>{body}</tool_call>\nLast.")
    assert (reply.content, reply.tool_calls) == ("First.\n\nLast.", [])
    (invalid,) = reply.invalid_tool_calls
    assert invalid["args"] == body.strip()
    assert str(invalid["error"]).startswith("not a tool call: ")
    json.dumps(invalid, ensure_ascii=False).encode()


def test_integers_are_accepted_within_the_range_of_checkpoints() -> None:
    for number in ((1 << 64) - 1, -(1 << 63)):
        (call,) = parse(f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>').tool_calls
        assert call["args"] == {"a": number}
        assert JsonPlusSerializer().loads_typed(JsonPlusSerializer().dumps_typed(call)) == call


@pytest.mark.parametrize("call", [TAGGED, CALL, f"```json\n{CALL}\n```", f"<tool_call>[{CALL}, {CALL}]</tool_call>"])
def test_truncated_call_is_invalid(call: str) -> None:
    for end in range(call.index('"add"') + 5, call.index("}}") + 1):
        for truncated in (True, False):
            reply = parse(f"Well. {call[:end]}", truncated=truncated)
            assert (reply.content, reply.tool_calls) == ("Well.", []), call[:end]
            assert [invalid["name"] for invalid in reply.invalid_tool_calls] == ["add"]


def test_calls_before_a_truncated_call_stay_valid() -> None:
    for beginning in (f"{TAGGED}\n<tool_call>\n", f"<tool_call>[{CALL}, ", f"<tool_call>{CALL}\n"):
        reply = parse(beginning + '{"name": "remove", "arguments": {"path": "/ho', truncated=True)
        assert calls(reply) == [ADD]
        assert [invalid["name"] for invalid in reply.invalid_tool_calls] == ["remove"]
    assert len(parse("So <tool_call>", truncated=True).invalid_tool_calls) == 1


def test_invalid_call_text_that_could_be_completed_as_json_is_marked() -> None:
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
def test_constrained_reply_consists_of_calls_only(text: str, names: list[str], invalid: list[str | None]) -> None:
    reply = parse_constrained(text, TOOLS)
    assert reply.content == ""
    assert [call["name"] for call in reply.tool_calls] == names
    assert [call["name"] for call in reply.invalid_tool_calls] == invalid
