"""Errors as OpenAI's clients understand them, without a word about this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from lookahead_agent.errors import ConfigurationError, ContextLengthError, LookaheadError

logger = logging.getLogger(__name__)

# Absolute paths and addresses: names of folders and machines are nobody's business.
_INTERNAL = re.compile(r"https?://\S+|(?<![\w.])(?:/[\w.@+-]+){2,}/?|[A-Za-z]:\\\S+")
_ABSENT = (
    "there is nothing here: this server answers POST /v1/chat/completions, POST /v1/completions and GET /v1/models"
)
_LONGEST = 1000
"""Characters of an error's text."""
_FAILED = "the model failed; the server's log says why"


class ErrorBody(BaseModel):
    """What went wrong.

    Attributes:
        message: In words.
        type: "invalid_request_error", "authentication_error", "rate_limit_error" or "server_error".
        param: The field that it is about.
        code: A word for programs.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    """An error as OpenAI's API gives it."""

    error: ErrorBody


class RefusedError(Exception):
    """A request that is not carried out.

    Args:
        status: HTTP status.
        message: Why, in words.
        param: The field that it is about.
        code: A word for programs.
        retry_after: Seconds after which it may be tried again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after


def error_body(error: Exception) -> tuple[int, ErrorBody]:
    """Status and body for an exception."""
    match error:
        case RefusedError():
            kinds = {401: "authentication_error", 429: "rate_limit_error"}
            kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
            return error.status, ErrorBody(message=str(error), type=kind, param=error.param, code=error.code)
        case ContextLengthError():
            return 400, _invalid(error, "context_length_exceeded")
        case ConfigurationError():
            return 400, _invalid(error, None)
    logger.error("a request failed: %s", error, exc_info=not isinstance(error, LookaheadError))
    return 500, ErrorBody(message=_FAILED, type="server_error")


def _invalid(error: Exception, code: str | None) -> ErrorBody:
    return ErrorBody(message=_INTERNAL.sub("…", str(error)[:_LONGEST]), type="invalid_request_error", code=code)


def error_response(status: int, body: ErrorBody, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error as OpenAI's API gives it, of bounded length, whatever a client has sent."""
    for name in ("message", "param"):
        if len(text := getattr(body, name) or "") > _LONGEST:
            body = body.model_copy(update={name: text[: _LONGEST - 1] + "…"})
    return JSONResponse(ErrorReply(error=body).model_dump(), status, headers)


def install_handlers(app: FastAPI, on_error: Callable[[int], None]) -> None:
    """Have every error of the app answered in this form, and `on_error` told its status."""

    def reply(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> JSONResponse:
        on_error(status)
        return error_response(status, body, headers)

    async def known(_: Request, error: Exception) -> JSONResponse:
        status, body = error_body(error)
        wait = error.retry_after if isinstance(error, RefusedError) else None
        headers = {"Retry-After": str(wait)} if wait is not None else {}
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if status == 408:
            headers["Connection"] = "close"  # the rest of the request may still come
        return reply(status, body, headers)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        problem: dict[str, Any] = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"] if part != "body")
        return reply(
            400, ErrorBody(message=f"{name}: {problem['msg']}", type="invalid_request_error", param=name or None)
        )

    async def http(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = "invalid_request_error" if error.status_code < 500 else "server_error"
        message = _ABSENT if error.status_code in (404, 405) else str(error.detail)
        return reply(error.status_code, ErrorBody(message=message, type=kind), dict(error.headers or {}))

    app.add_exception_handler(RefusedError, known)
    app.add_exception_handler(LookaheadError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, known)
