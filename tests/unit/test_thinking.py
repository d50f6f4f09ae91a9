"""Thinking tags in tokenizers and chat templates, as Qwen3 and DeepSeek-R1 have them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent.decoding.regions import Regions
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.thinking_tags import ThinkingTags

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
    return regions.begins_outside_thinking(known.decode(known.chat_prompt(ASK, **template_arguments)))


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
