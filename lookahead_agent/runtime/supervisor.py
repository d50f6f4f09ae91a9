"""Supervises the models beside a target: starts them when a policy needs them, and restarts them when they end."""

import asyncio
import logging
import time
from collections import Counter

from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import EngineLauncher
from lookahead_agent.runtime.weights import judge_weights
from lookahead_agent.system.background import describe, in_daemon_thread, is_cancelled
from lookahead_agent.verifiers.embedding import Embedder, RemoteEmbedder
from lookahead_agent.verifiers.judge import EngineJudge, RemoteJudge

logger = logging.getLogger(__name__)

# Seconds before a draft server that could not be reached is tried again.
_RECONNECT_INTERVAL = 5.0
# Restarts of a draft or judge whose process ended: if it was killed for its memory, it would be killed again.
_MAX_RESTARTS = 3


class Supervisor:
    """Supplies the models beside a target; without them the target writes alone."""

    def __init__(self, spec: RuntimeSpec, launcher: EngineLauncher) -> None:
        self._spec = spec
        self._launcher = launcher
        self._remote_draft: OpenAIEngine | None = None
        self._first_starts: dict[str, asyncio.Task[None]] = {}  # starts of judge and embedding model
        self._last_connection_attempt = 0.0
        self._restarts: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._provide_by_role = {
            "draft": self._provide_draft,
            "judge": self._provide_judge,
            "embedding": self._provide_embedder,
        }

    async def ensure_models(self, engines: EngineSet, policy: VerifierPolicy) -> None:
        """Start the missing models that a policy needs; a draft or judge that has ended restarts in the background."""
        if policy.speculates:
            self._reconnect_draft(engines)
            self._restart_ended(engines)
        for role in self._roles(engines, policy):
            if role not in self._first_starts:
                self._first_starts[role] = asyncio.create_task(self._provide(engines, role))
            start = self._first_starts[role]
            if not start.done():  # the start continues if this call is cancelled
                await asyncio.wait({start})
            if not start.cancelled():
                start.result()  # invalid arguments fail every call that needs the model

    def _roles(self, engines: EngineSet, policy: VerifierPolicy) -> list[str]:
        """The roles that a policy needs beside target and draft."""
        needs = {"embedding": policy.embeds and engines.embedder is None, "judge": policy.asks_judge}
        return [role for role, needed in needs.items() if needed] if engines.draft is not None else []

    def models_to_start(self, engines: EngineSet, policy: VerifierPolicy) -> tuple[str, ...]:
        """The roles of the models that `ensure_models` would load."""
        models = self._spec.models
        judges_already = models.judge in (None, models.target, models.draft)
        return tuple(
            role
            for role in self._roles(engines, policy)
            if role not in self._first_starts and self._spec.is_local(role) and not (role == "judge" and judges_already)
        )

    def reset(self) -> None:
        """Cancel and forget starts, before the engines are started again."""
        for task in (*self._tasks.values(), *self._first_starts.values()):
            task.cancel()
        self._first_starts.clear()
        self._restarts.clear()

    async def connect_draft(self, engines: EngineSet) -> None:
        """Connect to the draft's server; if it cannot be reached, `engines.problems` says why."""
        self._remote_draft = await self._launcher.remote_engine("draft")
        await self._provide(engines, "draft")

    async def start_draft(self) -> Engine:
        """Start the draft in an engine of its own."""
        models, setup = self._spec.models, self._launcher.setup
        assert models.draft is not None
        assert setup.draft is not None
        return await self._launcher.start("draft", models.draft.hub_id, setup.draft)

    async def _provide(self, engines: EngineSet, role: str) -> None:
        """Add a model to the engines; if it is unavailable, `engines.problems` says why."""
        try:
            await self._provide_by_role[role](engines)
        except BaseException as error:
            # Errors of the libraries that load models must not fail a request, nor end the event loop.
            is_invalid = isinstance(error, ConfigurationError) and role != "embedding"
            if is_invalid or (isinstance(error, asyncio.CancelledError) and is_cancelled()):
                raise
            problem = describe(error)
            if engines.problems.get(role) != problem:
                logger.warning("running without the %s model: %s", role, problem)
            engines.problems[role] = problem
        else:
            engines.problems.pop(role, None)

    async def _provide_again(self, engines: EngineSet, role: str) -> None:
        """Add a model to the engines while calls go on without it: none of them gets an error, only the reason."""
        try:
            await self._provide(engines, role)
        except ConfigurationError as error:
            logger.warning("running without the %s model: %s", role, error)
            engines.problems[role] = str(error)

    def _reconnect_draft(self, engines: EngineSet) -> None:
        """Try an unreachable draft server again in the background; the call continues without it."""
        is_due = time.monotonic() - self._last_connection_attempt >= _RECONNECT_INTERVAL
        task = self._tasks.get("draft")
        if self._remote_draft is not None and engines.draft is None and is_due and (task is None or task.done()):
            self._tasks["draft"] = asyncio.create_task(self._provide_again(engines, "draft"))

    def _restart_ended(self, engines: EngineSet) -> None:
        """Restart a draft or a judge whose process has ended; calls continue without it."""
        models, draft, judge = self._spec.models, engines.draft, engines.judge
        if draft is not None and self._spec.is_local("draft") and not draft.healthy:
            engines.draft = None
            self._restart(engines, "draft")
        has_own_judge = models.judge not in (None, models.target, models.draft)
        if has_own_judge and isinstance(judge, EngineJudge) and not judge.engine.healthy:
            engines.judge = None
            self._restart(engines, "judge")

    def _restart(self, engines: EngineSet, role: str) -> None:
        self._restarts[role] += 1
        if self._restarts[role] > _MAX_RESTARTS:
            engines.problems[role] = f"the {role} model's process has ended {self._restarts[role]} times"
            return
        engines.problems[role] = f"the {role} model's process has ended; it is being started again"
        logger.warning("%s", engines.problems[role])
        self._tasks[role] = asyncio.create_task(self._provide_again(engines, role))

    async def _provide_draft(self, engines: EngineSet) -> None:
        if self._remote_draft is not None:
            try:
                await self._remote_draft.connect()
            finally:
                self._last_connection_attempt = time.monotonic()
            engines.draft = self._remote_draft
            return
        engines.draft = await self.start_draft()
        if "judge" in self._first_starts and self._spec.models.judge == self._spec.models.draft:
            engines.judge = EngineJudge(engines.draft)

    async def _provide_judge(self, engines: EngineSet) -> None:
        models, launcher = self._spec.models, self._launcher
        if (remote := self._spec.remote.get("judge")) is not None:
            engines.judge = launcher.hold(RemoteJudge(remote))
        elif models.judge == models.draft and engines.draft is not None:
            engines.judge = EngineJudge(engines.draft)
        elif models.judge is not None and models.judge != models.target and launcher.judge_problem is None:
            engines.judge = None
            folder = await launcher.fetch(models.judge)
            weights = judge_weights(folder, self._spec.judge_arguments, launcher.platform)
            await launcher.write(weights)
            engines.judge = EngineJudge(await launcher.start("judge", models.judge.hub_id, weights))

    async def _provide_embedder(self, engines: EngineSet) -> None:
        facts, launcher = self._spec.models.embedding, self._launcher
        if (remote := self._spec.remote.get("embedding")) is not None:
            engines.embedder = launcher.hold(RemoteEmbedder(remote))
            return
        folder = await launcher.fetch(facts)

        def load() -> Embedder:
            with launcher.progress.task(f"Loading embedding model {facts.hub_id}"):
                return launcher.loaders.load_embedder(folder)

        engines.embedder = await in_daemon_thread(load)
