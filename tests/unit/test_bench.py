from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.compare import compare_policies, summarize
from lookahead_agent.bench.problems import Problem, final_number, is_right, read_problems
from lookahead_agent.bench.ties import first_difference, trace_differences
from lookahead_agent.engine_set import EngineSet
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError
from tests.unit.chat import scripted_chat

PROBLEMS = [Problem("a", "What is 2 + 2?", "4"), Problem("b", "What is 2 + 3?", "5")]
REPLY = "Let me see.\n\nIt is 4."


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"So \(\boxed{320}\).", Fraction(320)),
        (r"\boxed{\$1,200.50} in 3 days", Fraction(2401, 2)),
        ("First 3, then 4 dollars.", Fraction(4)),
        ("It loses -7.", Fraction(-7)),
        ("It is $452.50.", Fraction(905, 2)),
        ("nothing", None),
    ],
)
def test_final_number(text: str, number: Fraction | None) -> None:
    assert final_number(text) == number


def test_is_right() -> None:
    assert is_right("It is 1,000.0.", "1000")
    assert not is_right("It is 1,001.", "1000")
    assert not is_right("I do not know.", "1000")


def test_read_problems(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("".join(json.dumps({"id": i, "question": "?", "answer": str(i)}) + "\n" for i in range(5)))
    assert [problem.id for problem in read_problems(file, limit=2, skip=1)] == ["1", "2"]
    with pytest.raises(ConfigurationError, match="no problem"):
        read_problems(file, skip=5)


def test_compare_resumes_and_refuses_other_settings(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    models = {name: scripted_chat(REPLY, policy=name, return_token_ids=True) for name in ("off", "exact")}
    asked: list[str] = []
    first = compare_policies(PROBLEMS[:1], models, out, {"v": 1}, lambda row: asked.append(row["id"]))
    out.write_text(out.read_text() + '{"id": "b", "pol')  # cut by an interruption
    with out.open("a") as file:
        file.write("\n")
    rows = compare_policies(PROBLEMS, models, out, {"v": 1}, lambda row: asked.append(row["id"]))
    assert asked == ["a", "a", "b", "b"]
    assert [row for row in rows if row["id"] == "a"] == first
    with pytest.raises(ConfigurationError, match="other settings"):
        compare_policies(PROBLEMS, models, out, {"v": 2}, lambda _: None)


def test_summary(tmp_path: Path) -> None:
    models = {name: scripted_chat(REPLY, policy=name, return_token_ids=True) for name in ("off", "exact")}
    rows = compare_policies(PROBLEMS, models, tmp_path / "r.jsonl", {}, lambda _: None)
    off, exact = summarize(rows, "off")
    assert (off["policy"], off["right"], off["replies"], off["acceptance_rate"]) == ("off", 1, 2, 0)
    assert exact["same_tokens"] == 2
    assert exact["acceptance_rate"] == 1
    assert exact["speedup"] > 0
    assert exact["judge_calls"] == 0
    assert set(exact["wasted"]) == {"target", "draft"}
    assert exact["wasted"]["target"] > 0, "the target's own steps, where the draft's were accepted"
    assert off["wasted"] == {"target": 0, "draft": 0}


def test_problems_asked_at_once_come_back_under_their_own_names(tmp_path: Path) -> None:
    models = {"off": scripted_chat(REPLY, policy="off", return_token_ids=True)}
    rows = compare_policies(PROBLEMS, models, tmp_path / "r.jsonl", {}, lambda _: None, concurrency=2)
    assert sorted(row["id"] for row in rows) == sorted(problem.id for problem in PROBLEMS)
    again = compare_policies(PROBLEMS, models, tmp_path / "r.jsonl", {}, lambda _: pytest.fail("asked again"), 2)
    assert {row["id"] for row in again} == {row["id"] for row in rows}


def test_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_differences_are_traced_to_the_targets_log_probabilities() -> None:
    tokenizer = ScriptedTokenizer()
    yes, no = tokenizer.encode("yes") + tokenizer.encode("no")
    engine = ScriptedEngine(tokenizer, [ScriptedStep("x")], logprobs={"yes": -0.7, "no": -0.75})
    model = ChatLookahead(engines=EngineSet(engine), policy="off")
    rows = [
        {"id": "a", "policy": "off", "token_ids": [5, yes]},
        {"id": "a", "policy": "exact", "token_ids": [5, no]},
        {"id": "b", "policy": "off", "token_ids": [5, yes]},
        {"id": "b", "policy": "exact", "token_ids": [5, yes]},
        {"id": "b", "policy": "balanced", "token_ids": [5, no]},
    ]
    (traced,) = trace_differences(rows, {"a": "?", "b": "?"}, "off", model)
    assert (traced["id"], traced["at"]) == ("a", 1)
    assert traced["gap"] == pytest.approx(0.05)
    prompt, _ = engine.requests[-1]
    assert prompt[-1] == 5, "asked after the tokens that are equal"
