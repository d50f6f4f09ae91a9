"""The application: which address answers what."""

from __future__ import annotations

import asyncio
import json
import os
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
from lookahead_agent.generation.backend import GenerateRequest, request_from_json
from lookahead_agent.generation.server_backend import ENGINES_HEADER, STATUS_PATH, ServerStatus
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.admission import HostCheck, check_key
from lookahead_agent.server.body import BodyReader
from lookahead_agent.server.errors import ErrorReplies, RefusedError
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from lookahead_agent.server.replies import Replies, ReplyResponse
from lookahead_agent.server.writer import ReplyWriter

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
            with_usage=body.stream_options is not None and body.stream_options.include_usage,
        )
        if body.stream:
            return ReplyResponse(replies.events(errors), "text/event-stream")
        return ReplyResponse(replies.body(), "application/json")

    @api.post("/chat/completions", openapi_extra=_described(ChatRequestBody))
    async def chat(request: Request, policy: PolicyHeader = None, node: NodeHeader = None) -> Response:
        """Reply to a conversation."""
        if settings.engines_digest is not None and ENGINES_HEADER in request.headers:
            streams = [writer.generate(await own_request(request))]
            replies = Replies(streams, 1, writer.model_name, chat=True, with_events=True)
            return ReplyResponse(replies.events(errors), "text/event-stream")
        return await respond(request, ChatRequestBody, policy, node)

    @api.post("/completions", openapi_extra=_described(CompletionRequestBody))
    async def text(request: Request, policy: PolicyHeader = None, node: NodeHeader = None) -> Response:
        """Go on with a text."""
        return await respond(request, CompletionRequestBody, policy, node)

    async def model_entry() -> dict[str, Any]:
        entry = {"id": writer.model_name, "object": "model", "created": created, "owned_by": "lookahead-agent"}
        return entry | {"max_model_len": await writer.context_length()}

    @api.get("/models")
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [await model_entry()]}

    @api.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model that is served, by its name."""
        if name != writer.model_name:
            raise writer.unknown_model(name)
        return await model_entry()

    async def health(response: Response) -> dict[str, Any]:
        """Whether replies can be generated."""
        healthy = llm.backend.healthy()
        response.status_code = 200 if healthy else 503
        admission = writer.admission
        told = {"status": "ok" if healthy else "failing"}
        return told | {"running": admission.running, "waiting": admission.waiting}

    app.add_api_route("/health", health, methods=["GET"])
    app.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Figures for Prometheus."""
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # This user's own programs send whole requests, and get events with steps and the whole reply.

    def engines() -> str:
        names = llm.backend.runtime.spec.names if llm.backend.runtime is not None else {"target": writer.model_name}
        return " with ".join(names[role] for role in ("target", "draft") if role in names)

    async def own_request(request: Request) -> GenerateRequest:
        if request.headers[ENGINES_HEADER] != settings.engines_digest:
            raise RefusedError(409, f"the engines of this server are {engines()}")
        data = await bodies.arrived(request, settings.body_limit(0))
        try:
            return await asyncio.to_thread(lambda: request_from_json(json.loads(data)["lookahead"]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RefusedError(400, f"the request cannot be read: {error!r}") from None

    async def status() -> ServerStatus:
        """Tell which engines run here, and what they do."""
        return ServerStatus(
            pid=os.getpid(),
            engines=settings.engines_digest or "",
            models=engines(),
            reason=await asyncio.to_thread(llm.explain),
            context_length=await writer.context_length(),
            version=__version__,
            seconds=time.time() - created,
            replies=writer.replies,
            running=writer.admission.running,
        )

    app.include_router(api)
    if settings.engines_digest is not None:
        app.add_api_route(STATUS_PATH, status, methods=["GET"])
    app.openapi = lambda: _description(app)  # type: ignore[method-assign]
    return app


def _described(model: type[BaseModel]) -> dict[str, Any]:
    """How OpenAPI describes a route whose body FastAPI does not read itself."""
    content = {"application/json": {"schema": {"$ref": _BODIES + model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def _description(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        models: list[type[BaseModel]] = [ChatRequestBody, CompletionRequestBody]
        _, bodies = models_json_schema([(model, "validation") for model in models], ref_template=_BODIES + "{model}")
        schema["components"]["schemas"] |= {f"Request.{name}": body for name, body in bodies["$defs"].items()}
        app.openapi_schema = schema
    return app.openapi_schema
