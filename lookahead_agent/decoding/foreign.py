"""Calls verifiers, and the models that they ask, which may block, raise anything, or never return."""

import weakref
from collections.abc import Awaitable, Callable
from typing import TypeVar

from lookahead_agent.engines.foreign_loop import ForeignLoop
from lookahead_agent.system.background import is_foreign

T = TypeVar("T")


# Each class has a loop: an instance that blocks it keeps its thread, and later calls get a new one.
_LOOPS: weakref.WeakKeyDictionary[type, ForeignLoop] = weakref.WeakKeyDictionary()


async def call_part(part: object, call: Callable[[], Awaitable[T]]) -> T:
    """Await a call of a verifier, or of a model that it asks; a foreign one cannot block or end the decoder's loop."""
    if not is_foreign(part):
        return await call()
    cls = type(part)
    return await _LOOPS.setdefault(cls, ForeignLoop(f"lookahead-agent-{cls.__name__}")).arun(call)
