"""The clients of a server: who may use it, with which cache salt, and what share of the replies each has."""

import asyncio
import hmac
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from pydantic import SecretStr

from lookahead_agent.server.errors import RefusedError


@dataclass(frozen=True, eq=False)
class Client:
    """The holder of an API key, or everybody on a server without keys.

    `cache_key` is a random number: it derives the client's cache salts, and nothing of the API key can be learned
    from them.
    """

    has_key: bool
    cache_key: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def cache_salt(self, salt: str | None) -> str | None:
        """Return the engines' cache salt, given the request's: prompts of other clients are never in its cache."""
        if salt is None and not self.has_key:
            return None
        return hmac.new(self.cache_key, (salt or "").encode(), "sha256").hexdigest()


class Clients:
    """The clients of a server, by API key; without keys, all requests are one client's."""

    def __init__(self, keys: Sequence[SecretStr]) -> None:
        self._clients = {key.get_secret_value().encode(): Client(has_key=True) for key in keys}
        self._anybody = Client(has_key=False)

    def authenticate(self, header: str | None) -> Client:
        """Return the client of an `Authorization` header; raises RefusedError if it has none of the expected keys."""
        if not self._clients:
            return self._anybody
        scheme, _, sent = (header or "").partition(" ")
        # Each key is compared, in constant time, so that the time tells neither a key nor which one is close.
        equal = [client for key, client in self._clients.items() if secrets.compare_digest(sent.strip().encode(), key)]
        if scheme.lower() != "bearer" or not equal:
            raise RefusedError(
                401,
                "the API key is wrong or missing: send it as 'Authorization: Bearer …'",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return equal[0]

    @property
    def count(self) -> int:
        """The number of clients that can be told apart."""
        return max(1, len(self._clients))

    def owner(self, client: Client) -> Hashable:
        """Return who owns the replies to a request: its client, or the request itself if all have one client."""
        return client if self.count > 1 else object()


@dataclass(eq=False)
class _Waiter:
    owner: Hashable
    admitted: asyncio.Future[None]


class Admission:
    """Admission control: `concurrent` replies run, `queue` replies wait, and further ones are refused.

    No owner of replies, a client or a request, shuts others out. Each gets its first slot before anybody gets a further
    one: beyond `share` slots of an owner, at most half of all are further ones. An owner fills at most half of the
    queue, and at least `longest` places, with the replies to one request. With `reserves`, for clients, of which there
    are few, one without any reply waits also if others fill the queue.
    """

    def __init__(
        self, concurrent: int, queue: int, *, share: int = 1, longest: int = 1, reserves: bool = False
    ) -> None:
        self._concurrent = concurrent
        self._queue = queue
        self._share = share
        self._own_queue = max(math.ceil(queue / 2), longest)
        self._reserves = reserves and queue > 0
        self._running: Counter[Hashable] = Counter()
        self._waiters: list[_Waiter] = []
        self._mean_seconds = 1.0

    @property
    def running(self) -> int:
        """The number of replies that are being generated."""
        return self._running.total()

    @property
    def waiting(self) -> int:
        """The number of replies that wait."""
        return len(self._waiters)

    @asynccontextmanager
    async def slot(self, owner: Hashable) -> AsyncIterator[None]:
        """Wait for a slot and hold it while the context lasts; raises RefusedError if the owner's queue is full."""
        if not self._has_slot(owner):
            self._check_queue(owner)
            await self._wait(owner)
        else:
            self._running[owner] += 1
        started = time.monotonic()
        try:
            yield
        finally:
            self._release(owner)
            # Moving average of the duration of replies, for the header Retry-After.
            self._mean_seconds += 0.2 * (time.monotonic() - started - self._mean_seconds)

    def _has_slot(self, owner: Hashable) -> bool:
        further = self.running - len(self._running)  # slots beyond each owner's first
        has_share = self._running[owner] >= self._share
        return self.running < self._concurrent and (not has_share or further < math.ceil(self._concurrent / 2))

    def _check_queue(self, owner: Hashable) -> None:
        own = sum(waiter.owner is owner for waiter in self._waiters)
        is_full = self.running + self.waiting >= self._concurrent + self._queue
        if not is_full and own < self._own_queue:
            return
        if self._reserves and not own and not self._running[owner]:
            return
        headers = {"Retry-After": str(math.ceil(self._mean_seconds * (self.waiting + 1) / self._concurrent))}
        message = f"{self.running} replies are being generated and {self.waiting} wait: try again later"
        raise RefusedError(429, message, code="queue_full", headers=headers)

    async def _wait(self, owner: Hashable) -> None:
        waiter = _Waiter(owner, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            else:  # the slot arrived in the same moment
                self._release(owner)
            raise

    def _release(self, owner: Hashable) -> None:
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        # The next slots are for the owners with the fewest, in the order in which they came.
        # A cancelled waiter leaves the list only when its task runs.
        while ready := [each for each in self._waiters if not each.admitted.done() and self._has_slot(each.owner)]:
            waiter = min(ready, key=lambda each: self._running[each.owner])
            self._waiters.remove(waiter)
            self._running[waiter.owner] += 1
            waiter.admitted.set_result(None)
