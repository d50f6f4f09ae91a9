"""Whether the target gives tokens, judged by the replies that it writes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lookahead_agent.errors import EngineError

_QUIET_SECONDS = 120.0  # silence of a reply without a timeout of its own
_RETRY_SECONDS = 60.0  # seconds after a stall until the server counts as healthy again, so that it gets requests


class StallMonitor:
    """Notices a target that gives nothing: a reply timed out since the last complete one, or all running ones wait."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._stalled_at: float | None = None
        self._last_events: dict[object, float] = {}  # latest events of running replies without a timeout of their own

    @contextmanager
    def watch(self, timeout: float | None) -> Iterator[Callable[[], None]]:
        """Watch a reply with this timeout while the context lasts; call the yielded function at each event."""
        reply, last = object(), self._clock()

        def progress() -> None:
            nonlocal last
            last = self._clock()
            if timeout is None:
                self._last_events[reply] = last

        progress()
        try:
            yield progress
        except EngineError:
            # Half, because an event arrives later here than the engine's token.
            if self._clock() - last >= (timeout or _QUIET_SECONDS) / 2:
                self._stalled_at = self._clock()
            raise
        else:
            self._stalled_at = None
        finally:
            self._last_events.pop(reply, None)

    @property
    def is_stalled(self) -> bool:
        """Whether the target gives nothing, as far as the replies show."""
        now = self._clock()
        if self._last_events and now - max(self._last_events.values()) >= _QUIET_SECONDS:
            return True
        return self._stalled_at is not None and now - self._stalled_at < _RETRY_SECONDS
