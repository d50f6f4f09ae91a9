from __future__ import annotations

import asyncio
import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import DraftStep, PartialStep, StepPair, Verdict, Verifier
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import EngineError
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import scripted_chat, scripted_engines
from lookahead_agent.verifiers.embedding import EmbeddingVerifier, RemoteEmbedder
from lookahead_agent.verifiers.judge import EngineJudge, JudgeVerifier
from lookahead_agent.verifiers.model_free import ExactVerifier
from lookahead_agent.verifiers.results import PrefilterVerifier


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


SLOW = [ScriptedStep(f"Step {number}.\n\n", 0.2) for number in range(6)]
REPLY = "First this.\n\nThen that.\n\nDone."


class EnginesWithVerifier(EngineSet):
    """Scripted engines with a user's verifier for every policy."""

    def __init__(self, verifier: Any) -> None:
        scripted = scripted_engines(REPLY)
        super().__init__(scripted.target, scripted.draft)
        self.given = verifier

    def verifier(self, policy: VerifierPolicy) -> Any:
        return self.given


def chat_with(verifier: Any, **fields: Any) -> ChatLookahead:
    return ChatLookahead(engines=EnginesWithVerifier(verifier), policy="exact:depth=2", **fields)


class Asks:
    """A user's verifier that runs a function in its coroutine."""

    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask

    async def verify(self, pair: StepPair) -> Verdict:
        answer = self._ask()
        if asyncio.iscoroutine(answer):
            answer = await answer
        return Verdict(answer is not None, "asked")


class AsksFirst(Asks):
    """The same without target steps."""

    async def verify_draft(self, step: DraftStep) -> Verdict:
        return await self.verify(None)  # type: ignore[arg-type]


class RefutesByAsking(Asks):
    """Accepts pairs, and runs the function to rule them out."""

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(True, "always")

    def refutes(self, draft: PartialStep, target: PartialStep) -> bool:
        return self._ask() is None


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Ends the calls that block, after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("verifier", [Asks, AsksFirst, RefutesByAsking])
def test_a_verifier_that_blocks_holds_neither_its_own_reply_nor_others(
    verifier: type[Asks], release: threading.Event
) -> None:
    entered = threading.Event()

    def block() -> None:
        entered.set()
        release.wait(60)

    replies: list[str] = []
    llm = chat_with(verifier(block))
    caller = threading.Thread(target=lambda: replies.append(llm.invoke("?").text))
    caller.start()
    assert entered.wait(60)
    assert scripted_chat("Another.").invoke("?").text == "Another."
    caller.join(60)
    assert replies == [REPLY], "the verifier still blocks, and the reply is complete"


@pytest.mark.parametrize("verifier", [Asks, AsksFirst, RefutesByAsking])
@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, OSError])
def test_a_verifier_that_raises_anything_ends_only_its_verdict(
    verifier: type[Asks], exception: type[BaseException]
) -> None:
    def fail() -> None:
        raise exception

    reply = chat_with(verifier(fail)).invoke("?")
    assert reply.text == REPLY
    disabled = reply.response_metadata["lookahead"]["speculation_disabled"]
    assert (disabled is None) if verifier is RefutesByAsking else (exception.__name__ in disabled)
    assert scripted_chat("Another.").invoke("?").text == "Another."


def test_a_verifier_may_ask_a_model() -> None:
    judge_model = scripted_chat("yes", policy="off")
    for ask in (lambda: judge_model.invoke("?"), lambda: judge_model.ainvoke("?")):
        reply = chat_with(Asks(ask)).invoke("?")
        assert reply.text == REPLY
        assert reply.response_metadata["lookahead"]["accepted"] > 0


def test_a_verifier_that_never_returns_is_left_out_for_a_minute() -> None:
    calls: list[None] = []

    async def hang() -> None:
        calls.append(None)
        await asyncio.Event().wait()

    engines = EnginesWithVerifier(Asks(hang))
    now = time.monotonic()
    engines.clock = lambda: now
    llm = ChatLookahead(engines=engines, policy=as_policy("exact:depth=2:verifier_timeout=0.2"), max_tokens=200)
    engines.target = ScriptedEngine(engines.target.tokenizer, SLOW)  # type: ignore[arg-type]
    first = llm.invoke("?").response_metadata["lookahead"]
    assert first["speculation_disabled"] == "the verifier timed out after 0.2 s"
    asked = len(calls)
    second = llm.invoke("?").response_metadata["lookahead"]
    assert len(calls) == asked, "the next reply does not ask it"
    expected = "the verifier timed out after 0.2 s in an earlier reply"
    assert second["speculation_disabled"] == second["mode_reason"] == expected
    now += 61
    llm.invoke("?")
    assert len(calls) > asked, "it is tried again after a while"


def test_a_silent_verifier_is_kept_as_long_as_it_is_left_out() -> None:
    """Another verifier would get its identity, and be left out in its place."""

    async def hang() -> None:
        await asyncio.Event().wait()

    def silent(verifier: Asks) -> VerifierPolicy:
        return VerifierPolicy(verifier=verifier, depth=2)

    engines = EnginesWithVerifier(Asks(hang))
    now = 0.0
    engines.clock = lambda: now
    verifier = Asks(hang)
    engines.remember_silence("verifier", silent(verifier), "timed out")
    assert engines.silence(silent(verifier)) == "timed out in an earlier reply"
    kept = weakref.ref(verifier)
    del verifier
    gc.collect()
    assert kept() is not None
    assert engines.silence(silent(Asks(hang))) is None
    now = 61.0
    engines.remember_silence("verifier", silent(Asks(hang)), "timed out")
    gc.collect()
    assert kept() is None


class BlockingEmbedder:
    """A user's embedder that blocks."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    async def similarity(self, first: str, second: str) -> float:
        self._release.wait(60)
        return 1.0


class BlockingJudge:
    """A user's judge that blocks."""

    def __init__(self, release: threading.Event) -> None:
        self._release = release

    async def first_token_probabilities(
        self, messages: Sequence[Mapping[str, str]], cache_salt: str | None = None
    ) -> Mapping[str, float]:
        self._release.wait(60)
        return {"yes": 1.0}


async def test_a_users_embedder_or_judge_that_blocks_holds_nothing_else(release: threading.Event) -> None:
    verifiers = [EmbeddingVerifier(BlockingEmbedder(release), 0.5), JudgeVerifier(BlockingJudge(release), 0.5)]
    for verifier in [*verifiers, *map(PrefilterVerifier, verifiers)]:
        verdict = asyncio.ensure_future(verifier.verify(pair("It is 4.", "So it is 4.")))
        await asyncio.sleep(0)
        assert not verdict.done()
        verdict.cancel()


@pytest.mark.parametrize(
    "result", [[], [1.0, 1.0], SystemExit(), asyncio.CancelledError(), GeneratorExit(), ValueError("no such layer")]
)
async def test_an_embedding_model_that_fails_in_any_way_answers_each_caller(result: Any) -> None:
    class Failing(RemoteEmbedder):
        def __init__(self) -> None:
            super(RemoteEmbedder, self).__init__()

        async def compare(self, texts: Sequence[str]) -> list[float]:
            if isinstance(result, BaseException):
                raise result
            return list(result)

    embedder = Failing()
    for _ in range(2):
        with pytest.raises((EngineError, ValueError)):
            await asyncio.wait_for(embedder.similarity("a", "b"), 60)


@pytest.mark.parametrize("error", [None, ValueError("no such layer")])
async def test_a_cancelled_caller_does_not_keep_the_answer_from_the_others(error: ValueError | None) -> None:
    class Slow(RemoteEmbedder):
        def __init__(self) -> None:
            super(RemoteEmbedder, self).__init__()
            self.asked, self.answers = asyncio.Event(), asyncio.Event()

        async def compare(self, texts: Sequence[str]) -> list[float]:
            self.asked.set()
            await self.answers.wait()
            if error is not None:
                raise error
            return [0.5] * (len(texts) // 2)

    embedder = Slow()
    cancelled, kept = (asyncio.ensure_future(embedder.similarity("a", "b")) for _ in range(2))
    await embedder.asked.wait()
    cancelled.cancel()
    await asyncio.wait([cancelled])
    embedder.answers.set()
    await asyncio.wait([kept], timeout=60)
    assert kept.done()
    assert kept.exception() is error
    assert error is not None or kept.result() == 0.5


def test_what_a_policy_lacks_is_named_by_model() -> None:
    whole = scripted_engines(REPLY)
    engines = EngineSet(whole.target, whole.draft)
    assert engines.explain_missing(as_policy("balanced")) == "a model is missing: the embedding model"
    engines.judge, engines.problems["judge"] = None, "no memory"
    assert engines.explain_missing(as_policy("judge")) == "a model is missing: the judge (no memory)"
    assert engines.explain_missing(as_policy("exact")) is None
    assert engines.explain_missing(as_policy("off")) is None
    for policy, reason in (
        ("balanced", "a model is missing: the embedding model"),
        ("judge", "a model is missing: the judge (no memory)"),
    ):
        metadata = ChatLookahead(engines=engines, policy=policy).invoke("?").response_metadata["lookahead"]
        assert metadata["mode_reason"] == metadata["speculation_disabled"] == reason
    alone = ChatLookahead(engines=EngineSet(whole.target), policy="exact").invoke("?").response_metadata["lookahead"]
    assert (alone["mode_reason"], alone["speculation_disabled"]) == ("a model is missing: the draft", None)
