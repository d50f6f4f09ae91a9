"""Writes the replies of requests: in turn, counted, and stopped when the client has gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from langchain_core.messages import AIMessage, BaseMessage
from starlette.requests import Request

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines import background
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.request import ChatRequest, TextDelta
from lookahead_agent.policy import POLICIES, PolicyLike, as_policy
from lookahead_agent.server.admission import Admission
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.metrics import Metrics
from lookahead_agent.server.protocol import CompletionTokens, LookaheadFigures, Sampled, Usage
from lookahead_agent.server.settings import ServerSettings
from lookahead_agent.server.streaming import disconnected

T = TypeVar("T")

_LONGEST_POLICY = 2000
"""Characters of a policy that a client writes, or fields."""

Prompt = list[BaseMessage] | str | list[int]


@dataclass(frozen=True)
class Chosen:
    """What a request's headers choose, before its body."""

    policy: str | None = None
    node: str | None = None


class ReplyWriter:
    """Writes replies for the server.

    Args:
        llm: The chat model.
        settings: The server's limits.
    """

    def __init__(self, llm: ChatLookahead, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.admission = Admission(settings.concurrent, settings.queue)
        named = [as_policy(policy) for policy in (*POLICIES.values(), *llm.policies.values(), llm.policy)]
        self._policies = {policy.name: policy for policy in named}
        self.metrics = Metrics(
            lambda: self.admission.running,
            lambda: self.admission.waiting,
            frozenset(llm.policies),
            frozenset(self._policies),
        )
        self._context_length: int | None = None

    @property
    def model_name(self) -> str:
        """The model's name on this server."""
        return self.settings.served_model or self.llm.model

    async def context_length(self) -> int:
        """Most tokens of prompt and reply together."""
        if self._context_length is None:
            self._context_length = await asyncio.to_thread(self.llm.access.context_length)
        return self._context_length

    def no_model(self, name: str) -> RefusedError:
        """The error for another model's name."""
        return RefusedError(
            404,
            f"there is no model {name[:200]!r}; this is {self.model_name!r}",
            param="model",
            code="model_not_found",
        )

    def check(self, body: Sampled, max_tokens: int | None) -> None:
        """Check what a request asks for against the limits.

        Raises:
            RefusedError: It asks for too much, or for another model.
        """
        if body.model is not None and body.model != self.model_name:
            raise self.no_model(body.model)
        if max_tokens is not None and max_tokens > self.settings.max_tokens:
            raise RefusedError(400, f"a reply has at most {self.settings.max_tokens} tokens here", param="max_tokens")
        if body.n > self.settings.max_choices:
            raise RefusedError(400, f"n is at most {self.settings.max_choices} here", param="n")

    def _policy(self, asked: str | dict[str, Any] | None) -> PolicyLike | None:
        if asked is None or (self.settings.client_policies and len(asked) <= _LONGEST_POLICY):
            return asked
        if isinstance(asked, str) and (asked in self._policies or (":" not in asked and "=" not in asked)):
            return self._policies.get(asked, asked)
        raise RefusedError(
            400,
            f"the server takes a policy's name, such as {', '.join(self._policies)}, and none of a client's own: its "
            "owner can allow them with --client-policies",
            param="policy",
        )

    def options(self, body: Sampled, max_tokens: int | None, chosen: Chosen, choice: int) -> dict[str, Any]:
        """The call's arguments for one of a request's replies."""
        return {
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            # Replies to one request differ, and are the same for the same request.
            "seed": None if body.seed is None else _wrapped(body.seed + choice),
            "stop": body.stop,
            "max_tokens": min(max_tokens or self.llm.max_tokens, self.settings.max_tokens),
            "policy": self._policy(chosen.policy or body.policy),
            "node": chosen.node or body.node,
            "response_format": body.response_format,
        }

    async def stream(self, prompt: Prompt, options: dict[str, Any]) -> AsyncGenerator[TextDelta | AIMessage, None]:
        """The pieces of a reply, and at last the message.

        Raises:
            RefusedError: Too many replies wait already.
            LookaheadError: The reply could not be written.
        """
        call = await asyncio.to_thread(self._call, prompt, options)
        async with self.admission.slot():
            started = time.monotonic()
            first: float | None = None
            async with aclosing(background.astream(self.llm.calls.work(call))) as items:
                async for item in items:
                    if isinstance(item, StepEvent):
                        continue
                    if isinstance(item, AIMessage):
                        self.metrics.written(item.response_metadata, time.monotonic() - started, first)
                    elif first is None:
                        first = time.monotonic() - started
                    yield item

    def _call(self, prompt: Prompt, options: dict[str, Any]) -> ChatRequest:
        return self.llm.calls.request(prompt, CallOptions.read(options), longest_prompt=self.settings.max_prompt_tokens)

    async def reply(self, prompt: Prompt, options: dict[str, Any]) -> AIMessage:
        """A whole reply; see `stream`."""
        message: AIMessage | None = None
        async with aclosing(self.stream(prompt, options)) as items:
            async for item in items:
                message = item if isinstance(item, AIMessage) else message
        assert message is not None
        return message


def _wrapped(seed: int) -> int:
    """In 64 bits: the last seed is followed by the first."""
    return (seed + 2**63) % 2**64 - 2**63


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, which is stopped when the client goes away.

    Raises:
        RefusedError: The client has gone (nobody will read it).
    """
    writing = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not writing.done():
            raise RefusedError(499, "the client has gone")
        return await writing
    finally:
        for task in (writing, watching):
            task.cancel()
        await asyncio.gather(writing, watching, return_exceptions=True)


def usage_of(messages: list[AIMessage], choices: int) -> Usage:
    """The tokens of a request: each prompt once, with its choices in a row."""
    counts = [message.usage_metadata for message in messages if message.usage_metadata is not None]
    prompt = sum(count["input_tokens"] for count in counts[::choices])
    completion = sum(count["output_tokens"] for count in counts)
    thinking = sum(count.get("output_token_details", {}).get("reasoning", 0) for count in counts)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        completion_tokens_details=CompletionTokens(reasoning_tokens=thinking),
    )


def figures_of(message: AIMessage) -> LookaheadFigures:
    """How a reply came about."""
    figures = message.response_metadata["lookahead"]
    return LookaheadFigures(
        policy=figures["policy"],
        steps=figures["steps"],
        accepted=figures["accepted"],
        acceptance_rate=figures["acceptance_rate"],
        speculation_disabled=figures["speculation_disabled"] is not None,
    )
