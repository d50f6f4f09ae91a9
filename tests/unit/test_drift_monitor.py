"""Steps accepted by a certificate that are looked at again."""

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
from lookahead_agent.decoding.verifier import EarlyVerifier, PartialStep, StepPair
from lookahead_agent.engines import background
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.runtime.engine_set import EngineSet
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
from tests.waiting import becomes


@given(st.integers(0, 20), st.integers(21, 400))
def test_what_was_seen_in_the_calibration_raises_no_alarm(disputed: int, accepted: int) -> None:
    test = DriftTest(disputed, accepted)
    assert test.bound > disputed / accepted
    for number in range(2000):
        test.add(number * disputed // accepted != (number - 1) * disputed // accepted)
    assert not test.drifted


def test_false_alarms_are_as_rare_as_promised() -> None:
    alarms = 0
    for seed in range(400):
        rng, test = random.Random(seed), DriftTest(20, 200)
        for _ in range(1500):
            test.add(rng.random() < test.bound)
        alarms += test.drifted
    assert alarms <= 400 * 0.01 + 4  # 1 % are allowed; more than 8 have a probability of 0.02 even then


@pytest.mark.parametrize(("share", "steps"), [(0.3, 150), (0.6, 40)])
def test_a_larger_share_is_noticed_soon(share: float, steps: int) -> None:
    noticed = 0
    for seed in range(50):
        rng, test = random.Random(seed), DriftTest(10, 200)
        for _ in range(steps):
            test.add(rng.random() < share)
        noticed += test.drifted
    assert noticed >= 45


def test_where_all_may_be_disputed_nothing_drifts() -> None:
    test = DriftTest(3, 3)
    for _ in range(100):
        test.add(True)
    assert not test.drifted


TOKENS = ScriptedTokenizer()


def chat(yes: float, **more: Any) -> tuple[ChatLookahead, ScriptedEngine]:
    """A chat model whose draft says the same in other words, and whose target, asked, answers yes with a logprob."""
    reply = [ScriptedStep("One thing.\n\n"), ScriptedStep("Another.\n\n"), ScriptedStep("The end.")]
    other = [ScriptedStep("A thing.\n\n"), ScriptedStep("Another one.\n\n"), ScriptedStep("The end.")]
    target = ScriptedEngine(
        TOKENS,
        lambda _, begun: reply[begun.count("\n\n") :],
        logprobs={"yes": yes, "no": -1.0},
    )
    draft = ScriptedEngine(TOKENS, lambda _, begun: other[begun.count("\n\n") :])
    engines = EngineSet(target, draft, AlwaysSimilar(), names=NAMES)
    return ChatLookahead(engines=engines, policy="risk=0.05", temperature=0.0, **more), target


class AlwaysSimilar(EqualTextEmbedder):
    """Finds everything similar."""

    async def similarity(self, first: str, second: str) -> float:
        return 0.99


def monitored(target: ScriptedEngine) -> DriftMonitor:
    return DriftMonitor(target, JudgeVerifier(EngineJudge(target), DISPUTED_BELOW), lambda _: None)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Certificate]:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    fields: dict[str, Any] = {"precision": {}, "disputed": 2, "accepted": 200}
    found = [
        certificate(**fields),
        certificate(risk=0.05, policy={"verifier": "embedding", "similarity": 0.8}, threshold=0.8, **fields),
    ]
    keep(found)
    return found


def figures(llm: ChatLookahead, question: str = "How?") -> dict[str, Any]:
    found: dict[str, Any] = llm.invoke(question).response_metadata["lookahead"]
    assert llm.engines is not None
    monitor, target = llm.engines.drift_monitor, llm.engines.target
    background.run(
        becomes(
            lambda: not monitor.waiting and target.in_flight == 0 and (monitor._task is None or monitor._task.done())
        )
    )
    return found


def test_disputed_steps_tighten_the_policy_until_it_is_exact(
    kept: list[Certificate], caplog: pytest.LogCaptureFixture
) -> None:
    llm, _ = chat(yes=-6.0, audit_rate=1.0)
    used = []
    for number in range(8):
        found = figures(llm, f"How, {number}?")
        used.append(found["certificate"])
    assert used[0] == kept[1].describe()
    assert kept[0].describe() + ", since accepted steps are disputed more often than in the calibration" in used
    assert used[-1] == "exact, since accepted steps are disputed more often than in the calibration"
    assert used == sorted(used, key=used.index), "never looser again"
    assert found["audit"]["tightened"] == 2
    counts = found["audit"]
    assert counts["disputed"] * 3 == counts["audited"] * 2 > 2, "the same text is never disputed"
    assert caplog.text.count("the policy is tightened") == 2


def test_agreement_changes_nothing(kept: list[Certificate]) -> None:
    llm, target = chat(yes=-0.1, audit_rate=1.0)
    found = [figures(llm, f"How, {number}?") for number in range(6)]
    assert {each["certificate"] for each in found} == {kept[1].describe()}
    assert found[-1]["audit"]["audited"] > 0
    assert found[-1]["audit"]["disputed"] == 0
    assert target.answers > 0


def test_nothing_is_watched_that_need_not_be(kept: list[Certificate]) -> None:
    llm, target = chat(yes=-6.0, audit_rate=0.0)
    for number in range(4):
        figures(llm, f"How, {number}?")
    assert target.answers == 0
    verifier = EmbeddingVerifier(AlwaysSimilar(), 0.8)
    monitor = monitored(target)
    assert monitor.audited(verifier, certificate(), 1.0) is verifier, "nothing to compare with"
    alone = LikelihoodVerifier(target, 0.0)
    assert monitor.audited(alone, kept[0], 1.0) is alone
    assert isinstance(monitor.audited(PrefilterVerifier(verifier), kept[0], 1.0), EarlyVerifier)
    assert not isinstance(monitor.audited(RandomVerifier(0.5), kept[0], 1.0), EarlyVerifier)


def test_a_share_is_drawn_and_no_more_wait_than_can(kept: list[Certificate]) -> None:
    _, target = chat(yes=-0.1)
    monitor = monitored(target)
    step = Step((1,), "a", StepEnd.DELIMITER)
    pair = StepPair("q", "", step, Step((2,), "b", StepEnd.DELIMITER))

    async def judge(share: float, times: int) -> None:
        verifier = monitor.audited(PrefilterVerifier(EmbeddingVerifier(AlwaysSimilar(), 0.8)), kept[0], share)
        assert isinstance(verifier, EarlyVerifier)
        assert verifier.refutes(PartialStep((1,), "It is 3.", True), PartialStep((2,), "It is 4 of all that", False))
        for _ in range(times):
            assert (await verifier.verify(pair)).accepted

    asyncio.run(judge(0.02, 1000))
    assert 3 <= len(monitor.waiting) <= 45
    asyncio.run(judge(1.0, 200))
    assert len(monitor.waiting) == 64
    assert monitor.counts.dropped >= 136


def test_an_engine_that_fails_harms_nothing(kept: list[Certificate]) -> None:
    _, target = chat(yes=-6.0, audit_rate=1.0)
    monitor = monitored(target)
    pair = StepPair("q", "", Step((1,), "a", StepEnd.DELIMITER), Step((2,), "b", StepEnd.DELIMITER))
    monitor._draw(kept[0], pair, 1.0)
    target.close()

    async def look() -> None:
        monitor.audit_waiting()
        await becomes(lambda: monitor.counts.dropped == 1)

    asyncio.run(look())
    assert monitor.counts.audited == 0
