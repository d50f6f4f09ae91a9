"""An engine that follows a script: for tests and simulation, with time that its event loop provides."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.tokenizer import ScriptedTokenizer, Tokenizer
from lookahead_agent.errors import EngineError


@dataclass(frozen=True)
class ScriptedStep:
    """What the engine does for one step of a reply.

    Attributes:
        text: What it writes; with the delimiter, if the step has one.
        seconds: How long that takes, spread evenly over its tokens.
        error: Raised instead of the last token.
        hangs: Whether it never ends after its tokens.
        ids: Token ids that it writes in place of the text's, which may be in no vocabulary.
    """

    text: str
    seconds: float = 0.0
    error: str | None = None
    hangs: bool = False
    ids: tuple[int, ...] | None = None


Script = Callable[[str, str], Sequence[ScriptedStep]]
"""Given the prompt and the reply so far, all that the engine would write next."""


class ScriptedEngine:
    """Writes what a script says.

    Args:
        tokenizer: Shared by engines that exchange token ids.
        script: A list of steps, of which step `n` follows the reply's first `n` (delimited) steps, or a function of
            the prompt and the reply so far.
        prompt_length: Tokens before the reply begins; None: it begins after the last "assistant: ".
        logprobs: Log-probabilities of tokens by text, for requests that ask for those of the first token or of the
            prompt's (there -1 for a text that is not listed).
        context_length: Most tokens of prompt and reply together.
        tokens_per_delta: How many tokens come at once.

    With a list, a reply ends (EOS) after the last step.
    """

    def __init__(
        self,
        tokenizer: ScriptedTokenizer,
        script: Sequence[ScriptedStep] | Script,
        prompt_length: int | None = None,
        *,
        logprobs: Mapping[str, float] | None = None,
        context_length: int = 1 << 20,
        tokens_per_delta: int = 1,
    ) -> None:
        self._tokenizer = tokenizer
        self._script = script if callable(script) else following(script)
        self._prompt_length = prompt_length
        self._logprobs = logprobs or {}
        self._context_length = context_length
        self._tokens_per_delta = tokens_per_delta
        self._in_flight = 0
        self._closed = False
        self.generated = 0
        """Tokens that were generated in all, but for answers."""
        self.answers = 0
        """Requests for log-probabilities that were answered, with one token each."""
        self.requests: list[tuple[tuple[int, ...], Sampling]] = []
        """Prompt and sampling parameters of every request."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer given."""
        return self._tokenizer

    @property
    def context_length(self) -> int:
        """The context length given."""
        return self._context_length

    @property
    def in_flight(self) -> int:
        """Requests that are running."""
        return self._in_flight

    @property
    def healthy(self) -> bool:
        """Whether it is not closed."""
        return not self._closed

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Write what the script says, token by token; see `Engine.generate`."""
        if self._closed:
            raise EngineError("the engine is shut down")
        self.requests.append((tuple(prompt_ids), sampling))
        self._in_flight += 1
        try:
            if sampling.logprobs is not None:
                yield self._likelihoods(sampling)
                return
            if sampling.prompt_logprobs:
                yield self._prompt_likelihoods(prompt_ids)
                return
            room = min(sampling.max_tokens, self._context_length - len(prompt_ids))
            together: tuple[int, ...] = ()
            for written, (token, seconds, step) in enumerate(self._tokens(prompt_ids), 1):
                if seconds:
                    await asyncio.sleep(seconds)
                if token is None:
                    if step.hangs:
                        await asyncio.Event().wait()
                    raise EngineError(step.error or "the script has no more to say")
                ended = token in self._tokenizer.eos_ids
                together += (token,)
                last = ended or written >= room
                if last or len(together) == self._tokens_per_delta:
                    self.generated += len(together)
                    yield Delta(together, None, "stop" if ended else "length" if last else None)
                    together = ()
                if last:
                    return
        finally:
            self._in_flight -= 1

    def _tokens(self, prompt_ids: Sequence[int]) -> list[tuple[int | None, float, ScriptedStep]]:
        """Tokens to write with the seconds before each; None where the script fails or hangs."""
        if self._prompt_length is not None:
            prompt = self._tokenizer.decode(prompt_ids[: self._prompt_length])
            reply = self._tokenizer.decode(prompt_ids[self._prompt_length :])
        else:
            prompt, _, reply = self._tokenizer.decode(prompt_ids).rpartition("assistant: ")
        tokens: list[tuple[int | None, float, ScriptedStep]] = []
        for step in self._script(prompt, reply):
            ids: list[int | None] = [*(step.ids if step.ids is not None else self._tokenizer.encode(step.text))]
            if step.error is not None or step.hangs:
                ids.append(None)
            tokens += [(token, step.seconds / len(ids), step) for token in ids]
            if ids and ids[-1] is None:
                return tokens
        return [*tokens, (ScriptedTokenizer.EOS, 0.0, ScriptedStep(""))]

    def _prompt_likelihoods(self, prompt_ids: Sequence[int]) -> Delta:
        known = [self._logprobs.get(self._tokenizer.decode((token,)), -1.0) for token in prompt_ids[1:]]
        self.answers += 1
        return Delta((ScriptedTokenizer.EOS,), None, "length", (None, *known))

    def _likelihoods(self, sampling: Sampling) -> Delta:
        logprobs = {self._tokenizer.encode(text)[0]: value for text, value in self._logprobs.items()}
        if sampling.allowed_token_ids is not None:
            logprobs = {token: logprobs.get(token, -math.inf) for token in sampling.allowed_token_ids}
        self.answers += 1
        best = max(logprobs, key=lambda token: logprobs[token])
        return Delta((best,), (logprobs,), "length")

    def close(self) -> None:
        """Refuse further requests."""
        self._closed = True


def reply_script(reply: Callable[[str], str] | str, seconds: float = 0.0) -> Script:
    """A script that writes whole replies step by step.

    Args:
        reply: The reply to every prompt, or to a given one; a function is asked for each step, and has to say the same.
        seconds: How long each step takes.
    """

    def script(prompt: str, begun: str) -> Sequence[ScriptedStep]:
        parts = re.findall(r".*?\n\n|.+\Z", reply if isinstance(reply, str) else reply(prompt), re.DOTALL)
        return following([ScriptedStep(part, seconds) for part in parts])(prompt, begun)

    return script


def following(steps: Sequence[ScriptedStep], delimiter: str = "\n\n") -> Script:
    """The script of a list: after `n` delimited steps comes step `n`, without what is already written of it."""

    def script(_: str, reply: str) -> Sequence[ScriptedStep]:
        *complete, begun = reply.split(delimiter)
        rest = list(steps[sum(1 for part in complete if part.strip()) :])
        if rest and begun and rest[0].text.startswith(begun):
            rest[0] = replace(rest[0], text=rest[0].text[len(begun) :])
        return rest

    return script
