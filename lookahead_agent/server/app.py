"""The ASGI application: authentication and routes."""

import asyncio
import importlib.metadata
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines.affinity import AFFINITY_HEADERS
from lookahead_agent.generation.backend import GenerateRequest, request_from_json
from lookahead_agent.generation.server_backend import CHAT_PATH, ENGINES_HEADER, STATUS_PATH, WARM_PATH, ServerStatus
from lookahead_agent.server import ServerSettings
from lookahead_agent.server.body import Body, BodyReader
from lookahead_agent.server.clients import Client
from lookahead_agent.server.errors import ErrorReplies, RefusedError
from lookahead_agent.server.head import HeadCheck
from lookahead_agent.server.protocol import ChatRequestBody, CompletionRequestBody
from lookahead_agent.server.replies import Replies, ReplyResponse
from lookahead_agent.server.start import EngineStart
from lookahead_agent.server.stored_responses import ResponseStore, StoredResponse
from lookahead_agent.server.writer import ReplyWriter
from lookahead_agent.system import background

if TYPE_CHECKING:
    from lookahead_agent.server.responses_reply import ResponseReply
    from lookahead_agent.server.responses_request import ResponseRequestBody

Endpoint = Callable[[Request, Client], Awaitable[Response]]


def create_app(
    llm: ChatLookahead,
    settings: ServerSettings | None = None,
    start: EngineStart | None = None,
) -> Starlette:
    """Create the ASGI application; its lifespan starts the engines of the chat model, by `start`, and closes them."""
    settings = settings or ServerSettings()
    writer, bodies = ReplyWriter(llm, settings), BodyReader(settings.request_timeout)
    stored = ResponseStore(settings.stored_responses, settings.stored_bytes, writer.clients.count)
    created = int(time.time())
    start = start or EngineStart(llm)
    errors = ErrorReplies(writer.metrics.count_error, with_exceptions=settings.engines_digest is not None)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await start.begin()
        try:
            yield
        finally:
            await asyncio.to_thread(llm.close)

    async def read_requests(
        request: Request,
        client: Client,
        model: type[Body],
        translate: Callable[[Body, int], ChatRequestBody | CompletionRequestBody],
    ) -> tuple[Body, list[GenerateRequest]]:
        """Read a body, and the requests for its replies; `translate` takes it, and the longest body in bytes."""
        length = await writer.context_length()
        limit = settings.body_limit(length)
        policy, node = (request.headers.get(f"X-Lookahead-{name}") for name in ("Policy", "Node"))
        # The client's key keeps its thread together on the servers of this server's engines.
        thread = next(filter(None, map(request.headers.get, AFFINITY_HEADERS)), None)
        data = await bodies.read_json(request, limit)
        async with bodies.slot(data):
            body = await bodies.parse(data, model, length)
            requests = await asyncio.to_thread(
                lambda: writer.requests(translate(body, limit), client, policy, node, thread)
            )
        return body, requests

    async def respond(
        request: Request, client: Client, model: type[ChatRequestBody | CompletionRequestBody] = CompletionRequestBody
    ) -> Response:
        body, requests = await read_requests(request, client, model, lambda body, _: body)
        usage, chat = body.stream_options and body.stream_options.include_usage, isinstance(body, ChatRequestBody)
        owner = writer.clients.owner(client)
        streams = [writer.generate(each, owner) for each in requests]
        replies = Replies(streams, body.n, writer.model_name, chat=chat, with_usage=bool(usage))
        if body.stream:
            return ReplyResponse(replies.events(errors), "text/event-stream")
        return ReplyResponse(replies.body(), "application/json")

    async def chat(request: Request, client: Client) -> Response:
        if settings.engines_digest is not None and ENGINES_HEADER in request.headers:
            generate_request = await read_generate_request(request)
            writer.check_models(generate_request)
            streams = [writer.generate(generate_request, writer.clients.owner(client))]
            replies = Replies(streams, 1, writer.model_name, chat=True, with_events=True)
            return ReplyResponse(replies.events(errors), "text/event-stream")
        return await respond(request, client, ChatRequestBody)

    async def create_response(request: Request, client: Client) -> Response:
        request_model, reply_model = await asyncio.to_thread(_load_responses)
        earlier: list[dict[str, Any]] = []

        def translate(body: "ResponseRequestBody", limit: int) -> ChatRequestBody:
            if body.store and not stored.is_enabled:
                raise RefusedError(400, "store: this server stores no responses", param="store")
            if body.previous_response_id is not None:
                conversation = stored.get(client, body.previous_response_id, "previous_response_id").conversation
                if len(conversation) > limit:
                    message = f"the conversation is longer than {limit} bytes: begin a new one"
                    raise RefusedError(400, message, param="previous_response_id", code="context_length_exceeded")
                earlier.extend(json.loads(conversation))
            return body.chat_body(earlier)

        body, (generate_request,) = await read_requests(request, client, request_model, translate)

        def store(response: dict[str, Any]) -> bool:
            conversation = json.dumps([*earlier, *body.items, *response["output"]])
            return stored.put(client, response["id"], StoredResponse(json.dumps(response), conversation))

        stream = writer.generate(generate_request, writer.clients.owner(client))
        keeps = stored.is_enabled and body.store is not False
        reply = reply_model(stream, body, generate_request, writer.model_name, store if keeps else None)
        if body.stream:
            return ReplyResponse(reply.events(errors), "text/event-stream")
        return ReplyResponse(reply.body(), "application/json")

    async def response(request: Request, client: Client) -> Response:
        if request.query_params:
            name = min(request.query_params)
            raise RefusedError(400, f"the parameter {name[:80]!r} is not supported: it takes none", param=name)
        response_id = request.path_params["id"]
        if request.method == "DELETE":
            stored.delete(client, response_id)
            return JSONResponse({"id": response_id, "object": "response", "deleted": True})
        return Response(stored.get(client, response_id).response, media_type="application/json")

    async def models(request: Request, _: Client) -> Response:
        name = request.path_params.get("name", writer.model_name)
        if name != writer.model_name:
            raise writer.unknown_model(name)
        entry = {"id": name, "object": "model", "created": created, "owned_by": "lookahead-agent"}
        entry |= {"max_model_len": await writer.context_length()}
        return JSONResponse(entry if "name" in request.path_params else {"object": "list", "data": [entry]})

    async def health(_: Request) -> Response:
        counts = {"running": writer.admission.running, "waiting": writer.admission.waiting}
        try:
            start.check()
        except RefusedError as error:
            content = {"status": error.code or "failing", "reason": error.message} | counts
            return JSONResponse(content, 503, error.headers)
        if (failure := writer.failure()) is not None:
            return JSONResponse({"status": "failing", "reason": failure} | counts, 503)
        return JSONResponse({"status": "ok"} | counts)

    async def metrics(request: Request) -> Response:
        writer.clients.authenticate(request.headers.get("Authorization"))
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
            version=importlib.metadata.version("lookahead-agent"),
            seconds=time.time() - created,
            replies=writer.replies,
            running=writer.admission.running,
        )
        return JSONResponse(server_status.model_dump())

    def with_client(endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def answer_checked(request: Request) -> Response:
            client = writer.clients.authenticate(request.headers.get("Authorization"))
            start.check()
            return await endpoint(request, client)

        return answer_checked

    routes = [
        Route(CHAT_PATH, with_client(chat), methods=["POST"]),
        Route("/v1/completions", with_client(respond), methods=["POST"]),
        Route("/v1/responses", with_client(create_response), methods=["POST"]),
        Route("/v1/responses/{id}", with_client(response), methods=["GET", "DELETE"]),
        *(Route(path, with_client(models)) for path in ("/v1/models", "/v1/models/{name:path}")),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    if settings.engines_digest is not None:
        routes += [Route(STATUS_PATH, status), Route(WARM_PATH, warm, methods=["POST"])]
    middleware = [Middleware(HeadCheck, allowed=settings.allowed_hosts, errors=errors)]
    if origins := settings.cors_origins:
        cors = Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST", "DELETE"], allow_headers=["*"]
        )
        middleware.insert(0, cors)
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=errors.handlers, lifespan=lifespan)
    app.state.writer = writer
    return app


def _load_responses() -> tuple[type["ResponseRequestBody"], type["ResponseReply"]]:
    """Import OpenAI's SDK, which takes seconds, with the first request for a response."""
    from lookahead_agent.server.responses_reply import ResponseReply
    from lookahead_agent.server.responses_request import ResponseRequestBody

    return ResponseRequestBody, ResponseReply
