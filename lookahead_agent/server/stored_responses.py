"""Keeps the responses of `/v1/responses` in memory, each client's own, so that later requests can continue them."""

from collections import OrderedDict
from dataclasses import dataclass

from lookahead_agent.server.clients import Client
from lookahead_agent.server.errors import RefusedError


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end, as JSON texts.

    No response refers to another one: each stays complete when the responses before it are removed.
    """

    response: str
    conversation: str  # the list of items, without instructions

    @property
    def size(self) -> int:
        """Length of the texts."""
        return len(self.response) + len(self.conversation)


class ResponseStore:
    """Stored responses; `clients` share the limits equally, and a client's new responses replace its oldest ones."""

    def __init__(self, responses: int, size: int, clients: int) -> None:
        self._responses = -(-responses // clients)
        self._size = size // clients
        self._stored: dict[Client, OrderedDict[str, StoredResponse]] = {}
        self._sizes: dict[Client, int] = {}

    @property
    def is_enabled(self) -> bool:
        """Whether the server stores responses."""
        return self._responses > 0

    def count(self, client: Client) -> int:
        """Number of a client's stored responses."""
        return len(self._stored.get(client, ()))

    def put(self, client: Client, response_id: str, stored: StoredResponse) -> bool:
        """Store a response, and remove the client's oldest ones beyond its share; False: the share is too small."""
        if not self.is_enabled or stored.size > self._size:
            return False
        own = self._stored.setdefault(client, OrderedDict())
        own[response_id] = stored
        self._sizes[client] = self._sizes.get(client, 0) + stored.size
        while len(own) > self._responses or self._sizes[client] > self._size:
            self._sizes[client] -= own.popitem(last=False)[1].size
        return True

    def get(self, client: Client, response_id: str, param: str | None = None) -> StoredResponse:
        """Return a client's response; raises RefusedError, with the name of the request's field, if it has none."""
        own = self._stored.get(client)
        if own is None or (stored := own.get(response_id)) is None:
            message = f"there is no response {response_id[:100]!r}: it was never stored, or removed for newer ones"
            raise RefusedError(404, message, param=param, code="previous_response_not_found" if param else "not_found")
        return stored

    def delete(self, client: Client, response_id: str) -> None:
        """Remove a client's response; raises RefusedError if it has none."""
        size = self.get(client, response_id).size
        self._sizes[client] -= size
        del self._stored[client][response_id]
