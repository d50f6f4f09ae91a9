"""The engines behind a chat model: which are needed, on which cores, started when they are first used."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookahead_agent.background import in_daemon_thread
from lookahead_agent.engines.cores import available_cores, binding, share_cores
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.shared import POOL
from lookahead_agent.engines.vllm_engine import VLLMConfig, as_arguments, require_vllm, runs_on_cpu
from lookahead_agent.errors import ConfigurationError, LookaheadError
from lookahead_agent.models import ResolvedSet, fetch
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.progress import LogProgress, Progress
from lookahead_agent.verifiers import (
    CascadeVerifier,
    Embedder,
    EmbeddingVerifier,
    ExactVerifier,
    JudgeVerifier,
    SentenceEmbedder,
    Verifier,
)
from lookahead_agent.verifiers.numbers_first import NumbersFirst

logger = logging.getLogger(__name__)

# Shares of the GPU's memory; vLLM's own default of 0.9 leaves no room for a second engine.
_GPU_SHARE = {"target": 0.68, "draft": 0.2}


class EngineSet:
    """Engines that work together.

    Args:
        target: The engine whose quality the replies have.
        draft: The engine that thinks ahead; None: the target alone.
        embedder: Measures similarity for policies that need it.
    """

    def __init__(self, target: Engine, draft: Engine | None = None, embedder: Embedder | None = None) -> None:
        self.target = target
        self.draft = draft
        self.embedder = embedder
        self.problem: str | None = None
        """Why there is no draft or embedder although one was wanted."""

    def verifier(self, policy: VerifierPolicy) -> Verifier | None:
        """The policy's verifier on these engines; None if the policy has none or its models are missing."""
        if self.draft is None or not policy.speculates:
            return None
        judge = JudgeVerifier(self.target, policy.p_aligned)
        match policy.verifier:
            case "exact":
                return ExactVerifier()
            case "judge":
                return NumbersFirst(judge) if policy.same_numbers else judge
        if self.embedder is None:
            return None
        if policy.verifier == "embedding":
            return EmbeddingVerifier(self.embedder, policy.similarity)
        ask_from = policy.similarity if policy.ask_judge_from is None else min(policy.ask_judge_from, policy.similarity)
        cascade = CascadeVerifier(self.embedder, policy.similarity, ask_from, judge)
        return NumbersFirst(cascade) if policy.same_numbers else cascade


@dataclass(frozen=True)
class RuntimeSpec:
    """What determines the engines of a chat model.

    Attributes:
        models: Target, draft and embedding model.
        target_arguments: Arguments of the target's vLLM engine.
        draft_arguments: Arguments of the draft's vLLM engine.
        cores: CPU cores as (target, draft) in vLLM's notation; None: chosen.
    """

    models: ResolvedSet
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[str, str] | None = None


class Runtime:
    """Starts engines when they are needed and keeps them until it is closed or collected.

    Its coroutines run in the background loop.

    Args:
        spec: Which engines.
        expects_draft: Whether some policy of the chat model needs the draft. If none does, the target gets all
            cores; should a call then ask for the draft all the same, the target is started anew on its share.
        progress: Told about downloads and starts.
    """

    def __init__(self, spec: RuntimeSpec, *, expects_draft: bool, progress: Progress | None = None) -> None:
        require_vllm()
        self._spec = spec
        self._with_draft = expects_draft and spec.models.draft is not None
        self.progress = progress or LogProgress()
        self._engines: EngineSet | None = None
        self._embedder_problem: str | None = None
        self._users = 0
        self._changed = asyncio.Condition()
        self._held: list[VLLMConfig] = []
        # The finalizer must not keep the runtime alive, so it gets the list and not the method.
        self._close = weakref.finalize(self, _release, self._held)

    @asynccontextmanager
    async def engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        """The engines that a policy needs, for as long as the context lasts; starts them if they are not running.

        Raises:
            ModelError: A model could not be fetched.
            EngineStartError: The target could not be started.
        """
        async with self._changed:
            if self._engines is None or (policy.speculates and not self._with_draft):
                await self._changed.wait_for(lambda: self._users == 0)
                await self._start(policy)
            assert self._engines is not None
            if policy.verifier in ("embedding", "cascade"):
                await self._load_embedder(self._engines)
            self._users += 1
        try:
            yield self._engines
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()

    async def _start(self, policy: VerifierPolicy) -> None:
        if self._engines is not None and not (policy.speculates and not self._with_draft):
            return  # another call started them while this one waited
        models = self._spec.models
        if policy.speculates and models.draft is None:
            raise ConfigurationError(
                f"the policy {policy.name!r} needs a draft model: name one with draft_model=… (--draft)"
            )
        self._with_draft = self._with_draft or policy.speculates
        self._engines = None
        await in_daemon_thread(lambda: _release(self._held))
        target = await self._acquire("target", models.target.hub_id, await self._fetch(models.target))
        self._engines = EngineSet(target)
        if self._with_draft and models.draft is not None:
            try:
                folder = await self._fetch(models.draft)
                draft = await self._acquire("draft", models.draft.hub_id, folder)
                if draft.tokenizer.fingerprint != target.tokenizer.fingerprint:
                    raise ConfigurationError(
                        f"{models.draft.hub_id} has another tokenizer than {models.target.hub_id}: "
                        "choose a draft model of the target's family"
                    )
                self._engines.draft = draft
            except ConfigurationError:
                self._engines = None
                raise
            except LookaheadError as error:  # never worse than the target alone
                logger.warning("running without the draft model: %s", error)
                self._engines.problem = str(error)

    async def _fetch(self, facts: Any) -> Path:
        return await in_daemon_thread(lambda: fetch(facts, self.progress))

    async def _acquire(self, role: str, name: str, folder: Path) -> Engine:
        config = self._config(role, folder)

        def start() -> Engine:
            with self.progress.task(f"Loading {role} model {name}"):
                return POOL.acquire(config)

        engine = await in_daemon_thread(start)
        self._held.append(config)
        return engine

    def _config(self, role: str, folder: Path) -> VLLMConfig:
        given = self._spec.target_arguments if role == "target" else self._spec.draft_arguments
        arguments = dict(given)
        cores = None
        if runs_on_cpu():
            chosen = self._spec.cores
            if chosen is None:
                target, draft = share_cores(available_cores(), with_draft=self._with_draft)
                chosen = binding(target), binding(draft)
            cores = chosen[0] if role == "target" else chosen[1]
        elif self._with_draft:
            arguments.setdefault("gpu_memory_utilization", _GPU_SHARE[role])
        return VLLMConfig(folder, cores, as_arguments(arguments))

    async def _load_embedder(self, engines: EngineSet) -> None:
        if engines.embedder is not None or engines.draft is None or self._embedder_problem is not None:
            return
        facts = self._spec.models.embedding
        try:
            folder = await self._fetch(facts)

            def load() -> SentenceEmbedder:
                with self.progress.task(f"Loading embedding model {facts.hub_id}"):
                    return SentenceEmbedder(folder)

            engines.embedder = await in_daemon_thread(load)
        except (LookaheadError, OSError) as error:
            logger.warning("running without the embedding model: %s", error)
            self._embedder_problem = engines.problem = str(error)

    def close(self) -> None:
        """Shut down the engines that nobody else uses; may be called again."""
        self._close()
        self._engines = None


def _release(held: list[VLLMConfig]) -> None:
    while held:
        POOL.release(held.pop())
