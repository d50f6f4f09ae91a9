"""The engines behind a chat model: which are needed, on which cores, started when they are first used."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Protocol

from lookahead_agent import __version__
from lookahead_agent.engines import background
from lookahead_agent.engines.background import in_daemon_thread
from lookahead_agent.engines.engine_pool import POOL, EnginePool
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.processes import available_cores
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.token_speculation import speculates_by_draft_model
from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.engines.vllm_config import CPU_CONTEXT, VLLMConfig, as_arguments, require_vllm, trained_context
from lookahead_agent.errors import ConfigurationError, EngineError, EngineStartError, LookaheadError, ModelError
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.models import ResolvedSet, configured, fetch, fetch_tokenizer
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.progress import LogProgress, Progress
from lookahead_agent.runtime.engine_selection import (
    EngineRequest,
    EngineSetup,
    Platform,
    Weights,
    judge_weights,
    select_engines,
)
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.gpu_memory import USABLE, memory_shares
from lookahead_agent.verifiers import Embedder, EngineJudge, RemoteEmbedder, RemoteJudge, SentenceEmbedder

logger = logging.getLogger(__name__)

# Share of a GPU's memory for a judge of its own, which is loaded later than target and draft.
_JUDGE_SHARE = 0.16
# Seconds after which a draft server that could not be reached is looked for again.
_LOOK_AGAIN = 5.0
# Times that a draft or judge whose process ended is started again: killed for its memory, it would be killed again.
_RESTARTS = 3


@dataclass(frozen=True)
class RuntimeSpec:
    """What determines the engines of a chat model.

    Attributes:
        models: Target, draft, judge and embedding model.
        target_arguments: Arguments of the target's vLLM engine.
        draft_arguments: Arguments of the draft's vLLM engine.
        judge_arguments: Arguments of the judge's vLLM engine.
        remote: The models that are behind servers, by role: "target", "draft", "judge", "embedding".
        token_speculation: Method of token-level speculation inside the target's engine, or "auto".
        precision: Of the target's weights.
        draft_precision: Of the draft's.
        cores: CPU cores as (target, draft) in vLLM's notation; None: chosen. A judge shares the draft's.
    """

    models: ResolvedSet
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)
    judge_arguments: Mapping[str, Any] = field(default_factory=dict)
    remote: Mapping[str, RemoteModel] = field(default_factory=dict)
    token_speculation: str | Mapping[str, Any] = "auto"
    precision: Precision = "auto"
    draft_precision: Precision = "auto"
    cores: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """Text that is equal for equal specifications."""
        return repr(self) + "".join(remote.key for remote in self.remote.values())

    @property
    def digest(self) -> str:
        """The key in 64 characters, of this version: by it processes agree on which engines they mean."""
        return sha256(f"{__version__} {self.key}".encode()).hexdigest()

    def runs_here(self, *roles: str) -> bool:
        """Whether these roles' models all run in engines of this process."""
        return self.remote.keys().isdisjoint(roles)

    @property
    def names(self) -> dict[str, str]:
        """The models' names by role; a judge is only named if it has an engine of its own."""
        models = self.models
        facts = {"target": models.target, "draft": models.draft, "judge": models.judge, "embedding": models.embedding}
        found = {role: each.name for role, each in facts.items() if each}
        return found | {role: each.model for role, each in self.remote.items() if each.model is not None}

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model, here or behind a server."""
        return self.models.draft is not None or not self.runs_here("draft")


class _Closable(Protocol):
    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class Loaders:
    """The sources of models and engines; tests give others.

    Attributes:
        fetch: Brings a model onto this machine.
        select: Decides which engines to start.
        write: Converts a model's weights where they need it.
        pool: Starts engines, and shares those of one configuration.
        load_embedder: Loads an embedding model.
        platform: What the engines run on; None: this machine.
        memory_shares: Divides a GPU's memory.
    """

    fetch: Callable[[ModelFacts, Progress], Path] = fetch
    select: Callable[[EngineRequest, Path | None, Path | None, Platform], EngineSetup] = select_engines
    write: Callable[[Weights, Progress], Path] = Weights.write
    pool: EnginePool = POOL
    load_embedder: Callable[[Path], Embedder] = SentenceEmbedder
    platform: Platform | None = None
    memory_shares: Callable[..., Mapping[str, float]] = memory_shares


_RUNTIMES: weakref.WeakSet[Runtime] = weakref.WeakSet()
_OF_PARENTS: list[object] = []


class Runtime:
    """Starts engines when they are needed and keeps them until it is closed or collected.

    Its coroutines run in the background loop. Chat models of one configuration share one: `Runtime.shared`.

    Args:
        spec: Which engines.
        expects_draft: Whether some policy of the chat model commands that steps are speculated on, which takes a draft
            with an engine of its own. If none does, what is fastest is started; should a call then force steps all
            the same, the engines are started anew.
        progress: Told about downloads and starts.
        loaders: Sources of models and engines.
    """

    _registry: ClassVar[weakref.WeakValueDictionary[tuple[str, bool], Runtime]] = weakref.WeakValueDictionary()
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        spec: RuntimeSpec,
        *,
        expects_draft: bool,
        progress: Progress | None = None,
        loaders: Loaders = Loaders(),
    ) -> None:
        if spec.runs_here("target") or (expects_draft and spec.runs_here("draft")):
            require_vllm()
        self._spec = spec
        self._with_draft = expects_draft and spec.has_draft
        self._loaders = loaders
        self._platform = loaders.platform or Platform.detect()
        self._engine_setup = EngineSetup()
        self._memory_shares: Mapping[str, float] = {}
        self.progress = progress or LogProgress()
        self._engines: EngineSet | None = None
        self._embedder_problem: str | None = None
        self._judged_by: EngineSet | None = None
        self._remote_draft: OpenAIEngine | None = None
        self._looking_for_draft: asyncio.Task[None] | None = None
        self._looked_for_draft = 0.0
        self._restarts: Counter[str] = Counter()
        self._restarting: dict[str, asyncio.Task[None]] = {}
        self._calls = 0
        self._changed = asyncio.Condition()
        self._leases: weakref.WeakSet[EngineLease] = weakref.WeakSet()
        self._held: list[VLLMConfig] = []
        self._holding = threading.Lock()
        self._tokenizing = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        self._closings = 0
        self._connections: list[_Closable] = []
        _RUNTIMES.add(self)
        # The finalizers must not keep the runtime alive, so they get the lists and not a method.
        weakref.finalize(self, _release, loaders.pool, self._held)
        # At exit nobody runs coroutines any more, and connections end with the process.
        weakref.finalize(self, _disconnect, self._connections).atexit = False

    @classmethod
    def shared(cls, spec: RuntimeSpec, *, expects_draft: bool) -> Runtime:
        """The runtime of a specification, which lives as long as somebody refers to it."""
        with cls._registry_lock:
            key = (spec.key, expects_draft)
            runtime = cls._registry.get(key)
            if runtime is None:
                runtime = cls._registry[key] = cls(spec, expects_draft=expects_draft)
            return runtime

    def lease(self) -> EngineLease:
        """A claim on the engines; it ends when it is released or collected."""
        lease = EngineLease(self)
        self._leases.add(lease)
        return lease

    def release(self, lease: EngineLease) -> None:
        """End a lease; the end of the last one shuts the engines down."""
        self._leases.discard(lease)
        if not self._leases:
            self.close()

    @property
    def spec(self) -> RuntimeSpec:
        """Which engines these are."""
        return self._spec

    @property
    def models(self) -> ResolvedSet:
        """Which models these are."""
        return self._spec.models

    @property
    def running(self) -> EngineSet | None:
        """The engines, if they have been started."""
        return self._engines

    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer, without its engine.

        Raises:
            ModelError: It could not be fetched.
        """
        if self._engines is not None:
            return self._engines.target.tokenizer
        with self._tokenizing:
            if self._tokenizer is None:
                self._tokenizer = HFTokenizer(fetch_tokenizer(self._spec.models.target, self.progress))
            return self._tokenizer

    def known_context_length(self) -> int | None:
        """Most tokens of prompt and reply together, as far as one knows without starting engines or asking servers."""
        if self._engines is not None:
            return self._engines.target.context_length
        given = self._spec.target_arguments.get("max_model_len")
        if isinstance(given, int) and given > 0:
            return given
        models, on_cpu = self._spec.models, self._spec.runs_here("target") and self._platform.on_cpu
        if models.catalogued is not None:
            trained = models.catalogued.context_length
        elif (folder := configured(models.target)) is not None:
            trained = trained_context(folder)
        else:
            return CPU_CONTEXT if on_cpu else None
        return min(CPU_CONTEXT, trained) if on_cpu else trained

    @asynccontextmanager
    async def engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        """The engines that a policy needs, for as long as the context lasts; starts them if they are not running.

        A target whose process has ended is started again before the call, a draft or a judge beside it: until they are
        there, the target writes alone.

        Raises:
            ModelError: A model could not be fetched.
            EngineStartError: The target could not be started.
        """
        async with self._changed:
            if self._must_start(policy):
                await self._changed.wait_for(lambda: self._calls == 0)
                await self._start(policy)
            engines = self._engines
            assert engines is not None
            if policy.speculates:
                self._look_for_draft(engines)
                self._restart_ended(engines)
            if engines.draft is not None and policy.embeds:
                await self._load_embedder(engines)
            if engines.draft is not None and policy.asks_judge:
                await self._start_judge(engines)
            self._calls += 1
        try:
            yield engines
        finally:
            async with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _must_start(self, policy: VerifierPolicy) -> bool:
        """Whether no engines run, or not those that a policy needs, or the target's process has ended."""
        if self._engines is None or self._lacks_draft(policy):
            return True
        return self._spec.runs_here("target") and not self._engines.target.healthy

    def _lacks_draft(self, policy: VerifierPolicy) -> bool:
        """Whether a policy commands what the engines that are running were not started for."""
        return policy.forces_speculation and not self._with_draft and not self._engine_setup.draft_engine

    async def _start(self, policy: VerifierPolicy) -> None:
        if not self._must_start(policy):
            return  # another call started them while this one waited
        spec = self._spec
        if policy.forces_speculation and not spec.has_draft:
            raise ConfigurationError(
                f"the policy {policy.name!r} needs a draft model: name one with draft_model=… (--draft)"
            )
        self._with_draft = self._with_draft or policy.forces_speculation
        if self._engines is not None and not self._lacks_draft(policy):
            logger.warning("the target's process has ended: starting the engines again")
        self._engines = None
        for task in self._restarting.values():
            task.cancel()
        self._restarts.clear()
        await in_daemon_thread(lambda: _release(self._loaders.pool, self._held))
        _disconnect(self._connections)
        target_folder, (draft_folder, problem) = await asyncio.gather(self._fetch_target(), self._fetch_draft())
        engine_setup = await self._select_engines(target_folder, draft_folder)
        try:
            await self._write_weights(engine_setup)
        except ModelError as error:
            if draft_folder is None:
                raise
            problem = str(error)
            engine_setup = await self._select_engines(target_folder, None)
            await self._write_weights(engine_setup)
        self._engine_setup = engine_setup
        try:
            target, (draft, late_problem) = await self._start_engines(engine_setup)
        except EngineStartError as error:
            if engine_setup.speculation_method != "shared_draft":
                raise
            engine_setup = self._engine_setup = engine_setup.without_shared_draft(str(error))
            logger.warning("%s", engine_setup.reason)
            target, (draft, late_problem) = await self._start_engines(engine_setup)
        engines = EngineSet(target, engine_setup=engine_setup, names=spec.names)
        engines.draft = draft
        problem = problem or late_problem
        if not spec.runs_here("draft") and self._may_use_draft():
            self._remote_draft = await self._remote_engine("draft")
            problem = await self._connect_draft(engines)
        if problem is not None:
            logger.warning("running without the draft model: %s", problem)
            engines.problems["draft"] = problem
        self._engines = engines

    async def _start_engines(self, engine_setup: EngineSetup) -> tuple[Engine, tuple[Engine | None, str | None]]:
        """Start target and draft at the same time."""
        self._memory_shares = await self._divide_memory(engine_setup)
        # Waited for both, so that none is left behind.
        target, draft = await asyncio.gather(
            self._start_target(engine_setup), self._start_draft(engine_setup), return_exceptions=True
        )
        if isinstance(target, BaseException) or isinstance(draft, BaseException):
            await in_daemon_thread(lambda: _release(self._loaders.pool, self._held))
            raise next(failure for failure in (target, draft) if isinstance(failure, BaseException))
        return target, draft

    async def _divide_memory(self, engine_setup: EngineSetup) -> Mapping[str, float]:
        """Shares of a GPU's memory by role; none where the target has it alone."""
        spec, target, draft = self._spec, engine_setup.target, engine_setup.draft
        if self._platform.on_cpu or target is None or draft is None or not engine_setup.draft_engine:
            return {}
        engines = {
            "target": (target.folder, {**target.arguments, **engine_setup.target_arguments, **spec.target_arguments}),
            "draft": (draft.folder, {**draft.arguments, **spec.draft_arguments}),
        }
        usable = USABLE if spec.models.judge is None else USABLE - _JUDGE_SHARE
        return await in_daemon_thread(lambda: self._loaders.memory_shares(engines, usable=usable))

    async def _fetch_target(self) -> Path | None:
        return await self._fetch(self._spec.models.target) if self._spec.runs_here("target") else None

    async def _fetch_draft(self) -> tuple[Path | None, str | None]:
        """The draft's folder, or why it could not be fetched: the target works without it."""
        draft = self._spec.models.draft
        if draft is None or not self._spec.runs_here("draft") or not self._may_use_draft():
            return None, None
        try:
            return await self._fetch(draft), None
        except LookaheadError as error:
            return None, str(error)

    async def _write_weights(self, engine_setup: EngineSetup) -> None:
        """Convert weights that are not in the precision of their engines yet, both models' at the same time."""

        async def write(weights: Weights) -> Path:
            return await in_daemon_thread(lambda: self._loaders.write(weights, self.progress))

        await asyncio.gather(*(write(each) for each in (engine_setup.target, engine_setup.draft) if each is not None))

    def _may_use_draft(self) -> bool:
        """Whether the draft may be of use: for steps, or for draft tokens."""
        method = self._spec.token_speculation
        name = method if isinstance(method, str) else method.get("method")
        return self._with_draft or name in ("auto", "draft_model", "shared_draft")

    async def _select_engines(self, target: Path | None, draft: Path | None) -> EngineSetup:
        spec = self._spec
        method = spec.token_speculation if target is not None else "none"
        if draft is None and spec.has_draft and spec.runs_here("draft") and speculates_by_draft_model(method):
            method = "none"  # it could not be fetched, and the target works without it
        wanted = EngineRequest(
            method,
            spec.precision,
            spec.draft_precision,
            spec.target_arguments,
            spec.draft_arguments,
            draft_engine=(self._with_draft or not spec.runs_here("target")) and draft is not None,
        )
        # The model's own arguments go before what is chosen here, so that nothing is decided that cannot be.
        return await in_daemon_thread(lambda: self._loaders.select(wanted, target, draft, self._platform))

    async def _remote_engine(self, role: str) -> OpenAIEngine:
        """An engine over this role's servers, not connected yet."""
        models, remote = self._spec.models, self._spec.remote[role]
        facts = models.target if role == "target" else models.draft or models.target
        folder = await in_daemon_thread(lambda: fetch_tokenizer(facts, self.progress))
        tokenizer = await asyncio.to_thread(HFTokenizer, folder)
        arguments = self._spec.target_arguments if role == "target" else self._spec.draft_arguments
        engine = OpenAIEngine(remote, tokenizer, role, context_length=arguments.get("max_model_len"))
        self._connections.append(engine)
        return engine

    def _look_for_draft(self, engines: EngineSet) -> None:
        """See whether a draft server that could not be reached is there now, while the call goes on without it."""
        if self._remote_draft is None or engines.draft is not None:
            return
        busy = self._looking_for_draft is not None and not self._looking_for_draft.done()
        if not busy and time.monotonic() - self._looked_for_draft >= _LOOK_AGAIN:
            self._looking_for_draft = asyncio.create_task(self._look(engines))

    async def _look(self, engines: EngineSet) -> None:
        problem = await self._connect_draft(engines)
        if problem is None:
            engines.problems.pop("draft", None)
        else:
            engines.problems["draft"] = problem

    def _restart_ended(self, engines: EngineSet) -> None:
        """Start a draft or a judge whose process has ended again, while calls go on without it."""
        models, draft, judge = self._spec.models, engines.draft, engines.judge
        if draft is not None and self._spec.runs_here("draft") and not draft.healthy:
            engines.draft = None
            self._restart(engines, "draft", self._restart_draft)
        own = models.judge not in (None, models.target, models.draft)
        if own and isinstance(judge, EngineJudge) and not judge.engine.healthy:
            engines.judge = None
            self._restart(engines, "judge", self._put_judge)

    def _restart(self, engines: EngineSet, role: str, start: Callable[[EngineSet], Coroutine[Any, Any, None]]) -> None:
        self._restarts[role] += 1
        if self._restarts[role] > _RESTARTS:
            engines.problems[role] = f"the {role} model's process has ended {self._restarts[role]} times"
            return
        engines.problems[role] = f"the {role} model's process has ended; it is being started again"
        logger.warning("%s", engines.problems[role])

        async def restart() -> None:
            try:
                await start(engines)
            except LookaheadError as error:
                engines.problems[role] = str(error)

        self._restarting[role] = asyncio.create_task(restart())

    async def _restart_draft(self, engines: EngineSet) -> None:
        draft, problem = await self._start_draft(self._engine_setup)
        if draft is None:
            engines.problems["draft"] = problem or "the draft model could not be started again"
            return
        engines.draft = draft
        if self._judged_by is engines and self._spec.models.judge == self._spec.models.draft:
            engines.judge = EngineJudge(draft)
        engines.problems.pop("draft", None)

    async def _connect_draft(self, engines: EngineSet) -> str | None:
        """Put the draft behind a server to work; says why if it cannot."""
        assert self._remote_draft is not None
        try:
            await self._remote_draft.connect()
        except LookaheadError as error:
            return str(error)
        finally:
            self._looked_for_draft = time.monotonic()
        engines.draft = self._remote_draft
        return None

    async def _start_target(self, engine_setup: EngineSetup) -> Engine:
        if engine_setup.target is None:
            engine = await self._remote_engine("target")
            await engine.connect()
            return engine
        name = self._spec.models.target.hub_id
        return await self._acquire("target", name, engine_setup.target, engine_setup.target_arguments)

    async def _start_draft(self, engine_setup: EngineSetup) -> tuple[Engine | None, str | None]:
        """The draft, and if it could not be started, why: the target works without it."""
        draft = self._spec.models.draft
        if engine_setup.draft is None or not engine_setup.draft_engine or draft is None:
            return None, None
        try:
            return await self._acquire("draft", draft.hub_id, engine_setup.draft), None
        except ConfigurationError:
            raise
        except LookaheadError as error:
            return None, str(error)

    async def _fetch(self, facts: ModelFacts) -> Path:
        return await in_daemon_thread(lambda: self._loaders.fetch(facts, self.progress))

    async def _acquire(
        self, role: str, name: str, weights: Weights, more_arguments: Mapping[str, Any] | None = None
    ) -> Engine:
        config = self._config(role, weights.folder, {**weights.arguments, **(more_arguments or {})})
        closings, pool = self._closings, self._loaders.pool

        def start() -> Engine:
            with self.progress.task(f"Loading {role} model {name}"):
                engine = pool.acquire(config)
                with self._holding:
                    if self._closings == closings:
                        self._held.append(config)  # here, for a call that was cancelled meanwhile holds it all the same
                        return engine
                pool.release(config)
                raise EngineError("the engines were closed while they started")

        return await in_daemon_thread(start)

    def _config(self, role: str, folder: Path, more_arguments: Mapping[str, Any]) -> VLLMConfig:
        spec = self._spec
        given = {"target": spec.target_arguments, "draft": spec.draft_arguments, "judge": spec.judge_arguments}[role]
        arguments = {**more_arguments, **given}
        if "additional_config" in more_arguments and "additional_config" in given:
            arguments["additional_config"] = {**more_arguments["additional_config"], **given["additional_config"]}
        cores = None
        both = self._engine_setup.draft_engine and spec.runs_here("target", "draft")
        if self._platform.on_cpu:
            chosen = spec.cores
            if chosen is None:
                from lookahead_agent.cpu.cores import binding, share_cores

                target, draft = share_cores(available_cores(), with_draft=both)
                chosen = binding(target), binding(draft)
            cores = chosen[0] if role == "target" or not spec.runs_here("target") else chosen[1]
        elif both:
            arguments.setdefault("gpu_memory_utilization", self._memory_shares.get(role, _JUDGE_SHARE))
            # The longest context for which the share has room.
            arguments.setdefault("max_model_len", -1)
        return VLLMConfig(folder, cores, as_arguments(arguments))

    async def _start_judge(self, engines: EngineSet) -> None:
        """Put the wanted judge in place of the target, once."""
        if engines.draft is not None and self._judged_by is not engines:
            self._judged_by = engines
            await self._put_judge(engines)

    async def _put_judge(self, engines: EngineSet) -> None:
        models, remote = self._spec.models, self._spec.remote.get("judge")
        if remote is not None:
            judge = RemoteJudge(remote)
            self._connections.append(judge)
            engines.judge = judge
        elif models.judge == models.draft and engines.draft is not None:
            engines.judge = EngineJudge(engines.draft)
        elif models.judge is not None and models.judge != models.target:
            try:
                folder = await self._fetch(models.judge)
                weights = judge_weights(folder, self._spec.judge_arguments, self._platform)
                await in_daemon_thread(lambda: self._loaders.write(weights, self.progress))
                engines.judge = EngineJudge(await self._acquire("judge", models.judge.hub_id, weights))
            except ConfigurationError:
                raise
            except LookaheadError as error:
                logger.warning("running without the judge: %s", error)
                engines.judge = None
                engines.problems["judge"] = str(error)
                return
        engines.problems.pop("judge", None)

    async def _load_embedder(self, engines: EngineSet) -> None:
        if engines.embedder is not None or engines.draft is None or self._embedder_problem is not None:
            return
        facts = self._spec.models.embedding
        if (remote := self._spec.remote.get("embedding")) is not None:
            embedder = RemoteEmbedder(remote)
            self._connections.append(embedder)
            engines.embedder = embedder
            return
        try:
            folder = await self._fetch(facts)

            def load() -> Embedder:
                with self.progress.task(f"Loading embedding model {facts.hub_id}"):
                    return self._loaders.load_embedder(folder)

            engines.embedder = await in_daemon_thread(load)
        except Exception as error:  # of whatever library reads it: no request fails for it
            logger.warning("running without the embedding model: %s", error)
            self._embedder_problem = engines.problems["embedding"] = str(error)

    def begin_anew(self) -> None:
        """Leave engines and connections to the parent, in a process that was forked."""
        self._changed, self._calls = asyncio.Condition(), 0
        self._holding = threading.Lock()
        self._held.clear()
        _OF_PARENTS.extend([self._engines, *self._connections])  # kept, so that nothing of them is closed
        self._connections.clear()
        self._restarting.clear()
        self._engines = self._judged_by = self._remote_draft = self._looking_for_draft = None

    def close(self) -> None:
        """Shut down the engines that nobody else uses; a later call starts them again."""
        with self._holding:
            self._closings += 1
        _release(self._loaders.pool, self._held)
        _disconnect(self._connections)
        self._engines = None


class EngineLease:
    """One chat model's claim on the engines of a runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def release(self) -> None:
        """End the claim; the end of the last one shuts the engines down."""
        self._runtime.release(self)


def _begin_anew() -> None:
    """Have every runtime of a process that was forked start engines of its own when they are needed."""
    Runtime._registry_lock = threading.Lock()
    for runtime in list(_RUNTIMES):
        runtime.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


def _release(pool: EnginePool, held: list[VLLMConfig]) -> None:
    while held:
        pool.release(held.pop())


def _disconnect(connections: list[_Closable]) -> None:
    while connections:
        background.submit(connections.pop().aclose())
