"""`ReplyReader` parses a reply identically, however it is split into chunks."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.utils.json import parse_partial_json

from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.reader import ReplyReader
from lookahead_agent.generation.tool_calls import as_invalid_json
from lookahead_agent.generation.tool_parsers import choose_tool_parser
from tests.unit.replies import FORMATS, TAGS, cuts_of, read, replies_in, reply_content
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
