"""Starts the engines while the server already listens."""

import asyncio
from collections.abc import Callable

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.system.background import in_daemon_thread
from lookahead_agent.system.progress import Progress

_QUICK_SECONDS = 0.5  # engines that start in this time have started when the server begins to answer
_RETRY_AFTER = 5  # seconds after which a client may try again while the models load


class EngineStart:
    """Starts the engines of a chat model when the server starts.

    With `on_end`, the server answers meanwhile, and refuses requests; the function is called with None, or with the
    error of the start. Without it, the server's own start waits.
    """

    def __init__(
        self,
        llm: ChatLookahead,
        on_end: Callable[[Exception | None], None] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._llm = llm
        self._progress = progress
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    async def begin(self) -> None:
        """Begin the start, and wait for it, briefly if the server answers meanwhile; raises its error else."""
        self._task = asyncio.create_task(self._start())
        if self._on_end is not None:
            await asyncio.wait({self._task}, timeout=_QUICK_SECONDS)
            return
        await self._task
        if self._error is not None:
            raise self._error

    async def _start(self) -> None:
        try:
            # A daemon thread starts the engines, so that the end of the server does not wait for it.
            await in_daemon_thread(lambda: self._llm.start(self._progress))
        except Exception as error:
            self._error = error
        if self._on_end is not None:
            self._on_end(self._error)

    def check(self) -> None:
        """Raise RefusedError unless the engines have started; without `begin`, the first request starts them."""
        if self._error is not None:
            raise RefusedError(503, "the models did not start: the server's log says why")
        if self._task is not None and not self._task.done():
            headers = {"Retry-After": str(_RETRY_AFTER)}
            raise RefusedError(503, "the models are being loaded: try again later", code="loading", headers=headers)
