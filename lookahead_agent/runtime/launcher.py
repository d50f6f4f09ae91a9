"""Fetches models, and starts engines on their cores or their share of a GPU."""

import asyncio
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lookahead_agent.engines.engine_pool import POOL, EnginePool
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.servers import Server
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments
from lookahead_agent.errors import ConfigurationError, EngineError, IntegrityError, LookaheadError
from lookahead_agent.hardware.gpus import (
    MIN_CONTEXT,
    MemoryPlan,
    PlannedEngine,
    place_engines,
    plan_memory,
    visible_devices,
    visible_gpus,
)
from lookahead_agent.hardware.mps import SERVICE, MPSUse, MultiProcessService
from lookahead_agent.models.catalogue import CATALOGUE, ModelFacts
from lookahead_agent.models.resolve import fetch, fetch_tokenizer
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec, select_engines
from lookahead_agent.runtime.weights import Platform, Weights
from lookahead_agent.system import background
from lookahead_agent.system.background import in_daemon_thread
from lookahead_agent.system.machine import available_cores
from lookahead_agent.system.progress import Progress
from lookahead_agent.verifiers.embedding import Embedder, RemoteEmbedder, SentenceEmbedder
from lookahead_agent.verifiers.judge import RemoteJudge

Connection = TypeVar("Connection", OpenAIEngine, RemoteJudge, RemoteEmbedder)


@dataclass(frozen=True)
class Loaders:
    """The sources of models and engines, which tests replace; `platform` None means this machine."""

    fetch: Callable[[ModelFacts, Progress], Path] = fetch
    select: Callable[[RuntimeSpec, Path | None, Path | None, Platform], EngineSetup] = select_engines
    write: Callable[[Weights, Progress], Path] = Weights.write
    pool: EnginePool = POOL
    load_embedder: Callable[[Path], Embedder] = SentenceEmbedder
    platform: Platform | None = None
    fetch_config: Callable[[ModelFacts, Progress], Path] = fetch_tokenizer
    gpus: Callable[[], Sequence[int]] = visible_gpus  # bytes of each
    plan_memory: Callable[..., MemoryPlan] = plan_memory
    mps: MultiProcessService = SERVICE


class EngineLauncher:
    """Starts the engines and connections of a specification, reports to `progress`, and holds them until `release`."""

    def __init__(self, spec: RuntimeSpec, progress: Progress, loaders: Loaders) -> None:
        self.progress = progress
        self.loaders = loaders
        self.platform = loaders.platform or Platform.detect()
        self.setup = EngineSetup()  # the engines being started, or those started last
        self.held: list[VLLMConfig] = []
        self._servers: list[Server] = []
        self._spec = spec
        self.judge_problem: str | None = None  # why the catalogue's judge has no room, so that the target judges
        self._memory = MemoryPlan({})
        self._placement: Mapping[str, Sequence[int]] = {}
        self._mps: MPSUse | None = None
        self._mps_uses: list[MultiProcessService] = []  # services whose servers this launcher keeps running
        self._held_lock = threading.Lock()
        self._releases = 0
        # The finalizers must not keep the launcher alive, so they get the lists and no bound method.
        weakref.finalize(self, _release, loaders.pool, self.held, self._mps_uses)
        # At exit no loop runs coroutines any more, and the system closes connections.
        weakref.finalize(self, _disconnect, self._servers).atexit = False

    async def fetch(self, facts: ModelFacts) -> Path:
        """Fetch a model to this machine, and return its folder."""
        return await in_daemon_thread(lambda: self.loaders.fetch(facts, self.progress))

    async def write(self, *models: Weights | None) -> None:
        """Convert concurrently the models' weights that are not yet in the precision of their engines."""
        conversions = (partial(self.loaders.write, weights, self.progress) for weights in models if weights is not None)
        await asyncio.gather(*map(in_daemon_thread, conversions))

    async def place(self) -> None:
        """Place the engines of `setup` on GPUs, divide those that they share, and add both to the reason."""
        self._memory, self._placement, self.judge_problem, self._mps = MemoryPlan({}), {}, None, None
        if self.platform.on_cpu:
            if self._spec.gpus:
                raise ConfigurationError("gpus are for vLLM's CUDA build, and this one is for CPUs: leave them out")
            return
        engines = self._local_engines()
        if (judge := await self._fetch_judge_config(engines)) is not None:
            engines["judge"] = (judge, self._spec.judge_arguments)
        if len(engines) > 1 or self._spec.gpus:
            await in_daemon_thread(lambda: self._plan(engines))
        elif engines:
            with suppress(IntegrityError):  # vLLM knows shapes that the plan does not
                await in_daemon_thread(lambda: self._plan(engines))
        if self._memory.shares:
            self._mps = await in_daemon_thread(partial(self._acquire_mps, self._releases))
        if self._memory.explanation:
            mps = self._mps.explanation if self._mps is not None else None
            reasons = (self.setup.reason, self._memory.explanation, mps, self.judge_problem)
            self.setup = replace(self.setup, reason=". ".join(filter(None, reasons)))

    def has_gpu_for_draft(self) -> bool:
        """Whether the target leaves a GPU free, so that a draft costs it nothing; raises ConfigurationError."""
        spec = self._spec
        if self.platform.on_cpu or spec.models.draft is None or not spec.is_local("target", "draft"):
            return False
        arguments = {"target": spec.target_arguments, "draft": spec.draft_arguments}
        placed = place_engines(arguments, spec.gpus, len(self.loaders.gpus()))
        return not set(placed["target"]) & set(placed["draft"])

    @property
    def uses_mps(self) -> bool:
        """Whether the engines were started under an MPS server of this process."""
        return self._mps is not None and self._mps.folder is not None

    def _acquire_mps(self, releases: int) -> MPSUse:
        if not (self._spec.mps and self.setup.mps):
            return MPSUse("The engines of a GPU take turns, unless an MPS server runs")
        use = self.loaders.mps.acquire()
        if use.folder is not None:
            with self._held_lock:
                if self._releases == releases:
                    self._mps_uses.append(self.loaders.mps)
                    return use
            self.loaders.mps.release()
            raise EngineError("the engines were closed while they started")
        return use

    def _local_engines(self) -> dict[str, PlannedEngine]:
        """Folders and arguments of the engines that start here, by role."""
        spec, setup = self._spec, self.setup
        found: dict[str, PlannedEngine] = {}
        if setup.target is not None:
            arguments = {**setup.target.arguments, **setup.target_arguments, **spec.target_arguments}
            found["target"] = setup.target.folder, arguments
        if setup.draft is not None and setup.draft_engine:
            found["draft"] = setup.draft.folder, {**setup.draft.arguments, **spec.draft_arguments}
        return found

    def _plan(self, engines: dict[str, PlannedEngine]) -> None:
        if not (totals := self.loaders.gpus()):
            return  # vLLM says that it finds none
        models = self._spec.models
        known = CATALOGUE.get(models.name)
        if "judge" in engines and known is not None and known.judge == models.judge and "judge" not in self._spec.gpus:
            # The user did not ask for this judge, and the target can judge.
            try:
                self._place_on(engines, totals)
                has_room = "judge" not in self._memory.shares or self._memory.room >= MIN_CONTEXT
            except ConfigurationError:
                has_room = False
            if has_room:
                return
            del engines["judge"]
            self.judge_problem = f"The target judges, because a GPU has no room for {known.judge and known.judge.name}"
        self._place_on(engines, totals)

    def _place_on(self, engines: Mapping[str, PlannedEngine], totals: Sequence[int]) -> None:
        arguments = {role: given for role, (_, given) in engines.items()}
        self._placement = place_engines(arguments, self._spec.gpus, len(totals))
        self._memory = self.loaders.plan_memory(engines, self._placement, totals)

    async def _fetch_judge_config(self, engines: Mapping[str, PlannedEngine]) -> Path | None:
        """The folder of a judge with an engine of its own, whose weights may be fetched later; None without one."""
        spec, judge = self._spec, self._spec.models.judge
        drafts = "draft" in engines or not spec.is_local("draft")
        if (
            judge is None
            or judge in (spec.models.target, spec.models.draft)
            or not drafts
            or not spec.is_local("judge")
        ):
            return None
        try:
            return await in_daemon_thread(lambda: self.loaders.fetch_config(judge, self.progress))
        except LookaheadError:
            return None  # the start of the judge reports the problem

    async def start(
        self, role: str, name: str, weights: Weights, more_arguments: Mapping[str, Any] | None = None
    ) -> Engine:
        """Start a model's engine, or share an equal one; the specification's arguments override `more_arguments`."""
        releases, pool = self._releases, self.loaders.pool

        def acquire() -> Engine:
            # This runs in a thread and not in the event loop, because `weights.folder` reads the model's files.
            config = self.config(role, weights.folder, {**weights.arguments, **(more_arguments or {})})
            with self.progress.task(f"Loading {role} model {name}"):
                engine = pool.acquire(config)
                if role == "target":
                    engine.restarts = True
                with self._held_lock:
                    if self._releases == releases:
                        self.held.append(config)  # here, because a cancelled call holds the engine too
                        return engine
                pool.release(config)
                raise EngineError("the engines were closed while they started")

        return await in_daemon_thread(acquire)

    def config(self, role: str, folder: Path, more_arguments: Mapping[str, Any]) -> VLLMConfig:
        """The configuration of a role's engine."""
        spec = self._spec
        override = {"target": spec.target_arguments, "draft": spec.draft_arguments, "judge": spec.judge_arguments}[role]
        arguments = {**more_arguments, **override}
        if "additional_config" in more_arguments and "additional_config" in override:
            arguments["additional_config"] = {**more_arguments["additional_config"], **override["additional_config"]}
        cores = None
        shares_machine = self.setup.draft_engine and spec.is_local("target", "draft")
        if self.platform.on_cpu:
            from lookahead_agent.cpu import format_cores, share_cores

            target, draft = spec.cores or map(format_cores, share_cores(available_cores(), with_draft=shares_machine))
            cores = target if role == "target" or not spec.is_local("target") else draft
        else:
            if role in self._memory.shares:
                arguments.setdefault("gpu_memory_utilization", self._memory.shares[role])
            arguments.setdefault("max_model_len", -1)  # the longest context that fits
        numbers = self._placement.get(role, ())
        beside_draft = role == "target" and bool(set(numbers) & set(self._placement.get("draft", ())))
        # An engine without a variable of its own begins at the first GPU too.
        first = list(numbers) == list(range(len(numbers))) and role not in spec.gpus
        gpus = None if first else visible_devices(numbers, os.environ.get("CUDA_VISIBLE_DEVICES"))
        mps = self._mps.folder if self._mps is not None and role in self._memory.shares else None
        return VLLMConfig(folder, cores, as_arguments(arguments), beside_draft=beside_draft, gpus=gpus, mps=mps)

    async def remote_engine(self, role: str) -> OpenAIEngine:
        """An engine on this role's server, not yet connected."""
        models, remote = self._spec.models, self._spec.remote[role]
        facts = models.target if role == "target" else models.draft or models.target
        folder = await in_daemon_thread(lambda: self.loaders.fetch_config(facts, self.progress))
        tokenizer = await asyncio.to_thread(HFTokenizer, folder)
        arguments = self._spec.target_arguments if role == "target" else self._spec.draft_arguments
        return self.hold(OpenAIEngine(remote, tokenizer, role, context_length=arguments.get("max_model_len")))

    def hold(self, connection: Connection) -> Connection:
        """Hold a connection until `release`, and return it."""
        self._servers.append(connection.server)
        return connection

    def release(self) -> None:
        """Shut down engines without other users, including those still starting, and close connections."""
        with self._held_lock:
            self._releases += 1
        _release(self.loaders.pool, self.held, self._mps_uses)
        _disconnect(self._servers)


def _release(pool: EnginePool, held: list[VLLMConfig], mps_uses: list[MultiProcessService]) -> None:
    while held:
        pool.release(held.pop())
    while mps_uses:
        mps_uses.pop().release()


def _disconnect(servers: list[Server]) -> None:
    while servers:
        background.submit(servers.pop().aclose())
