"""A generation that goes on after its engine has failed: the tokens received so far become part of the prompt."""

import hashlib
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.errors import EngineError


class UnavailableError(EngineError):
    """An engine did not complete a request, and another attempt may succeed."""

    is_away = False  # whether no engine took the request, so that it may wait for one
    is_of_gateway = False  # whether a balancer said so, in place of the engine's server
    needs_tokens = False  # whether only a reply that has tokens is attempted again
    has_timed_out = False  # whether a further attempt would hang as long
    retry_after: float | None = None  # seconds that the server asks to wait


class Continuation:
    """The requests of one generation, of which each continues the tokens that the earlier ones generated.

    A form's grammar and a stop string may cover both sides of the place of a failure, so such an output is generated
    again from its beginning: greedily, or with the same seed, it repeats the tokens, which are left out. Every other
    continuation has a seed of its own, since the same random numbers at two places would not sample from the model's
    distribution.
    """

    def __init__(
        self, prompt_ids: Sequence[int], sampling: Sampling, eos_ids: Collection[int], *, seeds: bool = False
    ) -> None:
        self._prompt_ids = prompt_ids
        self._eos_ids = eos_ids
        self._repeats = sampling.structured is not None or bool(sampling.stop)
        if seeds and self._repeats and sampling.temperature > 0 and sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(31))
        self._sampling = sampling
        self._received: list[int] = []
        self._place = 0  # place in the received tokens where the current request goes on
        self._is_first = True  # whether the current request is the first one
        self._is_resumed = False  # whether the current request goes on with a reply, and no delta has told so yet

    @property
    def count(self) -> int:
        """The number of tokens received."""
        return len(self._received)

    @property
    def can_resume(self) -> bool:
        """Whether another request can go on from here: not if it would have to repeat random tokens."""
        sampling = self._sampling
        return not self._repeats or not self._received or sampling.temperature == 0 or sampling.seed is not None

    @property
    def end(self) -> Delta | None:
        """The last delta, if no token is left to generate: the engine failed before it said so. Else None."""
        is_eos = bool(self._received) and self._received[-1] in self._eos_ids
        if not is_eos and len(self._received) < self._sampling.max_tokens:
            return None
        return Delta((), None, "stop" if is_eos else "length")

    def resume(self) -> None:
        """Go on with another request."""
        self._is_resumed = bool(self._received) or self._sampling.in_reply
        self._place = 0 if self._repeats else len(self._received)
        self._is_first = False

    @property
    def request(self) -> tuple[Sequence[int], Sampling]:
        """The prompt and the sampling of the current request, before any of its tokens."""
        sampling = self._sampling
        if not self._place:
            return self._prompt_ids, sampling
        seed = sampling.seed
        if seed is not None:
            seed = int.from_bytes(hashlib.sha256(f"{seed}:{self._place}".encode()).digest()[:4])
        left = sampling.max_tokens - self._place
        return [*self._prompt_ids, *self._received], replace(sampling, max_tokens=left, seed=seed)

    def take(self, delta: Delta) -> Delta | None:
        """The part of a request's delta that is new; None if nothing is. Raises UnavailableError for other tokens."""
        ids = delta.token_ids
        known = self._received[self._place : self._place + len(ids)]
        ends_early = delta.finish_reason is not None and self._place + len(ids) < len(self._received)
        if list(ids[: len(known)]) != known or ends_early:
            raise UnavailableError("an engine that was to repeat a form or a text with stop strings wrote another one")
        self._place += len(ids)
        new = ids[len(known) :]
        self._received += new
        if self._is_first:
            return delta
        if not new and delta.finish_reason is None:
            return None
        resumptions, self._is_resumed = int(self._is_resumed), False
        logprobs = delta.logprobs[len(known) :] if delta.logprobs is not None else None
        # The prompt of a later request has tokens of the reply.
        return replace(delta, token_ids=new, logprobs=logprobs, cached_tokens=None, resumptions=resumptions)
