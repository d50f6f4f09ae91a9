"""Scripted engine pairs for tests of the decoder."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.decoding.request import Regions
from lookahead_agent.decoding.verifier import DraftVerifier, StepPair, Verdict, Verifier
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.virtual_time import run_in_virtual_time

PROMPT = "user: what is it?\nassistant: "


@dataclass
class ScriptedVerifier:
    """Decides by a function of both texts, after a delay."""

    accepts: Callable[[str, str], bool]
    seconds: float = 0.0
    error: str | None = None

    async def verify(self, pair: StepPair) -> Verdict:
        import asyncio

        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise RuntimeError(self.error)
        return Verdict(self.accepts(pair.draft.text, pair.target.text), "script")


Steps = Sequence[ScriptedStep | str]


def scripted(steps: Steps, seconds: float = 1.0) -> list[ScriptedStep]:
    return [step if isinstance(step, ScriptedStep) else ScriptedStep(step, seconds) for step in steps]


class SampledEngine(ScriptedEngine):
    """Follows a second script for sampled requests, which are those of further candidates."""

    def __init__(self, greedy: ScriptedEngine, sampled: ScriptedEngine) -> None:
        self._engines = {True: greedy, False: sampled}

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engines[True].tokenizer

    @property
    def in_flight(self) -> int:
        return sum(engine.in_flight for engine in self._engines.values())

    @property
    def generated(self) -> int:  # type: ignore[override]
        return sum(engine.generated for engine in self._engines.values())

    @property
    def requests(self) -> list[tuple[tuple[int, ...], Sampling]]:  # type: ignore[override]
        return [request for engine in self._engines.values() for request in engine.requests]

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        return self._engines[sampling.temperature == 0].generate(prompt_ids, sampling)


class Pair:
    """A scripted target and draft; `sampled` is the script of the draft for sampled requests."""

    def __init__(
        self,
        target: Steps,
        draft: Steps | None,
        target_seconds: float = 3.0,
        draft_seconds: float = 1.0,
        sampled: Steps | None = None,
        two_tokenizers: bool = False,
        logprobs: Mapping[str, float] | None = None,
        tokens_per_delta: int = 1,
    ):
        self.tokenizer = ScriptedTokenizer()
        self.prompt = self.tokenizer.encode(PROMPT)
        self.draft_tokenizer = ScriptedTokenizer() if two_tokenizers else self.tokenizer
        if two_tokenizers:
            self.draft_tokenizer.encode("other words come first, so that ids differ")
        self.draft_prompt = self.draft_tokenizer.encode(PROMPT)

        def engine(tokenizer: ScriptedTokenizer, steps: Steps, seconds: float, prompt: list[int]) -> ScriptedEngine:
            return ScriptedEngine(
                tokenizer, scripted(steps, seconds), len(prompt), logprobs=logprobs, tokens_per_delta=tokens_per_delta
            )

        self.target = engine(self.tokenizer, target, target_seconds, self.prompt)
        self.draft: ScriptedEngine | None = None
        if draft is not None:
            self.draft = engine(self.draft_tokenizer, draft, draft_seconds, self.draft_prompt)
            if sampled is not None:
                sampling_engine = engine(self.draft_tokenizer, sampled, draft_seconds, self.draft_prompt)
                self.draft = SampledEngine(self.draft, sampling_engine)
        self.pieces: list[str] = []

    def request(self, sampling: Sampling | None = None, markers: tuple[str, ...] = ()) -> ReplyRequest:
        return ReplyRequest(
            tuple(self.prompt),
            sampling or Sampling(max_tokens=10_000),
            "what is it?",
            Regions(markers),
            tuple(self.draft_prompt) if self.draft_tokenizer is not self.tokenizer else None,
        )

    async def reply(
        self,
        verifier: Verifier | DraftVerifier | None = None,
        settings: DecodingSettings | None = None,
        sampling: Sampling | None = None,
        markers: tuple[str, ...] = (),
    ) -> Reply:
        reply = await lookahead(
            self.request(sampling, markers),
            self.target,
            self.draft,
            verifier or ExactVerifier(),
            settings or DecodingSettings(),
            self.pieces.append,
        )
        assert "".join(self.pieces) == reply.text
        self.check_accounts(reply)
        return reply

    def run(
        self,
        verifier: Verifier | DraftVerifier | None = None,
        settings: DecodingSettings | None = None,
        sampling: Sampling | None = None,
        markers: tuple[str, ...] = (),
    ) -> Reply:
        return run_in_virtual_time(self.reply(verifier, settings, sampling, markers))

    def check_accounts(self, reply: Reply) -> None:
        report = reply.report
        assert self.target.in_flight == 0
        assert report.target_tokens.total == self.target.generated
        if self.draft is not None:
            assert self.draft.in_flight == 0
            assert report.draft_tokens.total == self.draft.generated
        if self.draft_tokenizer is self.tokenizer:
            assert report.target_tokens.committed + report.draft_tokens.committed == len(reply.token_ids)
        assert 0 <= report.accepted <= report.steps
