"""Connections to the keeper; nothing that they need is slow to import."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lookahead_agent.errors import EngineError
from lookahead_agent.running.address import is_private, process_at, same_user, socket_path
from lookahead_agent.running.frames import Frame, receive, send

logger = logging.getLogger(__name__)

_PATIENCE = 20.0
"""Seconds: a keeper answers in milliseconds, and in a few seconds where the system swaps."""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected() -> AsyncIterator[Connection | None]:
    """A connection to this user's keeper; None if there is none."""
    path = await asyncio.to_thread(_private_socket)
    if path is None:
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


def _private_socket() -> Path | None:
    path = socket_path()
    return path if is_private(path) else None


async def first_answer(connection: Connection, patience: float = _PATIENCE) -> Frame | None:
    """A keeper's answer that takes no work; None if it ends the connection.

    Args:
        connection: To the keeper, which was sent an order.
        patience: Seconds.

    Raises:
        EngineError: It gives no answer; the message says how to end it.
    """
    reader, writer = connection
    try:
        async with asyncio.timeout(patience):
            return await receive(reader)
    except TimeoutError:
        pid = process_at(writer.get_extra_info("socket"))
        raise EngineError(
            f"the process that keeps the running engines ({pid or 'its number is not known'}) has not answered for "
            f"{patience:g} s: `kill -9 {pid or 'PID'}` ends it and its engines"
        ) from None


async def ask_keeper(order: str, patience: float = _PATIENCE) -> Frame | None:
    """Have the keeper tell its status ("status"), or stop ("stop"); None if there is none.

    Raises:
        EngineError: It gave no answer.
    """
    async with connected() as connection:
        if connection is None:
            return None
        send(connection[1], {"order": order})
        answer = await first_answer(connection, patience)
        if answer is None:
            raise EngineError("the running engines' process ended without an answer")
        return answer
