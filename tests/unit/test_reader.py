"""`ReplyReader` parses a reply identically, however it is split into chunks."""

from __future__ import annotations

import ast
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.exceptions import OutputParserException
from langchain_core.utils.json import parse_partial_json

from lookahead_agent.chat.structured_output import FormParser
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.reader import ReplyReader
from lookahead_agent.generation.tool_calls import MAX_CALLS, as_invalid_json
from lookahead_agent.generation.tool_parsers import choose_tool_parser, first_calls
from tests.unit.replies import FORMATS, TAGS, TOOLS, cuts_of, read, replies_in, reply_content
from tests.unit.test_tool_parsers import tokenizer_with

EXAMPLES = int(os.environ.get("READER_EXAMPLES", "120"))
"""Number of generated replies per format."""


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ToolParser]:
    tokenizer = tokenizer_with(tmp_path_factory.mktemp("tokenizer"))
    return {name: choose_tool_parser(name, tokenizer) for name in FORMATS}


def parses_as_arguments(arguments: str) -> bool:
    """Whether LangChain or another client would parse arguments from this text."""
    for parse in (json.loads, parse_partial_json):
        try:
            value = parse(arguments)
        except ValueError:
            continue
        if value is not None or parse is json.loads:
            return True
    return not arguments


@pytest.mark.parametrize("name", FORMATS)
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example]
)
@given(data=st.data(), truncated=st.booleans(), tags=st.sampled_from([None, TAGS]), inside=st.booleans())
def test_a_reply_in_chunks_parses_like_the_whole_reply(
    name: str,
    parsers: dict[str, ToolParser],
    data: st.DataObject,
    truncated: bool,
    tags: ThinkingTags | None,
    inside: bool,
) -> None:
    text = data.draw(replies_in(name))
    inside = inside and tags is not None
    reply = read(text, parser=parsers[name], tags=tags, inside=inside, truncated=truncated)
    chunked = read(text, data.draw(cuts_of(text)), parser=parsers[name], tags=tags, inside=inside, truncated=truncated)
    assert reply_content(chunked) == reply_content(reply)
    for call in reply.parsed.tool_calls:
        assert call["name"]
        json.dumps(call["args"], ensure_ascii=False, allow_nan=False).encode()
    for invalid in reply.parsed.invalid_tool_calls:
        assert invalid["error"]
        assert invalid["args"] is not None
        assert not parses_as_arguments(as_invalid_json(invalid["args"]))


@given(chunks=st.lists(st.sampled_from(["\n", "\n\n", " ", "```", "a\n", "<think>", "<tool_call>", "`", "b"])))
def test_without_tags_and_tools_every_chunk_is_streamed_at_once(chunks: list[str]) -> None:
    """No chunk waits for the end of its line: clients count tokens by chunks, and people read code live."""
    streamed: list[str] = []
    reader = ReplyReader(None, False, False, None, [], lambda chunk: streamed.append(chunk.text))
    for number, chunk in enumerate(chunks, 1):
        reader.push(chunk)
        assert streamed == chunks[:number]
    assert reader.finish(truncated=False).parsed.content == "".join(chunks)


CALL = '{"name": "add", "arguments": {"a": 1}}'
HOSTILE = [
    *(
        "`",
        "``` ",
        "```\n",
        "```json",
        "~~~\n",
        "x`",
        "<think>",
        "</think>",
        "<think>a</think>",
        "<tool_call>",
        "<tool_call>{",
    ),
    *(
        '<tool_call>["',
        "{",
        "[ ",
        " ",
        "\n",
        '{"name":',
        '[{"name": ',
        '{"type": "a", ',
        '{ "id" : ',
        '\\"',
        "a",
        '"',
        "<",
    ),
    *(f"{CALL}\n", f"```json\n{CALL}\n", f"<tool_call>{CALL}</tool_call>", f"[TOOL_CALLS]{CALL}", "[TOOL_CALLS]a "),
]
"""Texts that are hostile where they are repeated."""
BEGINNINGS = ["", "`", "x```", "{", '{"type": [', "<tool_call>", "<think>"]


def assert_linear(work: Callable[[str], object], text: str) -> None:
    """Assert that work on a text takes far less than 16 times as long as work on a fourth of it."""
    # The processor's time is noisy on a busy machine: only a repeated excess is one.
    for _ in range(4):
        began = time.process_time()
        work(text)
        whole = time.process_time() - began
        if whole < 0.05:
            return
        began = time.process_time()
        work(text[: len(text) // 4])
        if whole < 10 * (time.process_time() - began):
            return
    pytest.fail(f"{whole:.2f} s for {text[:40]!r}…")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        *[(name, 1 << 16) for name in ("hermes", "llama3_json", "mistral", "qwen3_coder", "deepseek_v31")],
        *[(name, 8) for name in ("hermes", "mistral", "pythonic")],
    ],
)
def test_reading_takes_time_in_proportion_to_the_length_of_any_text(
    name: str, size: int, parsers: dict[str, ToolParser]
) -> None:
    def work(text: str) -> None:
        reader = ReplyReader(TAGS, False, False, parsers[name], TOOLS, lambda _: None)
        for at in range(0, len(text), size):
            reader.push(text[at : at + size])
        reply = reader.finish(truncated=len(text) % 2 == 0)
        reply.thinking_tokens(range(1, len(text)))

    units = [*HOSTILE, *FORMATS[name]]
    for number, unit in enumerate(units):
        begin = BEGINNINGS[number % len(BEGINNINGS)] if size > 8 else ""
        assert_linear(work, begin + unit * (16_000 // len(unit)))


@pytest.mark.parametrize(
    ("name", "begin", "unit", "end"),
    [
        ("hermes", "", f"<tool_call>{CALL}</tool_call>", ""),
        ("hermes", "", "<tool_call>{", ""),
        ("hermes", "<tool_call>[", f"{CALL},", "]</tool_call>"),
        ("hermes", "<tool_call>[", f"{CALL},", ""),
        ("hermes", "<tool_call>", f"{CALL},", "</tool_call>"),
        ("hermes", "<tool_call>[", "{},", "]</tool_call>"),
        ("hermes", "", f"{CALL}\n", ""),
        ("hermes", "[", f"{CALL},", "]"),
        ("hermes", "```json\n[", f"{CALL},", "]\n```"),
        ("llama3_json", "", f"<|python_tag|>{CALL}", ""),
        ("mistral", "", "[TOOL_CALLS]add {}", ""),
        ("qwen3_coder", "", "<tool_call><function=add></function></tool_call>", ""),
        ("pythonic", "[", "add(),", "]"),
    ],
)
def test_a_reply_has_so_many_calls_and_one_invalid_call_for_the_rest(
    name: str, begin: str, unit: str, end: str, parsers: dict[str, ToolParser]
) -> None:
    for count in (MAX_CALLS, MAX_CALLS + 1, 4 * MAX_CALLS):
        reader = ReplyReader(None, False, False, parsers[name], TOOLS, lambda _: None)
        reader.push(begin + (unit * count).rstrip(",") + end)
        parsed = reader.finish(truncated=False).parsed
        assert len(parsed.tool_calls) == (0 if "{}," in unit or unit == "<tool_call>{" else MAX_CALLS)
        assert parsed.count <= MAX_CALLS + 2
        if count > MAX_CALLS and name != "pythonic":  # vLLM's parser keeps no text of a call
            assert unit.strip(",\n") in (parsed.invalid_tool_calls[-1]["args"] or "")


def test_vllms_parser_of_python_reads_no_more_calls_than_a_reply_may_have() -> None:
    call = """add(a='),f(' + "\\"]", b=[(1, 2)], c={'d': "f()"}), """
    for count, kept in ((MAX_CALLS + 1, MAX_CALLS + 1), (16_000, MAX_CALLS + 1), (3, 3)):
        text = first_calls(f"<|python_start|>[{call * count}]<|python_end|>")
        source = text.removeprefix("<|python_start|>").removesuffix("<|python_end|>")
        calls = ast.parse(source, mode="eval").body
        assert isinstance(calls, ast.List)
        assert len(calls.elts) == kept
    for text in ("", "[", ")" * 1000, "'" * 1001, "[f(" * 1000):
        assert first_calls(text) == text


def test_parsing_of_a_form_takes_time_in_proportion_to_the_length_of_any_text() -> None:
    def work(text: str) -> None:
        for chunks in ([text], [text[at : at + 4] for at in range(0, len(text), 4)]):
            with suppress(OutputParserException):
                list(FormParser().transform(iter(chunks)))

    for unit in ('{"a":', "[", '{"a":"', "\\", '{"a": 1}', "[1,", "```json\n", '"a",', "1", " "):
        for begin in ("", '["'):
            assert_linear(work, begin + unit * (16_000 // len(unit)))


@pytest.mark.parametrize("text", ["[" * 5000, '{"a":' * 5000])
def test_deep_json_is_a_parsing_error(text: str) -> None:
    with pytest.raises(OutputParserException, match="nested too deep"):
        FormParser().parse(text)
    assert list(FormParser().transform(iter(['{"a": "b', '", "c": [1, 2', "]}"]))) == [
        {"a": "b"},
        {"a": "b", "c": [1, 2]},
    ]
