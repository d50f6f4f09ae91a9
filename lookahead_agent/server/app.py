"""The application: which address answers what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from lookahead_agent import __version__
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.server.admission import HostCheck, check_key
from lookahead_agent.server.body import Body, BodyReader
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
    408: {"model": ErrorReply, "description": "The body did not arrive in time."},
    413: {"model": ErrorReply, "description": "The body is too long."},
    415: {"model": ErrorReply, "description": "The body is not sent as JSON."},
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


async def _chat_body(request: Request) -> ChatRequestBody:
    return await _body(request, ChatRequestBody)


async def _text_body(request: Request) -> CompletionRequestBody:
    return await _body(request, CompletionRequestBody)


async def _body(request: Request, model: type[Body]) -> Body:
    writer: ReplyWriter = request.app.state.writer
    bodies: BodyReader = request.app.state.bodies
    length = await writer.context_length()
    return await bodies.read(request, model, writer.settings.body_limit(length), length)


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

    # What describes the API is for those who may use it.
    described = "/openapi.json" if key is None else None
    app = FastAPI(title="lookahead-agent", version=__version__, lifespan=lifespan, openapi_url=described)
    app.add_middleware(HostCheck, allowed=settings.allowed_hosts, on_error=writer.metrics.refused)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    install_handlers(app, writer.metrics.refused)
    app.state.writer = writer
    protected = [Depends(authorised)]
    app.state.bodies = BodyReader(settings.request_timeout)

    @app.post(
        "/v1/chat/completions",
        response_model=ChatReplyBody,
        responses=_ERRORS | _STREAM,
        dependencies=protected,
        openapi_extra=_body_of(ChatRequestBody),
    )
    async def chat(
        body: Annotated[ChatRequestBody, Depends(_chat_body)],
        request: Request,
        policy: PolicyHeader = None,
        node: NodeHeader = None,
    ) -> Any:
        """Reply to a conversation."""
        return await chat_completions(writer, body, request, Chosen(policy, node))

    @app.post(
        "/v1/completions",
        response_model=CompletionReplyBody,
        responses=_ERRORS | _STREAM,
        dependencies=protected,
        openapi_extra=_body_of(CompletionRequestBody),
    )
    async def text(
        body: Annotated[CompletionRequestBody, Depends(_text_body)],
        request: Request,
        policy: PolicyHeader = None,
        node: NodeHeader = None,
    ) -> Any:
        """Go on with a text."""
        return await completions(writer, body, request, Chosen(policy, node))

    async def model_entry() -> ModelEntry:
        return ModelEntry(id=writer.model_name, created=created, max_model_len=await writer.context_length())

    @app.get("/v1/models", responses={401: _ERRORS[401]}, dependencies=protected)
    async def models() -> ModelList:
        """The model that is served."""
        return ModelList(data=[await model_entry()])

    @app.get("/v1/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]}, dependencies=protected)
    async def model(name: str) -> ModelEntry:
        """The model that is served, by its name."""
        if name != writer.model_name:
            raise writer.no_model(name)
        return await model_entry()

    async def health(response: Response) -> Health:
        """Whether replies can be written."""
        working = llm.access.healthy()
        response.status_code = 200 if working else 503
        return Health(
            status="ok" if working else "failing", running=writer.admission.running, waiting=writer.admission.waiting
        )

    failing: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "The engines have failed."}}
    app.add_api_route("/health", health, methods=["GET"], responses=failing)
    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


_BODIES = "#/components/schemas/Request."


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    """How OpenAPI describes a body that FastAPI does not read itself."""
    schema = {"$ref": _BODIES + model.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: list[type[BaseModel]] = [ChatRequestBody, CompletionRequestBody]
        _, bodies = models_json_schema([(model, "validation") for model in models], ref_template=_BODIES + "{model}")
        schema["components"]["schemas"] |= {f"Request.{name}": body for name, body in bodies["$defs"].items()}
        app.openapi_schema = schema
    return app.openapi_schema
