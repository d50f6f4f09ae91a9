"""The drift monitor, which audits a sample of the steps that certificates accept."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.certificates.certificate import Certificate, keep
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW, DriftMonitor, DriftTest
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import EarlyVerifier, PartialStep, StepPair, Verdict
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system import background
from lookahead_agent.testing import EqualTextEmbedder
from lookahead_agent.verifiers import (
    EmbeddingVerifier,
    EngineJudge,
    JudgeVerifier,
    LikelihoodVerifier,
    PrefilterVerifier,
    RandomVerifier,
)
from tests.unit.test_calibrate import NAMES, certificate
from tests.waiting import wait_until


@given(st.integers(0, 20), st.integers(21, 400))
def test_the_calibrated_dispute_rate_raises_no_alarm(disputed: int, accepted: int) -> None:
    test = DriftTest(disputed, accepted)
    assert test.bound > disputed / accepted
    for number in range(2000):
        test.add(number * disputed // accepted != (number - 1) * disputed // accepted)
    assert not test.drifted


def test_false_alarm_rate_is_within_its_bound() -> None:
    alarms = 0
    for seed in range(400):
        rng, test = random.Random(seed), DriftTest(20, 200)
        for _ in range(1500):
            test.add(rng.random() < test.bound)
        alarms += test.drifted
    assert alarms <= 400 * 0.01 + 4  # the bound is 1 %, at which more alarms would have a probability of 0.02


@pytest.mark.parametrize(("rate", "steps"), [(0.3, 150), (0.6, 40)])
def test_a_higher_dispute_rate_is_detected_within_few_steps(rate: float, steps: int) -> None:
    detected = 0
    for seed in range(50):
        rng, test = random.Random(seed), DriftTest(10, 200)
        for _ in range(steps):
            test.add(rng.random() < rate)
        detected += test.drifted
    assert detected >= 45


def test_no_drift_if_the_calibration_disputed_every_step() -> None:
    test = DriftTest(3, 3)
    for _ in range(100):
        test.add(True)
    assert not test.drifted


TOKENS = ScriptedTokenizer()


def chat(yes_logprob: float, **fields: Any) -> tuple[ChatLookahead, ScriptedEngine]:
    """Return a chat model whose draft paraphrases the target, and the target, which judges with a fixed logprob."""
    reply = [ScriptedStep("One thing.\n\n"), ScriptedStep("Another.\n\n"), ScriptedStep("The end.")]
    paraphrase = [ScriptedStep("A thing.\n\n"), ScriptedStep("Another one.\n\n"), ScriptedStep("The end.")]
    target = ScriptedEngine(
        TOKENS,
        lambda _, prefix: reply[prefix.count("\n\n") :],
        logprobs={"yes": yes_logprob, "no": -1.0},
    )
    draft = ScriptedEngine(TOKENS, lambda _, prefix: paraphrase[prefix.count("\n\n") :])
    engines = EngineSet(target, draft, AlwaysSimilar(), names=NAMES)
    return ChatLookahead(engines=engines, policy="risk=0.05", temperature=0.0, **fields), target


class AlwaysSimilar(EqualTextEmbedder):
    """Rates every pair as similar."""

    async def similarity(self, first: str, second: str) -> float:
        return 0.99


def monitor_of(target: ScriptedEngine) -> DriftMonitor:
    return DriftMonitor(target, JudgeVerifier(EngineJudge(target), DISPUTED_BELOW), lambda _: None)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Certificate]:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    fields: dict[str, Any] = {"precision": {}, "disputed": 2, "accepted": 200}
    certificates = [
        certificate(**fields),
        certificate(risk=0.05, policy={"verifier": "embedding", "similarity": 0.8}, threshold=0.8, **fields),
    ]
    keep(certificates)
    return certificates


def ask_and_audit(llm: ChatLookahead, question: str = "How?") -> dict[str, Any]:
    metadata: dict[str, Any] = llm.invoke(question).response_metadata["lookahead"]
    assert llm.engines is not None
    monitor, target = llm.engines.drift_monitor, llm.engines.target
    background.run(
        wait_until(
            lambda: not monitor.waiting and target.in_flight == 0 and (monitor._task is None or monitor._task.done())
        )
    )
    return metadata


def test_disputed_steps_tighten_the_policy_until_it_is_exact(
    stored: list[Certificate], caplog: pytest.LogCaptureFixture
) -> None:
    llm, _ = chat(yes_logprob=-6.0, audit_rate=1.0)
    labels = []
    for number in range(8):
        metadata = ask_and_audit(llm, f"How, {number}?")
        labels.append(metadata["certificate"])
    assert labels[0] == stored[1].describe()
    assert stored[0].describe() + ", since accepted steps are disputed more often than in the calibration" in labels
    assert labels[-1] == "exact, since accepted steps are disputed more often than in the calibration"
    assert labels == sorted(labels, key=labels.index), "the policy never loosens again"
    assert metadata["audit"]["tightened"] == 2
    counts = metadata["audit"]
    assert counts["disputed"] * 3 == counts["audited"] * 2 > 2, "steps with the same text are never disputed"
    assert caplog.text.count("the policy is tightened") == 2


def test_undisputed_steps_leave_the_certificate_unchanged(stored: list[Certificate]) -> None:
    llm, target = chat(yes_logprob=-0.1, audit_rate=1.0)
    metadata = [ask_and_audit(llm, f"How, {number}?") for number in range(6)]
    assert {each["certificate"] for each in metadata} == {stored[1].describe()}
    assert metadata[-1]["audit"]["audited"] > 0
    assert metadata[-1]["audit"]["disputed"] == 0
    assert target.answers > 0


def test_no_audit_at_rate_0_without_calibration_counts_or_for_draft_verifiers(stored: list[Certificate]) -> None:
    llm, target = chat(yes_logprob=-6.0, audit_rate=0.0)
    for number in range(4):
        ask_and_audit(llm, f"How, {number}?")
    assert target.answers == 0
    verifier = EmbeddingVerifier(AlwaysSimilar(), 0.8)
    monitor = monitor_of(target)
    assert monitor.wrap(verifier, certificate(), 1.0) is verifier, "the certificate has no calibrated dispute rate"
    alone = LikelihoodVerifier(target, 0.0)
    assert monitor.wrap(alone, stored[0], 1.0) is alone
    assert isinstance(monitor.wrap(PrefilterVerifier(verifier), stored[0], 1.0), EarlyVerifier)
    assert not isinstance(monitor.wrap(RandomVerifier(0.5), stored[0], 1.0), EarlyVerifier)


def test_audit_samples_a_share_of_the_steps_and_its_queue_is_bounded(stored: list[Certificate]) -> None:
    _, target = chat(yes_logprob=-0.1)
    monitor = monitor_of(target)
    monitor._random.seed(1)
    step = Step((1,), "a", StepEnd.DELIMITER)
    pair = StepPair("q", "", step, Step((2,), "b", StepEnd.DELIMITER))

    async def judge(rate: float, times: int) -> None:
        verifier = monitor.wrap(PrefilterVerifier(EmbeddingVerifier(AlwaysSimilar(), 0.8)), stored[0], rate)
        assert isinstance(verifier, EarlyVerifier)
        assert verifier.refutes(PartialStep((1,), "It is 3.", True), PartialStep((2,), "It is 4 of all that", False))
        for _ in range(times):
            assert (await verifier.verify(pair)).accepted

    asyncio.run(judge(0.02, 1000))
    assert 10 <= len(monitor.waiting) <= 30
    asyncio.run(judge(1.0, 200))
    assert len(monitor.waiting) == 64
    assert monitor.counts.dropped >= 136


@pytest.mark.parametrize("foreign", [False, True])
def test_failed_judge_drops_the_step_from_the_audit(
    stored: list[Certificate], foreign: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Judge:
        async def verify(self, pair: StepPair) -> Verdict:
            raise KeyError("a judge of the user's own")

    _, target = chat(yes_logprob=-6.0, audit_rate=1.0)
    monitor = DriftMonitor(target, Judge(), lambda _: None) if foreign else monitor_of(target)
    pair = StepPair("q", "", Step((1,), "a", StepEnd.DELIMITER), Step((2,), "b", StepEnd.DELIMITER))
    monitor._draw(stored[0], pair, 1.0)
    target.close()

    async def audit() -> None:
        monitor.audit_waiting()
        await wait_until(lambda: monitor.counts.dropped == 1)

    asyncio.run(audit())
    assert monitor.counts.audited == 0
    assert ("judge of the user" in caplog.text) == foreign
