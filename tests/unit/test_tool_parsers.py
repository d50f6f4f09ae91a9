"""Tool calls in the formats of other model families, parsed by vLLM's own parsers."""

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
from lookahead_agent.generation.json_tool_parsers import JsonToolParser
from lookahead_agent.generation.tool_calls import ParsedReply
from lookahead_agent.generation.tool_parsers import VLLMToolParser, choose_tool_parser
from tests.unit.replies import read, reply_content

SPECIAL_TOKENS = [
    *("<|python_tag|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen3_json": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "llama3_json": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "llama4_json": '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "qwen3_xml": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
    "</function>\n</tool_call>",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "pythonic": "[add(a=1, b=2)]",
}
FORMATS_WITH_TEXT = [name for name in CALLS if name != "pythonic"]


def tokenizer_with(folder: Path, template: str = "") -> HFTokenizer:
    vocabulary = ["<eos>", "?", *(chr(code) for code in range(32, 127)), "\n"]
    backend = Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(dict.fromkeys(vocabulary))}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<|im_end|>", *SPECIAL_TOKENS]
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return HFTokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("tokenizer"))


def parse(name: str, tokenizer: HFTokenizer, text: str, *, truncated: bool = False) -> ParsedReply:
    parser = choose_tool_parser(name, tokenizer)
    reply = read(text, parser=parser, truncated=truncated)
    assert reply_content(read(text, range(len(text)), parser=parser, truncated=truncated)) == reply_content(reply)
    return reply.parsed


@pytest.mark.parametrize("name", CALLS)
def test_each_format_parses_its_calls_and_keeps_plain_text(tokenizer: HFTokenizer, name: str) -> None:
    parsed = parse(name, tokenizer, CALLS[name])
    assert [(call["name"], call["args"]) for call in parsed.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert parsed.content == ""
    plain = parse(name, tokenizer, "I would [rather] {not}, as in [1].\n")
    assert plain == ParsedReply("I would [rather] {not}, as in [1].\n")
    markers = choose_tool_parser(name, tokenizer).markers
    assert markers is not None
    assert any(marker in CALLS[name] for marker in markers)


@pytest.mark.parametrize("name", FORMATS_WITH_TEXT)
def test_text_around_calls_is_content(tokenizer: HFTokenizer, name: str) -> None:
    call = CALLS[name]
    parsed = parse(name, tokenizer, f"First: {call}\nThen: {call}\nThat is all.\n")
    assert parsed.content.split() == ["First:", "Then:", "That", "is", "all."]
    assert parsed.content.startswith("First:")
    assert parsed.content.endswith("all.")
    assert [call["args"] for call in parsed.tool_calls] == [{"a": 1, "b": 2}] * 2
    assert not parsed.invalid_tool_calls


@pytest.mark.parametrize("name", CALLS)
def test_truncated_calls_are_invalid(tokenizer: HFTokenizer, name: str) -> None:
    call = CALLS[name]
    last = max(call.rfind("2"), 0) + 1  # the last argument, which might continue
    for end in range(1, last + 1):
        for truncated in (True, False):
            parsed = parse(name, tokenizer, call[:end], truncated=truncated)
            assert not parsed.tool_calls, call[:end]
    parsed = parse(name, tokenizer, call[:last], truncated=True)
    assert len(parsed.invalid_tool_calls) == 1
    assert parsed.content == ""


@pytest.mark.parametrize("name", FORMATS_WITH_TEXT)
def test_only_the_truncated_one_of_two_calls_is_invalid(tokenizer: HFTokenizer, name: str) -> None:
    call = CALLS[name]
    parsed = parse(name, tokenizer, f"{call}\n{call[: call.rfind('2') + 1]}", truncated=True)
    assert [call["args"] for call in parsed.tool_calls] == [{"a": 1, "b": 2}]
    assert len(parsed.invalid_tool_calls) == 1


@pytest.mark.parametrize("name", ["xlam", "jamba"])
def test_last_call_of_a_truncated_reply_is_invalid_if_its_end_is_unmarked(tokenizer: HFTokenizer, name: str) -> None:
    call = '[{"name": "add", "arguments": {"a": 1, "b": 2}}]'
    if name == "jamba":
        call = f"<tool_calls>{call}</tool_calls>"
        tokenizer.backend.add_special_tokens({"additional_special_tokens": ["<tool_calls>", "</tool_calls>"]})
    assert [call["name"] for call in parse(name, tokenizer, call).tool_calls] == ["add"]
    parsed = parse(name, tokenizer, call, truncated=True)
    assert not parsed.tool_calls
    assert [call["name"] for call in parsed.invalid_tool_calls] == ["add"]


def test_format_without_a_known_start_has_no_markers(tokenizer: HFTokenizer) -> None:
    assert VLLMToolParser("xlam", tokenizer).markers is None


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{{ '<tool_call>' }}", JsonToolParser),
        ("{{ '<tool_call>\\n<function=' }}", "qwen3_coder"),
        ("{{ '<|python_tag|>' }}", "<|python_tag|>"),
        ("nothing about tools", JsonToolParser),
    ],
)
def test_parser_is_chosen_by_the_chat_template(tmp_path: Path, template: str, kind: type | str) -> None:
    parser = choose_tool_parser(None, tokenizer_with(tmp_path, template))
    if isinstance(kind, str):
        assert kind in (parser.name if isinstance(parser, VLLMToolParser) else parser.markers or ())
    else:
        assert isinstance(parser, kind)


def test_unknown_parser_name_raises_before_anything_loads() -> None:
    with pytest.raises(ConfigurationError, match=r"it has .*hermes.*qwen3_coder"):
        ChatLookahead(tool_parser="esperanto")
    assert isinstance(choose_tool_parser("mistral", ScriptedTokenizer()), JsonToolParser)


def test_special_tokens_that_mark_calls_stay_in_the_decoded_text(tokenizer: HFTokenizer) -> None:
    ids = tokenizer.backend.encode("a<|python_tag|>b<|im_end|>", add_special_tokens=False)
    assert tokenizer.decode(ids) == "a<|python_tag|>b"
    stream = tokenizer.stream()
    assert "".join(stream.push(token) for token in ids) + stream.flush() == "a<|python_tag|>b"
    assert json.loads(json.dumps(tokenizer.decode(tokenizer.encode("plain")))) == "plain"
