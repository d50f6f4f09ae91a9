"""Replays: ids that stand for prefixes, folders of replay models, and recorded verdicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.replay import ReplayBench
from lookahead_agent.bench.samples import read_results
from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import StepPair, Verifier
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replay.ids import EOS, NEXT_TOKENS, UNRECORDED, ReplayedReply, ReplayIds
from lookahead_agent.replay.recording import Recording, RegionsRecord
from lookahead_agent.replay.verdicts import RecordedVerifier
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.verifiers.model_free import RandomVerifier
from tests.unit.test_cli import run
from tests.unit.test_recordings import DEPTH, LOOKAHEAD, TARGET, record
from tests.virtual_time import run_in_virtual_time

LR = ("lr", "lr+sd", "lr+shared_draft")
QUESTIONS = ("What is it?", "What was it?")
SHAPE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "eos_token_id": 7,
    "hidden_size": 64,
    "num_attention_heads": 4,
}


def shape(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(SHAPE | changes))
    return folder


class FolderEngine:
    """Writes what a replay model's folder says: a token takes one turn of the event loop, or several."""

    context_length = 4096
    in_flight = 0
    healthy = True

    def __init__(self, folder: Path, turns: int) -> None:
        self.tokenizer = HFTokenizer(folder)
        (self._next,) = np.load(folder / NEXT_TOKENS)
        self._turns = turns

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        last = prompt_ids[-1]
        for index in range(sampling.max_tokens):
            for _ in range(self._turns):
                await asyncio.sleep(0)
            last = int(self._next[last])
            end = "stop" if last in self.tokenizer.eos_ids else "length" if index == sampling.max_tokens - 1 else None
            yield Delta((last,), finish_reason=end)
            if end is not None:
                return

    def close(self) -> None:
        """The engine holds no resources."""


def folders(ids: ReplayIds, folder: Path) -> dict[str, Path]:
    written = {"target": folder / "target", "draft": folder / "draft"}
    for writer, path in written.items():
        ids.write_model(writer, shape(folder / f"{writer}-shape"), path)  # type: ignore[arg-type]
    return written


def replay(
    folder: dict[str, Path], reply: ReplayedReply, verifier: Verifier | None, *, turns: int = 4, depth: int = DEPTH
) -> Reply:
    engines = FolderEngine(folder["target"], turns), FolderEngine(folder["draft"], 1)
    request = ReplyRequest(reply.prompt, Sampling(64), reply.recording.question)
    return asyncio.run(lookahead(request, *engines, verifier, DecodingSettings(depth=depth)))


@pytest.mark.parametrize("turns", [1, 4, 9])
@pytest.mark.parametrize("depth", [1, 3])
def test_replay_writes_the_recorded_replies(tmp_path: Path, turns: int, depth: int) -> None:
    ids = ReplayIds(record(QUESTIONS))
    folder = folders(ids, tmp_path)
    verifier = RecordedVerifier(ids.replies.values())
    for reply in ids.replies.values():
        alone = replay(folder, reply, None)
        assert (alone.text, alone.token_ids) == ("".join(TARGET), reply.target_alone)
        written = replay(folder, reply, verifier, turns=turns, depth=depth)
        assert (written.text, written.token_ids) == (LOOKAHEAD, reply.lookahead)
        recorded = reply.recording.lookahead
        assert (written.report.steps, written.report.accepted) == (recorded.steps, recorded.accepted)
        assert UNRECORDED not in written.token_ids


def test_drawn_verdicts_leave_the_reply_and_come_back_to_it(tmp_path: Path) -> None:
    (recording,) = record()
    ids = ReplayIds([recording])
    folder, (reply,) = folders(ids, tmp_path), ids.replies.values()
    lengths, texts = set(), set()
    for seed in range(20):
        written = replay(folder, reply, RandomVerifier(0.5, seed))
        assert written.finish_reason == "stop"
        assert UNRECORDED not in written.token_ids
        lengths.add(written.report.steps)
        texts.add(written.text)
    assert lengths == {recording.lookahead.steps}
    assert len(texts) > 3


def test_ids_of_prompts_and_of_what_is_not_recorded() -> None:
    ids = ReplayIds(record(QUESTIONS))
    first, second = (reply.prompt for reply in ids.replies.values())
    shared = [one for one, other in zip(first, second, strict=False) if one == other]
    assert "".join(ids.texts[token] for token in shared) == "user: What", "prompts share their common beginning"
    assert set(first[len(shared) :]).isdisjoint(second)
    for writer in ids.next:
        assert ids.next[writer][UNRECORDED] == UNRECORDED
        assert ids.next[writer][first[0]] == UNRECORDED
    twice = ReplayIds([*record(), *(each.model_copy(update={"name": "again"}) for each in record())])
    one, other = (reply.prompt for reply in twice.replies.values())
    assert one[:-1] == other[:-1]
    assert one[-1] != other[-1], "the last token of a prompt is its own"


def test_folder_has_a_tokenizer_with_the_recorded_texts(tmp_path: Path) -> None:
    ids = ReplayIds(record())
    written = folders(ids, tmp_path)
    tokenizers = {writer: HFTokenizer(folder) for writer, folder in written.items()}
    assert tokenizers["target"].fingerprint == tokenizers["draft"].fingerprint
    assert tokenizers["target"].size == len(ids.texts)
    assert tokenizers["target"].eos_ids == {EOS}
    (reply,) = ids.replies.values()
    stream = tokenizers["target"].stream(reply.prompt)
    assert "".join(map(stream.push, reply.lookahead)) + stream.flush() == LOOKAHEAD
    config = json.loads((written["target"] / "config.json").read_text())
    assert config["architectures"] == ["ReplayQwen2ForCausalLM"]
    assert config["eos_token_id"] == EOS
    for changes, message in (
        ({"vocab_size": 9}, "the recordings need .* token ids, and .* has 9: replay fewer"),
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture GPT2LMHeadModel: choose LlamaForCausalLM, "),
    ):
        with pytest.raises(ConfigurationError, match=message):
            ids.write_model("target", shape(tmp_path / message[:9], **changes), tmp_path / "none")


def test_head_writes_the_targets_tokens_at_the_given_rates(tmp_path: Path) -> None:
    ids = ReplayIds(record(QUESTIONS))
    shape(tmp_path / "shape", num_hidden_layers=9, layer_types=["full_attention"] * 9)
    ids.write_head(tmp_path / "shape", tmp_path / "head", (1.0, 0.6, 0.0))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3ReplayForCausalLM"]
    assert (config["num_hidden_layers"], config["hidden_size"], config["draft_vocab_size"]) == (1, 64, 512)
    assert "layer_types" not in config
    table = np.load(tmp_path / "head" / NEXT_TOKENS)
    target = np.array(ids.next["target"])
    always, often, never = table[:, : len(target)]
    assert (always == target).all()
    assert not never.any()
    known = target != UNRECORDED
    assert set(often[known & (often != target)]) == {UNRECORDED}
    assert 0.4 < (often[known] == target[known]).mean() < 0.8


@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_replay_on_a_cpu_has_the_recorded_precision(tmp_path: Path, precision: str) -> None:
    (recording,) = record()
    recording = recording.model_copy(update={"settings": recording.settings | {"precision": {"target": precision}}})
    layers = {"num_hidden_layers": 1, "num_key_value_heads": 2}
    shapes = shape(tmp_path / "a", tie_word_embeddings=True, **layers), shape(tmp_path / "b", **layers)
    for on_cpu in (True, False):
        ReplayBench([recording], shapes, tmp_path / "r.jsonl", task={"modes": ["off"]}, engine_args={}, on_cpu=on_cpu)
        config = json.loads((tmp_path / "r-models" / "target" / "config.json").read_text())
        assert ("quantization_config" in config) == (on_cpu and precision == "int8")
        assert config["tie_word_embeddings"] == ("quantization_config" not in config)


def test_text_of_a_token_may_look_like_the_name_of_an_id(tmp_path: Path) -> None:
    row = record()[0].model_dump(mode="json")
    run = row["runs"][0]
    run["texts"][:3] = ["7:", "\n8:", ""]
    ids = ReplayIds([Recording.model_validate(row)])
    ids.write_model("target", shape(tmp_path / "shape"), tmp_path / "target")
    (reply,) = ids.replies.values()
    assert HFTokenizer(tmp_path / "target").decode(reply.target_alone[:4]) == "7:\n8:" + run["texts"][3]


def test_recorded_verdict_takes_its_seconds_and_others_are_rejected() -> None:
    (recording,) = record()
    changed = [verdict.model_copy(update={"seconds": 7.0}) for verdict in recording.verdicts]
    ids = ReplayIds([recording.model_copy(update={"verdicts": tuple(changed)})])
    (reply,) = ids.replies.values()
    verifier = RecordedVerifier([reply])
    (draft, target), recorded = next(iter(reply.verdicts.items()))

    async def verify(draft: tuple[int, ...], target: tuple[int, ...]) -> tuple[bool, str, float]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        steps = [Step(ids, "x", StepEnd.DELIMITER) for ids in (draft, target)]
        verdict = await verifier.verify(StepPair("", "", steps[0], steps[1]))
        return verdict.accepted, verdict.reason, loop.time() - started

    assert run_in_virtual_time(verify(draft, target)) == (recorded.accepted, recorded.reason, 7.0)
    assert run_in_virtual_time(verify((9999,), target)) == (False, "unrecorded", 0.0)


def test_recordings_of_thinking_models_are_refused() -> None:
    (recording,) = record()
    thinking = recording.model_copy(update={"regions": RegionsRecord(thinking=ThinkingTags())})
    with pytest.raises(ConfigurationError, match="a recording of a thinking model"):
        ReplayIds([thinking])


def folder_chat(**fields: Any) -> ChatLookahead:
    """A chat model on engines that write what the folders of its models say."""
    target, draft = (FolderEngine(Path(fields[name] or fields["model"]), 2) for name in ("model", "draft_model"))
    return ChatLookahead(engines=EngineSet(target, draft), **fields)


def recordings_file(folder: Path, recordings: Sequence[Recording]) -> Path:
    rows = RowFile(folder / "recordings.jsonl")
    with rows.open_for_writing():
        for each in recordings:
            settings = each.settings | {"policy": "balanced", "early": None}
            rows.append(each.model_copy(update={"settings": settings}).model_dump(mode="json"))
    return rows.path


def test_replay_command_measures_every_mode_and_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = recordings_file(tmp_path, record(QUESTIONS)), tmp_path / "replay.jsonl"
    shapes = ("--target-shape", str(shape(tmp_path / "a")), "--draft-shape", str(shape(tmp_path / "b")))
    command = ("bench", "replay", str(file), *shapes, "--depths", "1,3", "--out", str(out))
    assert run(*command, "--limit", "1", chat_class=folder_chat) == 0
    first = out.read_text()
    assert run(*command, chat_class=folder_chat) == 0, "the folders of its models are written again"
    assert run(*command, "--limit", "1", chat_class=folder_chat) == 0, "the file has more recordings"
    assert out.read_text().startswith(first)
    samples = read_results(RowFile(out).rows)
    names = ["off", "sd", "shared_draft", *(f"{mode} depth={depth}" for mode in LR for depth in (1, 3))]
    assert sorted({sample.configuration.replace(" balanced", "") for sample in samples}) == sorted(names)
    assert len(samples) == 2 * len(names)
    for sample in samples:
        steps = sample.mode.startswith("lr")
        assert sample.answer == (LOOKAHEAD if steps else "".join(TARGET))
        assert sample.calls[0].accepted == (3 if steps else 0)
    capsys.readouterr()
    assert run("bench", "report", str(out)) == 0
    assert "lr balanced depth=3" in capsys.readouterr().out


def test_replay_command_draws_verdicts_and_refuses_what_it_cannot_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recording,) = record()
    file, out = recordings_file(tmp_path, [recording]), tmp_path / "replay.jsonl"
    folder = str(shape(tmp_path / "shape"))
    command = ("bench", "replay", str(file), "--target-shape", folder, "--draft-shape", folder, "--out", str(out))
    drawn = ("--modes", "lr", "--policies", "random:probability=0")
    assert run(*command, *drawn, chat_class=folder_chat) == 0
    sample = read_results(RowFile(out).rows)[-1]
    assert (sample.answer, sample.calls[0].accepted) == ("".join(TARGET), 0)
    other = RowFile(tmp_path / "other.jsonl")
    with other.open_for_writing():
        for name, depth in (("a", 3), ("b", 4)):
            changes = {"name": name, "settings": {"policy": "balanced", "depth": depth}}
            other.append(recording.model_copy(update=changes).model_dump(mode="json"))
    for words, message in (
        (("--modes", "auto"), "auto: choose of off, sd, shared_draft, lr"),
        (
            ("--real-verifier", "--policies", "strict", "--out", f"{out}.real"),
            "asks a judge, and a replayed target cannot",
        ),
    ):
        assert run(*command, *words, chat_class=folder_chat) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert run(*command[:2], str(other.path), *command[3:], chat_class=folder_chat) == 2
    assert "the recordings have different settings" in " ".join(capsys.readouterr().err.split())


def test_engines_on_a_gpu_get_room_for_the_recorded_replies(tmp_path: Path) -> None:
    recordings = record(QUESTIONS)
    layers = {"num_hidden_layers": 2, "num_key_value_heads": 2}
    shapes = shape(tmp_path / "a", **layers), shape(tmp_path / "b", **layers | {"num_hidden_layers": 1})
    task = {"modes": ["off", "lr+sd"], "concurrency": 3}
    given = {"max_num_seqs": 8}
    replayed = ReplayBench(recordings, shapes, tmp_path / "r.jsonl", task=task, engine_args=given, on_cpu=False)
    config = replayed.bench.config
    context = max(len(each.prompt.ids) + each.max_tokens for each in recordings) + 64
    per_token = 2 * 2 * 16 * 2  # keys and values, heads, their size, bytes
    # The target's engine may have the draft's layer too.
    for arguments, layer_count in ((config.engine_args, 3), (config.draft_engine_args, 1)):
        assert arguments == {
            "load_format": "dummy",
            "max_num_seqs": 8,
            "max_model_len": context,
            "gpu_memory_utilization": 0.01,
            "kv_cache_memory_bytes": 2 * 3 * context * per_token * layer_count,
        }
    on_cpu = ReplayBench(recordings, shapes, tmp_path / "r.jsonl", task=task, engine_args=given, on_cpu=True)
    assert on_cpu.bench.config.engine_args == {"load_format": "dummy", "max_num_seqs": 8, "dtype": "bfloat16"}


def test_nothing_begins_after_the_time_limit(tmp_path: Path) -> None:
    shapes = shape(tmp_path / "a"), shape(tmp_path / "b")
    task = {"modes": ["off"]}
    bench = ReplayBench(record(), shapes, tmp_path / "r.jsonl", task=task, engine_args={}, make=folder_chat).bench
    assert bench.run(seconds=0) == []
    assert len(bench.run(seconds=3600)) == 1
    assert bench.list_missing() == []


def test_replay_command_reports_other_tokens_than_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recording,) = record()
    file = recordings_file(tmp_path, [recording.model_copy(update={"target_alone": recording.lookahead})])
    folder, out = str(shape(tmp_path / "shape")), str(tmp_path / "replay.jsonl")
    command = ("bench", "replay", str(file), "--target-shape", folder, "--draft-shape", folder, "--out", out)
    assert run(*command, "--modes", "off", chat_class=folder_chat) == 1
    assert "What is it?, off: other tokens than recorded" in capsys.readouterr().out
