"""The key by which a load balancer sends all requests of a reply, and replies of one thread, to one replica."""

import hmac
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

AFFINITY_HEADERS = ("X-Session-ID", "X-SMG-Routing-Key")
"""Headers of the key: of vLLM's router and vLLM, and of SGLang's gateway."""
RANK_HEADER = "X-data-parallel-rank"  # of vLLM's own data parallelism
_MAX_PROMPT = 1024  # characters or token ids of a prompt without messages that are its beginning
_SALT = secrets.token_bytes(32)  # of this process: a key of a prompt can be computed nowhere else


@dataclass(frozen=True)
class Affinity:
    """The thread of a reply, or its prompt's beginning."""

    content: bytes
    is_thread: bool


_CURRENT: ContextVar[Affinity | None] = ContextVar("affinity", default=None)


def affinity_of(
    thread: str | None, messages: Sequence[Mapping[str, Any]] | None, prompt: str | Sequence[int], salt: str | None
) -> Affinity:
    """The affinity of a reply: its thread, else its conversation up to the first question, or its prompt's beginning.

    Replies with different cache salts share no cache, and no key.
    """
    if thread is not None:
        return Affinity(json.dumps([salt, thread]).encode(), is_thread=True)
    if messages is None:
        return Affinity(json.dumps([salt, prompt[:_MAX_PROMPT]]).encode(), is_thread=False)
    first = next((index for index, message in enumerate(messages) if message.get("role") == "user"), 0)
    return Affinity(json.dumps([salt, messages[: first + 1]], default=str).encode(), is_thread=False)


@contextmanager
def keep_together(affinity: Affinity) -> Iterator[None]:
    """Give all requests of this context, and of the tasks that it starts, the key of one affinity."""
    token = _CURRENT.set(affinity)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def affinity_key(api_key: str | None) -> str | None:
    """The key of the current reply as 32 hexadecimal digits; None outside a reply.

    It is a keyed hash. The key of a thread is the same in all processes with the same API key, and that of a prompt
    holds in this process only, so that nobody can compare it with the keys of other texts.
    """
    affinity = _CURRENT.get()
    if affinity is None:
        return None
    secret = (api_key or "").encode() if affinity.is_thread else _SALT
    return hmac.new(secret, affinity.content, "sha256").hexdigest()[:32]
