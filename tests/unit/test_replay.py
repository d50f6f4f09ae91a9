"""Recordings of a pair, and their replay by token ids that decide which id follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.shared_draft import SharedDraftBuffer
from lookahead_agent.engines.shared_draft_proposer import BUFFER, SharedDraftProposer
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replay.proposer import ReplayProposer
from lookahead_agent.replay.recorder import Recorder
from lookahead_agent.replay.recording import Recording, parse_recordings, read_recordings
from lookahead_agent.replay.replies import EOS, TABLE, UNRECORDED, RecordedReplies, write_model
from lookahead_agent.replay.verifiers import DrawnVerifier, RecordedVerifier
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.testing import scripted_engines
from tests.unit.test_cli import run

TARGET = ["Add two and two.\n\n", "It is four.\n\n", "So we multiply by three.\n\n", "Tell it.\n\n", "It is twelve."]
DRAFT = ["Add two and two.\n\n", "That gives four.\n\n", "So we add three.\n\n", "Say it.\n\n", "It is twelve."]
ALONE = "".join(TARGET)
# The second draft step stands for the target's, and the third and the fourth do not.
LOOKAHEAD = "".join([TARGET[0], DRAFT[1], *TARGET[2:]])
DEPTH = 3


class ByText:
    """Accepts equal steps and those about four."""

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(pair.same_text or "four" in pair.draft.text, "by text", 0.5)


def record(questions: Sequence[str] = ("What is it?",), max_tokens: int = 64) -> list[Recording]:
    tokenizer = ScriptedTokenizer()
    engines = [ScriptedEngine(tokenizer, [ScriptedStep(step) for step in steps]) for steps in (TARGET, DRAFT)]
    settings = {"delimiter": "\n\n", "max_step_tokens": 256, "depth": DEPTH}
    recorder = Recorder(*engines, ByText(), DecodingSettings(depth=DEPTH), settings=settings)

    async def each() -> list[Recording]:
        return [
            await recorder.record(
                question,
                ReplyRequest(tuple(tokenizer.encode(f"user: {question}\nassistant: ")), Sampling(max_tokens), question),
            )
            for question in questions
        ]

    recordings = asyncio.run(each())
    assert all(engine.in_flight == 0 for engine in engines)
    return recordings


class TableEngine:
    """Writes the next id of each id; a target's token takes three turns of the event loop."""

    context_length = 1 << 12
    healthy = True

    def __init__(self, tokenizer: HFTokenizer, table: Any, turns: int, buffer: SharedDraftBuffer | None = None) -> None:
        self.tokenizer = tokenizer
        self._table = table
        self._turns = turns
        self._buffer = buffer
        self.in_flight = 0

    @property
    def shared_draft(self) -> bool:
        return self._buffer is not None

    def draft_lines(self, prompt_ids: Sequence[int]) -> Any:
        assert self._buffer is not None
        return self._buffer.draft_lines(prompt_ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.in_flight += 1
        try:
            token = prompt_ids[-1]
            for number in range(sampling.max_tokens):
                for _ in range(self._turns):
                    await asyncio.sleep(0)
                token = int(self._table[token])
                reason = "stop" if token == EOS else "length" if number == sampling.max_tokens - 1 else None
                yield Delta((token,), None, reason)
                if reason is not None:
                    return
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """Nothing is open."""


SHAPE = {"architectures": ["Qwen2ForCausalLM"], "vocab_size": 2048, "model_type": "qwen2", "eos_token_id": 7}


def replay_engines(replies: RecordedReplies, folder: Path, turns: int, shared: bool = False) -> list[TableEngine]:
    folder.mkdir(exist_ok=True)
    replies.write_tokenizer(folder)
    tokenizer = HFTokenizer(folder)
    buffer = SharedDraftBuffer() if shared else None
    target = TableEngine(tokenizer, replies.table("target", 2048), turns, buffer)
    return [target, TableEngine(tokenizer, replies.table("draft", 2048), 1)]


def write(engines: Sequence[Engine], reply: Any, verifier: Any, depth: int, shared: bool = False) -> Reply:
    recording = reply.recording
    request = ReplyRequest(reply.prompt, Sampling(recording.max_tokens), recording.name, recording.regions.regions)
    settings = DecodingSettings(depth=depth, shared_draft=shared)
    return asyncio.run(lookahead(request, engines[0], engines[1], verifier, settings))


def test_recording_has_all_that_the_pair_writes() -> None:
    (recording,) = record()
    texts = {(step.model, step.position): "".join(_text(recording, step.after, step.end)) for step in recording.steps}
    assert texts["target", 2] == TARGET[2]
    assert texts["draft", 2] == DRAFT[2]
    assert recording.target_alone.steps == recording.lookahead.steps == 5
    assert recording.lookahead.accepted == 3
    # From the front of each of the five steps, chains of three draft steps, and target steps after each.
    assert {step.position for step in recording.steps if step.model == "draft"} == {0, 1, 2, 3, 4}
    accepted = {recording.steps[verdict.draft].position: verdict.accepted for verdict in recording.verdicts}
    assert accepted == {0: True, 1: True, 2: False, 3: False, 4: True}
    assert all(verdict.seconds >= 0 and verdict.reason == "by text" for verdict in recording.verdicts)


def _text(recording: Recording, after: Any, end: Any) -> list[str]:
    from lookahead_agent.replay.recording import PrefixTree

    tree, texts = PrefixTree.of(recording), []
    prefix = tree.find(end)
    while prefix != tree.find(after):
        texts.append(tree.texts[prefix])
        prefix = tree.parents[prefix]
    return texts[::-1]


@pytest.mark.parametrize("turns", [1, 3, 20])
def test_replay_writes_the_recorded_reply_in_each_mode_at_any_speed(turns: int, tmp_path: Path) -> None:
    recordings = [Recording.model_validate_json(row.model_dump_json()) for row in record(("What is it?", "And this?"))]
    replies = RecordedReplies(recordings)
    for reply in replies.replies:
        for shared in (False, True):
            engines = replay_engines(replies, tmp_path / "tokenizer", turns, shared)
            alone = write(engines, reply, None, 0, shared)
            assert alone.token_ids == reply.target_alone
            assert alone.text == ALONE
            if shared:
                assert alone.report.draft_tokens.speculative > 0
            for depth in (1, DEPTH):
                written = write(engines, reply, RecordedVerifier([reply]), depth, shared)
                assert written.token_ids == reply.lookahead
                assert written.text == LOOKAHEAD
                assert (written.report.steps, written.report.accepted) == (5, 3)
                assert UNRECORDED not in written.token_ids
            assert not any(engine.in_flight for engine in engines)


def test_drawn_verdicts_write_whole_steps_of_the_recording(tmp_path: Path) -> None:
    (recording,) = record()
    replies = RecordedReplies([recording])
    engines = replay_engines(replies, tmp_path / "tokenizer", 3)
    steps = {text.strip() for text in (*TARGET, *DRAFT)}
    for alpha, accepted in ((0.0, 0), (1.0, 5)):
        verifier = DrawnVerifier([replies.replies[0]], alpha)
        written = write(engines, replies.replies[0], verifier, DEPTH)
        assert [part.strip() in steps for part in written.text.split("\n\n")] == [True] * 5
        assert written.report.accepted == accepted


def test_draft_is_recorded_after_each_token_of_the_target() -> None:
    (recording,) = record()
    replies = RecordedReplies([recording])
    target, draft = (replies.table(model, 2048) for model in ("target", "draft"))
    (reply,) = replies.replies
    for path in (reply.target_alone, reply.lookahead):
        for last in (reply.prompt[-1], *path[:-1]):
            assert draft[last] != UNRECORDED
    assert all(target[last] != UNRECORDED for last in (reply.prompt[-1], *reply.target_alone[:-1]))
    # "Say" is another token than "Tell" after the same words, and "It" is the same in both.
    assert sum(target[last] != draft[last] for last in (reply.prompt[-1], *reply.target_alone[:-1])) > 2


def test_ids_of_one_prefix_are_equal_and_fit_the_vocabulary(tmp_path: Path) -> None:
    recordings = record(("What is it?", "What is that?"))
    replies = RecordedReplies(recordings)
    first, second = (reply.prompt for reply in replies.replies)
    common = sum(a == b for a, b in zip(first, second, strict=False))
    assert 0 < common < len(first), "equal beginnings share prefix caches"
    assert first[:common] == second[:common]
    assert set(replies.replies[0].target_alone[:-1]).isdisjoint(replies.replies[1].target_alone[:-1])
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "model.safetensors").write_bytes(b"weights")
    (shape / "config.json").write_text(json.dumps(SHAPE))
    written = write_model(replies, "draft", shape, tmp_path / "draft")
    assert (written / "model.safetensors").read_bytes() == b"weights"
    config = json.loads((written / "config.json").read_text())
    assert config["architectures"] == ["LookaheadReplayQwen2ForCausalLM"]
    for wrong, message in (
        ({"vocab_size": 20}, "replay fewer recordings"),
        ({"architectures": ["GPT2LMHeadModel"]}, "cannot replay: choose a shape of Qwen2"),
    ):
        (shape / "config.json").write_text(json.dumps(SHAPE | wrong))
        with pytest.raises(ConfigurationError, match=message):
            write_model(replies, "draft", shape, tmp_path / "other")


def test_shared_draft_finds_its_place_again_by_recorded_tokens(tmp_path: Path) -> None:
    (recording,) = record()
    replies = RecordedReplies([recording])
    (reply,) = replies.replies
    file = tmp_path / "tokens.npz"
    replies.write_tokens(file)
    buffer = SharedDraftBuffer()
    config = SimpleNamespace(
        additional_config={BUFFER: str(buffer.path), TABLE: str(file)},
        model_config=SimpleNamespace(max_model_len=4096, get_vocab_size=lambda: 2048),
        speculative_config=SimpleNamespace(num_speculative_tokens=12),
    )
    # "Tell it." and "Say it." after the same prefix: the ids differ, and the last tokens are the same.
    drafted, target = next(
        steps
        for verdict in recording.verdicts
        if (steps := (reply.step_ids(verdict.draft), reply.step_ids(verdict.target)))[1][0] in reply.lookahead
        and recording.steps[verdict.draft].position == 3
    )
    assert set(drafted).isdisjoint(target)
    before = [*reply.prompt, *reply.lookahead[: reply.lookahead.index(target[0])]]
    lines = buffer.draft_lines(reply.prompt)
    line = lines.begin(before)
    assert line is not None
    line.extend(drafted)
    written = np.array([*before, *target[:-1]], np.int32)
    for make, proposed in ((ReplayProposer, [target[-1]]), (SharedDraftProposer, [])):
        assert make(config).propose([[1]], np.array([len(written)]), written[None]) == [proposed]
    # Without a match elsewhere, ids and tokens agree.
    written = np.array([*before, *drafted[:1]], np.int32)
    assert ReplayProposer(config).propose([[1]], np.array([len(written)]), written[None]) == [list(drafted[1:])]
    lines.close()


def test_file_of_recordings_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "recordings.jsonl"
    with pytest.raises(ConfigurationError, match="there is no file"):
        read_recordings(file)
    rows = RowFile(file)
    recordings = record(("What is it?", "And this?"))
    with rows.open_for_writing():
        for recording in recordings:
            rows.append(recording.model_dump(mode="json"))
    assert [each.name for each in read_recordings(file)] == ["What is it?", "And this?"]
    assert read_recordings(file, 1) == recordings[:1]
    row = recordings[0].model_dump(mode="json")
    run = row["runs"][0]
    for changes, message in (
        ({"version": 2}, "no recording of version 1: its version is 2"),
        ({"runs": [run | {"texts": []}]}, "0 texts"),
        ({"runs": [run | {"after": [3, 1]}]}, "run 0 follows a place that no run before it has"),
        ({"verdicts": [row["verdicts"][0] | {"draft": 999}]}, "names step 999, which is no step of the draft"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            parse_recordings(file, [row | changes])
    with pytest.raises(ConfigurationError, match="another recording with the name"):
        parse_recordings(file, [row, row])
    with pytest.raises(ConfigurationError, match="another tokenizer"):
        parse_recordings(file, [row, row | {"name": "b", "tokenizer": "other"}])
    twice = Recording.model_validate(row | {"runs": [*row["runs"], run | {"ids": [9999, *run["ids"][1:]]}]})
    with pytest.raises(ConfigurationError, match="the target continues one prefix in two ways"):
        RecordedReplies([twice])


def test_short_budget_and_sampling(tmp_path: Path) -> None:
    (recording,) = record(max_tokens=7)
    assert len(recording.target_alone.ids) == len(recording.lookahead.ids) == 7
    replies = RecordedReplies([recording])
    engines = replay_engines(replies, tmp_path / "tokenizer", 2)
    written = write(engines, replies.replies[0], RecordedVerifier(replies.replies), 2)
    assert written.token_ids == replies.replies[0].lookahead
    assert written.finish_reason == "length"
    recorder = Recorder(*[ScriptedEngine(engine.tokenizer, []) for engine in engines], ByText(), DecodingSettings())  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="temperature 0"):
        asyncio.run(recorder.record("a", ReplyRequest((1,), Sampling(8, temperature=0.5))))
    others = [ScriptedEngine(ScriptedTokenizer(), []) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="different tokenizers"):
        Recorder(*others, ByText(), DecodingSettings())


def test_record_command_continues_and_refuses_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = "Let me add.\n\nIt is 4."
    draft = lambda prompt: reply if "first" in prompt else "Let me see.\n\nIt is 4."  # noqa: E731
    scripted = partial(ChatLookahead, engines=scripted_engines(reply, draft))
    problems, out = tmp_path / "problems.jsonl", tmp_path / "recordings.jsonl"
    rows = [{"id": name, "question": f"the {name}?", "answer": "4"} for name in ("first", "second")]
    problems.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    command = ("bench", "record", "--dataset", str(problems), "--out", str(out), "--depth", "2")
    assert run(*command, "--limit", "1", chat_class=scripted) == 0
    first = out.read_text()
    assert run(*command, chat_class=scripted) == 0
    assert out.read_text().startswith(first)
    recordings = read_recordings(out)
    assert [each.name for each in recordings] == ["questions first", "questions second"]
    assert [each.lookahead.accepted for each in recordings] == [2, 1]
    assert {each.settings["depth"] for each in recordings} == {2}
    assert run(*command, chat_class=scripted) == 0, "nothing is left"
    for options, message in (
        (("--depth", "3"), "another depth: choose another file"),
        (("--policy", "off"), "it accepts no step"),
        (("--task", "plan_execute", "--node", "nowhere", "--out", str(tmp_path / "a.jsonl")), "calls no model in"),
    ):
        assert run(*command, *options, chat_class=scripted) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert run("bench", "replay", str(problems)) == 2
    assert "is no recording of version 1" in " ".join(capsys.readouterr().err.split())
