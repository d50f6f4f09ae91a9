"""Replies from engines that another process keeps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from langchain_core.messages import AIMessage

from lookahead_agent.chat_call import Emit
from lookahead_agent.errors import EngineError
from lookahead_agent.running.address import is_private, same_user, socket_path
from lookahead_agent.running.wire import (
    Frame,
    ReplyOrder,
    error_from_frame,
    event_from_frame,
    order_to_frame,
    receive,
    send,
)

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


async def reply_of_running(order: ReplyOrder, emit: Emit) -> AIMessage | None:
    """Have the keeper write a reply; None if there is no keeper, or one of other engines.

    Cancelling the task takes the order back.

    Raises:
        LookaheadError: What the same call raises in one process.
        EngineError: The keeper ended meanwhile.
    """
    async with connected() as connection:
        if connection is None:
            return None
        reader, writer = connection
        send(writer, order_to_frame(order))
        first = await receive(reader)
        if first is None or "accepted" not in first:
            running = "they are stopping" if first is None else f"they are {first.get('refused')}"
            logger.warning("the engines that run in the background are not these, but others are started: %s", running)
            return None
        while (frame := await receive(reader)) is not None:
            event = event_from_frame(frame)
            if event is not None:
                emit(event)
            elif "message" in frame:
                return AIMessage.model_validate(frame["message"])
            elif "error" in frame:
                raise error_from_frame(frame)
        raise EngineError("the running engines ended while they wrote the reply: see `lookahead-agent status`")
