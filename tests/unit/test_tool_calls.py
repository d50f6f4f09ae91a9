from __future__ import annotations

import pytest

from lookahead_agent.replies.tool_calls import MARKERS, ContentStream, parse_reply

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = '{"name": "add", "arguments": {"a": 1}}'


def test_tagged_calls() -> None:
    parsed = parse_reply(f"I add.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", {"add"})
    assert parsed.content == "I add."
    assert [(call["name"], call["args"]) for call in parsed.tool_calls] == [("add", {"a": 1})] * 2
    assert len({call["id"] for call in parsed.tool_calls}) == 2


def test_a_call_without_its_closing_tag() -> None:
    assert parse_reply(f"<tool_call>{CALL}", {"add"}).tool_calls[0]["args"] == {"a": 1}


@pytest.mark.parametrize(
    "text", [f"```json\n{CALL}\n```", CALL, f"Now:\n{CALL}", '{\n  "name": "add",\n"arguments": {}}']
)
def test_calls_without_tags(text: str) -> None:
    assert parse_reply(text, {"add"}).tool_calls[0]["name"] == "add"


def test_json_that_names_no_tool_is_content() -> None:
    text = '```json\n{"name": "Ada", "arguments": {}}\n```'
    parsed = parse_reply(text, {"add"})
    assert parsed.content == text
    assert not parsed.tool_calls


def test_without_tools_nothing_is_a_call() -> None:
    assert parse_reply(f"<tool_call>{CALL}</tool_call>", ()).tool_calls == []


@pytest.mark.parametrize("body", ["{", "[]", '{"arguments": {}}', '{"name": "add", "arguments": [1]}'])
def test_calls_that_cannot_be_read_are_reported(body: str) -> None:
    parsed = parse_reply(f"<tool_call>{body}</tool_call>", {"add"})
    assert not parsed.tool_calls
    assert parsed.invalid_tool_calls[0]["args"] == body
    assert parsed.invalid_tool_calls[0]["error"]


def test_arguments_as_a_json_text() -> None:
    body = '{"name": "add", "arguments": "{\\"a\\": 1}"}'
    assert parse_reply(f"<tool_call>{body}</tool_call>", {"add"}).tool_calls[0]["args"] == {"a": 1}


def test_the_stream_holds_back_calls() -> None:
    pieces: list[str] = []
    stream = ContentStream(MARKERS, pieces.append)
    for piece in ("I ", "add. <to", "ol_call>", CALL, "</tool_call>"):
        stream.push(piece)
    assert "".join(pieces) == "I add."
    stream.finish("I add.")
    assert "".join(pieces) == "I add."


def test_the_stream_gives_back_what_was_no_call() -> None:
    pieces: list[str] = []
    stream = ContentStream(MARKERS, pieces.append)
    stream.push("a < b, and <tool")
    stream.push("box> ")
    stream.push("```json\n{}\n```")
    stream.finish("a < b, and <toolbox> ```json\n{}\n```")
    assert "".join(pieces) == "a < b, and <toolbox> ```json\n{}\n```"
