"""Connections to the keeper; nothing that they need is slow to import."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lookahead_agent.errors import EngineError
from lookahead_agent.running.address import is_private, same_user, socket_path
from lookahead_agent.running.frames import Frame, receive, send

logger = logging.getLogger(__name__)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected() -> AsyncIterator[Connection | None]:
    """A connection to this user's keeper; None if there is none."""
    path = socket_path()
    if not is_private(path):
        yield None
        return
    try:
        reader, writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        logger.info("nobody answers at %s: %s", path, error)
        yield None
        return
    try:
        yield (reader, writer) if same_user(writer.get_extra_info("socket")) else None
    finally:
        writer.close()


async def ask_keeper(order: str) -> Frame | None:
    """Have the keeper tell its status ("status"), or stop ("stop"); None if there is none.

    Raises:
        EngineError: It gave no answer.
    """
    async with connected() as connection:
        if connection is None:
            return None
        reader, writer = connection
        send(writer, {"order": order})
        answer = await receive(reader)
        if answer is None:
            raise EngineError("the running engines' process ended without an answer")
        return answer
