"""Replies in each tool call format, and a reader whose deltas must add up to its final result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.backend import TextDelta
from lookahead_agent.generation.json_tool_parsers import JsonToolParser, ToolParser
from lookahead_agent.generation.reader import ReadReply, ReplyReader

TAGS = ThinkingTags()


def tool_named(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TOOLS = [tool_named("add", a="integer", b="integer"), tool_named("remove", path="string"), tool_named("now")]
HERMES = JsonToolParser()


def read(
    text: str,
    cuts: Sequence[int] = (),
    *,
    parser: ToolParser | None = HERMES,
    tags: ThinkingTags | None = None,
    inside: bool = False,
    after: bool = False,
    truncated: bool = False,
) -> ReadReply:
    """Read a reply that is split at `cuts`; the emitted deltas must add up to the final result."""
    deltas: list[TextDelta] = []
    reader = ReplyReader(tags, inside, after, parser, TOOLS, deltas.append)
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        reader.push(text[begin:end])
    reply = reader.finish(truncated)
    deltas += reply.pieces
    assert "".join(delta.text for delta in deltas if delta.kind == "answer") == reply.parsed.content
    assert "".join(delta.text for delta in deltas if delta.kind == "thinking") == reply.thinking
    return reply


def reply_content(reply: ReadReply) -> tuple[Any, ...]:
    """The content of a reply, without the ids of its tool calls."""
    parsed = reply.parsed
    return (
        parsed.content,
        [(call["name"], call["args"]) for call in parsed.tool_calls],
        [(call["name"], call["args"], call["error"]) for call in parsed.invalid_tool_calls],
        reply.thinking,
        reply.thinking_spans,
    )


ARGUMENTS = ['{"a": 1, "b": 2}', '{"path": "/home/a b"}', "{}", "[]", '{"path": "</tool_call>"}', '{"a": NaN}', '"x"']
JSON_CALLS = [
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    '{"name": "remove", "arguments": "{\\"path\\": \\"/home/a"}',
    '{"name": "remove", "parameters": {"path": "</tool_call> `x` </think>\n"}}',
    '{"name": "now"}',
    '{"name": "nobody", "arguments": {}}',
    '{"name": "add", "arguments": {"a": 1e999}}',
    '[{"name": "add", "arguments": {}}, {"name": "now"}]',
    '{"name": "Ada", "age": 36}',
    '{"type": "function", "name": "remove", "parameters": {"path": "\\ud83d"}}',
]
PROSE = [
    "Let me see.",
    " ",
    "\n",
    "\n\n",
    "`",
    "```",
    "```json\n",
    "\n```\n",
    "~~~\n",
    "{",
    "}",
    "[",
    "é😀\u2028",
    "<",
    "a < b",
    "; ",
    ", ",
    '"',
]
THINKING = ["<think>", "</think>", "<thi", "</thi", "hm"]
FORMATS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", "<tool_c", "</tool_", *JSON_CALLS],
    "llama3_json": ["<|python_tag|>", "<|python", *JSON_CALLS],
    "mistral": ["[TOOL_CALLS]", "[TOOL_", "add", "remove", "[ARGS]", "[CALL_ID]x1", *ARGUMENTS, *JSON_CALLS],
    "qwen3_coder": [
        "<tool_call>",
        "</tool_call>",
        "<function=add>",
        "<function=remove>\n",
        "<parameter=path>\n/home/a\n</parameter>\n",
        "<parameter=a>\n1\n</parameter>",
        "<parameter=b>2",
        "</function>",
        "<func",
        "</tool",
    ],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>remove\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        "<｜tool▁call",
        *ARGUMENTS,
    ],
    "deepseek_v31": [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>add<｜tool▁sep｜>",
        "<｜tool▁call▁begin｜>remove<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁call",
        *ARGUMENTS,
    ],
    "pythonic": ["[", "]", "add(a=1, b=2)", "remove(path='/home/a')", "remove(path='/ho", ", ", "now()", "[add(a=1)]"],
}


def replies_in(name: str) -> st.SearchStrategy[str]:
    """Replies of fragments of a format in any order, possibly truncated."""
    fragments = st.sampled_from([*FORMATS[name], *FORMATS[name], *PROSE, *THINKING])
    whole = st.lists(fragments, max_size=10).map("".join)
    return st.tuples(whole, st.integers(0, 400)).map(lambda pair: pair[0][: pair[1]] if pair[1] < 200 else pair[0])


def cuts_of(text: str) -> st.SearchStrategy[list[int]]:
    """Positions at which a text is split: every character, or a few random ones."""
    return st.one_of(st.just(list(range(len(text)))), st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
