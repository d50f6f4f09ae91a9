"""Why an engine's processes have ended, as far as can be told from outside."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from multiprocessing.process import BaseProcess

from lookahead_agent.engines.memory import SHARED, kills_for_memory, memory

ADVICE = (
    "lower kv_cache_memory_bytes, max_model_len or max_num_seqs in engine_args (gpu_memory_utilization on a GPU), take "
    "precision int8-weights or a smaller model, or end what else runs"
)
"""What takes less memory."""

_KILLED = -int(signal.SIGKILL)
_AT_START = re.compile(rf"Failed core proc\(s\):.*(?<!\d){_KILLED}\b")


class CrashReport:
    """Watches what the system kills while an engine runs; made before the engine starts."""

    def __init__(self) -> None:
        self._before = kills_for_memory()

    def explain(self, processes: Sequence[BaseProcess], patience: float = 2.0) -> str:
        """Why an engine that does not work any more does not, as far as can be told.

        Args:
            processes: vLLM's, started by this process; each has workers of its own.
            patience: Seconds to wait for one that is ending; blocks so long.
        """
        for process in processes:
            process.join(patience)
        codes = [process.exitcode for process in processes]
        if kills_for_memory() > self._before:
            return f"the system has killed a process for lack of memory ({_free()}): {ADVICE}"
        if _KILLED in codes:
            return _killed()
        signals = [signal.Signals(-code).name for code in codes if code is not None and code < 0]
        if "SIGBUS" in signals:
            return f"its process found {SHARED} full (SIGBUS): make it larger (--shm-size=1g for a container)"
        if signals:
            return f"its process was ended by {signals[0]}"
        return (
            "its worker failed, or was killed, as systems do that run out of memory; the log says which "
            f"(VLLM_LOGGING_LEVEL=INFO). If it was memory ({_free()}): {ADVICE}"
        )

    def explain_start(self, said: str) -> str | None:
        """The same of an engine that did not start.

        Args:
            said: What vLLM says of it.
        """
        if kills_for_memory() > self._before or _AT_START.search(said):
            return _killed()
        return None


def _killed() -> str:
    return f"its process was killed, as systems do that run out of memory ({_free()}): {ADVICE}"


def _free() -> str:
    total, free = memory()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB are free now"
