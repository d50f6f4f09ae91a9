"""Replies from engines that another process keeps."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from lookahead_agent.errors import EngineError
from lookahead_agent.generation.backend import (
    ChatReply,
    GenerateEvent,
    GenerateRequest,
    event_from_json,
    request_to_json,
)
from lookahead_agent.running.connection import ask_keeper, connected
from lookahead_agent.running.frames import receive, send
from lookahead_agent.running.wire import error_from_frame

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerStatus:
    """What a keeper tells of its engines.

    Attributes:
        reason: How they were chosen.
        context_length: Most tokens of prompt and reply together.
    """

    reason: str
    context_length: int


class ServerBackend:
    """Has the keeper generate replies.

    Args:
        digest: Which engines are meant: `RuntimeSpec.digest`.
        status: What the keeper tells of them.
    """

    def __init__(self, digest: str, status: ServerStatus) -> None:
        self._digest = digest
        self.status = status

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateEvent, None]:
        """Generate a reply; see `Backend.generate`."""
        async with connected() as connection:
            if connection is None:
                raise EngineError("the running engines have ended: see `lookahead-agent status`")
            reader, writer = connection
            send(writer, {"order": "reply", "engines": self._digest, "request": request_to_json(request)})
            while (frame := await receive(reader)) is not None:
                if "refused" in frame:
                    raise EngineError(f"the running engines are stopping ({frame['refused']})")
                if "error" in frame:
                    raise error_from_frame(frame)
                event = event_from_json(frame)
                yield event
                if isinstance(event, ChatReply):
                    return
            raise EngineError("the running engines ended while they wrote the reply: see `lookahead-agent status`")


async def find_server(digest: str) -> ServerBackend | None:
    """The keeper of these engines; None: there is none, or one of other engines."""
    status: dict[str, Any] | None = await ask_keeper("status")
    if status is None:
        return None
    if status.get("engines") != digest:
        logger.warning(
            "the engines that run in the background are not these, but others are started: they are %s",
            status.get("models"),
        )
        return None
    return ServerBackend(digest, ServerStatus(status["reason"], int(status["context_length"])))
