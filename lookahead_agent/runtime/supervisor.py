"""Keeps the models beside a target: started when a policy needs them, and again when their process has ended."""

import asyncio
import logging
import time
from collections import Counter

from lookahead_agent.engines.background import in_daemon_thread
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import ConfigurationError, LookaheadError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import EngineLauncher
from lookahead_agent.runtime.weights import judge_weights
from lookahead_agent.verifiers.embedding import Embedder, RemoteEmbedder
from lookahead_agent.verifiers.judge import EngineJudge, RemoteJudge

logger = logging.getLogger(__name__)

# Seconds after which a draft server that could not be reached is looked for again.
_LOOK_AGAIN = 5.0
# Times that a draft or judge whose process ended is started again: killed for its memory, it would be killed again.
_RESTARTS = 3


class Supervisor:
    """Keeps the models beside a target; without them the target writes alone."""

    def __init__(self, spec: RuntimeSpec, launcher: EngineLauncher) -> None:
        self._spec = spec
        self._launcher = launcher
        self._remote_draft: OpenAIEngine | None = None
        self._judged: EngineSet | None = None
        self._looked_for_draft = 0.0
        self._restarts: Counter[str] = Counter()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._put_by_role = {"draft": self._put_draft, "judge": self._put_judge, "embedding": self._put_embedder}

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
        self._remote_draft = await self._launcher.remote_engine("draft")
        await self._put(engines, "draft")

    async def start_draft(self) -> Engine:
        """The draft in an engine of its own."""
        models, setup = self._spec.models, self._launcher.setup
        assert models.draft is not None
        assert setup.draft is not None
        return await self._launcher.start("draft", models.draft.hub_id, setup.draft)

    async def _put(self, engines: EngineSet, role: str) -> None:
        """Put a model to work; the engines' problems say why if it cannot be had."""
        try:
            await self._put_by_role[role](engines)
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
        models, launcher = self._spec.models, self._launcher
        if (remote := self._spec.remote.get("judge")) is not None:
            engines.judge = launcher.connected(RemoteJudge(remote))
        elif models.judge == models.draft and engines.draft is not None:
            engines.judge = EngineJudge(engines.draft)
        elif models.judge is not None and models.judge != models.target:
            engines.judge = None
            folder = await launcher.fetch(models.judge)
            weights = judge_weights(folder, self._spec.judge_arguments, launcher.platform)
            await launcher.write(weights)
            engines.judge = EngineJudge(await launcher.start("judge", models.judge.hub_id, weights))

    async def _put_embedder(self, engines: EngineSet) -> None:
        facts, launcher = self._spec.models.embedding, self._launcher
        if (remote := self._spec.remote.get("embedding")) is not None:
            engines.embedder = launcher.connected(RemoteEmbedder(remote))
            return
        folder = await launcher.fetch(facts)

        def load() -> Embedder:
            with launcher.progress.task(f"Loading embedding model {facts.hub_id}"):
                return launcher.loaders.load_embedder(folder)

        engines.embedder = await in_daemon_thread(load)
