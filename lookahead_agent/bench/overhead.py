"""The decoder's own CPU time per token of a reply, on engines that need no time at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from lookahead_agent.decoding import DecodingSettings, ReplyRequest, lookahead
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedTokenizer
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.verifiers import ExactVerifier

_PROMPT = 200
_PARTS = 10
"""Of a reply, to compare its beginning with its end."""


@dataclass(frozen=True)
class Overhead:
    """The decoder's CPU time."""

    requests: int  # replies at once
    accepted: float  # share of the committed steps that the draft wrote
    microseconds: float  # per token of all replies
    at_first: float  # the same over the first tenth
    at_last: float  # over the last tenth

    def share(self, pass_seconds: float) -> float:
        """Share of a forward pass that gives each reply one token; with steps ahead a pass gives more."""
        spent = self.microseconds * 1e-6 * self.requests
        return spent / (pass_seconds + spent)


class _Ready:
    """An engine with all tokens ready: each request continues the reply from the end of its prompt."""

    context_length = 1 << 20
    healthy = True

    def __init__(self, tokenizer: Tokenizer, reply: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.in_flight = 0
        self._reply = reply

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.in_flight += 1
        try:
            begin = len(prompt_ids) - _PROMPT
            for index in range(begin, min(begin + sampling.max_tokens, len(self._reply))):
                await asyncio.sleep(0)  # the others' turn, as in a batch
                last = index == len(self._reply) - 1
                yield Delta((self._reply[index],), finish_reason="stop" if last else None)
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """There is nothing to end."""


def measure(requests: int, tokens: int, steps: int, *, rejected: float = 0.0, depth: int = 4) -> Overhead:
    """Measure so many replies at once, each with `tokens` in `steps` steps of the same length.

    Args:
        rejected: Share of the draft steps that differ from the target's.
        depth: Steps ahead (γ); 0: the target alone.
    """
    return asyncio.run(_measure(requests, tokens, steps, rejected, depth))


async def _measure(requests: int, tokens: int, steps: int, rejected: float, depth: int) -> Overhead:
    tokenizer = ScriptedTokenizer()
    words = tokens // steps - 1
    every = round(1 / rejected) if rejected else 0
    texts = [" ".join(f"word{number}" for number in range(words)) + "\n\n" for _ in range(steps)]
    others = [
        text.replace("word1", "other", 1) if every and index % every == every - 1 else text
        for index, text in enumerate(texts)
    ]
    replies = [[*tokenizer.encode("".join(both)), ScriptedTokenizer.EOS] for both in (texts, others)]
    target, draft = (_Ready(tokenizer, reply) for reply in replies)
    engine_only = await _of_engine(_Ready(tokenizer, replies[0]), requests)
    progress = _Progress(requests * len("".join(texts)), requests * len(replies[0]))
    verifier = ExactVerifier() if depth else None
    request = ReplyRequest((1,) * _PROMPT, Sampling(max_tokens=1 << 20))
    begun = time.thread_time()
    written = await asyncio.gather(
        *(
            lookahead(request, target, draft, verifier, DecodingSettings(depth=depth), progress.count)
            for _ in range(requests)
        )
    )
    spent = time.thread_time() - begun
    # Target and draft write each token once, and that is the engines' time.
    own = engine_only * (2 if depth else 1)
    total = sum(len(reply.token_ids) for reply in written)
    committed = sum(reply.report.steps for reply in written)
    return Overhead(
        requests,
        sum(reply.report.accepted for reply in written) / committed,
        (spent / total - own) * 1e6,
        (progress.rate(0) - own) * 1e6,
        (progress.rate(_PARTS - 1) - own) * 1e6,
    )


async def _of_engine(engine: _Ready, requests: int) -> float:
    """CPU seconds per token of reading an engine to its end, and nothing else."""

    async def read() -> int:
        return sum([len(delta.token_ids) async for delta in engine.generate((1,) * _PROMPT, Sampling(1 << 20))])

    begun = time.thread_time()
    tokens = sum(await asyncio.gather(*(read() for _ in range(requests))))
    return (time.thread_time() - begun) / tokens


class _Progress:
    """CPU time at each tenth of the text of all replies."""

    def __init__(self, characters: int, tokens: int) -> None:
        self._characters = characters
        self._tokens = tokens
        self._seen = 0
        self._times = [time.thread_time()]

    def count(self, text: str) -> None:
        self._seen += len(text)
        while self._seen * _PARTS >= len(self._times) * self._characters:
            self._times.append(time.thread_time())

    def rate(self, part: int) -> float:
        """CPU seconds per token in one of the parts."""
        return (self._times[part + 1] - self._times[part]) * _PARTS / self._tokens
