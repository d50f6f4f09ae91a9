"""The engines behind a chat model: which are needed, on which cores, started when they are first used."""

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

from lookahead_agent.engines.background import in_daemon_thread
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.engines.vllm_config import CPU_CONTEXT, require_vllm, speculates_by_draft_model, trained_context
from lookahead_agent.errors import ConfigurationError, EngineStartError, LookaheadError, ModelError
from lookahead_agent.models.resolve import configured, fetch_tokenizer
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.progress import LogProgress, Progress
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import EngineLauncher, Loaders
from lookahead_agent.runtime.supervisor import Supervisor

logger = logging.getLogger(__name__)

_RUNTIMES: "weakref.WeakSet[Runtime]" = weakref.WeakSet()
_OF_PARENTS: list[object] = []  # kept, so that nothing is closed that the parent uses


class Runtime:
    """Starts engines in the background loop when they are needed, and keeps them until it is closed or collected.

    A draft gets an engine of its own if a policy `expects_draft`; a call that forces steps starts them anew.
    """

    _registry: ClassVar["weakref.WeakValueDictionary[tuple[str, bool], Runtime]"] = weakref.WeakValueDictionary()
    _registry_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, spec: RuntimeSpec, *, expects_draft: bool, loaders: Loaders | None = None) -> None:
        if spec.runs_here("target") or (expects_draft and spec.runs_here("draft")):
            require_vllm()
        self.spec = spec
        self.models = spec.models
        self._with_draft = expects_draft and spec.has_draft
        self._begin(LogProgress(), loaders or Loaders())
        self._holders: weakref.WeakSet[object] = weakref.WeakSet()
        self._tokenizing = threading.Lock()
        self._tokenizer: Tokenizer | None = None
        _RUNTIMES.add(self)

    def _begin(self, progress: Progress, loaders: Loaders) -> None:
        self.launcher = EngineLauncher(self.spec, progress, loaders)
        self._supervisor = Supervisor(self.spec, self.launcher)
        self.running: EngineSet | None = None  # the engines, if they have been started
        self._calls = 0
        self._changed = asyncio.Condition()

    @classmethod
    def shared(cls, spec: RuntimeSpec, *, expects_draft: bool) -> "Runtime":
        """The runtime of a specification, which lives as long as somebody refers to it."""
        with cls._registry_lock:
            key = (spec.digest, expects_draft)
            runtime = cls._registry.get(key)
            if runtime is None:
                runtime = cls._registry[key] = cls(spec, expects_draft=expects_draft)
            return runtime

    def lease(self, holder: object) -> None:
        """Have the engines wait for one more, until it releases them or is collected."""
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """End a claim on the engines; the end of the last one shuts them down."""
        self._holders.discard(holder)
        if not self._holders:
            self.close()

    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer, without its engine; raises ModelError if it cannot be fetched."""
        if self.running is not None:
            return self.running.target.tokenizer
        with self._tokenizing:
            if self._tokenizer is None:
                self._tokenizer = HFTokenizer(fetch_tokenizer(self.spec.models.target, self.launcher.progress))
            return self._tokenizer

    def known_context_length(self) -> int | None:
        """Most tokens of prompt and reply together, as far as one knows without starting engines or asking servers."""
        if self.running is not None:
            return self.running.target.context_length
        given = self.spec.target_arguments.get("max_model_len")
        if isinstance(given, int) and given > 0:
            return given
        models, on_cpu = self.spec.models, self.spec.runs_here("target") and self.launcher.platform.on_cpu
        if models.name:
            trained = models.context_length
        elif (folder := configured(models.target)) is not None:
            trained = trained_context(folder)
        else:
            return CPU_CONTEXT if on_cpu else None
        return min(CPU_CONTEXT, trained) if on_cpu else trained

    @asynccontextmanager
    async def engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        """The engines that a policy needs, for as long as the context lasts; starts them if they are not running.

        A target whose process has ended is started again before the call, a draft or a judge beside it.
        """
        async with self._changed:
            if self._must_start(policy):
                await self._changed.wait_for(lambda: self._calls == 0)
                await self._start(policy)
            engines = self.running
            assert engines is not None
            await self._supervisor.attend(engines, policy)
            self._calls += 1
        try:
            yield engines
        finally:
            async with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _must_start(self, policy: VerifierPolicy) -> bool:
        """Whether no engines run, or not those that a policy needs, or the target's process has ended."""
        if self.running is None or self._lacks_draft(policy):
            return True
        return self.spec.runs_here("target") and not self.running.target.healthy

    def _lacks_draft(self, policy: VerifierPolicy) -> bool:
        """Whether a policy commands what the engines that are running were not started for."""
        return policy.forces_speculation and not self._with_draft and not self.launcher.setup.draft_engine

    async def _start(self, policy: VerifierPolicy) -> None:
        if not self._must_start(policy):
            return  # another call started them while this one waited
        spec, launcher = self.spec, self.launcher
        if policy.forces_speculation and not spec.has_draft:
            raise ConfigurationError(
                f"the policy {policy.name!r} needs a draft model: name one with draft_model=… (--draft)"
            )
        if self.running is not None and not self._lacks_draft(policy):
            logger.warning("the target's process has ended: starting the engines again")
        self._with_draft = self._with_draft or policy.forces_speculation
        self.running = None
        self._supervisor.reset()
        await in_daemon_thread(launcher.release)
        target_folder, (draft_folder, problem) = await asyncio.gather(self._fetch_target(), self._fetch_draft())
        try:
            await self._select_engines(target_folder, draft_folder)
        except ModelError as error:
            if draft_folder is None:
                raise
            problem = str(error)
            await self._select_engines(target_folder, None)
        try:
            target, draft = await self._start_engines()
        except EngineStartError as error:
            if launcher.setup.speculation_method != "shared_draft":
                raise
            launcher.setup = launcher.setup.without_shared_draft(str(error))
            logger.warning("%s", launcher.setup.reason)
            target, draft = await self._start_engines()
        engines = EngineSet(target, engine_setup=launcher.setup, names=spec.names)
        if isinstance(draft, LookaheadError):
            problem = str(draft)
        else:
            engines.draft = draft
        if problem is not None:
            logger.warning("running without the draft model: %s", problem)
            engines.problems["draft"] = problem
        if not spec.runs_here("draft") and self._may_use_draft():
            await self._supervisor.connect_draft(engines)
        self.running = engines

    async def _start_engines(self) -> tuple[Engine, Engine | LookaheadError | None]:
        """Start target and draft at the same time; for a draft that does not start, the error."""
        await self.launcher.divide_memory()
        starts = [self._start_target()]
        if self.launcher.setup.draft is not None and self.launcher.setup.draft_engine:
            starts.append(self._supervisor.start_draft())
        # Waited for both, so that none is left behind.
        target, *drafts = await asyncio.gather(*starts, return_exceptions=True)
        draft = drafts[0] if drafts else None
        done_without = isinstance(draft, LookaheadError) and not isinstance(draft, ConfigurationError)
        failures = [one for one in (target, None if done_without else draft) if isinstance(one, BaseException)]
        if failures:
            await in_daemon_thread(self.launcher.release)
            raise failures[0]
        return target, draft  # type: ignore[return-value]

    async def _fetch_target(self) -> Path | None:
        return await self.launcher.fetch(self.spec.models.target) if self.spec.runs_here("target") else None

    async def _fetch_draft(self) -> tuple[Path | None, str | None]:
        """The draft's folder, or why it could not be fetched: the target works without it."""
        draft = self.spec.models.draft
        if draft is None or not self.spec.runs_here("draft") or not self._may_use_draft():
            return None, None
        try:
            return await self.launcher.fetch(draft), None
        except LookaheadError as error:
            return None, str(error)

    def _may_use_draft(self) -> bool:
        """Whether the draft may be of use: for steps, or for draft tokens."""
        method = self.spec.token_speculation
        name = method if isinstance(method, str) else method.get("method")
        return self._with_draft or name in ("auto", "draft_model", "shared_draft")

    async def _select_engines(self, target: Path | None, draft: Path | None) -> None:
        """Decide which engines to start, and have the weights in their precision."""
        spec, launcher = self.spec, self.launcher
        method = spec.token_speculation if target is not None else "none"
        if draft is None and spec.has_draft and spec.runs_here("draft") and speculates_by_draft_model(method):
            method = "none"  # it could not be fetched, and the target works without it
        own_engine = (self._with_draft or not spec.runs_here("target")) and draft is not None
        wanted = replace(spec, token_speculation=method, draft_engine=own_engine)
        select = partial(launcher.loaders.select, wanted, target, draft, launcher.platform)
        launcher.setup = await in_daemon_thread(select)
        await launcher.write(launcher.setup.target, launcher.setup.draft)

    async def _start_target(self) -> Engine:
        setup = self.launcher.setup
        if setup.target is None:
            engine = await self.launcher.remote_engine("target")
            await engine.connect()
            return engine
        name = self.spec.models.target.hub_id
        return await self.launcher.start("target", name, setup.target, setup.target_arguments)

    def begin_anew(self) -> None:
        """Leave engines and connections to the parent, in a process that was forked."""
        _OF_PARENTS.extend([self.running, self.launcher, self._supervisor])
        self._begin(self.launcher.progress, self.launcher.loaders)

    def close(self) -> None:
        """Shut down the engines that nobody else uses; a later call starts them again."""
        self.launcher.release()
        self.running = None


def _begin_anew() -> None:
    """Have every runtime of a process that was forked start engines of its own when they are needed."""
    Runtime._registry_lock = threading.Lock()
    for runtime in list(_RUNTIMES):
        runtime.begin_anew()


os.register_at_fork(after_in_child=_begin_anew)
