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

from lookahead_agent import background
from lookahead_agent.background import in_daemon_thread
from lookahead_agent.engines.cores import available_cores, binding, share_cores
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.shared import POOL
from lookahead_agent.engines.token_speculation import guesses_by_draft_model, speculative_config
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_engine import VLLMConfig, as_arguments, require_vllm, runs_on_cpu
from lookahead_agent.errors import ConfigurationError, LookaheadError
from lookahead_agent.models import ResolvedSet, fetch
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.progress import LogProgress, Progress
from lookahead_agent.verifiers import (
    CascadeVerifier,
    ChecksFirst,
    DraftVerifier,
    Embedder,
    EmbeddingVerifier,
    EngineJudge,
    ExactVerifier,
    JudgeModel,
    JudgeVerifier,
    LikelihoodVerifier,
    RandomVerifier,
    ScoreVerifier,
    SentenceEmbedder,
    Verifier,
)
from lookahead_agent.verifiers.judge import USER_PROMPT
from lookahead_agent.verifiers.remote_judge import RemoteJudge
from lookahead_agent.verifiers.score import PROMPT

logger = logging.getLogger(__name__)

# Shares of the GPU's memory; vLLM's own default of 0.9 leaves no room for a second engine.
_GPU_SHARE = {"target": 0.68, "draft": 0.2}
_GPU_SHARE_WITH_JUDGE = {"target": 0.6, "draft": 0.16, "judge": 0.16}


class EngineSet:
    """Engines that work together.

    Args:
        target: The engine whose quality the replies have.
        draft: The engine that thinks ahead; None: the target alone.
        embedder: Measures similarity for policies that need it.
        judge: Judges step pairs; None: the target does.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None = None,
        embedder: Embedder | None = None,
        judge: JudgeModel | None = None,
    ) -> None:
        self.target = target
        self.draft = draft
        self.embedder = embedder
        self.judge: JudgeModel | None = judge or EngineJudge(target)
        """None if the one that was wanted could not be started."""
        self.problem: str | None = None
        """Why there is no draft, judge or embedder although one was wanted."""

    def verifier(self, policy: VerifierPolicy) -> Verifier | DraftVerifier | None:
        """The policy's verifier on these engines; None if the policy has none or its models are missing."""
        if self.draft is None or not policy.speculates:
            return None
        match policy.verifier:
            case "exact":
                return ExactVerifier()
            case "score":
                return ScoreVerifier(self.target, policy.score, policy.judge_prompt or PROMPT)
            case "likelihood":
                return LikelihoodVerifier(self.target, policy.likelihood)
            case "random":
                return RandomVerifier(policy.probability)
        if (policy.asks_judge and self.judge is None) or (policy.embeds and self.embedder is None):
            return None
        return ChecksFirst(self._by_meaning(policy), same_results=policy.compares_results)

    def _by_meaning(self, policy: VerifierPolicy) -> Verifier:
        judge = None
        if policy.asks_judge:
            assert self.judge is not None
            judge = JudgeVerifier(self.judge, policy.p_aligned, user_prompt=policy.judge_prompt or USER_PROMPT)
            if policy.verifier == "judge":
                return judge
        assert self.embedder is not None
        if policy.verifier == "embedding":
            return EmbeddingVerifier(self.embedder, policy.similarity)
        ask_from = policy.similarity if judge is None else policy.ask_judge_from
        assert ask_from is not None
        return CascadeVerifier(self.embedder, policy.similarity, ask_from, judge)


@dataclass(frozen=True)
class RemoteJudgeSpec:
    """A judge behind an OpenAI-compatible server.

    Attributes:
        url: Address up to and with `/v1`.
        model: The model's name there.
        api_key: Its key; None: none.
    """

    url: str
    model: str
    api_key: str | None = None


@dataclass(frozen=True)
class RuntimeSpec:
    """What determines the engines of a chat model.

    Attributes:
        models: Target, draft, judge and embedding model.
        target_arguments: Arguments of the target's vLLM engine.
        draft_arguments: Arguments of the draft's vLLM engine.
        judge_arguments: Arguments of the judge's vLLM engine.
        remote_judge: The judge, if it is not in this process.
        token_speculation: Method of token-level speculation inside the target's engine.
        cores: CPU cores as (target, draft) in vLLM's notation; None: chosen. A judge shares the draft's.
    """

    models: ResolvedSet
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)
    judge_arguments: Mapping[str, Any] = field(default_factory=dict)
    remote_judge: RemoteJudgeSpec | None = None
    token_speculation: str | Mapping[str, Any] = "none"
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
        self._judged_by: EngineSet | None = None
        self._users = 0
        self._changed = asyncio.Condition()
        self._held: list[VLLMConfig] = []
        # The finalizer must not keep the runtime alive, so it gets the list and not the method.
        self._close = weakref.finalize(self, _release, self._held)

    @property
    def models(self) -> ResolvedSet:
        """Which models these are."""
        return self._spec.models

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
            if policy.embeds:
                await self._load_embedder(self._engines)
            if policy.asks_judge:
                await self._start_judge(self._engines)
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
        target_folder = await self._fetch(models.target)
        try:
            draft_folder = await self._fetch(models.draft) if self._with_draft and models.draft is not None else None
            problem = None
        except LookaheadError as error:  # never worse than the target alone
            draft_folder, problem = None, str(error)
        self._engines = EngineSet(await self._start_target(target_folder, draft_folder))
        if draft_folder is not None and models.draft is not None:
            try:
                self._engines.draft = await self._acquire("draft", models.draft.hub_id, draft_folder)
            except ConfigurationError:
                self._engines = None
                raise
            except LookaheadError as error:
                problem = str(error)
        if problem is not None:
            logger.warning("running without the draft model: %s", problem)
            self._engines.problem = problem

    async def _start_target(self, folder: Path, draft_folder: Path | None) -> Engine:
        method = self._spec.token_speculation
        draft = self._spec.models.draft
        if guesses_by_draft_model(method) and draft_folder is None and draft is not None:
            draft_folder = await self._fetch(draft)
        config = speculative_config(method, draft_folder, on_cpu=runs_on_cpu())
        if config is not None and config.get("method") == "draft_model":
            await asyncio.to_thread(_check_one_vocabulary, folder, Path(config["model"]))
        return await self._acquire(
            "target", self._spec.models.target.hub_id, folder, {"speculative_config": config} if config else {}
        )

    async def _fetch(self, facts: Any) -> Path:
        return await in_daemon_thread(lambda: fetch(facts, self.progress))

    async def _acquire(
        self, role: str, name: str, folder: Path, more_arguments: Mapping[str, Any] | None = None
    ) -> Engine:
        config = self._config(role, folder, more_arguments or {})

        def start() -> Engine:
            with self.progress.task(f"Loading {role} model {name}"):
                return POOL.acquire(config)

        engine = await in_daemon_thread(start)
        self._held.append(config)
        return engine

    def _config(self, role: str, folder: Path, more_arguments: Mapping[str, Any]) -> VLLMConfig:
        spec = self._spec
        given = {"target": spec.target_arguments, "draft": spec.draft_arguments, "judge": spec.judge_arguments}[role]
        arguments = {**given, **more_arguments}
        cores = None
        if runs_on_cpu():
            chosen = spec.cores
            if chosen is None:
                target, draft = share_cores(available_cores(), with_draft=self._with_draft)
                chosen = binding(target), binding(draft)
            cores = chosen[0] if role == "target" else chosen[1]
        elif self._with_draft:
            shares = _GPU_SHARE if spec.models.judge is None else _GPU_SHARE_WITH_JUDGE
            arguments.setdefault("gpu_memory_utilization", shares[role])
        return VLLMConfig(folder, cores, as_arguments(arguments))

    async def _start_judge(self, engines: EngineSet) -> None:
        """Put the wanted judge in place of the target, once."""
        models, remote = self._spec.models, self._spec.remote_judge
        if engines.draft is None or self._judged_by is engines:
            return
        self._judged_by = engines
        if remote is not None:
            engines.judge = RemoteJudge(remote.url, remote.model, remote.api_key)
        elif models.judge == models.draft:
            engines.judge = EngineJudge(engines.draft)
        elif models.judge is not None and models.judge != models.target:
            try:
                folder = await self._fetch(models.judge)
                engines.judge = EngineJudge(await self._acquire("judge", models.judge.hub_id, folder))
            except ConfigurationError:
                raise
            except LookaheadError as error:
                logger.warning("running without the judge: %s", error)
                engines.judge = None
                engines.problem = str(error)

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
        if self._engines is not None and isinstance(self._engines.judge, RemoteJudge):
            background.submit(self._engines.judge.aclose())
        self._engines = None


def _check_one_vocabulary(target: Path, draft: Path) -> None:
    """Token-level speculation guesses the target's tokens, so the draft must have the same.

    Raises:
        ConfigurationError: It has not.
    """
    if HFTokenizer(target).fingerprint != HFTokenizer(draft).fingerprint:
        raise ConfigurationError(
            f"{draft.name} has another tokenizer than {target.name}, and draft_model speculation guesses tokens: "
            "choose another method (as a draft of steps, which are exchanged as text, it will do)"
        )


def _release(held: list[VLLMConfig]) -> None:
    while held:
        POOL.release(held.pop())
