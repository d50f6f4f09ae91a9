"""Prefills the beginnings of prompts into the engines' prefix caches while no reply is written."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import takewhile

from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.system.background import is_cancelled, log_unattended, wait_for_end

_MAX_PREFIXES = 16  # prompts that wait, and prompts that an engine has read recently


@dataclass
class _Prefix:
    engine: Engine
    ids: Sequence[int]
    drafted: bool  # whether a draft model inside the engine prefills it too
    read: int = 0  # tokens that the engine has prefilled


class PrefixWarmer:
    """Prefills prefixes piece by piece, and makes way for every reply.

    A reply cancels the current piece; earlier pieces stay in the cache. A running forward pass ends first, so a reply
    waits for at most one piece.
    """

    def __init__(self, idle: Callable[[], bool], piece: int | None = None, idle_seconds: float = 0.5) -> None:
        self._idle = idle  # whether no reply is written
        # Seconds without a reply before a prefill, so that the next reply of a loop over questions is never delayed.
        self._idle_seconds = idle_seconds
        self._piece = piece
        self.waiting: deque[_Prefix] = deque(maxlen=_MAX_PREFIXES)
        self.known: deque[tuple[Engine, Sequence[int]]] = deque(maxlen=_MAX_PREFIXES)
        """Token ids, shape (n,), that an engine has read or written recently."""
        self.prefill_task: asyncio.Task[None] | None = None
        self._has_failed = False

    def add(self, engine: Engine, ids: Sequence[int], *, drafted: bool) -> None:
        """Let an engine prefill token ids, shape (n,), when no reply is written."""
        self.waiting.append(_Prefix(engine, ids, drafted))
        self.resume()

    async def stop(self) -> None:
        """Cancel the current prefill for a reply; `resume` continues it."""
        task, self.prefill_task = self.prefill_task, None
        if task is not None:
            task.cancel()
            await wait_for_end([task])

    def resume(self) -> None:
        """Start to prefill waiting prefixes, unless a reply is being written."""
        if self.waiting and self.prefill_task is None and self._idle():
            self.prefill_task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            await self._read_waiting()
        except BaseException as error:  # nobody waits for the task
            if is_cancelled():
                raise
            self.waiting.clear()
            self._report(error)
        if self.prefill_task is asyncio.current_task():
            self.prefill_task = None

    def _report(self, error: BaseException) -> None:
        """Log the first failure as a warning: the replies are complete, and only their prompts take longer."""
        level = logging.DEBUG if self._has_failed else logging.WARNING
        log_unattended(level, "prompts are not read ahead", error)
        self._has_failed = True

    async def _read_waiting(self) -> None:
        await asyncio.sleep(self._idle_seconds)
        if self._piece is None:
            # Tokens in whole blocks of the cache. A CPU gets one block, whose pass takes a tenth of a second.
            self._piece = 32 if await asyncio.to_thread(runs_on_cpu) else 512
        while self.waiting:
            prefix = self.waiting[0]
            prefix.read = max(prefix.read, *(self._common_tokens(prefix, *entry) for entry in self.known), 0)
            try:
                while prefix.read < len(prefix.ids):
                    # One token more than whole blocks: vLLM recomputes the last token of a prompt in any case.
                    end = (prefix.read // self._piece + 1) * self._piece
                    sampling = Sampling(max_tokens=1, drafted=prefix.drafted)
                    async with aclosing(prefix.engine.generate(prefix.ids[: end + 1], sampling)) as deltas:
                        async for _ in deltas:
                            continue
                    prefix.read = end
                self.known.append((prefix.engine, prefix.ids))
            except BaseException as error:
                if is_cancelled():
                    raise
                if prefix.engine.healthy:  # one that is shut down reads no more prompts
                    self._report(error)
            if self.waiting and self.waiting[0] is prefix:  # new prefixes may have evicted it meanwhile
                self.waiting.popleft()

    @staticmethod
    def _common_tokens(prefix: _Prefix, engine: Engine, ids: Sequence[int]) -> int:
        if engine is not prefix.engine:
            return 0
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prefix.ids, ids, strict=False)))
