"""Pauses Python's garbage collector while long-lived objects are loaded."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the collector; if it was enabled, it is again when the last of several pauses ends.

    Importing vLLM makes a million objects, all of which stay. The collector looks through them again and again, which
    takes a third of the time; so it does while a tokenizer is read.
    """
    global _pauses, _was_enabled
    with _lock:
        if _pauses == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _pauses += 1
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
