"""A tiny draft learns from its target, on real vLLM and with real training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lookahead_agent.align.replies import ReplyRow
from lookahead_agent.align.training import Training, train
from lookahead_agent.cli.app import app
from lookahead_agent.progress import LogProgress
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import make_small_vocabulary_pair

ENGINE = [part for name, value in TINY_ENGINE.items() for part in ("--engine-arg", f"{name}={json.dumps(value)}")]


def test_training_teaches_what_the_replies_have(tmp_path: Path) -> None:
    """Replies that go on as they began, of which a random model knows nothing."""
    _, draft = make_small_vocabulary_pair(tmp_path)
    rows = [
        ReplyRow(prompt=f"{first}", writer="w", prompt_ids=[1, first, 2], reply_ids=[3, 4, 5, 6, 7] * 4 + [0])
        for first in (3, 4, 5, 6)
    ]
    out = tmp_path / "trained"
    how = Training(epochs=30, rank=8, learning_rate=0.01)
    found = train(draft, rows[:3], rows[3:], how, out, LogProgress())
    assert found.after > max(0.8, found.before)
    assert train(draft, rows[:3], rows[3:], how, out, LogProgress()) == found, "it is there"
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= names
    assert not any("adapter" in name or name == "order.json" for name in names), "merged"


@pytest.mark.timeout(600)
def test_a_draft_is_trained_and_measured(tmp_path: Path) -> None:
    target, draft = make_small_vocabulary_pair(tmp_path)
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"question": f"{'abc'[n % 3]}{'abc'[n // 3]}?"}) for n in range(9)))
    out = tmp_path / "out"
    command = ["align", "--dataset", str(questions), "--replies", "6", "--held-back", "3", "--out", str(out), "--json"]
    command += ["--model", str(target), "--draft", str(draft), "--policy", "exact", "--temperature", "0"]
    command += ["--max-tokens", "32", "--epochs", "40", "--rank", "8", "--learning-rate", "0.01", *ENGINE]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert 0 <= found["tokens"]["before"] <= 1
    low, high = found["gain"]
    assert low <= found["steps_after"] - found["steps_before"] <= high
    assert found["kept"] == (found["gain"][0] > 0 and found["tokens"]["after"] > found["tokens"]["before"] - 0.01)
    assert (out / "draft" / "config.json").is_file() == found["kept"]
    rows = [json.loads(line) for line in (out / "replies.jsonl").read_text().splitlines()]
    assert len(rows) == 9
    assert all(0 < len(row["reply_ids"]) <= 32 for row in rows)
