"""Fetches models, and starts engines on the cores or the share of a GPU that they have."""

import asyncio
import threading
import weakref
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
from lookahead_agent.errors import EngineError
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.resolve import fetch, fetch_tokenizer
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec, select_engines
from lookahead_agent.runtime.weights import USABLE, Platform, Weights, memory_shares
from lookahead_agent.verifiers.embedding import Embedder, RemoteEmbedder, SentenceEmbedder
from lookahead_agent.verifiers.judge import RemoteJudge

# Share of a GPU's memory for a judge of its own, which is loaded later than target and draft.
_JUDGE_SHARE = 0.16


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
    """Starts engines and connections of a specification, tells `progress`, and holds them until it releases them."""

    def __init__(self, spec: RuntimeSpec, progress: Progress, loaders: Loaders) -> None:
        self.progress = progress
        self.loaders = loaders
        self.platform = loaders.platform or Platform.detect()
        self.setup = EngineSetup()  # the engines that are started, or were last
        self.held: list[VLLMConfig] = []
        self._servers: list[Server] = []
        self._spec = spec
        self._memory_shares: Mapping[str, float] = {}
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


def _release(pool: EnginePool, held: list[VLLMConfig]) -> None:
    while held:
        pool.release(held.pop())


def _disconnect(servers: list[Server]) -> None:
    while servers:
        background.submit(servers.pop().aclose())
