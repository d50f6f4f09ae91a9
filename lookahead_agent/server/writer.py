"""Generates the replies to requests, with admission control, metrics and the server's limits."""

import asyncio
import time
from collections.abc import AsyncGenerator, Hashable
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from langchain_core.messages import BaseMessage
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from lookahead_agent.chat.messages import from_openai
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding import StepEvent
from lookahead_agent.errors import PolicyError
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, GenerateRequest, TextDelta
from lookahead_agent.generation.call_options import CallOptions, SamplingArguments
from lookahead_agent.policy import POLICIES, PolicyLike, as_policy
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.clients import Admission, Client, Clients
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.health import StallMonitor
from lookahead_agent.server.models import RunningModels
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from lookahead_agent.system import background

_MAX_NODE = 256
_MAX_NODES = 32  # Nodes with a label of their own besides those with a policy
_ENDED = "the server ended while it generated the reply: the time for its shutdown is over"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)


class Metrics:
    """Prometheus metrics by policy and node.

    Clients can make up nodes and policies. The nodes given have their own labels, and so have the first 32 others;
    further ones, and policies other than those given, are labelled "other".
    """

    def __init__(self, nodes: frozenset[str], policies: frozenset[str]) -> None:
        self._nodes = set(nodes)
        self._max_nodes = len(nodes) + _MAX_NODES
        self._policies = policies
        self._registry = CollectorRegistry()
        labels = ("policy", "node")
        common: dict[str, Any] = {"namespace": "lookahead", "registry": self._registry}
        timed = common | {"labelnames": labels, "buckets": _SECONDS, "unit": "seconds"}
        self._replies = Counter("replies", "Replies, by why they ended.", (*labels, "finish_reason"), **common)
        self._steps = Counter("steps", "Steps of replies, by who wrote them.", (*labels, "source"), **common)
        by_fate, by_source = (*labels, "model", "fate"), (*labels, "model", "source")
        self._tokens = Counter("tokens", "Tokens that the engines generated, by fate.", by_fate, **common)
        self._prompts = Counter("prompt_tokens", "Tokens of prompts, by where they came from.", by_source, **common)
        self._judged = Counter("verifier_calls", "Draft steps that the verifier was asked about.", labels, **common)
        self._disabled = Counter("speculation_disabled", "Replies whose speculation ended early.", labels, **common)
        self._failures = Counter("refused", "Requests without a reply.", ("status",), **common)
        self._seconds = Histogram("reply", "Time to generate a reply.", **timed)
        self._prompt = Histogram("prompt", "Time of a reply until the target's first token.", **timed)
        self._writing = Histogram("writing", "Time of a reply after the target's first token.", **timed)
        self._first = Histogram("first_text", "Time to the first text that is certain.", **timed)
        audited = "Steps accepted by a certificate, judged again, by outcome."
        self._audited = Gauge("audited_steps", audited, ("outcome",), **common)
        self._tightened = Gauge(
            "tightened_policies", "Certificates given up: too many of their steps were disputed.", **common
        )
        self.running = Gauge("running", "Replies being generated.", **common)
        self.waiting = Gauge("waiting", "Replies that wait.", **common)

    def count_reply(self, reply: ChatReply, seconds: float, first: float | None) -> None:
        """Count a reply by its seconds in total and until its first text; `first` is None if it had no text."""
        metadata = reply.lookahead
        path, name = metadata["path"], metadata["policy"]
        if path is not None and len(self._nodes) < self._max_nodes:
            self._nodes.add(path)
        node = "" if path is None else path if path in self._nodes else "other"
        # A client may make up "balanced:depth=8": all variants of a policy share one label.
        base = name.partition(":")[0]
        labels = (base if base in self._policies or name in self._policies else "other", node)
        self._replies.labels(*labels, reply.finish_reason).inc()
        self._steps.labels(*labels, "draft").inc(metadata["accepted"])
        self._steps.labels(*labels, "target").inc(metadata["steps"] - metadata["accepted"])
        for model, token_counts in metadata["tokens"].items():
            for fate, count in token_counts.items():
                self._tokens.labels(*labels, model, fate).inc(count)
        for model, prompt in metadata["prompt_tokens"].items():
            cached = prompt["cached"] or 0
            self._prompts.labels(*labels, model, "cache").inc(cached)
            self._prompts.labels(*labels, model, "read").inc(prompt["total"] - cached)
        self._judged.labels(*labels).inc(metadata["verifier_calls"])
        self._disabled.labels(*labels).inc(metadata["speculation_disabled"] is not None)
        audit = metadata["audit"]
        for outcome, count in (audit | {"agreed": audit["audited"] - audit["disputed"]}).items():
            if outcome in ("agreed", "disputed", "dropped"):
                self._audited.labels(outcome).set(count)
        self._tightened.set(audit["tightened"])
        self._seconds.labels(*labels).observe(seconds)
        self._prompt.labels(*labels).observe(metadata["seconds"]["prompt"])
        self._writing.labels(*labels).observe(metadata["seconds"]["writing"])
        if first is not None:
            self._first.labels(*labels).observe(first)

    def count_error(self, status: int) -> None:
        """Count a request that failed with an HTTP status."""
        self._failures.labels(str(status)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class ReplyWriter:
    """Generates replies for the server."""

    def __init__(self, llm: ChatLookahead, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.model_name = settings.served_model or llm.model
        self.clients = Clients(settings.api_key)
        share = settings.concurrent // self.clients.count if self.clients.count > 1 else 1
        self.admission = Admission(
            settings.concurrent,
            settings.queue,
            share=max(1, share),
            longest=settings.max_choices,
            reserves=self.clients.count > 1,
        )
        self.replies = 0  # Replies that are complete
        self._models = RunningModels(llm)
        self._stalls = StallMonitor()
        self._has_ended = False
        self._timeouts: set[asyncio.Timeout] = set()  # timeouts of the replies that run or wait
        known = [as_policy(policy) for policy in (*POLICIES.values(), *llm.policies.values(), llm.policy)]
        self._policies = {policy.name: policy for policy in known}
        self.metrics = Metrics(frozenset(llm.policies), frozenset(self._policies))
        self.metrics.running.set_function(lambda: self.admission.running)
        self.metrics.waiting.set_function(lambda: self.admission.waiting)
        self._context_length: int | None = None

    async def context_length(self) -> int:
        """Return the maximum number of tokens of prompt and reply together."""
        if self._context_length is None:
            self._context_length = await asyncio.to_thread(self.llm.backend.context_length)
        return self._context_length

    def unknown_model(self, name: str) -> RefusedError:
        """Build the error for a model name that the server does not serve."""
        message = f"there is no model {name[:200]!r}; this is {self.model_name!r}"
        return RefusedError(404, message, param="model", code="model_not_found")

    def requests(
        self,
        body: ChatRequestBody | CompletionRequestBody,
        client: Client,
        policy: str | None,
        node: str | None,
        thread: str | None = None,
    ) -> list[GenerateRequest]:
        """Turn a body into one request per reply; `policy`, `node` and `thread` are from the headers.

        `policy` and `node` override the body's; requests of one thread go to one replica of the engines' servers.
        """
        limits, max_tokens = self.settings, body.max_tokens
        if body.model is not None and body.model != self.model_name:
            raise self.unknown_model(body.model)
        if body.n > limits.max_choices:
            raise RefusedError(400, f"n is at most {limits.max_choices} here", param="n")
        if node is not None and len(node) > _MAX_NODE:
            raise RefusedError(400, f"X-Lookahead-Node has at most {_MAX_NODE} characters", param="node")
        names = (*SamplingArguments.model_fields, "response_format", "tool_choice", "parallel_tool_calls")
        options = {name: getattr(body, name, None) for name in names}
        options |= {"policy": self._policy(policy or body.policy), "node": node or body.node}
        options |= {"max_tokens": min(max_tokens or self.llm.max_tokens or limits.max_tokens, limits.max_tokens)}
        prompts: list[list[BaseMessage] | str | list[int]]
        if isinstance(body, ChatRequestBody):
            prompts = [[from_openai(message.model_dump(exclude_none=True)) for message in body.messages]]
            tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
            options |= {"tools": tools, "template_arguments": body.chat_template_kwargs or {}}
            options |= {"thinking_tokens": body.thinking_tokens}
        else:
            prompts = list(body.prompts)
            if len(prompts) * body.n > limits.max_choices:
                raise RefusedError(400, f"a request has at most {limits.max_choices} choices here", param="prompt")
        # Each reply has its own seed, derived from the body's: a repeated request gets the same replies. Seeds wrap
        # around at 64 bits.
        first = body.seed
        seeds = [None if first is None else (first + index + 2**63) % 2**64 - 2**63 for index in range(body.n)]
        call_options = [CallOptions.read({**options, "seed": seed}) for seed in seeds]
        requests = [self.llm.request(prompt, each) for prompt in prompts for each in call_options]
        salt = client.cache_salt(body.cache_salt)
        requests = [
            replace(each, sampling=replace(each.sampling, cache_salt=salt), thread=thread or each.thread)
            for each in requests
        ]
        self.check_models(requests[0])
        return requests

    def check_models(self, request: GenerateRequest) -> None:
        """Raise PolicyError if a request would start models, unless requests may."""
        if not self.settings.start_models:
            self._models.check(request.policy)

    def _policy(self, name: str | None) -> PolicyLike | None:
        if name is None:
            return None
        if name in self._policies:
            return self._policies[name]
        if ":" not in name and "=" not in name:
            with suppress(PolicyError):  # its words offer what only the server's owner may write
                return as_policy(name)
        message = f"the server takes a policy's name, such as {', '.join(self._policies)}, and none of a client's own"
        raise RefusedError(400, message, param="policy")

    async def generate(self, request: GenerateRequest, owner: Hashable) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the text deltas and step events of a reply, and finally the reply itself."""
        try:
            async with asyncio.timeout(0 if self._has_ended else None) as timeout:
                self._timeouts.add(timeout)
                async with self.admission.slot(owner), aclosing(self._events(request)) as events:
                    async for event in events:
                        yield event
        except TimeoutError:
            if not timeout.expired():
                raise
            raise RefusedError(503, _ENDED, code="shutdown") from None
        finally:
            self._timeouts.discard(timeout)

    async def _events(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        started = time.monotonic()
        first: float | None = None
        limits = [limit for limit in (request.target_timeout, request.stall_timeout) if limit is not None]
        with self._stalls.watch(min(limits, default=None)) as progress:
            async with aclosing(background.astream(partial(self.llm.backend.emit_reply, request))) as events:
                async for event in events:
                    if not isinstance(event, StepEvent):  # the end of a failed reply has some
                        progress()
                    if isinstance(event, ChatReply):
                        self.replies += 1
                        self.metrics.count_reply(event, time.monotonic() - started, first)
                    elif first is None and isinstance(event, TextDelta):
                        first = time.monotonic() - started
                    yield event

    def end_replies(self) -> None:
        """End the replies that run or wait, and later ones, with an error: the time for a shutdown is over."""
        self._has_ended = True
        for timeout in self._timeouts:
            timeout.reschedule(0)

    def failure(self) -> str | None:
        """Return why the target cannot write replies, as far as is known without a request to it, else None."""
        if not self.llm.backend.healthy():
            return "the target's process has ended"
        return "the target gives no token" if self._stalls.is_stalled else None
