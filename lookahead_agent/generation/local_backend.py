"""Generates replies on the engines of this process, which chat models of one configuration share."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial

from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import ConfigurationError, LookaheadError
from lookahead_agent.generation.backend import LIVE_EVENTS, GenerateEvent, GenerateRequest, TextDelta
from lookahead_agent.generation.generator import ConstrainedGenerator, ReplyGenerator, ignore
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.tool_parsers import choose_tool_parser
from lookahead_agent.models.catalogue import ModelSet
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.runtime import Runtime
from lookahead_agent.system import background
from lookahead_agent.system.progress import Progress

logger = logging.getLogger(__name__)

_MAX_QUEUED = 16  # prompts that wait for the engines to start


class LocalBackend:
    """Generates the replies of one chat model, on the engines passed in or on those that a runtime starts."""

    def __init__(self, engines: EngineSet | None = None, runtime: Runtime | None = None) -> None:
        self.runtime = runtime
        self._injected_engines = engines
        self.catalogue_entry: ModelSet | None = runtime.models if runtime is not None and runtime.models.name else None
        """The catalogue's entry for the target; None if it has none."""
        if runtime is not None:
            runtime.lease(self)
        self._tool_parsers: dict[str | None, ToolParser] = {}
        self._prefill_queue: deque[GenerateRequest] = deque(maxlen=_MAX_QUEUED)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Yield the events of `emit_reply` in the background loop; closing the generator aborts the reply."""
        return background.event_stream(partial(self.emit_reply, request))

    async def emit_reply(
        self,
        request: GenerateRequest,
        emit: Callable[[GenerateEvent], None],
        kinds: Collection[type[GenerateEvent]] = LIVE_EVENTS,
    ) -> None:
        """Generate a reply in the background loop, and pass its events to `emit`; the last one is the `ChatReply`.

        The events before it are of these `kinds`: each event takes time.
        Raises ContextLengthError, ConfigurationError if the engine does not support the request, or EngineError.
        """
        if request.thinking_tokens is not None:
            await asyncio.to_thread(self._check_thinks)  # engines start after this check
        async with self.engines(request.policy) as engines:
            thinking = self.thinking(engines)
            parser = await self._tool_parser(request, engines)
            generator = ReplyGenerator if request.sampling.structured is None else ConstrainedGenerator
            on_text, on_step = emit if TextDelta in kinds else ignore, emit if StepEvent in kinds else None
            reply = await generator(request, engines, thinking, parser, on_text, on_step).reply()
        if self._prefill_queue:
            # The reply does not wait for it.
            background.submit_unattended(self._drain_prefill_queue(), "prompts are not read ahead")
        emit(reply)

    async def warm(self, request: GenerateRequest) -> None:
        """Queue a request's prompt for prefill, which the engines do once they run and are idle."""
        self._prefill_queue.append(request)
        await self._drain_prefill_queue()

    async def _drain_prefill_queue(self) -> None:
        while self._prefill_queue and (engines := self.running) is not None:
            request = self._prefill_queue.popleft()
            try:
                parser = await self._tool_parser(request, engines)
                await ReplyGenerator(request, engines, self.thinking(engines), parser).warm()
            except LookaheadError as error:
                logger.debug("a prompt is not read ahead: %s", error)

    async def _tool_parser(self, request: GenerateRequest, engines: EngineSet) -> ToolParser:
        """Return the parser of tool calls, and have the engines cache the policy's certificate."""
        # Both calls run in threads: they may read files or import modules, which would delay every other reply.
        if request.policy.risk is not None:
            await asyncio.to_thread(engines.resolve_certificate, request.policy)
        parsers, name = self._tool_parsers, request.tool_parser
        if name not in parsers:
            parsers[name] = await asyncio.to_thread(choose_tool_parser, name, engines.target.tokenizer)
        return parsers[name]

    @asynccontextmanager
    async def engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        """Provide the engines that a policy needs while the context lasts; start them if they are not running."""
        if self.runtime is None:
            assert self._injected_engines is not None
            yield self._injected_engines
            return
        self.runtime.lease(self)
        async with self.runtime.engines(policy) as engines:
            yield engines

    def start(self, policies: Sequence[VerifierPolicy], progress: Progress | None) -> None:
        """Start the engines that policies need; see `ChatLookahead.start`."""
        if self.runtime is not None:
            if progress is not None:
                self.runtime.launcher.progress = progress
            for policy in policies:
                background.run(self._context_length(policy))
            background.run(self._drain_prefill_queue())

    def close(self) -> None:
        """Release the engines, which shuts them down unless another chat model has leased them."""
        if self.runtime is not None:
            self.runtime.release(self)

    @property
    def running(self) -> EngineSet | None:
        """The running engines; None before they start."""
        return self._injected_engines or (self.runtime.running if self.runtime is not None else None)

    def healthy(self) -> bool:
        """Return whether the target can write replies, as far as is known without a request to it."""
        return self.running is None or self.running.target.healthy

    def models_to_start(self, policy: VerifierPolicy) -> tuple[str, ...]:
        """The roles of the models that a call under this policy would start or restart; empty if all run."""
        return self.runtime.models_to_start(policy) if self.runtime is not None else ()

    def tokenizer(self) -> Tokenizer:
        """Return the target's tokenizer; starts no engine."""
        if self.runtime is not None:
            return self.runtime.tokenizer()
        assert self._injected_engines is not None
        return self._injected_engines.target.tokenizer

    def find_context_length(self) -> int | None:
        """Return the most tokens of prompt and reply together, if known without starting engines or asking servers."""
        if self.runtime is not None:
            return self.runtime.find_context_length()
        assert self._injected_engines is not None
        return self._injected_engines.target.context_length

    def context_length(self) -> int:
        """Return the most tokens of prompt and reply together; starts the engines if they are not running."""
        return background.run(self._context_length(as_policy("off")))

    async def _context_length(self, policy: VerifierPolicy) -> int:
        async with self.engines(policy) as engines:
            return engines.target.context_length

    def thinking(self, engines: EngineSet) -> ThinkingTags | None:
        """Return the tags around the target's thinking: the catalogue's, else those of its chat template."""
        return self._tags(lambda: engines.target.tokenizer)

    def _tags(self, tokenizer: Callable[[], Tokenizer]) -> ThinkingTags | None:
        return self.catalogue_entry.thinking if self.catalogue_entry is not None else tokenizer().thinking

    def _check_thinks(self) -> None:
        if self._tags(self.tokenizer) is None:
            raise ConfigurationError(
                "thinking_tokens is for models that think, and neither the chat template nor the vocabulary of this "
                "one has thinking tags: leave it out"
            )

    def explain(self, policies: Sequence[VerifierPolicy]) -> str:
        """Explain the selection of the engines and the certificates of policies; see `ChatLookahead.explain`."""
        engines = self.running
        if engines is None:
            return "the engines are not running: call start()"
        setup = engines.engine_setup
        lines = [setup.reason if setup is not None and setup.reason else "The caller supplied the engines"]
        certified = {policy.name: engines.resolve_certificate(policy).reason for policy in policies}
        lines += [f"{name}: {reason}" for name, reason in certified.items() if reason is not None]
        table = engines.modes.table()
        return "\n".join([*lines, *(["", *table] if table else [])])
