"""The decoder's own CPU time per token, on engines that need none: one reply of 2,000 steps, and 32 replies at once.

Every fourth draft step differs from the target's. Target and draft write each token once, and reading an engine to its
end is the engines' time: it is subtracted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from lookahead_agent.decoding import DecodingSettings, ReplyRequest, lookahead
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.verifiers.model_free import ExactVerifier

PROMPT = (1,) * 200
TOKENS, STEP_TOKENS = 32_000, 16


class Ready:
    """An engine with all tokens ready: each request goes on with the reply from the end of its prompt."""

    context_length = 1 << 20
    healthy = True
    in_flight = 0

    def __init__(self, tokenizer: ScriptedTokenizer, text: str) -> None:
        self.tokenizer = tokenizer
        self._reply = [*tokenizer.encode(text), ScriptedTokenizer.EOS]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Write the reply's tokens."""
        for token in self._reply[len(prompt_ids) - len(PROMPT) :]:
            await asyncio.sleep(0)  # the others' turn, as in a batch
            yield Delta((token,), finish_reason="stop" if token == ScriptedTokenizer.EOS else None)

    def close(self) -> None:
        """There is nothing to end."""


async def microseconds(replies: int) -> float:
    """CPU time of the decoder per token of so many replies at once."""
    step = " ".join(f"word{number}" for number in range(STEP_TOKENS - 1)) + "\n\n"
    other = step.replace("word1 ", "other ")
    count = TOKENS // replies // STEP_TOKENS
    tokenizer, sampling = ScriptedTokenizer(), Sampling(max_tokens=1 << 20)
    target = Ready(tokenizer, step * count)
    draft = Ready(tokenizer, "".join(other if number % 4 == 3 else step for number in range(count)))

    async def read() -> None:
        async for _ in target.generate(PROMPT, sampling):
            pass

    begun = time.thread_time()
    await asyncio.gather(*(read() for _ in range(replies)))
    engines = time.thread_time() - begun
    request, verifier, settings = ReplyRequest(PROMPT, sampling), ExactVerifier(), DecodingSettings(depth=4)
    begun = time.thread_time()
    await asyncio.gather(*(lookahead(request, target, draft, verifier, settings) for _ in range(replies)))
    return (time.thread_time() - begun - 2 * engines) / (replies * count * STEP_TOKENS) * 1e6


for replies in (1, 32):
    spent = asyncio.run(microseconds(replies))
    of_pass = spent * replies / (20_000 + spent * replies)
    print(f"{replies} at once: {spent:.0f} microseconds a token, {of_pass:.1%} of a forward pass of 20 ms")
