"""Generates the replies of requests: in turn, counted, and within the server's limits."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from langchain_core.messages import BaseMessage
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lookahead_agent.chat.messages import from_openai
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, GenerateRequest, TextDelta
from lookahead_agent.generation.call_options import CallOptions, SamplingArguments
from lookahead_agent.policy import POLICIES, PolicyLike, as_policy
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody

_MAX_NODE = 256
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Admission:
    """Lets so many replies be generated at once, so many wait, and refuses the rest."""

    def __init__(self, concurrent: int, queue: int) -> None:
        self._concurrent = concurrent
        self._queue = queue
        self._slots = asyncio.Semaphore(concurrent)
        self._seconds = 1.0
        self.running = 0  # Replies that are being generated
        self.waiting = 0  # Replies that wait

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for one's turn, and have it while the context lasts."""
        if self.running >= self._concurrent and self.waiting >= self._queue:
            wait = {"Retry-After": str(math.ceil(self._seconds * (self.waiting + 1) / self._concurrent))}
            message = f"{self.running} replies are being generated and {self.waiting} wait: try again later"
            raise RefusedError(429, message, code="queue_full", headers=wait)
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        self.running += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self.running -= 1
            self._slots.release()
            # How long a reply takes lately, for those who ask when to come again.
            self._seconds += 0.2 * (time.monotonic() - started - self._seconds)


class Metrics:
    """Counts what the server does; other nodes and policies than these, which clients choose, are "other"."""

    def __init__(self, nodes: frozenset[str], policies: frozenset[str]) -> None:
        self._nodes = nodes
        self._policies = policies
        self._registry = CollectorRegistry()
        labels = ("policy", "node")
        of: dict[str, Any] = {"namespace": "lookahead", "registry": self._registry}
        timed = of | {"labelnames": labels, "buckets": _SECONDS, "unit": "seconds"}
        self._replies = Counter("replies", "Replies, by why they ended.", (*labels, "finish_reason"), **of)
        self._steps = Counter("steps", "Steps of replies, by who wrote them.", (*labels, "source"), **of)
        fates, sources = (*labels, "model", "fate"), (*labels, "model", "source")
        self._tokens = Counter("tokens", "Tokens that the engines generated, by fate.", fates, **of)
        self._prompts = Counter("prompt_tokens", "Tokens of prompts, by where they came from.", sources, **of)
        self._judged = Counter("verifier_calls", "Draft steps that the verifier was asked about.", labels, **of)
        self._disabled = Counter("speculation_disabled", "Replies whose speculation ended early.", labels, **of)
        self._failures = Counter("refused", "Requests without a reply.", ("status",), **of)
        self._seconds = Histogram("reply", "Time to generate a reply.", **timed)
        self._prompt = Histogram("prompt", "Time of a reply until the target's first token.", **timed)
        self._writing = Histogram("writing", "Time of a reply after the target's first token.", **timed)
        self._first = Histogram("first_text", "Time to the first text that is certain.", **timed)
        audited = "Steps accepted by a certificate, judged again, by outcome."
        self._audited = Gauge("audited_steps", audited, ("outcome",), **of)
        self._tightened = Gauge(
            "tightened_policies", "Certificates given up: too many of their steps were disputed.", **of
        )
        self.running = Gauge("running", "Replies being generated.", **of)
        self.waiting = Gauge("waiting", "Replies that wait.", **of)

    def count_reply(self, reply: ChatReply, seconds: float, first: float | None) -> None:
        """Count a reply that took so many seconds, and so many until its first text; None: it had none."""
        figures = reply.lookahead
        path, name = figures["path"], figures["policy"]
        node = "" if path is None else path if path in self._nodes else "other"
        # "balanced:depth=8" may be a client's own: one label for all changes of a policy.
        base = name.partition(":")[0]
        labels = (base if base in self._policies or name in self._policies else "other", node)
        self._replies.labels(*labels, reply.finish_reason).inc()
        self._steps.labels(*labels, "draft").inc(figures["accepted"])
        self._steps.labels(*labels, "target").inc(figures["steps"] - figures["accepted"])
        for model, token_counts in figures["tokens"].items():
            for fate, count in token_counts.items():
                self._tokens.labels(*labels, model, fate).inc(count)
        for model, prompt in figures["prompt_tokens"].items():
            cached = prompt["cached"] or 0
            self._prompts.labels(*labels, model, "cache").inc(cached)
            self._prompts.labels(*labels, model, "read").inc(prompt["total"] - cached)
        self._judged.labels(*labels).inc(figures["verifier_calls"])
        self._disabled.labels(*labels).inc(figures["speculation_disabled"] is not None)
        audit = figures["audit"]
        for outcome, count in (audit | {"agreed": audit["audited"] - audit["disputed"]}).items():
            if outcome in ("agreed", "disputed", "dropped"):
                self._audited.labels(outcome).set(count)
        self._tightened.set(audit["tightened"])
        self._seconds.labels(*labels).observe(seconds)
        self._prompt.labels(*labels).observe(figures["seconds"]["prompt"])
        self._writing.labels(*labels).observe(figures["seconds"]["writing"])
        if first is not None:
            self._first.labels(*labels).observe(first)

    def count_error(self, status: int) -> None:
        """Count a request without a reply."""
        self._failures.labels(str(status)).inc()

    def text(self) -> bytes:
        """All figures in Prometheus' format."""
        return generate_latest(self._registry)


class ReplyWriter:
    """Generates replies for the server."""

    def __init__(self, llm: ChatLookahead, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.model_name = settings.served_model or llm.model
        self.admission = Admission(settings.concurrent, settings.queue)
        self.replies = 0  # Replies that are complete
        named = [as_policy(policy) for policy in (*POLICIES.values(), *llm.policies.values(), llm.policy)]
        self._policies = {policy.name: policy for policy in named}
        self.metrics = Metrics(frozenset(llm.policies), frozenset(self._policies))
        self.metrics.running.set_function(lambda: self.admission.running)
        self.metrics.waiting.set_function(lambda: self.admission.waiting)
        self._context_length: int | None = None

    async def context_length(self) -> int:
        """Most tokens of prompt and reply together."""
        if self._context_length is None:
            self._context_length = await asyncio.to_thread(self.llm.backend.context_length)
        return self._context_length

    def unknown_model(self, name: str) -> RefusedError:
        """The error for another model's name."""
        message = f"there is no model {name[:200]!r}; this is {self.model_name!r}"
        return RefusedError(404, message, param="model", code="model_not_found")

    def requests(
        self, body: ChatRequestBody | CompletionRequestBody, policy: str | None, node: str | None
    ) -> list[GenerateRequest]:
        """The requests of a body, one for each of its replies; `policy` and `node` are from the headers."""
        limits, max_tokens = self.settings, body.max_tokens
        if body.model is not None and body.model != self.model_name:
            raise self.unknown_model(body.model)
        if max_tokens is not None and max_tokens > limits.max_tokens:
            raise RefusedError(400, f"a reply has at most {limits.max_tokens} tokens here", param="max_tokens")
        if body.n > limits.max_choices:
            raise RefusedError(400, f"n is at most {limits.max_choices} here", param="n")
        if node is not None and len(node) > _MAX_NODE:
            raise RefusedError(400, f"X-Lookahead-Node has at most {_MAX_NODE} characters", param="node")
        names = (*SamplingArguments.model_fields, "response_format", "tool_choice", "parallel_tool_calls")
        options = {name: getattr(body, name, None) for name in names}
        options |= {"policy": self._policy(policy or body.policy), "node": node or body.node}
        options |= {"max_tokens": min(max_tokens or self.llm.max_tokens, limits.max_tokens)}
        prompts: list[list[BaseMessage] | str | list[int]]
        if isinstance(body, ChatRequestBody):
            prompts = [[from_openai(message.model_dump(exclude_none=True)) for message in body.messages]]
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            options |= {"tools": tools, "template_arguments": body.chat_template_kwargs or {}}
        else:
            prompts = list(body.prompts)
            if len(prompts) * body.n > limits.max_choices:
                raise RefusedError(400, f"a request has at most {limits.max_choices} choices here", param="prompt")
        # Replies to one request differ, and are the same for the same request. The last seed of 64 bits is followed by
        # the first.
        first = body.seed
        seeds = [None if first is None else (first + each + 2**63) % 2**64 - 2**63 for each in range(body.n)]
        read = [CallOptions.read({**options, "seed": seed}) for seed in seeds]
        return [self.llm.request(prompt, each) for prompt in prompts for each in read]

    def _policy(self, asked: str | None) -> PolicyLike | None:
        if asked is None:
            return None
        if asked in self._policies or (":" not in asked and "=" not in asked):
            return self._policies.get(asked, asked)
        message = f"the server takes a policy's name, such as {', '.join(self._policies)}, and none of a client's own"
        raise RefusedError(400, message, param="policy")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """The text and steps of a reply, and at last the reply."""
        async with self.admission.slot():
            started = time.monotonic()
            first: float | None = None
            async with aclosing(background.astream(self.llm.backend.generate(request))) as events:
                async for event in events:
                    if isinstance(event, ChatReply):
                        self.replies += 1
                        self.metrics.count_reply(event, time.monotonic() - started, first)
                    elif first is None and isinstance(event, TextDelta):
                        first = time.monotonic() - started
                    yield event
