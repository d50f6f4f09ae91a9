"""Scripted engine pairs for tests of the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.virtual_time import run_in_virtual_time
from lookahead_agent.regions import Regions
from lookahead_agent.verifiers import ExactVerifier, StepPair, Verdict, Verifier

PROMPT = "user: what is it?\nassistant: "


@dataclass
class ScriptedVerifier:
    """Decides by a function of the two texts, after some seconds."""

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


class Pair:
    """A scripted target and draft."""

    def __init__(self, target: Steps, draft: Steps | None, target_seconds: float = 3.0, draft_seconds: float = 1.0):
        self.tokenizer = ScriptedTokenizer()
        self.prompt = self.tokenizer.encode(PROMPT)
        length = len(self.prompt)
        self.target = ScriptedEngine(self.tokenizer, scripted(target, target_seconds), length)
        self.draft = (
            ScriptedEngine(self.tokenizer, scripted(draft, draft_seconds), length) if draft is not None else None
        )
        self.pieces: list[str] = []

    def request(self, sampling: Sampling | None = None, markers: tuple[str, ...] = ()) -> ReplyRequest:
        return ReplyRequest(
            tuple(self.prompt), sampling or Sampling(max_tokens=10_000), "what is it?", Regions(markers)
        )

    async def reply(
        self,
        verifier: Verifier | None = None,
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
        verifier: Verifier | None = None,
        settings: DecodingSettings | None = None,
        sampling: Sampling | None = None,
        markers: tuple[str, ...] = (),
    ) -> Reply:
        return run_in_virtual_time(self.reply(verifier, settings, sampling, markers))

    def check_accounts(self, reply: Reply) -> None:
        report = reply.report
        assert self.target.in_flight == 0
        assert report.target_tokens.generated == self.target.generated
        if self.draft is not None:
            assert self.draft.in_flight == 0
            assert report.draft_tokens.generated == self.draft.generated
        assert report.target_tokens.committed + report.draft_tokens.committed == len(reply.token_ids)
        assert 0 <= report.accepted <= report.steps
