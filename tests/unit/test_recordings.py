"""Recordings of everything that a pair writes to a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.decoding import DecodingSettings, ReplyRequest
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.replay.recorder import Recorder
from lookahead_agent.replay.recording import PrefixTree, Recording, parse_recordings, read_recordings
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.testing import scripted_engines
from tests.unit.test_cli import run

TARGET = ["Add two and two.\n\n", "It is four.\n\n", "So we multiply by three.\n\n", "Tell it.\n\n", "It is twelve."]
DRAFT = ["Add two and two.\n\n", "That gives four.\n\n", "So we add three.\n\n", "Say it.\n\n", "It is twelve."]
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

    prompts = {question: tuple(tokenizer.encode(f"user: {question}\nassistant: ")) for question in questions}
    requests = {name: ReplyRequest(prompt, Sampling(max_tokens), name) for name, prompt in prompts.items()}
    recordings = asyncio.run(recorder.record(requests))
    assert all(engine.in_flight == 0 for engine in engines)
    return recordings


def test_recording_has_all_that_the_pair_writes() -> None:
    (recording,) = record()
    texts = {(step.model, step.position): "".join(_text(recording, step.after, step.end)) for step in recording.steps}
    assert texts["target", 2] == TARGET[2]
    assert texts["draft", 2] == DRAFT[2]
    assert recording.target_alone.steps == recording.lookahead.steps == 5
    assert recording.lookahead.accepted == 3
    assert "".join(_reply_texts(recording)) == LOOKAHEAD
    # From the front of each of the five steps, chains of three draft steps, and target steps after each.
    assert {step.position for step in recording.steps if step.model == "draft"} == {0, 1, 2, 3, 4}
    accepted = {recording.steps[verdict.draft].position: verdict.accepted for verdict in recording.verdicts}
    assert accepted == {0: True, 1: True, 2: False, 3: False, 4: True}
    assert all(verdict.seconds >= 0 and verdict.reason == "by text" for verdict in recording.verdicts)


def _reply_texts(recording: Recording) -> list[str]:
    tree, texts, prefix = PrefixTree.of(recording), [], 0
    for token in recording.lookahead.ids:
        prefix = tree.children[prefix][token]
        texts.append(tree.texts[prefix])
    return texts


def _text(recording: Recording, after: Any, end: Any) -> list[str]:
    tree, texts = PrefixTree.of(recording), []
    prefix = tree.find(end)
    while prefix != tree.find(after):
        texts.append(tree.texts[prefix])
        prefix = tree.parents[prefix]
    return texts[::-1]


def test_draft_is_recorded_after_each_token_of_the_target() -> None:
    (recording,) = record()
    tree = PrefixTree.of(recording)
    for reply in (recording.target_alone, recording.lookahead):
        prefix = 0
        for token in reply.ids:
            assert prefix in tree.next["draft"]
            prefix = tree.children[prefix][token]
    prefix, different = 0, 0
    for token in recording.target_alone.ids:
        assert tree.next["target"][prefix] == token
        different += tree.next["draft"][prefix] != token
        prefix = tree.children[prefix][token]
    # "Say" is another token than "Tell" after the same words, and "It" is the same in both.
    assert 2 < different < len(recording.target_alone.ids)


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
        ({"version": 2}, "is not a recording of version 1: its version is 2"),
        ({"runs": [run | {"texts": []}]}, "0 texts"),
        ({"runs": [run | {"after": [3, 1]}]}, "run 0 follows a place that no run before it has"),
        ({"verdicts": [row["verdicts"][0] | {"draft": 999}]}, "names step 999, which is not a step of the draft"),
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
        PrefixTree.of(twice)


def test_short_budget_and_sampling() -> None:
    (recording,) = record(max_tokens=7)
    assert len(recording.target_alone.ids) == len(recording.lookahead.ids) == 7
    tokenizer = ScriptedTokenizer()
    recorder = Recorder(*[ScriptedEngine(tokenizer, []) for _ in range(2)], ByText(), DecodingSettings())
    with pytest.raises(ConfigurationError, match="temperature 0"):
        asyncio.run(recorder.record({"a": ReplyRequest((1,), Sampling(8, temperature=0.5))}))
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
    planner = ("--task", "plan_execute", "--limit", "1", "--out", str(tmp_path / "planner.jsonl"))
    assert run(*command, *planner, chat_class=scripted) == 0
    (recording,) = read_recordings(tmp_path / "planner.jsonl")
    assert (recording.name, recording.question) == ("plan_execute first", "the first?")
    assert "the first?" in "".join(recording.prompt.texts)
    for options, message in (
        (("--depth", "3"), "another depth: choose another file"),
        (("--policy", "off"), "it accepts no step"),
        (("--task", "plan_execute", "--node", "nowhere", "--out", str(tmp_path / "a.jsonl")), "calls no model in"),
    ):
        assert run(*command, *options, chat_class=scripted) == 2
        assert message in " ".join(capsys.readouterr().err.split())
