"""Recordings as token ids: every recorded prefix has an id of its own, so that a token decides which one follows.

A replay model looks the next id up by the last one. Ids of one prefix are equal in all engines and all prompts, so that
prefix caches, and comparisons of tokens, work as in the recorded run.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lookahead_agent.engines.model_files import read_config, read_count
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replay.recording import PrefixTree, Recording, Writer

EOS = 0  # ends every reply, whatever token the recorded model ended it with
UNRECORDED = 1  # follows a prefix after which nothing is recorded, and itself
_FIRST = 2
_END = "\0"  # around the number of a token's name, which makes equal texts different tokens

TABLE = "lookahead_replay"  # key in a model's config.json: the file with the next id of each id
ARCHITECTURE = "LookaheadReplay"  # prefix of the architectures that `models` registers
EXTENSION = "lookahead_agent.replay.models.ReplayModels"  # for vLLM's `worker_extension_cls`
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf")


class ReplayedReply:
    """The recorded replies to one prompt, in ids of the replay."""

    def __init__(self, replies: "RecordedReplies", recording: Recording) -> None:
        self.recording = recording
        self.prompt = tuple(replies.walk(0, recording.prompt.ids, recording.prompt.texts))
        self._replies = replies
        self._tree = PrefixTree.of(recording)
        self.ids = [0]  # by prefix of the tree: the id of its last token
        eos = set(recording.eos_ids)
        nodes = [replies.node(self.prompt)]
        for prefix in range(1, len(self._tree.ids)):
            token, parent = self._tree.ids[prefix], nodes[self._tree.parents[prefix]]
            node = replies.grow(parent, token, self._tree.texts[prefix]) if token not in eos else -1
            nodes.append(node)
            self.ids.append(EOS if node < 0 else node + _FIRST - 1)
        self.ids[0] = self.prompt[-1]
        for model, following in self._tree.next.items():
            for prefix, token in following.items():
                replies.next[model].setdefault(self.ids[prefix], self.ids[self._tree.children[prefix][token]])
        self._splice()
        self.target_alone = self._walk(recording.target_alone.ids)
        self.lookahead = self._walk(recording.lookahead.ids)

    def _splice(self) -> None:
        """Continue steps after which nothing is recorded with the recorded reply, at the next position."""
        tree, steps = self._tree, self.recording.steps
        starts: dict[int, int] = {}
        path = {0}
        prefix = 0
        for token in self.recording.lookahead.ids:
            prefix = tree.children[prefix][token]
            path.add(prefix)
        for step in steps:
            if (after := tree.find(step.after)) in path:
                starts.setdefault(step.position, after)
        for step in steps:
            end = tree.find(step.end)
            if self.ids[end] == EOS:
                continue
            for model, following in self._replies.next.items():
                first = self._first(model, starts.get(step.position + 1))
                following.setdefault(self.ids[end], first)

    def _first(self, model: Writer, prefix: int | None) -> int:
        """The id with which a model begins the step after a prefix; EOS after the last step."""
        if prefix is None or (longer := self._tree.follow(model, prefix)) is None:
            return EOS
        return self.ids[longer]

    def _walk(self, tokens: Sequence[int]) -> tuple[int, ...]:
        prefix, ids = 0, []
        for token in tokens:
            prefix = self._tree.children[prefix][token]
            ids.append(self.ids[prefix])
        return tuple(ids)

    def step_ids(self, index: int) -> tuple[int, ...]:
        """The ids of a recorded step."""
        step = self.recording.steps[index]
        prefix, after, ids = self._tree.find(step.end), self._tree.find(step.after), []
        while prefix != after:
            ids.append(self.ids[prefix])
            prefix = self._tree.parents[prefix]
        return tuple(ids[::-1])


class RecordedReplies:
    """The ids of some recordings, and the next id after each, of target and draft."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._children: list[dict[int, int]] = [{}]  # by prefix of prompt and reply
        self._texts = ["", "?"]  # by id
        self._tokens = [-2, -1]  # by id: the recorded token
        self._prefixes = [-1, -1]  # by id: the id of the token before it
        self.next: dict[Writer, dict[int, int]] = {"target": {}, "draft": {}}
        self.replies = [ReplayedReply(self, recording) for recording in recordings]

    @property
    def size(self) -> int:
        """The number of ids."""
        return len(self._texts)

    def grow(self, node: int, token: int, text: str) -> int:
        """The prefix that is longer by a token."""
        longer = self._children[node].setdefault(token, len(self._children))
        if longer == len(self._children):
            self._children.append({})
            self._texts.append(text)
            self._tokens.append(token)
            self._prefixes.append(node + _FIRST - 1)
        return longer

    def walk(self, node: int, tokens: Sequence[int], texts: Sequence[str]) -> list[int]:
        """The ids of tokens that follow a prefix."""
        ids = []
        for token, text in zip(tokens, texts, strict=True):
            node = self.grow(node, token, text)
            ids.append(node + _FIRST - 1)
        return ids

    def node(self, ids: Sequence[int]) -> int:
        """The prefix that ends with the last of some ids."""
        return ids[-1] - _FIRST + 1

    def table(self, model: Writer, size: int) -> npt.NDArray[np.int64]:
        """The id that a model writes after each id, shape (size,)."""
        table = np.full(size, UNRECORDED, dtype=np.int64)
        for last, following in self.next[model].items():
            table[last] = following
        return table

    def write_tokens(self, file: Path) -> None:
        """Write the recorded token of each id, and the id before it, for `ReplayProposer`."""
        np.savez(file, tokens=np.array(self._tokens, np.int32), prefixes=np.array(self._prefixes, np.int32))

    def write_tokenizer(self, folder: Path) -> None:
        """Write a tokenizer of Hugging Face's format that gives each id its recorded text."""
        from tokenizers import Regex, Tokenizer, decoders, models

        names = {"<eos>": EOS} | {
            f"{text}{_END}{number}{_END}": number for number, text in enumerate(self._texts) if number != EOS
        }
        tokenizer = Tokenizer(models.WordLevel(names, unk_token=f"?{_END}{UNRECORDED}{_END}"))
        tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex(f"{_END}[0-9]+{_END}"), "")])
        tokenizer.add_special_tokens(["<eos>"])
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
        _write_json(folder / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False})
        _write_json(folder / "generation_config.json", {"eos_token_id": EOS})


def write_model(replies: RecordedReplies, model: Writer, shape: Path, folder: Path) -> Path:
    """Write the folder of a replay model: the shape's configuration and weights, the tokenizer and the next ids.

    Raises ConfigurationError if the shape's vocabulary is too small, or its architecture is not supported.
    """
    config = read_config(shape)
    size = read_count(config, "vocab_size")
    if replies.size > size:
        raise ConfigurationError(
            f"the recordings have {replies.size} prefixes, and the vocabulary of {shape.name} has {size} ids for them: "
            "replay fewer recordings (--limit)"
        )
    architectures = config.get("architectures") or [""]
    if architectures[0] not in ARCHITECTURES:
        raise ConfigurationError(
            f"{shape.name} is a {architectures[0] or 'model of no architecture'}, which cannot replay: choose a shape "
            f"of {', '.join(ARCHITECTURES)}"
        )
    folder.mkdir(parents=True)
    replies.write_tokenizer(folder)
    table = folder / "next.npy"
    np.save(table, replies.table(model, size))
    changes = {"architectures": [ARCHITECTURE + architectures[0]], TABLE: str(table), "eos_token_id": EOS}
    _write_json(folder / "config.json", config | changes | {"bos_token_id": None, "pad_token_id": None})
    for pattern in _WEIGHTS:
        for file in shape.glob(pattern):
            (folder / file.name).symlink_to(file.resolve())
    return folder


ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM")


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content))
