"""Engines shared by configuration within the process, and shut down when nobody needs them or the process exits."""

import atexit

# Imported for its exit handler, which waits for child processes and must be registered before ours: handlers run in
# reverse order, and ours is what ends those children.
import multiprocessing.util  # noqa: F401
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lookahead_agent.engines.processes import refuse_starts
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
    """Starts each configuration once, by `start`; `refuse_starts` ends what is starting when the pool is closed."""

    start: Callable[[VLLMConfig], VLLMEngine] = VLLMEngine
    refuse_starts: Callable[[], None] = refuse_starts

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._closed = False

    def acquire(self, config: VLLMConfig) -> VLLMEngine:
        """The running engine with this configuration, started if it is needed, which blocks; `release` gives it back.

        Raises EngineStartError, or EngineError once the pool is closed.
        """
        key = repr(config)  # equal for equal configurations, of which argument values need not be hashable
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
                    # vLLM has registered exit handlers by now; handlers run in reverse order, and ours must be first:
                    # an engine that is taken apart from below reports it as a crash.
                    atexit.unregister(self.close)
                    atexit.register(self.close)
                engine = entry.engine
        except BaseException:
            self.release(config)
            raise
        with self._lock:
            wanted = self._entries.get(key) is entry
        if not wanted:
            engine.close()
            raise EngineError("the engine was released while it started")
        return engine

    def release(self, config: VLLMConfig) -> None:
        """Say that an engine is no longer needed; the last user's release shuts it down."""
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
        """Shut everything down, engines that are still starting included."""
        with self._lock:
            self._closed = True
            entries = list(self._entries.values())
            self._entries.clear()
        for entry in entries:
            if entry.engine is not None:
                entry.engine.close()
        self.refuse_starts()

    def begin_anew(self) -> None:
        """Leave all engines to the parent, in a process that was forked: here they cannot be asked, nor closed."""
        self._lock = threading.Lock()
        entries, self._entries = self._entries, {}
        for entry in entries.values():
            if entry.engine is not None:
                entry.engine.leave_to_parent()


POOL = EnginePool()
os.register_at_fork(after_in_child=POOL.begin_anew)
atexit.register(POOL.close)
