"""Fetches models, and starts engines on their cores or their share of a GPU."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lookahead_agent.engines.engine_pool import POOL, EnginePool
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.servers import Server
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments
from lookahead_agent.errors import EngineError
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.resolve import fetch, fetch_tokenizer
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec, select_engines
from lookahead_agent.runtime.weights import USABLE, Platform, Weights, memory_shares
from lookahead_agent.system import background
from lookahead_agent.system.background import in_daemon_thread
from lookahead_agent.system.machine import available_cores
from lookahead_agent.system.progress import Progress
from lookahead_agent.verifiers.embedding import Embedder, RemoteEmbedder, SentenceEmbedder
from lookahead_agent.verifiers.judge import RemoteJudge

# Share of a GPU's memory for a separate judge, which is loaded after target and draft.
_JUDGE_SHARE = 0.16


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
    memory_shares: Callable[..., Mapping[str, float]] = memory_shares


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
        self._memory_shares: Mapping[str, float] = {}
        self._held_lock = threading.Lock()
        self._releases = 0
        # The finalizers must not keep the launcher alive, so they get the lists and no bound method.
        weakref.finalize(self, _release, loaders.pool, self.held)
        # At exit no loop runs coroutines any more, and the system closes connections.
        weakref.finalize(self, _disconnect, self._servers).atexit = False

    async def fetch(self, facts: ModelFacts) -> Path:
        """Fetch a model to this machine, and return its folder."""
        return await in_daemon_thread(lambda: self.loaders.fetch(facts, self.progress))

    async def write(self, *models: Weights | None) -> None:
        """Convert concurrently the models' weights that are not yet in the precision of their engines."""
        conversions = (partial(self.loaders.write, weights, self.progress) for weights in models if weights is not None)
        await asyncio.gather(*map(in_daemon_thread, conversions))

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
        """Start a model's engine, or share an equal one; the specification's arguments override `more_arguments`."""
        releases, pool = self._releases, self.loaders.pool

        def acquire() -> Engine:
            # In this thread and not in the event loop, because `weights.folder` reads the model's files.
            config = self.config(role, weights.folder, {**weights.arguments, **(more_arguments or {})})
            with self.progress.task(f"Loading {role} model {name}"):
                engine = pool.acquire(config)
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
        elif shares_machine:
            arguments.setdefault("gpu_memory_utilization", self._memory_shares.get(role, _JUDGE_SHARE))
            # The longest context that fits into the share.
            arguments.setdefault("max_model_len", -1)
        return VLLMConfig(folder, cores, as_arguments(arguments), beside_draft=shares_machine and role == "target")

    async def remote_engine(self, role: str) -> OpenAIEngine:
        """An engine on this role's server, not yet connected."""
        models, remote = self._spec.models, self._spec.remote[role]
        facts = models.target if role == "target" else models.draft or models.target
        folder = await in_daemon_thread(lambda: fetch_tokenizer(facts, self.progress))
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
        _release(self.loaders.pool, self.held)
        _disconnect(self._servers)


def _release(pool: EnginePool, held: list[VLLMConfig]) -> None:
    while held:
        pool.release(held.pop())


def _disconnect(servers: list[Server]) -> None:
    while servers:
        background.submit(servers.pop().aclose())
