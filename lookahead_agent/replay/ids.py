"""Token ids of a replay, each of which stands for one prefix, and the folders of its models."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead_agent.cpu import INT8, LAYOUT
from lookahead_agent.engines import replay_plugin
from lookahead_agent.engines.model_files import read_config, read_count
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replay.recording import PrefixTree, Recording, VerdictRecord, Writer
from lookahead_agent.system.files import write_atomically

UNRECORDED, EOS = 0, 1  # ids that follow a prefix without a recorded token, and that end a reply
NEXT_TOKENS = "next_tokens.npy"  # file in a replay model's folder: the id that follows each id, shape (positions, ids)
_HEAD_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "torch_dtype",
    "dtype",
)  # fields that an EAGLE-3 head has from its target
_HEAD_VOCABULARY = 32_000  # tokens that published EAGLE-3 heads of Qwen3 know


@dataclass(frozen=True)
class ReplayedReply:
    """A recording in the ids of its replay."""

    recording: Recording
    prompt: tuple[int, ...]  # shape (n,)
    target_alone: tuple[int, ...]  # the reply that the target writes alone
    lookahead: tuple[int, ...]  # the reply with step speculation
    # Records of the verdicts by `step_key` of draft and target step
    verdicts: Mapping[tuple[tuple[int, ...], tuple[int, ...]], VerdictRecord]


class ReplayIds:
    """The ids of recordings with one tokenizer: each prefix has its own, so that the next token depends on it alone.

    Prompts share the ids of their common beginning, as they share an engine's prefix cache; the last is a prompt's own.
    After a step that no recorded token follows, a model continues as after the recorded reply's step of that position.
    Raises ConfigurationError for a recording of a thinking model, or of a model that continues a prefix in two ways.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self.texts = ["", ""]  # text of each id
        self.next: dict[Writer, list[int]] = {"target": [UNRECORDED, EOS], "draft": [UNRECORDED, EOS]}  # next ids by id
        self._prompts: dict[tuple[int, int], int] = {}  # ids of longer prefixes, by the prefix's id and recorded token
        self.replies = {recording.name: self._add(recording) for recording in recordings}

    def write_model(self, writer: Writer, shape: Path, folder: Path, *, int8: bool = False) -> None:
        """Write the folder of a replay model: the configuration of a shape's folder, next tokens, and a tokenizer.

        `int8` gives it the weights that engines on CPUs have in int8, else they have the shape's dtype.
        Raises ConfigurationError if there is no replay model of the shape, or if its vocabulary is too small.
        """
        config = read_config(shape)
        # GGUF files name no architecture.
        architecture = (config.get("architectures") or [f"{str(config.get('model_type')).title()}ForCausalLM"])[0]
        if architecture not in replay_plugin.SHAPES:
            raise ConfigurationError(
                f"{shape} has the architecture {architecture}: choose {', '.join(replay_plugin.SHAPES)}"
            )
        if (size := read_count(config, "vocab_size")) < len(self.texts):
            raise ConfigurationError(
                f"the recordings need {len(self.texts)} token ids, and {shape} has {size}: replay fewer (--limit)"
            )
        config |= {"architectures": [replay_plugin.PREFIX + architecture], "eos_token_id": EOS, "bos_token_id": None}
        config.pop("quantization_config", None)
        if int8:
            config["quantization_config"] = {"quant_method": INT8, "layout": LAYOUT}
            config["tie_word_embeddings"] = False
        if config.get("model_type") == "qwen2":
            # transformers takes the decoder of Qwen2's tokenizer in place of the file's. The fields are the same.
            heads = read_count(config, "num_attention_heads")
            config |= {"model_type": "qwen3", "head_dim": read_count(config, "hidden_size") // heads}
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / NEXT_TOKENS, self._next_tokens(writer, size)[np.newaxis])
        # Every id needs a name of its own, which the decoder takes off again.
        names = [f"{number}:{text}" for number, text in enumerate(self.texts)]
        model = {"type": "WordLevel", "vocab": {name: number for number, name in enumerate(names)}}
        decoder = {"type": "Replace", "pattern": {"Regex": r"\A\d+:"}, "content": ""}
        tokenizer: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "model": model | {"unk_token": names[UNRECORDED]},
            "decoder": {"type": "Sequence", "decoders": [decoder, {"type": "Fuse"}]},
        }
        tokenizer |= dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
        names_of_ids = {"tokenizer_class": "TokenizersBackend", "eos_token": names[EOS]}
        files = {"config.json": config, "tokenizer.json": tokenizer, "tokenizer_config.json": names_of_ids}
        for name, content in files.items():
            write_atomically(folder / name, json.dumps(content))

    def write_head(self, shape: Path, folder: Path, acceptance: Sequence[float]) -> None:
        """Write the folder of an EAGLE-3 head for a target's shape, which writes the target's tokens.

        `acceptance` has a probability in [0, 1] for each draft token after accepted ones; else the token is another.
        """
        config = read_config(shape)
        size = read_count(config, "vocab_size")
        config = {name: config[name] for name in _HEAD_FIELDS if name in config}
        config |= {"architectures": [replay_plugin.HEAD], "model_type": "llama", "num_hidden_layers": 1}
        config |= {"draft_vocab_size": min(size, _HEAD_VOCABULARY), "tie_word_embeddings": False}
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "config.json", json.dumps(config))
        # One draw for each id, so that a token which a head predicts easily is so at every position.
        drawn = np.random.default_rng(0).random(size) < np.array(acceptance)[:, np.newaxis]
        np.save(folder / NEXT_TOKENS, np.where(drawn, self._next_tokens("target", size), UNRECORDED))

    def _next_tokens(self, writer: Writer, size: int) -> npt.NDArray[np.int64]:
        following = np.full(size, UNRECORDED, dtype=np.int64)
        following[: len(self.texts)] = self.next[writer]
        return following

    def _new(self, text: str) -> int:
        self.texts.append(text)
        for following in self.next.values():
            following.append(UNRECORDED)
        return len(self.texts) - 1

    def _add(self, recording: Recording) -> ReplayedReply:
        if recording.regions.thinking is not None:
            raise ConfigurationError(f"{recording.name} is a recording of a thinking model, which no replay has yet")
        tree, prompt = PrefixTree.of(recording), list[int]()
        *shared, (_, last) = zip(recording.prompt.ids, recording.prompt.texts, strict=True)
        for token, text in shared:
            place = prompt[-1] if prompt else UNRECORDED, token
            if place not in self._prompts:
                self._prompts[place] = self._new(text)
            prompt.append(self._prompts[place])
        prompt.append(self._new(last))
        ids = [prompt[-1]]  # id of each prefix
        for token, text in zip(tree.ids[1:], tree.texts[1:], strict=True):
            ids.append(EOS if token in recording.eos_ids else self._new(text))
        for writer, following in tree.next.items():
            for prefix, token in following.items():
                self.next[writer][ids[prefix]] = ids[tree.children[prefix][token]]
        self._continue_steps(recording, tree, ids)
        steps = [_step(tree, ids, tree.find(step.after), tree.find(step.end)) for step in recording.steps]
        return ReplayedReply(
            recording,
            tuple(prompt),
            _convert_reply(tree, ids, recording.target_alone.ids),
            _convert_reply(tree, ids, recording.lookahead.ids),
            {(step_key(steps[each.draft]), step_key(steps[each.target])): each for each in recording.verdicts},
        )

    def _continue_steps(self, recording: Recording, tree: PrefixTree, ids: Sequence[int]) -> None:
        """Continue after each step that has no recorded token as after the reply's step of the same position."""
        path, prefix = {0}, 0
        for token in recording.lookahead.ids:
            prefix = tree.children[prefix][token]
            path.add(prefix)
        ends = [(step, tree.find(step.end)) for step in recording.steps]
        fronts = {step.position: ids[end] for step, end in ends if end in path and not step.ended_by.ends_reply}
        for step, end in ends:
            # A reply with other steps may have tokens left where the limit of tokens ended the recorded one.
            front = None if step.ended_by.ends_reply else fronts.get(step.position)
            for writer, following in tree.next.items():
                if end not in following:
                    self.next[writer][ids[end]] = EOS if front is None else self.next[writer][front]


def step_key(token_ids: Sequence[int]) -> tuple[int, ...]:
    """What tells a step from every other: its last id, with the one before it if the step ends the reply."""
    return tuple(token_ids[-2:] if token_ids[-1] == EOS else token_ids[-1:])


def _convert_reply(tree: PrefixTree, ids: Sequence[int], reply: Sequence[int]) -> tuple[int, ...]:
    prefix, replayed = 0, list[int]()
    for token in reply:
        prefix = tree.children[prefix][token]
        replayed.append(ids[prefix])
    return tuple(replayed)


def _step(tree: PrefixTree, ids: Sequence[int], after: int, end: int) -> list[int]:
    step: list[int] = []
    while end != after:
        step.append(ids[end])
        end = tree.parents[end]
    return step[::-1]
