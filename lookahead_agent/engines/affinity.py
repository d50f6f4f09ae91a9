"""The key by which a load balancer sends all requests of a reply, and replies of one thread, to one replica."""

import hmac
import json
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

AFFINITY_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""Headers of the key: of vLLM's router and vLLM, and of SGLang's gateway."""
RANK_HEADER = "X-data-parallel-rank"  # header of vLLM's own data parallelism
SESSION_TOKEN = "x-session-token"  # header with the name of a replica, in llm-d's responses
FIXED_HEADERS = ("accept-encoding", "authorization", "connection", "content-length", "content-type", "cookie", "host")
"""Headers that a request has in any case, so that none can have the key."""
_MAX_PROMPT = 1024  # characters or token ids of a prompt without messages that are its beginning
_SALT = secrets.token_bytes(32)  # salt of this process: a key of a prompt can be computed nowhere else


@dataclass(frozen=True, eq=False)
class Affinity:
    """The common part of a reply's requests: its thread, else the beginning of its conversation or prompt.

    Replies with different cache salts share no cache, and no key.
    """

    thread: str | None
    messages: Sequence[Mapping[str, Any]] | None  # None: there is a `prompt` of text or token ids
    prompt: str | Sequence[int]
    salt: str | None  # the cache salt

    @cached_property
    def content(self) -> bytes:
        """The thread, else the conversation up to its first question, or the prompt's beginning."""
        if self.thread is not None:
            return json.dumps([self.salt, self.thread]).encode()
        if self.messages is None:
            return json.dumps([self.salt, self.prompt[:_MAX_PROMPT]]).encode()
        roles = [message.get("role") for message in self.messages]
        first = roles.index("user") if "user" in roles else 0
        return json.dumps([self.salt, self.messages[: first + 1]], default=str).encode()


AFFINITY: ContextVar[Affinity | None] = ContextVar("affinity", default=None)
"""The affinity of the reply whose requests this context sends, and those of the tasks that it starts."""


def affinity_key(api_key: str | None) -> str | None:
    """The key of the current reply as 32 hexadecimal digits; None outside a reply.

    It is a keyed hash. The key of a thread is the same in all processes with the same API key, and that of a prompt
    holds in this process only, so that nobody can compare it with the keys of other texts.
    """
    affinity = AFFINITY.get()
    if affinity is None:
        return None
    secret = (api_key or "").encode() if affinity.thread is not None else _SALT
    return hmac.new(secret, affinity.content, "sha256").hexdigest()[:32]
