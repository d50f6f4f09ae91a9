"""Tiny models with random weights, created on the fly: a target, and a draft that often agrees with it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

TEXT = " so then we add two and three which makes five apples of each kind in the box"
WORDS = [f" {word}" for word in TEXT.split()]
DELIMITERS = ["\n\n", ".\n\n", ":\n\n"]
SPECIAL = ["<eos>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_pair(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write the pair in float32 and return the folders of target and draft."""
    tokenizer = _tokenizer(WORDS)
    return _save_pair(_speaker(tokenizer, WORDS, seed), tokenizer, folder, difference=0.005)


def make_other_draft(folder: Path, seed: int = 2) -> Path:
    """Write a draft with another tokenizer: half of the words are several of its tokens."""
    words = WORDS[::2]
    tokenizer = _tokenizer(words)
    _save(_speaker(tokenizer, words, seed), tokenizer, folder)
    return folder


def _speaker(tokenizer: Any, words: list[str], seed: int) -> Any:
    """A random model for which words are likelier than bytes, steps end often, and replies seldom."""
    import torch

    torch.manual_seed(seed)
    model = _random_model(len(tokenizer))
    with torch.no_grad():
        ends = [tokenizer.encode(delimiter)[0] for delimiter in DELIMITERS]
        likely = {*(tokenizer.encode(word)[0] for word in words), *ends}
        for token in range(len(tokenizer)):
            model.lm_head.weight[token] *= 1.0 if token in likely else 0.4
        for token in ends:
            model.lm_head.weight[token] *= 1.2
    return model


def make_small_vocabulary_pair(folder: Path, seed: int = 0) -> tuple[Path, Path]:
    """Write a pair with a vocabulary of eight tokens whose draft often disagrees with the target."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, "a", "b", "c", "\n\n", "?"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(seed)
    model = _random_model(len(words))
    with torch.no_grad():
        model.lm_head.weight *= 0.25  # every token is fairly likely
    return _save_pair(model, tokenizer, folder, difference=0.3)


def _random_model(vocabulary: int) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen2ForCausalLM(config).to(torch.float32)


def _save_pair(model: Any, tokenizer: Any, folder: Path, difference: float) -> tuple[Path, Path]:
    """Save the target, and the same model with noise on its weights as the draft."""
    import torch

    target, draft = folder / "target", folder / "draft"
    _save(model, tokenizer, target)
    with torch.no_grad():
        for weight in model.parameters():
            weight += difference * weight.std() * torch.randn_like(weight) if weight.numel() > 1 else 0
    _save(model, tokenizer, draft)
    return target, draft


def _tokenizer(words: list[str]) -> Any:
    """A byte-level tokenizer like Qwen's, with whole tokens for the words and the delimiters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*words * 3, *DELIMITERS * 3, "yes", "yes", "no", "no"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>", additional_special_tokens=SPECIAL[1:]
    )
    fast.chat_template = TEMPLATE
    return fast


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))


def questions(count: int, seed: int = 0) -> list[str]:
    """Random questions in the tiny vocabulary."""
    rng = random.Random(seed)
    return [
        "A" + "".join(rng.choice(WORDS + [str(digit) for digit in range(10)]) for _ in range(8)) + "?"
        for _ in range(count)
    ]
