"""A verifier of your own in the decoder: it accepts a draft step whose last number is the target's."""

import asyncio
import re

from lookahead_agent.decoding import ReplyRequest, lookahead
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer


class SameLastNumber:
    """Compares the last numbers of two steps."""

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        drafted, written = (re.findall(r"\d+", step.text)[-1:] for step in (pair.draft, pair.target))
        return Verdict(drafted == written, "last number")


# Scripted engines here; `VLLMEngine` and `OpenAIEngine` are used in the same way.
tokenizer = ScriptedTokenizer()
target = ScriptedEngine(tokenizer, [ScriptedStep("Two and two is 4.\n\n", 0.1), ScriptedStep("So it is 4.", 0.1)])
draft = ScriptedEngine(tokenizer, [ScriptedStep("2 + 2 = 4.\n\n"), ScriptedStep("So it is 5.")])
request = ReplyRequest(tuple(tokenizer.encode("What is 2 + 2?\nassistant: ")), Sampling(max_tokens=100))
reply = asyncio.run(lookahead(request, target, draft, SameLastNumber()))
print(reply.text)
print(f"[{reply.report.accepted} of {reply.report.steps} steps from the draft]")
