"""Requests of this user's own programs: as `GenerateRequest`, answered by events with steps and the whole reply."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable

from fastapi import Request

from lookahead_agent import __version__
from lookahead_agent.generation.backend import GenerateRequest, request_from_json
from lookahead_agent.generation.server_backend import ENGINES_HEADER, ServerStatus
from lookahead_agent.server.body import BodyReader
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.writer import ReplyWriter


async def read_request(request: Request, writer: ReplyWriter, bodies: BodyReader) -> GenerateRequest:
    """A request for these engines.

    Raises:
        RefusedError: It is for other engines (409), or cannot be read (400).
    """
    if request.headers[ENGINES_HEADER] != writer.settings.engines_digest:
        raise RefusedError(409, f"the engines of this server are {_models(writer)}")
    data = await bodies.arrived(request, writer.settings.body_limit(0))
    try:
        return await asyncio.to_thread(lambda: request_from_json(json.loads(data)["lookahead"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request cannot be read: {error!r}") from None


def status_route(writer: ReplyWriter) -> Callable[[], Awaitable[ServerStatus]]:
    """The route for the server's status."""
    started = time.monotonic()

    async def status() -> ServerStatus:
        """Tell which engines run here, and what they do."""
        return ServerStatus(
            pid=os.getpid(),
            engines=writer.settings.engines_digest or "",
            models=_models(writer),
            reason=await asyncio.to_thread(writer.llm.explain),
            context_length=await writer.context_length(),
            version=__version__,
            seconds=time.monotonic() - started,
            replies=writer.replies,
            running=writer.admission.running,
        )

    return status


def _models(writer: ReplyWriter) -> str:
    """The names of target and draft."""
    runtime = writer.llm.backend.runtime
    names = runtime.spec.names if runtime is not None else {"target": writer.model_name}
    return " with ".join(names[role] for role in ("target", "draft") if role in names)
