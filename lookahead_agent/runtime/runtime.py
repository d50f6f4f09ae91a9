"""The engines of a chat model: started on first use, restarted after a crash, and kept until they are closed."""

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from lookahead_agent.engines.counting_tokenizer import load_counting_tokenizer
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.engines.vllm_config import (
    CPU_CONTEXT,
    brought_speculation,
    read_trained_context,
    require_vllm,
    speculates_by_draft_model,
)
from lookahead_agent.errors import ConfigurationError, EngineStartError, IntegrityError, LookaheadError, ModelError
from lookahead_agent.models.resolve import fetch_tokenizer, folder_with_config
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import EngineLauncher, Loaders
from lookahead_agent.runtime.supervisor import Supervisor
from lookahead_agent.system.background import in_daemon_thread
from lookahead_agent.system.progress import LogProgress, Progress

logger = logging.getLogger(__name__)

_RUNTIMES: "weakref.WeakSet[Runtime]" = weakref.WeakSet()
_PARENT_OBJECTS: list[object] = []  # kept: garbage collection would close what the parent uses


@dataclass(eq=False)
class _Start:
    """A start of the engines, which no single call owns."""

    with_draft: bool  # whether a call needs the draft in an engine of its own
    speculates: bool  # whether its policy may accept draft steps
    drains: bool = False  # whether it waits for the running replies, or has ended their engines
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[Exception | None] | None = None


class Runtime:
    """Starts engines in the background loop when they are needed, and keeps them until it is closed or collected.

    `expects_draft` gives the draft an engine of its own; a call that forces steps restarts the engines to add one.
    """

    _registry: ClassVar["weakref.WeakValueDictionary[tuple[str, bool], Runtime]"] = weakref.WeakValueDictionary()
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, spec: RuntimeSpec, *, expects_draft: bool, loaders: Loaders | None = None) -> None:
        if spec.is_local("target") or (expects_draft and spec.is_local("draft")):
            require_vllm()
        self.spec = spec
        self.models = spec.models
        self._with_draft = expects_draft and spec.has_draft
        self._tries_draft = False  # whether the draft has an engine because a GPU is free for it
        self._initialize(LogProgress(), loaders or Loaders())
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        _RUNTIMES.add(self)

    def _initialize(self, progress: Progress, loaders: Loaders) -> None:
        self.launcher = EngineLauncher(self.spec, progress, loaders)
        self._supervisor = Supervisor(self.spec, self.launcher)
        self.running: EngineSet | None = None  # the engines, once started
        self._calls = 0  # number of calls that use the running engines
        self._start: _Start | None = None  # the start in progress

    @classmethod
    def find_or_create(cls, spec: RuntimeSpec, *, expects_draft: bool) -> "Runtime":
        """Return the runtime of a specification, which is shared and lives as long as a reference to it."""
        with cls._registry_lock:
            key = (spec.digest, expects_draft)
            runtime = cls._registry.get(key)
            if runtime is None:
                runtime = cls._registry[key] = cls(spec, expects_draft=expects_draft)
            return runtime

    def lease(self, holder: object) -> None:
        """Register a holder of the engines until it releases them or is collected."""
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Remove a holder of the engines; the last one's release shuts them down."""
        self._holders.discard(holder)
        if not self._holders:
            self.close()

    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer, without starting its engine; raises ModelError if it cannot be fetched."""
        if self.running is not None:
            return self.running.target.tokenizer
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_counting_tokenizer(
                    fetch_tokenizer(self.spec.models.target, self.launcher.progress)
                )
            return self._tokenizer

    def find_context_length(self) -> int | None:
        """Maximum tokens of prompt and reply, if known without starting engines or asking servers; else None."""
        if self.running is not None:
            return self.running.target.context_length
        max_model_len = self.spec.target_arguments.get("max_model_len")
        if isinstance(max_model_len, int) and max_model_len > 0:
            return max_model_len
        models, on_cpu = self.spec.models, self.spec.is_local("target") and self.launcher.platform.on_cpu
        if models.name:
            trained = models.context_length
        elif (folder := folder_with_config(models.target)) is not None:
            trained = read_trained_context(folder)
        else:
            return CPU_CONTEXT if on_cpu else None
        return min(CPU_CONTEXT, trained) if on_cpu else trained

    @asynccontextmanager
    async def engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        """The engines that a policy needs, for the duration of the context; starts them if they are not running.

        A target whose process has ended restarts before the call, a draft or a judge during the call. A call whose
        engines run waits for no download. It waits for a start only if that needs the running engines to end.
        """
        engines = await self._acquire(policy)
        try:
            yield engines
        finally:
            self._calls -= 1
            if self._start is not None and not self._calls:
                self._start.drained.set()

    async def _acquire(self, policy: VerifierPolicy) -> EngineSet:
        """Return the engines and count the call, once they run with the models that the policy needs."""
        has_waited = False
        while True:
            engines = self.running
            waits = self._start is not None and (engines is None or self._start.drains)
            if waits or engines is None or self._must_start(policy, engines, check_health=not has_waited):
                await self._wait_for_start(policy)
                has_waited = True
                continue
            await self._supervisor.ensure_models(engines, policy)
            # Meanwhile another call may have begun to restart the engines.
            if engines is self.running and (self._start is None or not self._start.drains):
                self._calls += 1
                return engines

    def _must_start(self, policy: VerifierPolicy, engines: EngineSet, *, check_health: bool = True) -> bool:
        """Whether the policy needs other engines than these, or the target's process has ended."""
        if self._lacks_draft(policy):
            return True
        return check_health and self.spec.is_local("target") and not engines.target.healthy

    async def _wait_for_start(self, policy: VerifierPolicy) -> None:
        """Wait for the start in progress, or begin one; it continues if the waiting call is cancelled.

        Raises the start's error, unless only the draft of another call's policy was missing.
        """
        if policy.forces_speculation and not self.spec.has_draft:
            raise ConfigurationError(
                f"the policy {policy.name!r} needs a draft model: name one with draft_model=… (--draft)"
            )
        if (start := self._start) is None:
            start = self._start = _Start(policy.forces_speculation, policy.speculates)
            start.task = asyncio.create_task(self._run_start(start))
        assert start.task is not None
        await asyncio.wait({start.task})
        if start.task.cancelled():
            raise EngineStartError("the start of the engines was cancelled")
        error = start.task.result()
        if error is not None and (policy.forces_speculation or not start.with_draft):
            raise error

    async def _run_start(self, start: "_Start") -> Exception | None:
        """Start the engines and return the error, which every waiting call raises."""
        try:
            await self._start_anew(start)
        except Exception as error:
            logger.warning("the engines did not start: %s", error)
            return error
        except (SystemExit, KeyboardInterrupt, GeneratorExit) as error:  # would end the event loop
            return EngineStartError(f"the engines did not start: {type(error).__name__} {error}".rstrip())
        finally:
            self._start = None
        return None

    def models_to_start(self, policy: VerifierPolicy) -> tuple[str, ...]:
        """The roles of the models that a call under this policy would start or restart; empty if all run."""
        if self.running is None:
            return ("target", "draft") if policy.forces_speculation else ("target",)
        if self._lacks_draft(policy):
            return ("target", "draft")
        return self._supervisor.models_to_start(self.running, policy)

    def _lacks_draft(self, policy: VerifierPolicy) -> bool:
        """Whether a policy forces step speculation, for which the running engines were not started."""
        return policy.forces_speculation and not self._with_draft and not self.launcher.setup.draft_engine

    async def _start_anew(self, start: "_Start") -> None:
        launcher, had_draft = self.launcher, self._with_draft
        if self.running is not None and not start.with_draft:
            logger.warning("the target's process has ended: starting the engines again")
        with_draft = had_draft or start.with_draft
        may_try = not with_draft and (self._tries_draft or start.speculates)
        self._tries_draft = may_try and await in_daemon_thread(launcher.has_gpu_for_draft)
        # The running engines serve calls during the downloads. Later calls wait, or the replies would never all end.
        folders = await asyncio.gather(
            self._fetch_target(), self._fetch_draft(with_draft or self._tries_draft), self._fetch_head()
        )
        start.drains = True
        while self._calls:
            start.drained.clear()
            await start.drained.wait()
        self.running, self._with_draft = None, with_draft
        self._supervisor.reset()
        try:
            await in_daemon_thread(launcher.release)
            await self._start_with(*folders)
        except BaseException:
            self._with_draft = had_draft  # the policy of one call must not fail those of others
            raise

    async def _start_with(
        self, target_folder: Path | None, draft: tuple[Path | None, str | None], head: Path | None
    ) -> None:
        spec, launcher, (draft_folder, problem) = self.spec, self.launcher, draft
        try:
            await self._select_engines(target_folder, draft_folder, head)
        except ModelError as error:
            if draft_folder is None:
                raise
            problem = str(error)
            await self._select_engines(target_folder, None, head)
        try:
            target, started_draft = await self._start_engines()
        except EngineStartError as error:
            simpler = launcher.setup.simplify(str(error), uses_mps=launcher.uses_mps)
            if simpler is None:
                raise
            launcher.setup = simpler
            logger.warning("%s", launcher.setup.reason)
            target, started_draft = await self._start_engines()
        engines = EngineSet(target, engine_setup=launcher.setup, names=spec.names)
        if isinstance(started_draft, LookaheadError):
            problem = str(started_draft)
        else:
            engines.draft = started_draft
        if problem is not None:
            logger.warning("running without the draft model: %s", problem)
            engines.problems["draft"] = problem
        if not spec.is_local("draft") and self._may_use_draft(self._with_draft):
            await self._supervisor.connect_draft(engines)
        self.running = engines

    async def _start_engines(self) -> tuple[Engine, Engine | LookaheadError | None]:
        """Start target and draft; for a draft that does not start, return the error.

        They start concurrently, except that a server is asked first: its failure is an error before a draft loads.
        """
        await self.launcher.place()
        setup = self.launcher.setup
        starts: list[Callable[[], Awaitable[Engine]]] = [self._start_target]
        if setup.draft is not None and setup.draft_engine:
            starts.append(self._supervisor.start_draft)
        started: list[Engine | BaseException] = []
        for group in [starts] if setup.target is not None else [[start] for start in starts]:
            # Wait for all, so that no engine is left behind.
            started += await asyncio.gather(*(start() for start in group), return_exceptions=True)
            target, draft = (*started, None)[:2]
            dispensable = isinstance(draft, LookaheadError) and not isinstance(draft, ConfigurationError)
            failures = [each for each in (target, None if dispensable else draft) if isinstance(each, BaseException)]
            if failures:
                await in_daemon_thread(self.launcher.release)
                raise failures[0]
        return target, draft  # type: ignore[return-value]

    async def _fetch_target(self) -> Path | None:
        return await self.launcher.fetch(self.spec.models.target) if self.spec.is_local("target") else None

    async def _fetch_draft(self, with_draft: bool) -> tuple[Path | None, str | None]:
        """The draft's folder, or why it could not be fetched: the target works without it."""
        draft = self.spec.models.draft
        if draft is None or not self.spec.is_local("draft") or not self._may_use_draft(with_draft):
            return None, None
        try:
            return await self.launcher.fetch(draft), None
        except LookaheadError as error:
            return None, str(error)

    async def _fetch_head(self) -> Path | None:
        """The folder of the head that drafts the target's tokens; None without one, or if it could not be fetched."""
        head = self.spec.models.head
        if head is None or not self._chooses_on_gpu:
            return None
        try:
            return await self.launcher.fetch(head)
        except LookaheadError as error:
            logger.warning("the target runs without its head: %s", error)
            return None

    @property
    def _chooses_on_gpu(self) -> bool:
        """Whether the library chooses how draft tokens are made for a target on a GPU."""
        spec = self.spec
        is_free = spec.token_speculation == "auto" and "speculative_config" not in spec.target_arguments
        return is_free and spec.is_local("target") and not self.launcher.platform.on_cpu

    async def _brought_speculation(self, target: Path | None, head: Path | None) -> dict[str, Any] | None:
        if target is None or not self._chooses_on_gpu:
            return None
        try:
            return await in_daemon_thread(partial(brought_speculation, target, head))
        except IntegrityError as error:
            logger.warning("the target runs without draft tokens of its own: %s", error)
            return None

    def _may_use_draft(self, with_draft: bool) -> bool:
        """Whether the draft may be used, for steps (`with_draft`) or for draft tokens."""
        method = self.spec.token_speculation
        name = method if isinstance(method, str) else method.get("method")
        tries_drafts = name == "auto" and self.launcher.platform.on_cpu
        return with_draft or tries_drafts or name in ("draft_model", "shared_draft")

    async def _select_engines(self, target: Path | None, draft: Path | None, head: Path | None) -> None:
        """Select the engines to start, and convert the weights to their precision."""
        spec, launcher = self.spec, self.launcher
        method = spec.token_speculation if target is not None else "none"
        brought = await self._brought_speculation(target, head)
        if brought is not None:
            method = brought
        elif self._chooses_on_gpu and self._tries_draft:
            method = "none"  # steps only, which a node can leave out
        if draft is None and spec.has_draft and spec.is_local("draft") and speculates_by_draft_model(method):
            method = "none"  # the draft could not be fetched: the target works without it
        own_engine = self._with_draft or self._tries_draft or not spec.is_local("target")
        adapted_spec = replace(spec, token_speculation=method, draft_engine=own_engine and draft is not None)
        select = partial(launcher.loaders.select, adapted_spec, target, draft, launcher.platform)
        launcher.setup = await in_daemon_thread(select)
        if brought is not None or (self._chooses_on_gpu and self._tries_draft):
            launcher.setup = launcher.setup.explain_on_gpu(brought)
        await launcher.write(launcher.setup.target, launcher.setup.draft)

    async def _start_target(self) -> Engine:
        setup = self.launcher.setup
        if setup.target is None:
            engine = await self.launcher.remote_engine("target")
            await engine.connect()
            return engine
        name = self.spec.models.target.hub_id
        return await self.launcher.start("target", name, setup.target, setup.target_arguments)

    def reset_after_fork(self) -> None:
        """Drop the parent's engines and connections in a forked child."""
        _PARENT_OBJECTS.extend([self.running, self.launcher, self._supervisor])
        self._initialize(self.launcher.progress, self.launcher.loaders)

    def close(self) -> None:
        """Shut down the engines without other users; a later call starts them again."""
        self.launcher.release()
        self.running = None


def _reset_after_fork() -> None:
    """Reset every runtime in a forked child, so that it starts its own engines when they are needed."""
    Runtime._registry_lock = threading.Lock()
    for runtime in list(_RUNTIMES):
        runtime.reset_after_fork()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)
