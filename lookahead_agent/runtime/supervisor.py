"""Keeps the models beside a target: started when a policy needs them, and again when their process has ended."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from lookahead_agent.engines.background import in_daemon_thread
from lookahead_agent.engines.openai_http import OpenAIEngine
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import ConfigurationError, LookaheadError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import EngineSetup, judge_weights
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import EngineLauncher
from lookahead_agent.runtime.spec import RuntimeSpec
from lookahead_agent.verifiers import Embedder, EngineJudge, RemoteEmbedder, RemoteJudge

logger = logging.getLogger(__name__)

# Seconds after which a draft server that could not be reached is looked for again.
_LOOK_AGAIN = 5.0
# Times that a draft or judge whose process ended is started again: killed for its memory, it would be killed again.
_RESTARTS = 3


class Supervisor:
    """Keeps the models beside a target; without them the target writes alone.

    Args:
        spec: Which models.
        launcher: Starts their engines.
    """

    def __init__(self, spec: RuntimeSpec, launcher: EngineLauncher) -> None:
        self.remote_draft: OpenAIEngine | None = None
        self._spec = spec
        self._launcher = launcher
        self._embedder_problem: str | None = None
        self._judged_by: EngineSet | None = None
        self._looking_for_draft: asyncio.Task[None] | None = None
        self._looked_for_draft = 0.0
        self._restarts: Counter[str] = Counter()
        self._restarting: dict[str, asyncio.Task[None]] = {}

    async def attend(self, engines: EngineSet, policy: VerifierPolicy) -> None:
        """Start what a policy needs and is not there; a draft or a judge that has ended starts beside the call."""
        if policy.speculates:
            self._look_for_draft(engines)
            self._restart_ended(engines)
        if engines.draft is not None and policy.embeds:
            await self._load_embedder(engines)
        if engines.draft is not None and policy.asks_judge:
            await self._start_judge(engines)

    def reset(self) -> None:
        """Forget restarts, before the engines are started anew."""
        for task in self._restarting.values():
            task.cancel()
        self._restarts.clear()

    def leave_to_parent(self) -> None:
        """Forget engines and tasks in a forked process."""
        self._restarting.clear()
        self._judged_by = self.remote_draft = self._looking_for_draft = None

    def _look_for_draft(self, engines: EngineSet) -> None:
        """See whether a draft server that could not be reached is there now, while the call goes on without it."""
        if self.remote_draft is None or engines.draft is not None:
            return
        busy = self._looking_for_draft is not None and not self._looking_for_draft.done()
        if not busy and time.monotonic() - self._looked_for_draft >= _LOOK_AGAIN:
            self._looking_for_draft = asyncio.create_task(self._look(engines))

    async def _look(self, engines: EngineSet) -> None:
        problem = await self.connect_draft(engines)
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
        draft, problem = await self.start_draft(self._launcher.setup)
        if draft is None:
            engines.problems["draft"] = problem or "the draft model could not be started again"
            return
        engines.draft = draft
        if self._judged_by is engines and self._spec.models.judge == self._spec.models.draft:
            engines.judge = EngineJudge(draft)
        engines.problems.pop("draft", None)

    async def connect_draft(self, engines: EngineSet) -> str | None:
        """Put the draft behind a server to work; says why if it cannot."""
        assert self.remote_draft is not None
        try:
            await self.remote_draft.connect()
        except LookaheadError as error:
            return str(error)
        finally:
            self._looked_for_draft = time.monotonic()
        engines.draft = self.remote_draft
        return None

    async def start_draft(self, engine_setup: EngineSetup) -> tuple[Engine | None, str | None]:
        """The draft, and if it could not be started, why: the target works without it."""
        draft = self._spec.models.draft
        if engine_setup.draft is None or not engine_setup.draft_engine or draft is None:
            return None, None
        try:
            return await self._launcher.start("draft", draft.hub_id, engine_setup.draft), None
        except ConfigurationError:
            raise
        except LookaheadError as error:
            return None, str(error)

    async def _start_judge(self, engines: EngineSet) -> None:
        """Put the wanted judge in place of the target, once."""
        if engines.draft is not None and self._judged_by is not engines:
            self._judged_by = engines
            await self._put_judge(engines)

    async def _put_judge(self, engines: EngineSet) -> None:
        models, remote = self._spec.models, self._spec.remote.get("judge")
        if remote is not None:
            judge = RemoteJudge(remote)
            self._launcher.connections.append(judge)
            engines.judge = judge
        elif models.judge == models.draft and engines.draft is not None:
            engines.judge = EngineJudge(engines.draft)
        elif models.judge is not None and models.judge != models.target:
            try:
                folder = await self._launcher.fetch(models.judge)
                weights = judge_weights(folder, self._spec.judge_arguments, self._launcher.platform)
                await self._launcher.write(weights)
                engines.judge = EngineJudge(await self._launcher.start("judge", models.judge.hub_id, weights))
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
            self._launcher.connections.append(embedder)
            engines.embedder = embedder
            return
        try:
            folder = await self._launcher.fetch(facts)

            def load() -> Embedder:
                with self._launcher.progress.task(f"Loading embedding model {facts.hub_id}"):
                    return self._launcher.loaders.load_embedder(folder)

            engines.embedder = await in_daemon_thread(load)
        except Exception as error:  # of whatever library reads it: no request fails for it
            logger.warning("running without the embedding model: %s", error)
            self._embedder_problem = engines.problems["embedding"] = str(error)
