"""The ASGI application: host check, authentication and routes."""

import asyncio
import ipaddress
import json
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lookahead_agent import __version__
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.generation.backend import GenerateRequest, request_from_json
from lookahead_agent.generation.server_backend import CHAT_PATH, ENGINES_HEADER, STATUS_PATH, WARM_PATH, ServerStatus
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.body import BodyReader
from lookahead_agent.server.errors import ErrorReplies, RefusedError
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from lookahead_agent.server.replies import Replies, ReplyResponse
from lookahead_agent.server.writer import ReplyWriter

Endpoint = Callable[[Request], Awaitable[Response]]


class HostCheck:
    """Middleware that refuses `Host` headers other than the allowed names, against DNS rebinding by web pages.

    A rebound page always sends its own name, so an IP address or a missing `Host` header is allowed.
    """

    def __init__(self, app: ASGIApp, allowed: Sequence[str], errors: ErrorReplies) -> None:
        self._app = app
        self._allowed = {name.lower().rstrip(".") for name in allowed}
        self._suffixes = tuple(name[1:] for name in self._allowed if name.startswith("*"))
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or respond with status 400."""
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._is_allowed(host):
            await self._app(scope, receive, send)
            return
        message = f"the server is not called {host[:100]!r}: its owner can allow the name with --allowed-host"
        await self._errors.response(RefusedError(400, message))(scope, receive, send)

    def _is_allowed(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0].lower().rstrip(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._allowed or name.endswith(self._suffixes)
        return True


def check_key(header: str | None, expected: str | None) -> None:
    """Check the `Authorization` header of a request; raises RefusedError if it lacks the expected key."""
    if expected is None:
        return
    scheme, _, key = (header or "").partition(" ")
    equal = secrets.compare_digest(key.strip().encode(), expected.encode())
    if scheme.lower() != "bearer" or not equal:
        raise RefusedError(
            401,
            "the API key is wrong or missing: send it as 'Authorization: Bearer …'",
            headers={"WWW-Authenticate": "Bearer"},
        )


def create_app(llm: ChatLookahead, settings: ServerSettings | None = None) -> Starlette:
    """Create the ASGI application; its lifespan starts and closes the engines of the chat model."""
    settings = settings or ServerSettings()
    writer, bodies = ReplyWriter(llm, settings), BodyReader(settings.request_timeout)
    created = int(time.time())
    key = settings.api_key.get_secret_value() if settings.api_key is not None else None
    errors = ErrorReplies(writer.metrics.count_error, with_exceptions=settings.engines_digest is not None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await asyncio.to_thread(llm.start)
        try:
            yield
        finally:
            await asyncio.to_thread(llm.close)

    async def respond(
        request: Request, model: type[ChatRequestBody | CompletionRequestBody] = CompletionRequestBody
    ) -> Response:
        length = await writer.context_length()
        body = await bodies.read(request, model, settings.body_limit(length), length)
        policy, node = (request.headers.get(f"X-Lookahead-{name}") for name in ("Policy", "Node"))
        requests = await asyncio.to_thread(writer.requests, body, policy, node)
        usage, chat = body.stream_options and body.stream_options.include_usage, isinstance(body, ChatRequestBody)
        streams = [writer.generate(each) for each in requests]
        replies = Replies(streams, body.n, writer.model_name, chat=chat, with_usage=bool(usage))
        if body.stream:
            return ReplyResponse(replies.events(errors), "text/event-stream")
        return ReplyResponse(replies.body(), "application/json")

    async def chat(request: Request) -> Response:
        if settings.engines_digest is not None and ENGINES_HEADER in request.headers:
            streams = [writer.generate(await read_generate_request(request))]
            replies = Replies(streams, 1, writer.model_name, chat=True, with_events=True)
            return ReplyResponse(replies.events(errors), "text/event-stream")
        return await respond(request, ChatRequestBody)

    async def models(request: Request) -> Response:
        name = request.path_params.get("name", writer.model_name)
        if name != writer.model_name:
            raise writer.unknown_model(name)
        entry = {"id": name, "object": "model", "created": created, "owned_by": "lookahead-agent"}
        entry |= {"max_model_len": await writer.context_length()}
        return JSONResponse(entry if "name" in request.path_params else {"object": "list", "data": [entry]})

    async def health(_: Request) -> Response:
        healthy = llm.backend.healthy()
        counts = {"running": writer.admission.running, "waiting": writer.admission.waiting}
        return JSONResponse({"status": "ok" if healthy else "failing"} | counts, 200 if healthy else 503)

    async def metrics(_: Request) -> Response:
        return Response(writer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    # Programs of this user send a `GenerateRequest`, and receive step events and the complete `ChatReply`.

    def engine_names() -> str:
        names = llm.backend.runtime.spec.names if llm.backend.runtime is not None else {"target": writer.model_name}
        return " with ".join(names[role] for role in ("target", "draft") if role in names)

    async def read_generate_request(request: Request) -> GenerateRequest:
        if request.headers.get(ENGINES_HEADER) != settings.engines_digest:
            raise RefusedError(409, f"the engines of this server are {engine_names()}")
        data = await bodies.read_bytes(request, settings.body_limit(0))
        try:
            return await asyncio.to_thread(lambda: request_from_json(json.loads(data)["lookahead"]))
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise RefusedError(400, f"the request cannot be read: {error!r}") from None

    async def warm(request: Request) -> Response:
        generate_request = await read_generate_request(request)
        await asyncio.wrap_future(background.submit(llm.backend.warm(generate_request)))  # engines run in this loop
        return Response(status_code=204)

    async def status(_: Request) -> Response:
        server_status = ServerStatus(
            pid=os.getpid(),
            engines=settings.engines_digest or "",
            models=engine_names(),
            reason=await asyncio.to_thread(llm.explain),
            context_length=await writer.context_length(),
            version=__version__,
            seconds=time.time() - created,
            replies=writer.replies,
            running=writer.admission.running,
        )
        return JSONResponse(server_status.model_dump())

    def with_key(endpoint: Endpoint) -> Endpoint:
        async def checked(request: Request) -> Response:
            check_key(request.headers.get("Authorization"), key)
            return await endpoint(request)

        return checked

    routes = [
        Route(CHAT_PATH, with_key(chat), methods=["POST"]),
        Route("/v1/completions", with_key(respond), methods=["POST"]),
        *(Route(path, with_key(models)) for path in ("/v1/models", "/v1/models/{name:path}")),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    if settings.engines_digest is not None:
        routes += [Route(STATUS_PATH, status), Route(WARM_PATH, warm, methods=["POST"])]
    middleware = [Middleware(HostCheck, allowed=settings.allowed_hosts, errors=errors)]
    if origins := settings.cors_origins:
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        middleware.insert(0, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors.handlers, lifespan=lifespan)
    app.state.writer = writer
    return app
