from __future__ import annotations

import math

import pytest

from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import PartialStep, StepPair, Verifier
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.errors import EngineError
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.embedding import EmbeddingVerifier
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.judge import EngineJudge, JudgeVerifier
from lookahead_agent.verifiers.prefilter import PrefilterVerifier


class FixedEmbedder:
    def __init__(self, similarity: float) -> None:
        self._similarity = similarity
        self.calls = 0

    async def similarity(self, first: str, second: str) -> float:
        self.calls += 1
        return self._similarity


def pair(draft: str, target: str) -> StepPair:
    tokenizer = ScriptedTokenizer()

    def step(text: str) -> Step:
        return Step(tuple(tokenizer.encode(text)), text, StepEnd.DELIMITER)

    return StepPair("What is it?", "", step(draft), step(target))


def judge(yes: float, no: float, threshold: float = 0.5) -> JudgeVerifier:
    tokenizer = ScriptedTokenizer()
    logprobs = {word: math.log(p) for word, p in (("yes", yes), ("no", no)) if p} | {"maybe": math.log(0.01)}
    return JudgeVerifier(EngineJudge(ScriptedEngine(tokenizer, [], logprobs=logprobs)), threshold)


async def accepted(verifier: Verifier, draft: str = "It is 4.", target: str = "So it is 4.") -> bool:
    return (await verifier.verify(pair(draft, target))).accepted


async def test_exact_compares_tokens_and_not_only_text() -> None:
    assert await accepted(ExactVerifier(), "same", "same")
    assert not await accepted(ExactVerifier(), "same", "same ")
    first, second = Step((1, 2), "ab", StepEnd.DELIMITER), Step((3,), "ab", StepEnd.DELIMITER)
    assert not (await ExactVerifier().verify(StepPair("", "", first, second))).accepted


async def test_embedding_accepts_from_its_threshold_on() -> None:
    assert await accepted(EmbeddingVerifier(FixedEmbedder(0.9), 0.9))
    assert not await accepted(EmbeddingVerifier(FixedEmbedder(0.89), 0.9))


async def test_judge_reads_p_aligned_from_log_probabilities() -> None:
    assert await judge(0.6, 0.2).p_aligned(pair("a", "b")) == pytest.approx(0.75)
    assert await accepted(judge(0.6, 0.2, threshold=0.75 - 1e-9))
    assert not await accepted(judge(0.6, 0.2, threshold=0.76))


async def test_judge_raises_without_a_yes_or_no() -> None:
    with pytest.raises(EngineError, match="neither yes nor no"):
        await judge(0, 0).p_aligned(pair("a", "b"))


async def test_cascade_calls_embedder_and_judge_only_if_needed() -> None:
    embedder = FixedEmbedder(0.95)
    cascade = PrefilterVerifier(EmbeddingVerifier(embedder, 0.9, judge(0.0, 0.9), 0.7))
    assert await accepted(cascade, "It is 4.", " It is 4.\n\n"), "equal texts need no embedder"
    assert embedder.calls == 0
    assert await accepted(cascade), "high similarity, so the judge (which would reject) is not called"
    assert not await accepted(EmbeddingVerifier(FixedEmbedder(0.6), 0.9, judge(0.9, 0.0), 0.7))
    assert await accepted(EmbeddingVerifier(FixedEmbedder(0.8), 0.9, judge(0.9, 0.1), 0.7))
    assert not await accepted(EmbeddingVerifier(FixedEmbedder(0.8), 0.9, judge(0.1, 0.9), 0.7))
    assert not await accepted(EmbeddingVerifier(FixedEmbedder(0.8), 0.9))


async def test_prefilter_rejects_different_numbers_without_the_embedder() -> None:
    embedder = FixedEmbedder(1.0)
    verifier = PrefilterVerifier(EmbeddingVerifier(embedder, 0.5))
    assert not await accepted(verifier, "12 × 5/6 = 6", "12 × 5/6 = 10")
    assert not await accepted(verifier, "So 5 + 6 = 12, of 11.", "Of 11 and 12, 5 + 6 = 11.")
    assert embedder.calls == 0
    assert await accepted(verifier, "So 5 + 6 = 12.", "It is 5 + 6 = 12."), "the target has the same wrong equation"


def engines(similarity: float = 1.0, yes: float = 1.0) -> EngineSet:
    tokenizer = ScriptedTokenizer()
    logprobs = {"yes": math.log(yes) if yes else -50.0, "no": math.log(1 - yes) if yes < 1 else -50.0}
    engine = ScriptedEngine(tokenizer, [], logprobs=logprobs)
    return EngineSet(engine, ScriptedEngine(tokenizer, []), FixedEmbedder(similarity))


@pytest.mark.parametrize("policy", ["exact", "strict", "balanced", {"verifier": "judge"}])
async def test_different_numbers_are_rejected_with_every_verifier(policy: str | dict[str, object]) -> None:
    verifier = engines().verifier(as_policy(policy))
    assert verifier is not None
    assert not await accepted(verifier, "12 × 5/6 = 6", "12 × 5/6 = 10")


async def test_every_threshold_of_a_policy_has_an_effect() -> None:
    async def decides(fields: dict[str, object], similarity: float = 1.0, yes: float = 1.0) -> bool:
        verifier = engines(similarity, yes).verifier(as_policy(fields))
        assert verifier is not None
        return await accepted(verifier, "It is 4.", "So it is 4 or 5." if "same_numbers" in fields else "So it is 4.")

    assert await decides({"verifier": "embedding", "similarity": 0.5}, similarity=0.6)
    assert not await decides({"verifier": "embedding", "similarity": 0.7}, similarity=0.6)
    assert await decides({"verifier": "judge", "p_aligned": 0.5}, yes=0.6)
    assert not await decides({"verifier": "judge", "p_aligned": 0.7}, yes=0.6)
    assert await decides({"verifier": "judge", "same_numbers": False})
    assert not await decides({"verifier": "judge", "same_numbers": True})
    assert await decides({"verifier": "cascade", "similarity": 0.9, "ask_judge_from": 0.5}, similarity=0.6)
    assert not await decides({"verifier": "cascade", "similarity": 0.9, "ask_judge_from": 0.7}, similarity=0.6)
    assert not await decides({"verifier": "cascade", "similarity": 0.9, "ask_judge_from": None}, similarity=0.6)
    assert not await decides({"verifier": "cascade", "p_aligned": 0.9}, similarity=0.7, yes=0.8)


def test_policy_without_its_models_has_no_verifier() -> None:
    all_engines = engines()
    assert EngineSet(all_engines.target).verifier(as_policy("exact")) is None
    assert EngineSet(all_engines.target, all_engines.draft).verifier(as_policy("balanced")) is None
    assert all_engines.verifier(as_policy("off")) is None


def test_exact_refutes_at_the_first_difference() -> None:
    def refutes(draft: list[int], target: list[int], complete: bool = False) -> bool:
        return ExactVerifier().refutes(PartialStep(draft, "", complete), PartialStep(target, "", False))

    assert not refutes([1, 2], [1])
    assert refutes([1, 2], [1, 3])
    assert not refutes([1, 2], [1, 2, 3])
    assert refutes([1, 2], [1, 2, 3], complete=True)


def test_numbers_refute_a_complete_draft_step() -> None:
    prefilter = PrefilterVerifier(EmbeddingVerifier(FixedEmbedder(1.0), 0.5))
    target = PartialStep([], "It takes 12 boxes and then some", False)
    assert prefilter.refutes(PartialStep([], "It takes 11 boxes.\n\n", True), target)
    assert not prefilter.refutes(PartialStep([], "It takes 12 boxes.\n\n", True), target)
    assert not prefilter.refutes(PartialStep([], "It takes 11 boxes", False), target), "the draft may still write 12"
