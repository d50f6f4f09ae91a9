"""Engines shared by configuration within the process, and shut down after their last release or at exit."""

import atexit

# Imported for its exit handler, which waits for child processes. It must be registered before ours: handlers run in
# reverse order, and ours ends those children.
import multiprocessing.util  # noqa: F401
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lookahead_agent.engines.starter import refuse_starts
from lookahead_agent.engines.vllm_config import VLLMConfig
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import EngineError


class _Entry:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.engine: VLLMEngine | None = None
        self.users = 0


@dataclass(eq=False)
class EnginePool:
    """Starts one engine per configuration with `start`; `close` ends unfinished starts with `refuse_starts`."""

    start: Callable[[VLLMConfig], VLLMEngine] = VLLMEngine
    refuse_starts: Callable[[], None] = refuse_starts

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closed = False

    def acquire(self, config: VLLMConfig) -> VLLMEngine:
        """Return the running engine of this configuration; start it if needed, which blocks. `release` gives it back.

        Raises EngineStartError, or EngineError if the pool is closed or the engine is released while it starts.
        """
        key = repr(config)  # equal for equal configurations, whose argument values may be unhashable
        with self._lock:
            if self._closed:
                raise EngineError("the process is shutting down")
            entry = self._entries.setdefault(key, _Entry())
            entry.users += 1
        try:
            with entry.lock:
                if entry.engine is not None and not entry.engine.healthy:
                    entry.engine.close()
                    entry.engine = None
                if entry.engine is None:
                    entry.engine = self.start(config)
                    # vLLM has registered exit handlers by now. Handlers run in reverse order, and ours must run first:
                    # an engine that vLLM's handlers tear down reports a crash.
                    atexit.unregister(self.close)
                    atexit.register(self.close)
                engine = entry.engine
        except BaseException:
            self.release(config)
            raise
        with self._lock:
            still_used = self._entries.get(key) is entry
        if not still_used:
            engine.close()
            raise EngineError("the engine was released while it started")
        return engine

    def release(self, config: VLLMConfig) -> None:
        """Give an engine back; the last user's release shuts it down."""
        key = repr(config)
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return
            entry.users -= 1
            if entry.users > 0:
                return
            del self._entries[key]
        if entry.engine is not None:
            entry.engine.close()

    def close(self) -> None:
        """Shut down all engines, including those that are still starting."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            if entry.engine is not None:
                entry.engine.close()
        self.refuse_starts()

    def reset_after_fork(self) -> None:
        """Drop the parent's engines in a forked child, which can neither query nor close them."""
        self._lock = threading.Lock()
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.engine is not None:
                entry.engine.detach_after_fork()


POOL = EnginePool()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=POOL.reset_after_fork)
atexit.register(POOL.close)
