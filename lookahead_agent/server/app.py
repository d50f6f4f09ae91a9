"""The application: which address answers what."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.middleware.cors import CORSMiddleware

from lookahead_agent import __version__
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.generation.server_backend import ENGINES_HEADER, STATUS_PATH
from lookahead_agent.server import private_api
from lookahead_agent.server.admission import HostCheck, check_key
from lookahead_agent.server.body import BodyReader
from lookahead_agent.server.errors import ErrorReplies, ErrorReply
from lookahead_agent.server.protocol import (
    ChatReplyBody,
    ChatRequestBody,
    CompletionReplyBody,
    CompletionRequestBody,
    Health,
    ModelEntry,
    ModelList,
)
from lookahead_agent.server.replies import Replies
from lookahead_agent.server.responses import EventStream, WholeReply
from lookahead_agent.server.settings import ServerSettings
from lookahead_agent.server.writer import ReplyWriter

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": description}
    for status, description in {
        400: "The request cannot be carried out.",
        401: "The API key is wrong or missing.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The body is too long.",
        415: "The body is not sent as JSON.",
        429: "Too many requests wait; Retry-After says when to come again.",
        500: "The model failed.",
    }.items()
}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "object", "properties": {"data": {"type": "string"}}}}}}
}
_BODIES = "#/components/schemas/Request."

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
    writer, bodies = ReplyWriter(llm, settings), BodyReader(settings.request_timeout)
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

    # The description of the API is for those who may use it.
    described = "/openapi.json" if key is None else None
    app = FastAPI(title="lookahead-agent", version=__version__, lifespan=lifespan, openapi_url=described)
    app.state.writer = writer
    errors = ErrorReplies(writer.metrics.count_error, with_exceptions=settings.engines_digest is not None)
    app.add_middleware(HostCheck, allowed=settings.allowed_hosts, errors=errors)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    errors.install(app)
    api = APIRouter(prefix="/v1", dependencies=[Depends(authorised)])

    async def respond(
        request: Request, model: type[ChatRequestBody | CompletionRequestBody], policy: str | None, node: str | None
    ) -> Response:
        length = await writer.context_length()
        body = await bodies.read(request, model, settings.body_limit(length), length)
        requests = await asyncio.to_thread(writer.requests, body, policy, node)
        replies = Replies(
            [writer.generate(each) for each in requests],
            body.n,
            writer.model_name,
            chat=isinstance(body, ChatRequestBody),
            with_usage=body.streams_usage,
        )
        return EventStream(replies.chunks(), errors) if body.stream else WholeReply(replies.body())

    @api.post("/chat/completions", response_model=ChatReplyBody, **_described(ChatRequestBody))
    async def chat(request: Request, policy: PolicyHeader = None, node: NodeHeader = None) -> Response:
        """Reply to a conversation."""
        if settings.engines_digest is not None and ENGINES_HEADER in request.headers:
            asked = await private_api.read_request(request, writer, bodies)
            replies = Replies([writer.generate(asked)], 1, writer.model_name, chat=True, with_events=True)
            return EventStream(replies.chunks(), errors)
        return await respond(request, ChatRequestBody, policy, node)

    @api.post("/completions", response_model=CompletionReplyBody, **_described(CompletionRequestBody))
    async def text(request: Request, policy: PolicyHeader = None, node: NodeHeader = None) -> Response:
        """Go on with a text."""
        return await respond(request, CompletionRequestBody, policy, node)

    async def model_entry() -> ModelEntry:
        return ModelEntry(id=writer.model_name, created=created, max_model_len=await writer.context_length())

    @api.get("/models", responses={401: _ERRORS[401]})
    async def models() -> ModelList:
        """The model that is served."""
        return ModelList(data=[await model_entry()])

    @api.get("/models/{name:path}", responses={401: _ERRORS[401], 404: _ERRORS[404]})
    async def model(name: str) -> ModelEntry:
        """The model that is served, by its name."""
        if name != writer.model_name:
            raise writer.unknown_model(name)
        return await model_entry()

    async def health(response: Response) -> Health:
        """Whether replies can be generated."""
        healthy = llm.backend.healthy()
        response.status_code = 200 if healthy else 503
        admission = writer.admission
        return Health(status="ok" if healthy else "failing", running=admission.running, waiting=admission.waiting)

    failing: dict[int | str, dict[str, Any]] = {503: {"model": Health, "description": "The engines have failed."}}
    app.add_api_route("/health", health, methods=["GET"], responses=failing)
    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    app.include_router(api)
    if settings.engines_digest is not None:
        app.add_api_route(STATUS_PATH, private_api.status_route(writer), methods=["GET"])
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


def _described(model: type[BaseModel]) -> dict[str, Any]:
    """How OpenAPI describes a route whose body FastAPI does not read itself."""
    content = {"application/json": {"schema": {"$ref": _BODIES + model.__name__}}}
    return {"responses": _ERRORS | _STREAM, "openapi_extra": {"requestBody": {"required": True, "content": content}}}


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: list[type[BaseModel]] = [ChatRequestBody, CompletionRequestBody]
        _, bodies = models_json_schema([(model, "validation") for model in models], ref_template=_BODIES + "{model}")
        schema["components"]["schemas"] |= {f"Request.{name}": body for name, body in bodies["$defs"].items()}
        app.openapi_schema = schema
    return app.openapi_schema
