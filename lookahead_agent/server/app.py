"""The application: which address answers what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from lookahead_agent import __version__
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.server.admission import BodyLimit, check_key
from lookahead_agent.server.chat import chat_completions
from lookahead_agent.server.completions import completions
from lookahead_agent.server.errors import ErrorReply, install_handlers
from lookahead_agent.server.protocol import (
    ChatReplyBody,
    ChatRequestBody,
    CompletionReplyBody,
    CompletionRequestBody,
    Health,
    ModelEntry,
    ModelList,
)
from lookahead_agent.server.replies import Chosen, ReplyWriter
from lookahead_agent.server.settings import ServerSettings

_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorReply, "description": "The request cannot be carried out."},
    401: {"model": ErrorReply, "description": "The API key is wrong or missing."},
    404: {"model": ErrorReply, "description": "There is no such model."},
    413: {"model": ErrorReply, "description": "The body is too long."},
    429: {"model": ErrorReply, "description": "Too many requests wait; Retry-After says when to come again."},
    500: {"model": ErrorReply, "description": "The model failed."},
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}}}
}

PolicyHeader = Annotated[
    str | None, Header(alias="X-Lookahead-Policy", description="Verifier policy, such as balanced or off.")
]
NodeHeader = Annotated[
    str | None,
    Header(alias="X-Lookahead-Node", description="The graph's node that asks, for its policy.", max_length=256),
]


def create_app(llm: ChatLookahead, settings: ServerSettings | None = None) -> FastAPI:
    """The ASGI application.

    Args:
        llm: The chat model. Its engines are started with the application and closed with it.
        settings: Limits.
    """
    settings = settings or ServerSettings()
    writer = ReplyWriter(llm, settings)
    created = int(time.time())
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await asyncio.to_thread(llm.start)
        try:
            yield
        finally:
            await asyncio.to_thread(llm.close)

    def authorised(request: Request) -> None:
        check_key(request.headers.get("Authorization"), key)

    app = FastAPI(title="lookahead-agent", version=__version__, lifespan=lifespan)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    install_handlers(app, writer.metrics.refused)
    app.state.writer = writer
    protected = [Depends(authorised)]

    @app.post("/v1/chat/completions", response_model=ChatReplyBody, responses=_ERRORS | _STREAM, dependencies=protected)
    async def chat(
        body: ChatRequestBody, request: Request, policy: PolicyHeader = None, node: NodeHeader = None
    ) -> Any:
        """Reply to a conversation."""
        return await chat_completions(writer, body, request, Chosen(policy, node))

    @app.post(
        "/v1/completions", response_model=CompletionReplyBody, responses=_ERRORS | _STREAM, dependencies=protected
    )
    async def text(
        body: CompletionRequestBody, request: Request, policy: PolicyHeader = None, node: NodeHeader = None
    ) -> Any:
        """Go on with a text."""
        return await completions(writer, body, request, Chosen(policy, node))

    @app.get("/v1/models", responses={401: _ERRORS[401]}, dependencies=protected)
    async def models() -> ModelList:
        """The model that is served."""
        length = await asyncio.to_thread(llm.access.context_length)
        return ModelList(data=[ModelEntry(id=writer.model_name, created=created, max_model_len=length)])

    @app.get("/health", responses={503: {"model": Health, "description": "The engines have failed."}})
    async def health(response: Response) -> Health:
        """Whether replies can be written."""
        working = llm.access.healthy()
        response.status_code = 200 if working else 503
        return Health(
            status="ok" if working else "failing", running=writer.admission.running, waiting=writer.admission.waiting
        )

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app
