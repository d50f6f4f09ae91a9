"""Tool calls in the formats of other model families, read by vLLM's own parsers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replies.tool_parsers import HermesToolParser, VLLMToolParser, choose_tool_parser

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
MARKS = ["<|python_tag|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<think>"]
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "pythonic": "[add(a=1, b=2)]",
}


def tokenizer_with(folder: Path, template: str = "") -> HFTokenizer:
    words = ["<eos>", "?", *(chr(code) for code in range(32, 127)), "\n"]
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(words))}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<|im_end|>", *MARKS]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return HFTokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_read(tokenizer: HFTokenizer, name: str) -> None:
    parser = VLLMToolParser(name, tokenizer)
    parsed = parser.parse(CALLS[name], [TOOL])
    assert [(call["name"], call["args"]) for call in parsed.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert parsed.content == ""
    plain = parser.parse("I would rather not.", [TOOL])
    assert (plain.content, plain.tool_calls, plain.invalid_tool_calls) == ("I would rather not.", [], [])
    assert parser.markers is not None
    assert any(marker in CALLS[name] for marker in parser.markers)


def test_calls_that_cannot_be_read_are_reported(tokenizer: HFTokenizer) -> None:
    parsed = VLLMToolParser("hermes", tokenizer).parse('I add. <tool_call>\n{"name": oops\n</tool_call>', [TOOL])
    assert parsed.content == "I add."
    assert parsed.tool_calls == []
    (invalid,) = parsed.invalid_tool_calls
    assert invalid["args"] is not None
    assert "oops" in invalid["args"]


def test_a_format_whose_beginning_is_unknown(tokenizer: HFTokenizer) -> None:
    assert VLLMToolParser("xlam", tokenizer).markers is None


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ '<tool_call>' }}", HermesToolParser),
        ("{{ '<tool_call>\\n<function=' }}", "qwen3_coder"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("nothing about tools", HermesToolParser),
    ],
)
def test_the_chat_template_gives_the_family_away(tmp_path: Path, template: str, kind: type | str) -> None:
    parser = choose_tool_parser(None, tokenizer_with(tmp_path, template))
    if isinstance(kind, str):
        assert isinstance(parser, VLLMToolParser)
        assert parser._name == kind
    else:
        assert isinstance(parser, kind)


def test_names_are_checked_before_anything_loads() -> None:
    with pytest.raises(ConfigurationError, match=r"it has .*hermes.*qwen3_coder"):
        ChatLookahead(tool_parser="esperanto")
    assert isinstance(choose_tool_parser("mistral", ScriptedTokenizer()), HermesToolParser)


def test_special_tokens_that_part_a_reply_are_shown(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.backend.encode("a<|python_tag|>b<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a<|python_tag|>b"
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.flush() == "a<|python_tag|>b"
    assert json.loads(json.dumps(tokenizer.decode(tokenizer.encode("plain")))) == "plain"
