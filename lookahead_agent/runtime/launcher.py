"""Fetches models, starts engines on the cores or the share of a GPU that they have, and starts ended ones again."""

import asyncio
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lookahead_agent.engines import background
from lookahead_agent.engines.background import in_daemon_thread
from lookahead_agent.engines.engine_pool import POOL, EnginePool
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.processes import available_cores
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.servers import Server
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments
from lookahead_agent.errors import ConfigurationError, EngineError, LookaheadError
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.resolve import fetch, fetch_tokenizer
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec, select_engines
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.weights import USABLE, Platform, Weights, judge_weights, memory_shares
from lookahead_agent.verifiers.embedding import Embedder, RemoteEmbedder, SentenceEmbedder
from lookahead_agent.verifiers.judge import EngineJudge, RemoteJudge

logger = logging.getLogger(__name__)

# Share of a GPU's memory for a judge of its own, which is loaded later than target and draft.
_JUDGE_SHARE = 0.16
# Seconds after which a draft server that could not be reached is looked for again.
_LOOK_AGAIN = 5.0
# Times that a draft or judge whose process ended is started again: killed for its memory, it would be killed again.
_RESTARTS = 3

Connection = TypeVar("Connection", OpenAIEngine, RemoteJudge, RemoteEmbedder)


@dataclass(frozen=True)
class Loaders:
    """The sources of models and engines, which tests replace; no platform: this machine's."""

    fetch: Callable[[ModelFacts, Progress], Path] = fetch
    select: Callable[[RuntimeSpec, Path | None, Path | None, Platform], EngineSetup] = select_engines
    write: Callable[[Weights, Progress], Path] = Weights.write
    pool: EnginePool = POOL
    load_embedder: Callable[[Path], Embedder] = SentenceEmbedder
    platform: Platform | None = None
    memory_shares: Callable[..., Mapping[str, float]] = memory_shares


class EngineLauncher:
    """Starts engines and connections of a specification, tells `progress`, and holds them until it releases them.

    The models beside the target start when a policy needs them, and again when their process has ended; without them
    the target writes alone.
    """

    def __init__(self, spec: RuntimeSpec, progress: Progress, loaders: Loaders) -> None:
        self.progress = progress
        self.loaders = loaders
        self.platform = loaders.platform or Platform.detect()
        self.setup = EngineSetup()  # the engines that are started, or were last
        self.held: list[VLLMConfig] = []
        self._servers: list[Server] = []
        self._spec = spec
        self._memory_shares: Mapping[str, float] = {}
        self._remote_draft: OpenAIEngine | None = None
        self._judged: EngineSet | None = None
        self._looked_for_draft = 0.0
        self._restarts: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._holding = threading.Lock()
        self._releases = 0
        # The finalizers must not keep the launcher alive, so they get the lists and not a method.
        weakref.finalize(self, _release, loaders.pool, self.held)
        # At exit no loop runs coroutines any more, and the system ends connections.
        weakref.finalize(self, _disconnect, self._servers).atexit = False

    async def fetch(self, facts: ModelFacts) -> Path:
        """Bring a model onto this machine."""
        return await in_daemon_thread(lambda: self.loaders.fetch(facts, self.progress))

    async def write(self, *models: Weights | None) -> None:
        """Convert models' weights that are not in the precision of their engines yet, all at the same time."""
        works = (partial(self.loaders.write, each, self.progress) for each in models if each is not None)
        await asyncio.gather(*map(in_daemon_thread, works))

    async def divide_memory(self) -> None:
        """Divide a GPU's memory between the engines of `setup`, unless the target has it alone."""
        spec, setup, target, draft = self._spec, self.setup, self.setup.target, self.setup.draft
        if self.platform.on_cpu or target is None or draft is None or not setup.draft_engine:
            self._memory_shares = {}
            return
        engines = {
            "target": (target.folder, {**target.arguments, **setup.target_arguments, **spec.target_arguments}),
            "draft": (draft.folder, {**draft.arguments, **spec.draft_arguments}),
        }
        usable = USABLE if spec.models.judge is None else USABLE - _JUDGE_SHARE
        self._memory_shares = await in_daemon_thread(lambda: self.loaders.memory_shares(engines, usable=usable))

    async def start(
        self, role: str, name: str, weights: Weights, more_arguments: Mapping[str, Any] | None = None
    ) -> Engine:
        """Start a model's engine, with arguments after the specification's; engines of one configuration are shared."""
        releases, pool = self._releases, self.loaders.pool

        def acquire() -> Engine:
            # Here and not in the event loop, for the folder's name depends on what is in the model's own.
            config = self.config(role, weights.folder, {**weights.arguments, **(more_arguments or {})})
            with self.progress.task(f"Loading {role} model {name}"):
                engine = pool.acquire(config)
                with self._holding:
                    if self._releases == releases:
                        self.held.append(config)  # here, for a call that was cancelled meanwhile holds it all the same
                        return engine
                pool.release(config)
                raise EngineError("the engines were closed while they started")

        return await in_daemon_thread(acquire)

    def config(self, role: str, folder: Path, more_arguments: Mapping[str, Any]) -> VLLMConfig:
        """The configuration of a role's engine."""
        spec = self._spec
        given = {"target": spec.target_arguments, "draft": spec.draft_arguments, "judge": spec.judge_arguments}[role]
        arguments = {**more_arguments, **given}
        if "additional_config" in more_arguments and "additional_config" in given:
            arguments["additional_config"] = {**more_arguments["additional_config"], **given["additional_config"]}
        cores = None
        both = self.setup.draft_engine and spec.runs_here("target", "draft")
        if self.platform.on_cpu:
            from lookahead_agent.cpu import binding, share_cores

            target, draft = spec.cores or map(binding, share_cores(available_cores(), with_draft=both))
            cores = target if role == "target" or not spec.runs_here("target") else draft
        elif both:
            arguments.setdefault("gpu_memory_utilization", self._memory_shares.get(role, _JUDGE_SHARE))
            # The longest context for which the share has room.
            arguments.setdefault("max_model_len", -1)
        return VLLMConfig(folder, cores, as_arguments(arguments), beside_draft=both and role == "target")

    async def remote_engine(self, role: str) -> OpenAIEngine:
        """An engine over this role's server, not connected yet."""
        models, remote = self._spec.models, self._spec.remote[role]
        facts = models.target if role == "target" else models.draft or models.target
        folder = await in_daemon_thread(lambda: fetch_tokenizer(facts, self.progress))
        tokenizer = await asyncio.to_thread(HFTokenizer, folder)
        arguments = self._spec.target_arguments if role == "target" else self._spec.draft_arguments
        return self.connected(OpenAIEngine(remote, tokenizer, role, context_length=arguments.get("max_model_len")))

    def connected(self, connection: Connection) -> Connection:
        """The same connection, held."""
        self._servers.append(connection.server)
        return connection

    def release(self) -> None:
        """Shut down the engines and connections that nobody else uses, those that are still starting included."""
        with self._holding:
            self._releases += 1
        _release(self.loaders.pool, self.held)
        _disconnect(self._servers)

    # The models beside the target

    async def attend(self, engines: EngineSet, policy: VerifierPolicy) -> None:
        """Start what a policy needs and is not there; a draft or a judge that has ended starts beside the call."""
        if policy.speculates:
            self._look_for_draft(engines)
            self._restart_ended(engines)
        if engines.draft is None:
            return
        if policy.embeds and engines.embedder is None and "embedding" not in engines.problems:
            await self._put(engines, "embedding")
        if policy.asks_judge and self._judged is not engines:
            self._judged = engines
            await self._put(engines, "judge")

    def reset(self) -> None:
        """Forget restarts, before the engines are started anew."""
        for task in self._tasks.values():
            task.cancel()
        self._restarts.clear()

    async def connect_draft(self, engines: EngineSet) -> None:
        """Put the draft behind a server to work; the engines' problems say why if it cannot be reached."""
        self._remote_draft = await self.remote_engine("draft")
        await self._put(engines, "draft")

    async def start_draft(self) -> Engine:
        """The draft in an engine of its own."""
        models, setup = self._spec.models, self.setup
        assert models.draft is not None
        assert setup.draft is not None
        return await self.start("draft", models.draft.hub_id, setup.draft)

    async def _put(self, engines: EngineSet, role: str) -> None:
        """Put a model to work; the engines' problems say why if it cannot be had."""
        try:
            await {"draft": self._put_draft, "judge": self._put_judge, "embedding": self._put_embedder}[role](engines)
        except Exception as error:
            # No request fails for what the library says that reads an embedding model.
            done_without = isinstance(error, LookaheadError) and not isinstance(error, ConfigurationError)
            if role != "embedding" and not done_without:
                raise
            if engines.problems.get(role) != str(error):
                logger.warning("running without the %s model: %s", role, error)
            engines.problems[role] = str(error)
        else:
            engines.problems.pop(role, None)

    def _look_for_draft(self, engines: EngineSet) -> None:
        """See whether a draft server that could not be reached is there now, while the call goes on without it."""
        waited = time.monotonic() - self._looked_for_draft >= _LOOK_AGAIN
        task = self._tasks.get("draft")
        if self._remote_draft is not None and engines.draft is None and waited and (task is None or task.done()):
            self._tasks["draft"] = asyncio.create_task(self._put(engines, "draft"))

    def _restart_ended(self, engines: EngineSet) -> None:
        """Start a draft or a judge whose process has ended again, while calls go on without it."""
        models, draft, judge = self._spec.models, engines.draft, engines.judge
        if draft is not None and self._spec.runs_here("draft") and not draft.healthy:
            engines.draft = None
            self._restart(engines, "draft")
        own = models.judge not in (None, models.target, models.draft)
        if own and isinstance(judge, EngineJudge) and not judge.engine.healthy:
            engines.judge = None
            self._restart(engines, "judge")

    def _restart(self, engines: EngineSet, role: str) -> None:
        self._restarts[role] += 1
        if self._restarts[role] > _RESTARTS:
            engines.problems[role] = f"the {role} model's process has ended {self._restarts[role]} times"
            return
        engines.problems[role] = f"the {role} model's process has ended; it is being started again"
        logger.warning("%s", engines.problems[role])
        self._tasks[role] = asyncio.create_task(self._put(engines, role))

    async def _put_draft(self, engines: EngineSet) -> None:
        if self._remote_draft is not None:
            try:
                await self._remote_draft.connect()
            finally:
                self._looked_for_draft = time.monotonic()
            engines.draft = self._remote_draft
            return
        engines.draft = await self.start_draft()
        if self._judged is engines and self._spec.models.judge == self._spec.models.draft:
            engines.judge = EngineJudge(engines.draft)

    async def _put_judge(self, engines: EngineSet) -> None:
        models = self._spec.models
        if (remote := self._spec.remote.get("judge")) is not None:
            engines.judge = self.connected(RemoteJudge(remote))
        elif models.judge == models.draft and engines.draft is not None:
            engines.judge = EngineJudge(engines.draft)
        elif models.judge is not None and models.judge != models.target:
            engines.judge = None
            folder = await self.fetch(models.judge)
            weights = judge_weights(folder, self._spec.judge_arguments, self.platform)
            await self.write(weights)
            engines.judge = EngineJudge(await self.start("judge", models.judge.hub_id, weights))

    async def _put_embedder(self, engines: EngineSet) -> None:
        facts = self._spec.models.embedding
        if (remote := self._spec.remote.get("embedding")) is not None:
            engines.embedder = self.connected(RemoteEmbedder(remote))
            return
        folder = await self.fetch(facts)

        def load() -> Embedder:
            with self.progress.task(f"Loading embedding model {facts.hub_id}"):
                return self.loaders.load_embedder(folder)

        engines.embedder = await in_daemon_thread(load)


def _release(pool: EnginePool, held: list[VLLMConfig]) -> None:
    while held:
        pool.release(held.pop())


def _disconnect(servers: list[Server]) -> None:
    while servers:
        background.submit(servers.pop().aclose())
