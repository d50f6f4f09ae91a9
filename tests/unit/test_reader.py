"""One reader for streams and whole replies: however a reply is cut to pieces, it says the same."""

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
from tests.unit.replies import FORMATS, TAGS, cuts_of, read, replies_in, said
from tests.unit.test_tool_parsers import tokenizer_with

EXAMPLES = int(os.environ.get("READER_EXAMPLES", "120"))
"""Generated replies for each format."""


@pytest.fixture(scope="module")
def parsers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ToolParser]:
    tokenizer = tokenizer_with(tmp_path_factory.mktemp("tokenizer"))
    return {name: choose_tool_parser(name, tokenizer) for name in FORMATS}


def completed(arguments: str) -> bool:
    """Whether LangChain, or another client, makes arguments of what is none."""
    for reader in (json.loads, parse_partial_json):
        try:
            value = reader(arguments)
        except ValueError:
            continue
        if value is not None or reader is json.loads:
            return True
    return not arguments


@pytest.mark.parametrize("name", FORMATS)
@settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.large_base_example]
)
@given(data=st.data(), truncated=st.booleans(), tags=st.sampled_from([None, TAGS]), inside=st.booleans())
def test_pieces_read_as_the_whole(
    name: str,
    parsers: dict[str, ToolParser],
    data: st.DataObject,
    truncated: bool,
    tags: ThinkingTags | None,
    inside: bool,
) -> None:
    text = data.draw(replies_in(name))
    inside = inside and tags is not None
    reply = read(text, parser=parsers[name], tags=tags, inside=inside, cut=truncated)
    in_pieces = read(text, data.draw(cuts_of(text)), parser=parsers[name], tags=tags, inside=inside, cut=truncated)
    assert said(in_pieces) == said(reply)
    for call in reply.parsed.tool_calls:
        assert call["name"]
        json.dumps(call["args"], ensure_ascii=False, allow_nan=False).encode()
    for invalid in reply.parsed.invalid_tool_calls:
        assert invalid["error"]
        assert invalid["args"] is not None
        assert not completed(as_invalid_json(invalid["args"]))


@given(pieces=st.lists(st.sampled_from(["\n", "\n\n", " ", "```", "a\n", "<think>", "<tool_call>", "`", "b"])))
def test_without_tags_and_tools_each_piece_is_passed_on_as_it_is(pieces: list[str]) -> None:
    """Clients that count tokens by pieces, and people who read code as it is written, wait for no line's end."""
    passed: list[str] = []
    reader = ReplyReader(None, False, False, None, [], lambda piece: passed.append(piece.text))
    for number, piece in enumerate(pieces, 1):
        reader.push(piece)
        assert passed == pieces[:number]
    assert reader.finish(truncated=False).parsed.content == "".join(pieces)
