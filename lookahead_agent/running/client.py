"""Replies from engines that another process keeps."""

from __future__ import annotations

import logging

from langchain_core.messages import AIMessage

from lookahead_agent.errors import EngineError
from lookahead_agent.generation.request import Emit
from lookahead_agent.running.connection import connected, first_answer
from lookahead_agent.running.frames import receive, send
from lookahead_agent.running.wire import ReplyOrder, error_from_frame, event_from_frame, order_to_frame

logger = logging.getLogger(__name__)


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
        first = await first_answer(connection)
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
