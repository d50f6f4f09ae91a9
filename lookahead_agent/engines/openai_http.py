"""An engine on an OpenAI-compatible server: vLLM, SGLang, llama.cpp, LM Studio, or a load balancer before several."""

import asyncio
import logging
import math
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

import httpx

from lookahead_agent.engines.affinity import RANK_HEADER
from lookahead_agent.engines.continuation import Continuation, UnavailableError
from lookahead_agent.engines.protocol import Delta, Sampling, room_for_reply
from lookahead_agent.engines.servers import RemoteModel, Retries, Server
from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.errors import ConfigurationError, EngineError, EngineStartError

logger = logging.getLogger(__name__)

_PROBE = "One two three. Une forêt, 42 + 1 = 43.\n\n"
_MODELS_SECONDS = 30.0  # seconds until a server that does not list its models counts as failed
_PROBE_SECONDS = 120.0  # the same for one token, before which some servers load the model
_RANKS = re.compile(r"\Avllm-.*-dp([1-9]\d{0,3})(?:-|\Z)")
_DEFAULT_CONTEXT = 8192
_MAX_CONTEXT = 1 << 30  # tokens
_MAX_NAME = 500  # characters of a server's name or reason
_UNCERTAIN_TOKENS = 64  # tokens that a server may count in a text beyond the local tokenizer's count


class OpenAIEngine:
    """An engine on the `/completions` endpoint of an OpenAI-compatible server; it is used from one event loop.

    It sends prompts as token ids, or as text if the server cannot use ids. vLLM's server also returns token ids. If a
    server returns only text, the local tokenizer encodes it, and steps are exchanged with that model as text. The
    context length is the argument in tokens, else the server's `max_model_len`, else 8192.
    """

    def __init__(
        self,
        remote: RemoteModel,
        tokenizer: HFTokenizer,
        role: str = "target",
        *,
        context_length: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._remote = remote
        self._role = role
        self._local_tokenizer = tokenizer
        self.tokenizer: Tokenizer = tokenizer
        self._context_override = context_length
        self.context_length = context_length or _DEFAULT_CONTEXT
        self.server = Server(remote, role, transport)
        self._model = remote.model
        self._accepts_ids = True
        self._accepts_unknown_options = True
        self._reports_cached_tokens = False
        self._connected = False
        self._has_served = False  # whether the server has begun any reply, so that the address is right
        self._is_awaited = False  # whether replies wait for the server, which is told once
        self.in_flight = 0

    @property
    def healthy(self) -> bool:
        """Whether the server responded to the latest request."""
        return self.server.answers

    async def connect(self) -> None:
        """Find out which model the server has and whether it returns token ids.

        Raises EngineStartError if the server cannot be reached, ConfigurationError for another model or tokenizer.
        """
        if self._connected:
            return
        try:
            await self._find_model()
            await self._probe_token_ids()
        except EngineError as error:
            raise EngineStartError(str(error)) from error
        self._connected = True

    @property
    def _name(self) -> str:
        """The model's name in messages."""
        return self.server.without_key(str(self._model))[:_MAX_NAME]

    async def _find_model(self) -> None:
        answer = await self.server.ask("/models", seconds=_MODELS_SECONDS)
        listed = answer.get("data") if isinstance(answer, dict) else None
        models = {
            entry["id"]: entry
            for entry in (listed if isinstance(listed, list) else ())
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        }
        if self._model not in models:
            if len(models) != 1:
                names = self.server.without_key(", ".join(sorted(models)))[:500] or "none"
                raise ConfigurationError(f"the {self._role}'s server has no model {self._model!r}; it has {names}")
            (self._model,) = models
            if self._remote.model is not None:
                logger.info("the %s's server calls its only model %r", self._role, self._name)
        if self._context_override is None:
            length = models[self._model].get("max_model_len")
            is_given = isinstance(length, int) and not isinstance(length, bool) and length > 0
            self.context_length = min(int(length or 0), _MAX_CONTEXT) if is_given else _DEFAULT_CONTEXT

    async def _probe_token_ids(self) -> None:
        ids = await asyncio.to_thread(self._local_tokenizer.encode, _PROBE)
        body = {"model": self._model, "max_tokens": 1, "temperature": 0}
        with self._answers():
            try:
                answer = await self._probe(body | {"prompt": _PROBE, "return_token_ids": True})
            except ConfigurationError:  # some servers reject unknown parameters
                self._accepts_unknown_options = False
                answer = await self._probe(body | {"prompt": _PROBE})
            choice = answer["choices"][0]
            prompt_tokens = (answer.get("usage") or {}).get("prompt_tokens")
            self._reports_cached_tokens = _count_cached_tokens(answer) is not None
            server_ids, returned = choice.get("prompt_token_ids"), choice.get("token_ids")
            if server_ids is not None:
                server_ids = [int(token) for token in server_ids]
            try:
                await self._probe(body | {"prompt": ids})
            except ConfigurationError:
                self._accepts_ids = False
            await self._find_ranks(answer.get("system_fingerprint"), body | {"prompt": _PROBE})
        if server_ids is None or returned is None or not self._accepts_ids:
            logger.info("the %s's server tells texts and not tokens: steps are exchanged as text", self._role)
            if prompt_tokens is not None and prompt_tokens not in (len(ids), len(ids) + 1):
                # The server counts other tokens than the local tokenizer: it would misread the ids.
                self._accepts_ids = False
            self.tokenizer = self._local_tokenizer.copy_for_text_exchange()
        # The server may prepend a beginning-of-sequence token.
        elif (server_ids[1:] if len(server_ids) == len(ids) + 1 else server_ids) != ids:
            raise ConfigurationError(
                f"the {self._role}'s server has another tokenizer than the one given here: name the tokenizer of "
                f"{self._name!r} ({'tokenizer' if self._role == 'target' else 'draft_tokenizer'}=…)"
            )

    async def _find_ranks(self, fingerprint: Any, body: Mapping[str, Any]) -> None:
        """Choose the data-parallel rank of each reply, if vLLM's fingerprint tells how many there are."""
        match = _RANKS.search(fingerprint) if isinstance(fingerprint, str) else None
        if match is None:
            return
        try:  # a server of some of the ranks refuses the others
            await self.server.ask("/completions", body, _PROBE_SECONDS, {RANK_HEADER: str(int(match[1]) - 1)})
        except ConfigurationError:
            return
        self.server.ranks = int(match[1])

    async def _probe(self, body: Mapping[str, Any]) -> Any:
        return await self.server.ask("/completions", body, _PROBE_SECONDS)

    @contextmanager
    def _answers(self) -> Iterator[None]:
        """Raise EngineError for an answer of another form; it does not quote the answer, which may have the API key."""
        try:
            yield
        except (EngineError, ConfigurationError):
            raise
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            raise EngineError(f"the {self._role}'s server does not answer like OpenAI's /completions") from None

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate from token ids; see `Engine.generate`."""
        room = room_for_reply(f"the {self._role}", self.context_length, prompt_ids)
        if not self._accepts_ids:  # the server counts the tokens of a text itself
            room = max(1, room - _UNCERTAIN_TOKENS)
        self.in_flight += 1
        try:
            if sampling.prompt_logprobs:
                with self._answers():
                    scores = await self._prompt_logprobs(prompt_ids, sampling)
                yield scores
                return
            limited = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            async with aclosing(self._generate_through_failures(prompt_ids, limited)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self.in_flight -= 1

    async def _generate_through_failures(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[Delta, None]:
        """Generate, and go on from the tokens received so far where a server fails; see `RemoteModel.max_retries`."""
        retries = Retries(self._remote)
        continuation = Continuation(prompt_ids, sampling, self._local_tokenizer.eos_ids, seeds=True)
        has_begun = False
        while True:
            before = continuation.count
            try:
                async with aclosing(self._request(*continuation.request)) as deltas:
                    async for delta in deltas:
                        self._has_served = True
                        if (new := continuation.take(delta)) is not None:
                            yield new
                self._is_awaited = False
                return
            except UnavailableError as failure:
                self.server.note_failure(failure)
                if (end := continuation.end) is not None:
                    yield end
                    return
                if continuation.count > before:
                    retries.reset()
                if not continuation.can_resume:
                    raise
                # The address is right if a server had taken the request, or if the balancer has had servers before.
                was_taken = not (failure.is_away or failure.needs_tokens)
                has_begun = has_begun or was_taken or (failure.is_of_gateway and self._has_served)
                # A reply does without its draft sooner than it would wait for it.
                in_reply = self._role == "target" and (sampling.in_reply or continuation.count > 0 or has_begun)
                if in_reply and failure.is_away and not self._is_awaited:
                    self._is_awaited = True
                    logger.warning("%s. Its replies wait for it, as long as the timeout", failure)
                await retries.wait(failure, in_reply=in_reply)
                continuation.resume()

    async def _request(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """The deltas of one request, of which the last has the finish reason; raises UnavailableError without one."""
        body = self._body(prompt_ids, sampling) | {"stream": True}
        # A server that tells no token ids is not vLLM's, and may share its cache between salts.
        salted = sampling.cache_salt is None or self.tokenizer is self._local_tokenizer
        if self._reports_cached_tokens and salted:
            body["stream_options"] = {"include_usage": True}
        last: Delta | None = None
        now, limit = asyncio.get_running_loop().time, self._remote.timeout or math.inf
        progressed_at = now()
        try:
            async with aclosing(self.server.stream("/completions", body)) as events:
                async for event in events:
                    with self._answers():
                        delta = self._delta(event["choices"][0], sampling) if event.get("choices") else None
                        if delta is None and last is not None:
                            last = replace(last, cached_tokens=_count_cached_tokens(event))
                    if delta is not None and last is None and delta.finish_reason is None:
                        yield delta
                    elif delta is not None and last is None:
                        last = delta  # its reader may close the stream, and the usage event follows it
                    if delta is not None and (delta.token_ids or delta.finish_reason is not None):
                        progressed_at = now()
                    elif now() - progressed_at >= limit:  # events without tokens may come without end
                        raise self.server.timeout_error(limit)
        except UnavailableError:
            if last is None:
                raise
        if last is not None:
            yield last

    def _body(self, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        prompt: Any = list(prompt_ids) if self._accepts_ids else self._local_tokenizer.decode_all(prompt_ids)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True if self.tokenizer is self._local_tokenizer else None,
            "top_k": sampling.top_k or None,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "logprobs": sampling.logprobs,
            "return_tokens_as_token_ids": True if sampling.logprobs is not None else None,
            "allowed_token_ids": list(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
            "response_format": _response_format(sampling.structured),
            "cache_salt": sampling.cache_salt if self._accepts_unknown_options else None,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _delta(self, choice: Mapping[str, Any], sampling: Sampling) -> Delta:
        ids = choice.get("token_ids")
        if ids is None:
            ids = self._local_tokenizer.encode(choice.get("text") or "")
        logprobs = None
        if sampling.logprobs is not None and (choice_logprobs := choice.get("logprobs")) is not None:
            logprobs = tuple(self._logprobs_by_id(position) for position in choice_logprobs.get("top_logprobs") or ())
        reason = choice.get("finish_reason")
        if reason in ("error", "abort"):
            details = [choice[name] for name in ("error", "message", "stop_reason") if choice.get(name)]
            why = f": {self.server.without_key(str(details[0]))[:500]}" if details else ""
            raise UnavailableError(f"{self.server.name} ended the reply with the finish_reason {reason!r}{why}")
        if reason is not None and not isinstance(reason, str):
            raise TypeError
        reason = self.server.without_key(reason)[:_MAX_NAME] if reason else reason
        return Delta(tuple(_token_id(token) for token in ids), logprobs, reason)

    def _logprobs_by_id(self, position: Mapping[str, float] | None) -> dict[int, float]:
        logprobs: dict[int, float] = {}
        for text, logprob in (position or {}).items():
            if text.startswith("token_id:"):
                logprobs[int(text.removeprefix("token_id:"))] = float(logprob)
            elif len(ids := self._local_tokenizer.encode(text)) == 1:
                logprobs[ids[0]] = float(logprob)
        return logprobs

    async def _prompt_logprobs(self, prompt_ids: Sequence[int], sampling: Sampling) -> Delta:
        body = self._body(prompt_ids, sampling) | {"max_tokens": 1, "prompt_logprobs": 0}
        answer = await self.server.ask("/completions", body)
        choice = answer["choices"][0]
        positions = choice.get("prompt_logprobs")
        if positions is None:
            raise EngineError(f"the {self._role}'s server gives no log-probabilities of prompts (vLLM's does)")
        logprobs = tuple(
            None if position is None else float(position[str(token)]["logprob"])
            for token, position in zip(prompt_ids, positions, strict=True)
        )
        return Delta(tuple(choice.get("token_ids") or ()), None, "length", logprobs)

    def close(self) -> None:
        """Do nothing: the server is not ours. `server.aclose` closes the connections."""


def _token_id(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise TypeError
    return value


def _count_cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """The prompt tokens that were in the server's prefix cache; None if the server does not report their number."""
    match answer.get("usage"):
        case {"prompt_tokens_details": {"cached_tokens": int() as cached}} if cached >= 0:
            return int(cached)
    return None  # also for a damaged usage, which must not fail a finished reply


def _response_format(structured: Mapping[str, Any] | None) -> dict[str, Any] | None:
    match structured:
        case None:
            return None
        case {"json": schema}:
            return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
        case {"json_object": True}:
            return {"type": "json_object"}
    raise ConfigurationError(f"servers know no constraint {', '.join(structured)}")
