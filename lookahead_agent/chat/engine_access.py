"""A chat model's engines: in this process, kept by another one, or given by a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from lookahead_agent.engines import background
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.generation.tool_parsers import ToolParser, choose_tool_parser
from lookahead_agent.models.catalogue import ModelSet, RecommendedSampling
from lookahead_agent.models.thinking_tags import ThinkingTags
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.progress import Progress
from lookahead_agent.running.connection import ask_keeper
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.runtime import Runtime


class EngineUser:
    """Represents a chat model among the users of its engines; each copy has one of its own.

    Attributes:
        tool_parsers: What reads their tool calls, by name.
    """

    def __init__(self) -> None:
        self.tool_parsers: dict[str | None, ToolParser] = {}


@dataclass(frozen=True)
class EngineAccess:
    """How a chat model gets at its engines, which it may share with others.

    Attributes:
        given: Engines that are there already and are not shut down; None: the runtime's.
        runtime: Starts engines when they are first needed; None where engines are given.
        user: On whose behalf.
        use_running: Whether engines of the same configuration that another process keeps write the replies.
    """

    given: EngineSet | None
    runtime: Runtime | None
    user: EngineUser
    use_running: bool

    @property
    def running(self) -> EngineSet | None:
        """The engines in this process; None before they are started."""
        return self.given or (self.runtime.running if self.runtime is not None else None)

    @property
    def digest(self) -> str:
        """Which engines are needed, in 64 characters that are equal in every process of this user; "" of given ones."""
        return self.runtime.spec.digest if self.runtime is not None else ""

    @property
    def described(self) -> str:
        """The names of target and draft."""
        if self.runtime is None:
            return "given engines"
        models = self.runtime.models
        return models.target.hub_id + (f" with {models.draft.hub_id}" if models.draft is not None else "")

    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer; starts no engine.

        Raises:
            ModelError: It could not be fetched.
        """
        if self.given is not None:
            return self.given.target.tokenizer
        assert self.runtime is not None
        return self.runtime.tokenizer()

    @property
    def target_name(self) -> str | None:
        """The target's name; None of given engines."""
        return self.runtime.models.target.name if self.runtime is not None else None

    def known_context_length(self) -> int | None:
        """Most tokens of prompt and reply together, as far as one knows without starting or asking anything."""
        if self.given is not None:
            return self.given.target.context_length
        assert self.runtime is not None
        return self.runtime.known_context_length()

    @property
    def _catalogued(self) -> ModelSet | None:
        return self.runtime.models.catalogued if self.runtime is not None else None

    @property
    def recommended_sampling(self) -> RecommendedSampling:
        """What the target's makers recommend, as far as the catalogue knows it."""
        catalogued = self._catalogued
        return catalogued.sampling if catalogued is not None else RecommendedSampling()

    @asynccontextmanager
    async def engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        """The engines that a policy needs, started if they are not running, for as long as the context lasts.

        Raises:
            ModelError: A model could not be fetched.
            EngineStartError: The target could not be started.
        """
        if self.given is not None:
            yield self.given
            return
        assert self.runtime is not None
        self.runtime.use(self.user)
        async with self.runtime.engines(policy) as engines:
            yield engines

    def start(self, policies: Sequence[VerifierPolicy], progress: Progress | None) -> None:
        """Start what these policies need, unless another process keeps it; see `ChatLookahead.start`."""
        if self.runtime is None:
            return
        if progress is not None:
            self.runtime.progress = progress
        if background.run(self.kept()) is not None:
            return
        for policy in policies:
            background.run(self._start(policy))

    async def _start(self, policy: VerifierPolicy) -> None:
        async with self.engines(policy):
            return

    def leave(self) -> None:
        """Say that the engines are no longer needed here; the last user's saying so shuts them down."""
        if self.runtime is not None:
            self.runtime.leave(self.user)

    @property
    def may_be_kept(self) -> bool:
        """Whether replies may come from engines that another process keeps."""
        runtime = self.runtime
        if self.given is not None or runtime is None or not self.use_running:
            return False
        # Engines that run in this process are nearer, and what is behind servers runs already.
        return runtime.running is None and not runtime.spec.remote

    async def kept(self) -> dict[str, Any] | None:
        """What is told of the engines that another process keeps, if replies come from them."""
        if not self.may_be_kept:
            return None
        status = await ask_keeper("status")
        return status if status is not None and status.get("engines") == self.digest else None

    def context_length(self) -> int:
        """Most tokens of prompt and reply together; starts the engines if they are not running."""
        return background.run(self._context_length())

    async def _context_length(self) -> int:
        if (kept := await self.kept()) is not None:
            return int(kept["context_length"])
        async with self.engines(as_policy("off")) as engines:
            return engines.target.context_length

    def healthy(self) -> bool:
        """Whether the target can write replies, as far as one knows without asking it."""
        engines = self.running
        return engines is None or engines.target.healthy

    def explain(self, policies: Sequence[VerifierPolicy]) -> str:
        """How the engines are arranged, and which certificates policies go by; see `ChatLookahead.explain`."""
        engines = self.running
        if engines is None:
            kept = background.run(self.kept())
            return "the engines are not running: call start()" if kept is None else str(kept["reason"])
        engine_setup = engines.engine_setup
        said = [
            engine_setup.reason
            if engine_setup is not None and engine_setup.reason
            else "the engines are as they were given"
        ]
        certified = {policy.name: engines.certified(policy)[2] for policy in policies}
        return "\n".join([*said, *(f"{name}: {reason}" for name, reason in certified.items() if reason is not None)])

    def thinking(self, engines: EngineSet) -> ThinkingTags | None:
        """The tags around the target's thinking: from the catalogue, else from its chat template."""
        catalogued = self._catalogued
        return catalogued.thinking if catalogued is not None else engines.target.tokenizer.thinking

    def tool_parser(self, name: str | None, engines: EngineSet) -> ToolParser:
        """What reads the target's tool calls: by its name, or by the chat template."""
        parsers = self.user.tool_parsers
        if name not in parsers:
            parsers[name] = choose_tool_parser(name, engines.target.tokenizer)
        return parsers[name]
