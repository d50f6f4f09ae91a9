"""Who judges: what a judge must do, and a model in this process."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.top_logprobs import top_logprobs
from lookahead_agent.errors import ContextLengthError

Messages = Sequence[Mapping[str, str]]


class JudgeModel(Protocol):
    """A chat model that is asked for one word."""

    async def first_words(self, messages: Messages) -> Mapping[str, float]:
        """Probabilities of the likeliest beginnings of an answer, by text.

        Raises:
            ContextLengthError: The messages are too long for the model.
            EngineError: The model failed.
        """
        ...


class EngineJudge:
    """A judge on an engine; the target's engine may judge too, in its own batch.

    Args:
        engine: The judge's engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def first_words(self, messages: Messages) -> Mapping[str, float]:
        """Probabilities of the likeliest first tokens."""
        tokenizer = self.engine.tokenizer
        # A judge that thinks first would neither say yes nor no.
        arguments = {"enable_thinking": False} if "enable_thinking" in tokenizer.template_variables else {}
        prompt = await asyncio.to_thread(tokenizer.chat_prompt, messages, None, arguments)
        if len(prompt) >= self.engine.context_length:
            raise ContextLengthError("the question to the judge is longer than its context")
        logprobs = await top_logprobs(self.engine, prompt)
        words: dict[str, float] = {}
        for token, logprob in logprobs.items():
            word = tokenizer.decode((token,))
            words[word] = words.get(word, 0.0) + math.exp(logprob)
        return words
