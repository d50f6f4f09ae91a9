"""Thinking tags in tokenizers and chat templates, as Qwen3 and DeepSeek-R1 have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent.decoding.request import Regions
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError, ContextLengthError

ASK = [{"role": "user", "content": "Why?"}]
TURNS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>\n{% endfor %}<assistant>"
# What the two families write at a prompt's end.
QWEN3 = TURNS + "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
R1 = TURNS + "<think>\n"


def tokenizer(folder: Path, template: str | None, added: tuple[str, ...] = ()) -> HFTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    fast.add_tokens(list(added))
    fast.chat_template = template
    fast.save_pretrained(folder)
    return HFTokenizer(folder)


def outside(known: HFTokenizer, **template_arguments: bool) -> bool:
    regions = Regions(thinking=known.thinking, answer_from_target=True)
    return regions.begins_outside_thinking(known.decode(known.chat_prompt(ASK, None, template_arguments)))


def test_qwen3_opens_its_thinking_itself(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, QWEN3, ("<think>", "</think>"))
    assert known.thinking == ThinkingTags()
    assert outside(known)
    assert outside(known, enable_thinking=False), "the template has closed it already"


def test_deepseek_r1_has_it_opened_by_the_template(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, R1, ("<think>", "</think>"))
    assert known.thinking == ThinkingTags()
    assert not outside(known)


def test_tags_are_known_from_the_vocabulary_or_the_template(tmp_path: Path) -> None:
    assert tokenizer(tmp_path / "a", TURNS, ("<think>", "</think>")).thinking is not None
    assert tokenizer(tmp_path / "b", QWEN3).thinking is not None
    assert tokenizer(tmp_path / "c", TURNS).thinking is None


def test_a_model_that_does_not_think_apart_has_no_answer_apart(tmp_path: Path) -> None:
    assert not outside(tokenizer(tmp_path, TURNS))


def test_a_follow_up_ends_the_reply_and_begins_another(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, TURNS)
    assert known.decode(known.follow_up("Sure?")) == "\n<user>Sure?\n<assistant>"
    assert known.follow_up("Sure?")[0] in known.eos_ids


@pytest.mark.parametrize("template", [None, "<assistant>"])
def test_a_template_that_cannot_follow_up(template: str | None, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="chat template"):
        tokenizer(tmp_path, template).follow_up("Sure?")


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "add_generation_prompt"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs", "bos_token", "self", "longest", "template_arguments"),
        *("nope", "enable_thinkin"),
    ],
)
def test_a_call_sets_what_the_template_reads_and_nothing_else(name: str, tmp_path: Path) -> None:
    known = tokenizer(tmp_path, QWEN3 + "{{ bos_token }}{{ documents }}{{ add_generation_prompt }}", ("<think>",))
    assert known.template_variables == {"enable_thinking"}
    with pytest.raises(
        ConfigurationError, match=rf"reads no {name}; a call may set what it does read: enable_thinking"
    ):
        known.chat_prompt(ASK, None, {name: "{% for _ in range(99999) %}{% endfor %}"})


@pytest.mark.parametrize(
    ("value", "message"),
    [("x" * 70_000, "have 700"), (object(), "no JSON"), (float("nan"), "no JSON"), ({"a": {1, 2}}, "no JSON")],
)
def test_values_for_the_template_are_small_and_of_jsons_types(value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        tokenizer(tmp_path, QWEN3).chat_prompt(ASK, None, {"enable_thinking": value})


@pytest.mark.parametrize("value", ["no number", None, [1], {"a": 1}, -(10**18)])
def test_a_value_that_the_template_fails_on_is_the_callers(value: object, tmp_path: Path) -> None:
    known = tokenizer(tmp_path, TURNS + "{{ (range(budget)|list)[0] + 1 }}")
    with pytest.raises(ConfigurationError, match="refuses these messages"):
        known.chat_prompt(ASK, None, {"budget": value})


def test_a_text_that_cannot_fit_is_not_encoded_to_its_end(tmp_path: Path) -> None:
    known = tokenizer(tmp_path, TURNS)
    for text in ("a" * 100_000, "word and, " * 10_000, "\u4f60" * 100_000, " " * 100_000):
        with pytest.raises(ContextLengthError, match="more than 1000 tokens"):
            known.encode(text, 1000)
        with pytest.raises(ContextLengthError, match="more than 1000 tokens"):
            known.chat_prompt([{"role": "user", "content": text}], longest=1000)
    assert known.encode("a" * 5000, 5000) == known.encode("a" * 5000)
    assert len(known.encode("a" * 1015, 1000)) == 1015, "little more is left to those who count exactly"


def test_a_text_that_fits_is_taken_however_its_tokens_are_cut(tmp_path: Path) -> None:
    """Tokens of sixteen letters: a limit on letters would refuse what fits."""
    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "a" * 16: 1}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token="[UNK]").save_pretrained(tmp_path)
    known = HFTokenizer(tmp_path)
    text = " ".join(["a" * 16] * 5000)
    assert known.encode(text, 5000) == [1] * 5000
    with pytest.raises(ContextLengthError):
        known.encode(text, 4000)
