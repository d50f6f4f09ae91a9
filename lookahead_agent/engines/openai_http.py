"""Tokens from an OpenAI-compatible server: vLLM, SGLang, llama.cpp, LM Studio, or a load balancer before several."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import httpx

from lookahead_agent.engines.protocol import Delta, Sampling, room_for_reply
from lookahead_agent.engines.servers import RemoteModel, Server
from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.errors import ConfigurationError, EngineError, EngineStartError

logger = logging.getLogger(__name__)

_PROBE = "One two three. Une forêt, 42 + 1 = 43.\n\n"
_DEFAULT_CONTEXT = 8192


class OpenAIEngine:
    """An engine over the `/completions` of an OpenAI-compatible server; it is used from one event loop.

    Prompts are sent as token ids. vLLM's server answers in token ids too; of others, which tell only texts, the
    tokenizer here makes token ids, and steps are exchanged with such a model as text. Its context is as given in
    tokens, else as the server says, else 8192.
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
        self._own_tokenizer = tokenizer
        self.tokenizer: Tokenizer = tokenizer
        self._given_context = context_length
        self.context_length = context_length or _DEFAULT_CONTEXT
        self.server = Server(remote, role, transport)
        self._model = remote.model
        self._accepts_ids = True
        self._tells_cached = False
        self._connected = False
        self.in_flight = 0

    @property
    def healthy(self) -> bool:
        """Whether the server has answered the last time."""
        return self.server.answers

    async def connect(self) -> None:
        """Find out which model the server has and whether it tells token ids.

        Raises EngineStartError if it cannot be reached, ConfigurationError if it has another model or tokenizer.
        """
        if self._connected:
            return
        try:
            await self._look_for_model()
            await self._find_out_about_ids()
        except EngineError as error:
            raise EngineStartError(str(error)) from error
        self._connected = True

    async def _look_for_model(self) -> None:
        listed = {entry["id"]: entry for entry in (await self.server.ask("/models")).get("data", ())}
        if self._model not in listed:
            if len(listed) != 1:
                known = ", ".join(sorted(listed)) or "none"
                raise ConfigurationError(f"the {self._role}'s server has no model {self._model!r}; it has {known}")
            (self._model,) = listed
            if self._remote.model is not None:
                logger.info("the %s's server calls its only model %r", self._role, self._model)
        if self._given_context is None:
            self.context_length = listed[self._model].get("max_model_len") or _DEFAULT_CONTEXT

    async def _find_out_about_ids(self) -> None:
        ids = await asyncio.to_thread(self._own_tokenizer.encode, _PROBE)
        body = {"model": self._model, "max_tokens": 1, "temperature": 0}
        try:
            try:
                answer = await self.server.ask("/completions", body | {"prompt": _PROBE, "return_token_ids": True})
            except ConfigurationError:  # some servers refuse what they do not know
                answer = await self.server.ask("/completions", body | {"prompt": _PROBE})
            choice = answer["choices"][0]
            try:
                await self.server.ask("/completions", body | {"prompt": ids})
            except ConfigurationError:
                self._accepts_ids = False
        except (KeyError, IndexError, TypeError) as error:
            raise EngineError(f"the {self._role}'s server does not answer like OpenAI's /completions") from error
        self._tells_cached = _cached_tokens(answer) is not None
        theirs = choice.get("prompt_token_ids")
        if theirs is None or choice.get("token_ids") is None or not self._accepts_ids:
            logger.info("the %s's server tells texts and not tokens: steps are exchanged as text", self._role)
            counted = (answer.get("usage") or {}).get("prompt_tokens")
            if counted is not None and counted not in (len(ids), len(ids) + 1):
                # It counts other tokens than the tokenizer here makes: ids would mean something else to it.
                self._accepts_ids = False
            self.tokenizer = self._own_tokenizer.exchanging_text()
        # It may add a token for the beginning of the text.
        elif (theirs[1:] if len(theirs) == len(ids) + 1 else theirs) != ids:
            raise ConfigurationError(
                f"the {self._role}'s server has another tokenizer than the one given here: name the tokenizer of "
                f"{self._model!r} ({'tokenizer' if self._role == 'target' else 'draft_tokenizer'}=…)"
            )

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate from token ids; see `Engine.generate`."""
        room = room_for_reply(f"the {self._role}", self.context_length, prompt_ids)
        self.in_flight += 1
        try:
            if sampling.prompt_logprobs:
                yield await self._prompt_logprobs(prompt_ids)
                return
            body = self._body(prompt_ids, sampling, min(sampling.max_tokens, room)) | {"stream": True}
            if self._tells_cached:
                body["stream_options"] = {"include_usage": True}
            last: Delta | None = None
            async with aclosing(self.server.stream("/completions", body)) as events:
                async for event in events:
                    if event.get("choices"):
                        delta = self._delta(event["choices"][0], sampling)
                        if delta.finish_reason is None:
                            yield delta
                        else:
                            last = delta  # its reader may close the stream, and the usage comes after it
                    elif last is not None:
                        last = replace(last, cached_tokens=_cached_tokens(event))
            if last is not None:
                yield last
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the {self._role}'s server does not answer like OpenAI's /completions") from error
        finally:
            self.in_flight -= 1

    def _body(self, prompt_ids: Sequence[int], sampling: Sampling, max_tokens: int) -> dict[str, Any]:
        prompt: Any = list(prompt_ids) if self._accepts_ids else self._own_tokenizer.decode_all(prompt_ids)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "return_token_ids": True if self.tokenizer is self._own_tokenizer else None,
            "top_k": sampling.top_k or None,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "logprobs": sampling.logprobs,
            "return_tokens_as_token_ids": True if sampling.logprobs is not None else None,
            "allowed_token_ids": list(sampling.allowed_token_ids) if sampling.allowed_token_ids else None,
            "response_format": _response_format(sampling.structured),
        }
        return {name: value for name, value in body.items() if value is not None}

    def _delta(self, choice: Mapping[str, Any], sampling: Sampling) -> Delta:
        ids = choice.get("token_ids")
        if ids is None:
            ids = self._own_tokenizer.encode(choice.get("text") or "")
        logprobs = None
        if sampling.logprobs is not None and (stated := choice.get("logprobs")) is not None:
            logprobs = tuple(self._by_id(position) for position in stated.get("top_logprobs") or ())
        return Delta(tuple(ids), logprobs, choice.get("finish_reason"))

    def _by_id(self, position: Mapping[str, float] | None) -> dict[int, float]:
        found: dict[int, float] = {}
        for text, logprob in (position or {}).items():
            if text.startswith("token_id:"):
                found[int(text.removeprefix("token_id:"))] = logprob
            elif len(ids := self._own_tokenizer.encode(text)) == 1:
                found[ids[0]] = logprob
        return found

    async def _prompt_logprobs(self, prompt_ids: Sequence[int]) -> Delta:
        body = self._body(prompt_ids, Sampling(max_tokens=1), 1) | {"prompt_logprobs": 0}
        answer = await self.server.ask("/completions", body)
        choice = answer["choices"][0]
        stated = choice.get("prompt_logprobs")
        if stated is None:
            raise EngineError(f"the {self._role}'s server gives no log-probabilities of prompts (vLLM's does)")
        known = tuple(
            None if position is None else float(position[str(token)]["logprob"])
            for token, position in zip(prompt_ids, stated, strict=True)
        )
        return Delta(tuple(choice.get("token_ids") or ()), None, "length", known)

    def close(self) -> None:
        """Nothing: the server is not ours. `server.aclose` closes the connections."""


def _cached_tokens(answer: Mapping[str, Any]) -> int | None:
    """The tokens of a prompt that a server had in its prefix cache; None: it does not tell."""
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def _response_format(structured: Mapping[str, Any] | None) -> dict[str, Any] | None:
    match structured:
        case None:
            return None
        case {"json": schema}:
            return {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
        case {"json_object": True}:
            return {"type": "json_object"}
    raise ConfigurationError(f"servers know no constraint {', '.join(structured)}")
