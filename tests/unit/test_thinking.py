"""Thinking tags in tokenizers and in chat templates like those of Qwen3 and DeepSeek-R1."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent.decoding.prefixes import Prefixes
from lookahead_agent.decoding.request import Regions, ReplyRequest
from lookahead_agent.decoding.thinking import ThinkingState, closing_tokens
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError, ContextLengthError

QUESTION = [{"role": "user", "content": "Why?"}]
TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}<assistant>"
# The end of the prompt in each model family.
QWEN3 = TURNS + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
R1 = TURNS + "<think>\n"


def hf_tokenizer(folder: Path, template: str | None, added_tokens: tuple[str, ...] = ()) -> HFTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    pretrained = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    pretrained.add_tokens(list(added_tokens))
    pretrained.chat_template = template
    pretrained.save_pretrained(folder)
    return HFTokenizer(folder)


def prompt_begins_outside_thinking(tokenizer: HFTokenizer, **template_arguments: bool) -> bool:
    regions = Regions(thinking=tokenizer.thinking, answer_from_target=True)
    prompt = tuple(tokenizer.chat_prompt(QUESTION, None, template_arguments))
    request = ReplyRequest(prompt, Sampling(max_tokens=1), regions=regions)
    return Prefixes(request, tokenizer, tokenizer, lambda _: None).awaits_thinking


def test_qwen3_prompt_leaves_the_opening_tag_to_the_model(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(tmp_path, QWEN3, ("<think>", "</think>"))
    assert tokenizer.thinking == ThinkingTags(separator="\n\n")
    assert prompt_begins_outside_thinking(tokenizer)
    assert prompt_begins_outside_thinking(tokenizer, enable_thinking=False), "the template has closed the thinking"


@pytest.mark.parametrize(
    ("template", "separator"),
    [
        ("{{ m.split('</think>')[-1] }}{{ '<think>\\n' + r + '\\n</think>\\n\\n' + m }}", "\n\n"),
        ("<think>\n{{ r }}\n</think>\n{{ m }}", "\n"),
        ("{{ m.split('</think>')[-1] }}", ""),
    ],
)
def test_template_shows_what_separates_the_thinking_from_the_answer(
    template: str, separator: str, tmp_path: Path
) -> None:
    tokenizer = hf_tokenizer(tmp_path, template, ("<think>", "</think>"))
    assert tokenizer.thinking == ThinkingTags(separator=separator)
    assert (
        tokenizer.decode(closing_tokens(tokenizer, ThinkingState(tokenizer.thinking, True))) == "</think>" + separator
    )


@pytest.mark.parametrize(
    ("tail", "closing"), [("", "</think>"), ("a", "</think>"), ("a <", "/think>"), ("</thin", "k>"), ("</think", ">")]
)
def test_a_closing_tag_of_several_tokens_is_completed_where_the_model_writes_it(
    tail: str, closing: str, tmp_path: Path
) -> None:
    state = ThinkingState(ThinkingTags(), True, tail)
    pieces, whole = hf_tokenizer(tmp_path / "a", TURNS), hf_tokenizer(tmp_path / "b", TURNS, ("<think>", "</think>"))
    assert pieces.decode(closing_tokens(pieces, state)) == closing
    assert whole.decode(closing_tokens(whole, state)) == "</think>", "a tag of one token cannot be completed"


def test_deepseek_r1_template_opens_the_thinking(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(tmp_path, R1, ("<think>", "</think>"))
    assert tokenizer.thinking == ThinkingTags()
    assert not prompt_begins_outside_thinking(tokenizer)


def test_thinking_tags_are_found_in_the_vocabulary_or_the_template(tmp_path: Path) -> None:
    assert hf_tokenizer(tmp_path / "a", TURNS, ("<think>", "</think>")).thinking is not None
    assert hf_tokenizer(tmp_path / "b", QWEN3).thinking is not None
    assert hf_tokenizer(tmp_path / "c", TURNS).thinking is None


def test_prompt_never_begins_outside_thinking_without_thinking_tags(tmp_path: Path) -> None:
    assert not prompt_begins_outside_thinking(hf_tokenizer(tmp_path, TURNS))


def test_follow_up_ends_the_reply_and_opens_the_next(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(tmp_path, TURNS)
    assert tokenizer.decode(tokenizer.follow_up("Sure?")) == "\n<user>Sure?\n<assistant>"
    assert tokenizer.follow_up("Sure?")[0] in tokenizer.eos_ids


@pytest.mark.parametrize("template", [None, "<assistant>"])
def test_follow_up_raises_without_a_suitable_chat_template(template: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="chat template"):
        hf_tokenizer(tmp_path, template).follow_up("Sure?")


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "self", "longest", "template_arguments"),
        *("nope", "enable_thinkin"),
    ],
)
def test_call_may_set_only_variables_that_the_template_reads(name: str, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(
        tmp_path, QWEN3 + "{{ bos_token }}{{ documents }}{{ add_generation_prompt }}", ("<think>",)
    )
    assert tokenizer.template_variables == {"enable_thinking"}
    with pytest.raises(
        ConfigurationError, match=rf"reads no {name}; a call may set what it does read: enable_thinking"
    ):
        tokenizer.chat_prompt(QUESTION, None, {name: "{% for _ in range(99999) %}{% endfor %}"})


@pytest.mark.parametrize(
    ("value", "message"),
    [("x" * 70_000, "have 700"), (object(), "not JSON"), (float("nan"), "not JSON"), ({"a": {1, 2}}, "not JSON")],
)
def test_template_values_that_are_too_large_or_not_json_raise(value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        hf_tokenizer(tmp_path, QWEN3).chat_prompt(QUESTION, None, {"enable_thinking": value})


@pytest.mark.parametrize("value", ["no number", None, [1], {"a": 1}, -(10**18)])
def test_value_that_makes_the_template_fail_is_a_configuration_error(value: object, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(tmp_path, TURNS + "{{ (range(budget)|list)[0] + 1 }}")
    with pytest.raises(ConfigurationError, match="refuses these messages"):
        tokenizer.chat_prompt(QUESTION, None, {"budget": value})


def test_text_far_over_the_token_limit_raises(tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(tmp_path, TURNS)
    for text in ("a" * 100_000, "word and, " * 10_000, "\u4f60" * 100_000, " " * 100_000):
        with pytest.raises(ContextLengthError, match="more than 1000 tokens"):
            tokenizer.encode(text, 1000)
        with pytest.raises(ContextLengthError, match="more than 1000 tokens"):
            tokenizer.chat_prompt([{"role": "user", "content": text}], longest=1000)
    assert tokenizer.encode("a" * 5000, 5000) == tokenizer.encode("a" * 5000)
    assert len(tokenizer.encode("a" * 1015, 1000)) == 1015, "a small excess is left to the exact check"


def test_token_limit_counts_tokens_and_not_characters(tmp_path: Path) -> None:
    """Each token has sixteen characters, so a limit on characters would refuse this text."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a" * 16: 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[UNK]").save_pretrained(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    text = " ".join(["a" * 16] * 5000)
    assert tokenizer.encode(text, 5000) == [1] * 5000
    with pytest.raises(ContextLengthError):
        tokenizer.encode(text, 4000)
