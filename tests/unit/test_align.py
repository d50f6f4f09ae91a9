"""Prompts, replies and what decides whether a trained draft is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lookahead_agent import ChatLookahead
from lookahead_agent.align import aligning
from lookahead_agent.align.acceptance import AcceptanceRow, gain
from lookahead_agent.align.aligning import Aligning, align
from lookahead_agent.align.prompts import Prompt, prompts_of_dataset, prompts_of_traces
from lookahead_agent.align.replies import ReplyRow, write_replies
from lookahead_agent.align.training import _IGNORED, Agreement, Training, _batch, _order
from lookahead_agent.cli.app import app
from lookahead_agent.engines.scripted import ScriptedEngine
from lookahead_agent.engines.tokenizer import ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.progress import LogProgress
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import SameText, replying
from lookahead_agent.trace.recorder import TraceRecorder

TOKENS = ScriptedTokenizer()
OTHER = "No.\n\nNever.\n\nNothing."
REPLY = "One.\n\nTwo.\n\nThree."


def chat(draft: str = REPLY, **fields: Any) -> ChatLookahead:
    engines = EngineSet(
        ScriptedEngine(TOKENS, replying(lambda _: REPLY)), ScriptedEngine(TOKENS, replying(lambda _: draft)), SameText()
    )
    return ChatLookahead(engines=engines, **{"policy": "off", "temperature": 0.0, **fields})


def asked(count: int) -> list[Prompt]:
    return [Prompt(({"role": "user", "content": f"Question {number}?"},)) for number in range(count)]


def test_questions_of_a_dataset_once_each(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    rows = [{"id": number, "question": question} for number, question in enumerate(["A?", "B?", "A?"])]
    file.write_text("\n".join(map(json.dumps, rows)))
    found = prompts_of_dataset(file)
    assert [prompt.messages[0]["content"] for prompt in found] == ["A?", "B?"]


def test_what_recorded_runs_asked(tmp_path: Path) -> None:
    trace = tmp_path / "run.jsonl"

    def search(query: str) -> str:
        """Search."""
        return query

    with TraceRecorder(trace) as recorder:
        for model in (chat(), chat().bind_tools([search]), chat().bind(response_format={"type": "json_object"})):
            model.invoke("A plan for tea?", {"callbacks": [recorder]})
    (prompt,) = prompts_of_traces([trace])
    assert prompt.messages == ({"role": "user", "content": "A plan for tea?"},)
    empty = tmp_path / "empty.jsonl"
    with TraceRecorder(empty):
        pass
    with pytest.raises(ConfigurationError, match="nothing was asked"):
        prompts_of_traces([empty])


def test_replies_are_written_once(tmp_path: Path) -> None:
    file = tmp_path / "replies.jsonl"
    first = write_replies(chat(), asked(3), file, LogProgress())
    assert [TOKENS.decode(row.reply_ids) for row in first.values()] == [REPLY] * 3
    assert all(row.prompt_ids for row in first.values())
    more = write_replies(chat(), asked(4), file, LogProgress())
    assert list(more)[:3] == list(first)
    assert len(file.read_text().splitlines()) == 4
    with pytest.raises(ConfigurationError, match="choose another folder"):
        write_replies(chat(max_tokens=5), asked(4), file, LogProgress())


def row(prompt: list[int], reply: list[int]) -> ReplyRow:
    return ReplyRow(prompt="p", writer="w", prompt_ids=prompt, reply_ids=reply)


def test_nothing_is_learnt_from_prompts() -> None:
    tokens, attended, labels = _batch([row([1, 2, 3], [4, 5]), row([1], [6])], torch)
    assert tokens.tolist() == [[1, 2, 3, 4, 5], [1, 6, 0, 0, 0]]
    assert attended.tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    no = _IGNORED
    assert labels.tolist() == [[no, no, no, 4, 5], [no, 6, no, no, no]]


@pytest.mark.parametrize(("epochs", "count"), [(0.5, 2), (1.0, 4), (2.5, 10), (0.01, 1)])
def test_epochs_may_be_parts(epochs: float, count: int) -> None:
    seen = _order(4, epochs, torch)
    assert len(seen) == count
    assert all(seen.count(each) <= -(-epochs // 1) for each in range(4))


@pytest.mark.parametrize(
    ("trained", "agreement", "kept"),
    [(REPLY, 0.9, True), (OTHER, 0.9, False), (REPLY, 0.7, False)],
)
def test_a_draft_is_kept_if_more_of_its_steps_stand_and_no_fewer_tokens_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str, agreement: float, kept: bool
) -> None:
    def train(
        draft: Path, replies: list[ReplyRow], held_back: list[ReplyRow], how: Training, folder: Path, _: Any
    ) -> Agreement:
        assert (len(replies), len(held_back)) == (3, 2)
        folder.mkdir()
        return Agreement(before=0.8, after=agreement)

    monkeypatch.setattr(aligning, "train", train)
    given = Aligning(
        chat,
        lambda folder: chat(trained if folder.endswith("draft") else OTHER, policy="balanced:depth=2:synchronous=true"),
        tmp_path / "base",
        "balanced",
        3,
        2,
        Training(),
        tmp_path / "out",
    )
    found = align(asked(5), given, LogProgress())
    assert found.kept == kept
    assert (tmp_path / "out" / "draft").is_dir() == kept
    assert found.draft == (str(tmp_path / "out" / "draft") if kept else None)
    assert json.loads((tmp_path / "out" / "aligned.json").read_text())["kept"] == kept
    monkeypatch.setattr(aligning, "train", None)
    assert align(asked(5), given, LogProgress()) == found, "nothing is trained twice"
    for other in (replace(given, how=Training(epochs=3)), replace(given, policy="strict"), replace(given, held_back=1)):
        with pytest.raises(ConfigurationError, match="delete the rest to train anew"):
            align(asked(5), other, LogProgress())
    with pytest.raises(ConfigurationError, match="5 different prompts"):
        align(asked(5), replace(given, replies=4), LogProgress())


@pytest.mark.parametrize(("better", "sure"), [(8, True), (1, False)])
def test_a_gain_by_chance_is_told_from_another(better: int, sure: bool) -> None:
    before = [AcceptanceRow(prompt=f"{n}", draft="before", steps=6, accepted=3) for n in range(8)]
    after = [row.model_copy(update={"accepted": 4 if n < better else 3}) for n, row in enumerate(before)]
    found = gain(before, after)
    assert found.value == pytest.approx(better / 48)
    assert found.low is not None
    assert (found.low > 0) == sure
    assert gain(before[:1], after[:1]).low is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--dataset or --traces"),
        (["--dataset", "own", "--traces", "run.jsonl"], "--dataset or --traces"),
        (["--dataset", "own", "--policy", "off"], "accepts no draft steps"),
    ],
)
def test_what_cannot_work_is_said_before_anything_loads(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["align", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
