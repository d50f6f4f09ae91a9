"""Calibration on scripted engines: step pairs are collected, labelled, scored and fitted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from lookahead_agent.bench.problems import Problem, read_problems
from lookahead_agent.calibration.collector import Collector
from lookahead_agent.calibration.fit import CANDIDATES, Fit, Measure, best, count_disputed, fit
from lookahead_agent.calibration.pairs import LabelledPair, OutcomesRow, PairRow, ScoresRow, labelled_pairs
from lookahead_agent.certificates.certificate import PACKAGED, Certificate, certificates, find_certificate, keep
from lookahead_agent.certificates.risk import Threshold
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli.app import CHAT_CLASS, app
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.system.progress import LogProgress
from lookahead_agent.testing import EqualTextEmbedder
from lookahead_agent.verifiers.arithmetic import false_only_in
from lookahead_agent.verifiers.judge import USER_PROMPT
from lookahead_agent.verifiers.results import PrefilterVerifier

NAMES = {"target": "big", "draft": "small", "embedding": "mini"}
TOKENS = ScriptedTokenizer()  # shared: rows contain token ids, and each tokenizer assigns its own
REPLY = ["Three boxes of four.\n\n", "3 * 4 = 12\n\n", "The answer is 12."]


class SimilarEmbedder(EqualTextEmbedder):
    """Returns a high similarity for different texts."""

    async def similarity(self, first: str, second: str) -> float:
        return 1.0 if first == second else 0.8


def _target(prompt: str, prefix: str) -> Sequence[ScriptedStep]:
    if "I forget it" in prefix:
        return [ScriptedStep("The answer is 7.")] if "answer" not in prefix else []
    return [ScriptedStep(each) for each in REPLY[prefix.count("\n\n") :]]


def _draft(prompt: str, prefix: str) -> Sequence[ScriptedStep]:
    number = prefix.count("\n\n")
    if "forget" in prompt:
        return [ScriptedStep("I forget it.\n\n")]
    if "false" in prompt:
        return [ScriptedStep("3 * 4 = 13\n\n")]
    if "reword" in prompt:
        return [ScriptedStep("Put otherwise.\n\n")]
    return [ScriptedStep(each) for each in REPLY[number:]]


def scripted(target: Callable[[str, str], Sequence[ScriptedStep]] = _target, **more: Any) -> ChatLookahead:
    engines = EngineSet(ScriptedEngine(TOKENS, target), ScriptedEngine(TOKENS, _draft), SimilarEmbedder(), names=NAMES)
    return ChatLookahead(engines=engines, policy="random", temperature=0.0, **more)


KINDS = ("plain", "forget", "false", "reword")


def problems(count: int = 8, answer: str | None = "12") -> list[Problem]:
    return [Problem(f"p{number}", f"How many, {KINDS[number % 4]} {number}?", answer) for number in range(count)]


def collect_pairs(
    out: Path, count: int = 8, answer: str | None = "12", llm: ChatLookahead | None = None, *measures: Measure
) -> dict[str, LabelledPair]:
    collector = Collector(
        llm or scripted(), problems(count, answer), out, measures=measures or ("similarity",), at_once=3
    )
    collector.run(LogProgress())
    return collector.pairs


@pytest.mark.parametrize("answer", ["12", None])
def test_pairs_are_labelled_by_the_outcomes_of_their_continuations(tmp_path: Path, answer: str | None) -> None:
    pairs = collect_pairs(tmp_path / "pairs.jsonl", answer=answer)
    labels = {problem.question.split()[2]: pairs[problem.id].changes_outcome for problem in problems()}
    assert labels == {"plain": False, "forget": True, "false": True, "reword": False}
    for pair in pairs.values():
        row = pair.row
        assert row.draft is not None
        assert row.target is not None
        assert row.reply == "".join(REPLY)
        assert row.reply.startswith(row.before + row.target.text)
        assert row.positions >= row.position >= 0
        if row.pair.same_text or false_only_in(row.pair.draft.text, row.pair.target.text):
            assert pair.outcomes is None, "no continuation is needed"
            continue
        assert pair.outcomes is not None
        assert pair.outcomes.answer == "12"
        changes_outcome = pair.changes_outcome
        assert len(pair.outcomes.draft) == len(pair.outcomes.target) == (16 if changes_outcome else 4)
        assert set(pair.outcomes.target) == {True}
    pair = pairs["p2"].row.pair
    assert false_only_in(pair.draft.text, pair.target.text) == ["3 * 4 = 13"]


def _failing_target(prompt: str, prefix: str) -> Sequence[ScriptedStep]:
    """The target, which fails while it continues a draft step of the problem p9."""
    if "forget 9" in prompt and "I forget it" in prefix:
        raise EngineError("gone")
    return _target(prompt, prefix)


def test_interrupted_collection_resumes_and_rejects_other_settings(tmp_path: Path) -> None:
    complete = collect_pairs(tmp_path / "whole.jsonl", 12)
    out = tmp_path / "pairs.jsonl"
    with pytest.raises(EngineError, match="gone"):
        Collector(scripted(_failing_target), problems(12), out, at_once=3).run(LogProgress())
    assert 0 < len(RowFile(out).rows) < len(RowFile(tmp_path / "whole.jsonl").rows)
    resumed = collect_pairs(out, 12)
    assert {name: pair.changes_outcome for name, pair in resumed.items()} == {
        name: pair.changes_outcome for name, pair in complete.items()
    }
    rows = out.read_text().splitlines()
    assert sum('"kind": "pair"' in row for row in rows) == 12
    collect_pairs(out, 12)
    assert out.read_text().splitlines() == rows, "a rerun adds no row"
    with pytest.raises(ConfigurationError, match="other settings"):
        Collector(scripted(), problems(), out, seed=1)
    with pytest.raises(ConfigurationError, match="is another in"):
        Collector(scripted(), [Problem("p0", "Another?", "1")], out)
    other = scripted()
    assert other.engines is not None
    other.engines.names["draft"] = "another"
    with pytest.raises(ConfigurationError, match="other models"):
        Collector(other, problems(13), out).run(LogProgress())


def test_missing_draft_and_unknown_rows_are_rejected(tmp_path: Path) -> None:
    no_draft = scripted()
    assert no_draft.engines is not None
    no_draft.engines.draft = None
    with pytest.raises(ConfigurationError, match="no draft model"):
        Collector(no_draft, problems(), tmp_path / "pairs.jsonl").run(LogProgress())
    for row, problem in (
        ('{"kind": "sample"}', "tag 'sample'"),
        ('{"kind": "scores", "problem": "p0", "scores": {}}', "no pair"),
    ):
        (tmp_path / "other.jsonl").write_text(row + "\n")
        with pytest.raises(ConfigurationError, match="row 1 is not of `lookahead-agent calibrate`") as raised:
            labelled_pairs(RowFile(tmp_path / "other.jsonl").rows)
        assert problem in str(raised.value)
        assert "\n" not in str(raised.value)


def test_collect_and_fit_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = copy_context()
    context.run(CHAT_CLASS.set, lambda **fields: scripted())
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path / "cache"))
    dataset, out = tmp_path / "problems.jsonl", tmp_path / "pairs.jsonl"
    dataset.write_text(
        "".join(
            json.dumps({"id": problem.id, "question": problem.question, "answer": problem.answer}) + "\n"
            for problem in problems(160)
        )
    )
    assert len(read_problems(dataset)) == 160

    def call(*arguments: str, code: int = 0, **more: Any) -> str:
        result = context.run(CliRunner().invoke, app, ["calibrate", *arguments], **more)
        assert result.exit_code == code, result.output
        return result.output

    output = call("collect", "--dataset", str(dataset), "--out", str(out))
    assert "160 pairs: 40 of the same text, 80 change the outcome, 0 not known yet" in output
    without_scores = CliRunner().invoke(app, ["calibrate", "fit", str(out), "--verifiers", "judge"])
    assert isinstance(without_scores.exception, ConfigurationError)
    assert "calibrate collect --measures p_aligned" in str(without_scores.exception)
    fitted = json.loads(call("fit", str(out), "--json"))
    assert fitted[0]["models"] == {"target": "big", "draft": "small", "embedding": "mini"}
    assert fitted[0]["policy"] == {"verifier": "embedding", "same_numbers": True, "similarity": fitted[0]["threshold"]}
    assert "Kept in" in call("fit", str(out))
    assert len(list((tmp_path / "cache" / "certificates").iterdir())) == 1
    found, reason, _ = find_certificate(fitted[0]["risk"], NAMES, {})
    assert found == Certificate.model_validate(fitted[0])
    assert reason == found.describe()
    for invalid in (
        ["fit", str(out), "--verifiers", "guess"],
        ["collect", "--dataset", str(dataset), "--measures", "guess"],
    ):
        assert "guess: choose of" in call(*invalid, code=2)


def _pair(score: float, changes_outcome: bool, text: str = "another") -> LabelledPair:
    step = Step(token_ids=(1,), text=text, end=StepEnd.DELIMITER)
    row = PairRow(
        problem="p",
        fingerprint="f",
        question="q",
        answer="1",
        draft=replace(step, text="own"),
        target=step,
        settings={"models": NAMES, "precision": {}, "delimiter": "\n\n"},
    )
    outcomes = OutcomesRow(problem="p", answer="1", draft=[not changes_outcome] * 16, target=[True] * 16)
    return LabelledPair(row=row, outcomes=outcomes, scores={"similarity": score, "p_aligned": 1 - score})


def pair_rows(harmless: int = 30, errors: int = 10) -> list[dict[str, Any]]:
    """Rows of a file of labelled and scored pairs."""
    rows: list[dict[str, Any]] = []
    for number in range(harmless + errors):
        pair = _pair(0.9 if number < harmless else 0.2, changes_outcome=number >= harmless)
        pair.scores["p_swapped"] = pair.scores["p_aligned"]
        assert pair.outcomes is not None
        problem = {"problem": f"p{number}"}
        rows += [
            pair.row.model_copy(update=problem).model_dump(mode="json"),
            pair.outcomes.model_copy(update=problem).model_dump(mode="json"),
            ScoresRow(problem=f"p{number}", scores=pair.scores).model_dump(mode="json"),
        ]
    return rows


def test_scores_of_both_orders_and_the_cascade() -> None:
    pair = _pair(0.7, False)
    assert CANDIDATES["both orders"].score(pair) is None, "the swapped order has no score"
    assert CANDIDATES["judge"].score(pair) == pytest.approx(0.3)
    for p_swapped, lower in ((0.1, 0.1), (0.8, 0.3)):
        pair.scores["p_swapped"] = p_swapped
        assert CANDIDATES["both orders"].score(pair) == pytest.approx(lower)
        assert CANDIDATES["cascade"].score(pair) == pytest.approx(lower)
    for similarity, score in ((0.6, float("-inf")), (0.96, float("inf"))):
        pair.scores["similarity"] = similarity
        assert CANDIDATES["cascade"].score(pair) == score
    policy = CANDIDATES["cascade"].policy(0.4)
    assert (policy.p_aligned, policy.similarity, policy.both_orders) == (0.4, 0.95, True)
    assert CANDIDATES["cascade"].decides == ("target", "draft", "embedding", "judge")
    assert CANDIDATES["both orders"].decides == ("target", "draft", "judge")


def test_scores_of_another_judge_are_rejected(tmp_path: Path) -> None:
    out = tmp_path / "pairs.jsonl"
    pairs = collect_pairs(out, 4, "12", chat_with_judge("other"), "similarity", "p_aligned")
    assert {pair.judge for pair in pairs.values()} == {"other"}
    assert all(pair.scores.keys() == {"similarity", "p_aligned"} for pair in pairs.values())
    with pytest.raises(ConfigurationError, match="other has judged these pairs, and not the target"):
        collect_pairs(out, 4, "12", chat_with_judge(None), "p_swapped")
    before = out.read_text()
    swapped = collect_pairs(out, 4, "12", chat_with_judge("other"), "p_swapped")
    assert all(pair.scores["p_swapped"] == 0.9 for pair in swapped.values())
    assert out.read_text().startswith(before), "earlier rows are kept"


def chat_with_judge(name: str | None) -> ChatLookahead:
    """A chat model whose judge accepts every pair."""
    llm = scripted()
    assert llm.engines is not None
    llm.engines.judge = RecordedModels({"p_aligned": 0.9, "p_swapped": 0.9}, draft_text="")
    if name is not None:
        llm.engines = EngineSet(
            llm.engines.target, llm.engines.draft, SimilarEmbedder(), llm.engines.judge, names=NAMES | {"judge": name}
        )
        return ChatLookahead(engines=llm.engines, policy="random", temperature=0.0)
    return llm


class RecordedModels:
    """Embedder and judge that repeat the recorded scores of one pair."""

    def __init__(self, scores: dict[str, float], draft_text: str) -> None:
        self._scores = scores
        self._draft_text = draft_text

    async def similarity(self, first: str, second: str) -> float:
        return self._scores["similarity"]

    async def first_token_probabilities(
        self, messages: Sequence[Mapping[str, str]], cache_salt: str | None = None
    ) -> Mapping[str, float]:
        before_draft = USER_PROMPT.partition("{draft}")[0].rpartition("{target}")[2]
        draft_order = messages[-1]["content"].partition(before_draft)[2].startswith(self._draft_text)
        probability = self._scores["p_aligned" if draft_order else "p_swapped"]
        return {"yes": probability, "no": 1 - probability}


SHARES = st.integers(0, 100).map(lambda percent: percent / 100)


@given(
    name=st.sampled_from(list(CANDIDATES)),
    text=st.sampled_from(["own", " own ", "another", "It is 3."]),
    similarity=SHARES,
    p_aligned=SHARES,
    p_swapped=SHARES,
    threshold=SHARES,
)
def test_recorded_score_decides_like_the_verifier(name: str, text: str, threshold: float, **scores: float) -> None:
    pair = _pair(0.5, False, text=text)
    pair.scores.update(scores)
    recorded = CANDIDATES[name].score(pair)
    assert recorded is not None
    models = RecordedModels(scores, draft_text="own")
    engines = EngineSet(ScriptedEngine(TOKENS, _target), ScriptedEngine(TOKENS, _draft), models, models, names=NAMES)
    verifier = engines.verifier(CANDIDATES[name].policy(threshold))
    assert isinstance(verifier, PrefilterVerifier)
    verdict = asyncio.run(verifier.verify(pair.row.pair))
    assert verdict.accepted == (recorded >= threshold), verdict


def test_best_fit_is_the_verifier_that_accepts_most() -> None:
    harmless, errors = {f"g{n}": _pair(0.9, False) for n in range(200)}, {f"b{n}": _pair(0.2, True) for n in range(50)}
    candidates = [CANDIDATES["judge"], CANDIDATES["embedding"]]
    chosen = best(fit(harmless | errors, candidates), 0.03)
    assert chosen is not None
    candidate, threshold = chosen
    assert candidate.name == "embedding", "the judge prefers the errors"
    assert (threshold.value, threshold.risk, threshold.accepted) == (0.21, 0.02, 200)
    assert candidate.policy(threshold.value).explain().endswith("a similarity of 0.21 to the target's")
    assert best(fit(errors | {"g": _pair(0.9, False)}, candidates), 0.2) is None


@pytest.mark.parametrize(("fewer", "name"), [(98, "embedding"), (97, "judge")])
def test_best_fit_is_the_cheaper_verifier_if_it_accepts_almost_as_many(fewer: int, name: str) -> None:
    fits = [
        Fit(CANDIDATES[candidate], {0.05: Threshold(0.5, 0.05, accepted, 0, 200, 0.05)})
        for candidate, accepted in (("judge", 100), ("embedding", fewer))
    ]
    chosen = best(fits, 0.05)
    assert chosen is not None
    assert chosen[0].name == name


def test_disputed_pairs_are_counted_among_accepted_ones() -> None:
    pairs = {f"g{n}": _pair(0.9, False) for n in range(20)} | {"same": _pair(0.9, False, text="own")}
    pairs |= {"low": _pair(0.4, False), "agreed": _pair(0.95, False)}
    for pair in pairs.values():
        pair.scores["p_swapped"] = pair.scores["p_aligned"]
    pairs["agreed"].scores["p_swapped"] = 0.9

    def count(name: str, threshold: float) -> int | None:
        return count_disputed(pairs, CANDIDATES[name], Threshold(threshold, 0.1, 1, 0, 1, 0.1))

    assert count("embedding", 0.5) == 20
    assert count("embedding", 0.92) == 0
    assert count("judge", 0.5) == 0
    pairs["unasked"] = _pair(0.9, False)
    assert count("embedding", 0.5) is None
    assert count("embedding", 0.92) == 0, "the new pair is not accepted"


def test_results_variant_rejects_different_results_at_any_similarity() -> None:
    different = _pair(0.99, True, text="It is 3.")
    assert CANDIDATES["embedding"].score(different) == 0.99
    assert CANDIDATES["embedding+results"].score(different) == float("-inf")
    assert CANDIDATES["embedding+results"].score(_pair(0.99, True, text=" own ")) == float("inf")


def certificate(**changes: Any) -> Certificate:
    fields: dict[str, Any] = {
        "risk": 0.02,
        "models": NAMES,
        "precision": {"target": "int8", "draft": "int8"},
        "verifier": "embedding",
        "policy": {"verifier": "embedding", "similarity": 0.9},
        "threshold": 0.9,
        "level": 0.1,
        "tests": 1,
        "pairs": 300,
        "accepted": 200,
        "errors": 0,
        "bound": 0.012,
        "rule": {"seeds": 4},
        "data": "pairs.jsonl 0",
        "date": "2026-11-23",
    }
    fields |= changes
    if "policy" in changes and "threshold" not in changes:
        fields["threshold"] = changes["policy"]["similarity"]
    elif "threshold" in changes and "policy" not in changes:
        fields["policy"] = {"verifier": "embedding", "similarity": changes["threshold"]}
    return Certificate.model_validate(fields)


def test_certificates_match_models_precision_and_delimiter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    precision = certificate().precision
    assert find_certificate(0.02, NAMES, precision)[0] is None
    keep([certificate(), certificate(risk=0.05, policy={"verifier": "embedding", "similarity": 0.8})])
    keep([certificate(precision={})])
    assert len(certificates(NAMES)) == 3
    keep([certificate(precision={}, threshold=0.95)])
    assert len(certificates(NAMES)) == 3, "the new certificate replaces the old one"
    for risk, similarity in ((0.02, 0.9), (0.06, 0.8)):
        found, reason, _ = find_certificate(risk, NAMES, precision)
        assert found is not None
        assert found.policy["similarity"] == similarity
        assert reason == found.describe()
        next_best, reason, tightened = find_certificate(risk, NAMES, precision, {found})
        assert tightened
        assert next_best == (certificates(NAMES)[0] if risk > 0.02 else None)
        assert reason.endswith("accepted steps are disputed more often than in the calibration")
    for risk, models, precisions, message in (
        (0.01, NAMES, precision, "no threshold keeps a risk of 0.01"),
        (0.02, NAMES | {"draft": "tiny"}, precision, "no certificate is of big with tiny"),
        (0.02, NAMES | {"embedding": "maxi"}, precision, "of this precision and verifier"),
        (0.02, NAMES, {"target": "bf16"}, "of this precision and verifier (target bf16)"),
    ):
        found, reason, tightened = find_certificate(risk, models, precisions)
        assert (found, tightened) == (None, False)
        assert message in reason
    lines = str(re.compile(r"\n+"))
    found, reason, _ = find_certificate(0.02, NAMES, precision, delimiter=lines)
    assert found is None
    assert reason.startswith(r"the certificates are of steps that end at '\n\n'")
    keep([certificate(delimiter=lines)])
    assert len(certificates(NAMES)) == 4, "certificates of other delimiters stay"
    assert find_certificate(0.02, NAMES, precision, delimiter=lines)[0] == certificate(delimiter=lines)
    next((tmp_path / "certificates").glob("big+small.json")).write_text("{}")
    with pytest.raises(ConfigurationError, match="has no certificates"):
        certificates(NAMES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"risk": -1.0}, "not a probability"),
        ({"risk": 1.0}, "not a probability"),
        ({"risk": "NaN"}, "risk"),
        ({"level": 0.0}, "not a probability"),
        ({"tests": 0}, "no tests"),
        ({"risk": 0.001}, "do not show a risk of 0.001"),
        ({"accepted": 100}, "100 accepted pairs do not show a risk of 0.02"),
        ({"bound": 0.001}, "or the stated bound"),
        ({"errors": 150}, "150 errors of 200 accepted pairs do not show"),
        ({"errors": -5}, "contradict each other"),
        ({"accepted": 400}, "contradict each other"),
        ({"disputed": 201}, "contradict each other"),
        ({"tests": 10**6}, "do not show"),
        ({"verifier": "random"}, "unknown verifier 'random'"),
        ({"verifier": "judge"}, "not that of the verifier 'judge'"),
        ({"policy": {"verifier": "random", "probability": 1.0}, "threshold": 1.0}, "not that of the verifier"),
        ({"policy": {"verifier": "off"}, "threshold": 0.9}, "not that of the verifier"),
        ({"policy": {"verifier": "exact", "similarity": 0.9}, "threshold": 0.9}, "not that of the verifier"),
        ({"policy": {"verifier": "embedding", "similarity": -1.0}, "threshold": -1.0}, "a threshold in 0 to 1"),
        ({"policy": {"verifier": "embedding", "similarity": 0.1}, "threshold": 0.9}, "not that of the verifier"),
        (
            {"policy": {"verifier": "embedding", "similarity": 0.9, "nope": 1}, "threshold": 0.9},
            "not that of the verifier",
        ),
        (
            {"policy": {"verifier": "embedding", "similarity": 0.9, "same_numbers": []}, "threshold": 0.9},
            "not that of the verifier",
        ),
        ({"verifier": "embedding+results"}, "not that of the verifier 'embedding+results'"),
        ({"verifier": "both orders", "policy": {"verifier": "judge", "p_aligned": 0.9}, "threshold": 0.9}, "not that"),
        (
            {"verifier": "cascade", "policy": {"verifier": "cascade", "p_aligned": 0.9, "similarity": -1.0}}
            | {"threshold": 0.9},
            "not that of the verifier 'cascade'",
        ),
        (
            {"policy": {"verifier": "embedding", "similarity": 0.9, "delimiter": "x"}, "threshold": 0.9},
            "not that of the",
        ),
        ({"models": {"target": "big", "draft": "small"}}, "it names no embedding"),
        ({"nope": 1}, "nope"),
        ({"accepted": "many"}, "accepted"),
        ({"pairs": 10**400}, "contradict each other"),
    ],
)
def test_a_certificate_that_does_not_show_what_it_claims_is_ignored_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    file = keep([certificate()])
    (row,) = json.loads(file.read_text())
    file.write_text(json.dumps([row | changes, row]))
    found = find_certificate(0.02, NAMES, certificate().precision)
    assert found.certificate == certificate(), "the other certificates of the file hold"
    file.write_text(json.dumps([row | changes]))
    found = find_certificate(0.02, NAMES, certificate().precision)
    assert found.certificate is None
    assert "certificate 1 of big+small.json is ignored" in found.description
    assert message in found.description


def test_the_packaged_certificates_show_what_they_claim() -> None:
    for file in PACKAGED.glob("*.json"):
        for row in json.loads(file.read_text()):
            assert Certificate.model_validate(row).problem() is None


def test_risk_policy_uses_the_policy_of_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    llm = scripted()
    uncertified = llm.invoke("How many, reword?", policy="risk=0.02").response_metadata["lookahead"]
    assert uncertified["policy"] == "risk=0.02"
    assert uncertified["certificate"].startswith("exact, since no certificate is of big with small")
    assert uncertified["accepted"] == 0
    keep([certificate(precision={}, policy={"verifier": "embedding", "similarity": 0.7})])
    llm = scripted()
    certified = llm.invoke("How many, reword?", policy="risk=0.02").response_metadata["lookahead"]
    assert certified["certificate"] == certificate(precision={}, threshold=0.7).describe()
    assert certified["accepted"] > 0
    for policy, kind in (("risk=0.02", "exact"), ("balanced", "not certified")):
        figures = llm.invoke("How many, reword?", policy=rf"{policy}:delimiter=/\n+/").response_metadata["lookahead"]
        assert figures["certificate"].startswith(rf"{kind}, since the certificates are of steps that end at '\n\n'")
    assert llm.invoke("How many?", policy="exact").response_metadata["lookahead"]["certificate"] is None
    assert scripted(policies={"a": "risk=0.02"}).explain().splitlines()[1].startswith("risk=0.02: risk 0.02: embedding")


def test_field_that_the_certified_verifier_does_not_use_is_rejected() -> None:
    policy = as_policy("risk=0.02:synchronous=true")
    assert policy.with_verifier({"verifier": "exact"}).synchronous
    with pytest.raises(ConfigurationError, match="does not use synchronous"):
        policy.with_verifier({"verifier": "likelihood", "likelihood": -0.1})


def test_named_policies_use_their_default_thresholds_only_without_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    engines = scripted().engines
    assert engines is not None
    for name in ("strict", "balanced", "fast"):
        policy = as_policy(name)
        unchanged, no_certificate, reason = engines.resolve_certificate(policy)
        assert (unchanged, no_certificate) == (policy, None)
        assert reason is not None
        assert reason.startswith("not certified, since no certificate is of big with small")
    balanced = certificate(precision={}, risk=0.04, delimiter=";")
    keep([balanced])
    certified, used, reason = EngineSet(engines.target, engines.draft, names=NAMES).resolve_certificate(
        as_policy("balanced:width=2:delimiter=;")
    )
    assert used == balanced
    assert (certified.verifier, certified.similarity) == ("embedding", 0.9)
    assert (certified.width, certified.delimiter) == (2, ";")
    assert not certified.compares_results, "the certificate replaces the default thresholds"
    assert reason == used.describe()
    # After too many disputes, the fallback is exact and not the default thresholds, which are not calibrated here.
    engines._revoke(used)
    assert engines.resolve_certificate(as_policy("balanced:delimiter=;")).policy.verifier == "exact"
    assert engines.resolve_certificate(as_policy("balanced:similarity=0.9")).policy.similarity == 0.9, (
        "an explicit threshold stays"
    )


def test_named_policies_have_the_thresholds_of_the_packaged_certificates() -> None:
    (packaged,) = PACKAGED.glob("*.json")
    by_risk = {entry["risk"]: entry["policy"] for entry in json.loads(packaged.read_text())}
    risks = {"strict": 0.02, "balanced": 0.05, "fast": 0.1}
    for name, risk in risks.items():
        policy = as_policy(name)
        assert policy.risk == risk
        assert policy.model_dump(include=set(by_risk[risk])) == by_risk[risk]


def test_packaged_certificates_are_reproducible_from_the_published_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = (Path(__file__).parents[2] / "docs" / "pairs").glob("pairs-*.jsonl.xz")
    names = "embedding,embedding+results,judge,judge+results,both orders,cascade"
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    arguments = ["calibrate", "fit", str(file), "--verifiers", names, "--json"]
    computed = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).output)
    (packaged,) = PACKAGED.glob("*.json")
    volatile = {"date", "environment"}
    assert [{name: entry[name] for name in entry.keys() - volatile} for entry in computed] == [
        {name: entry[name] for name in entry.keys() - volatile} for entry in json.loads(packaged.read_text())
    ]
