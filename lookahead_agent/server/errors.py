"""Errors in the format of OpenAI's API, without local paths and URLs."""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from lookahead_agent.errors import ConfigurationError, ContextLengthError, LookaheadError

logger = logging.getLogger(__name__)

# Absolute paths and URLs, which responses must not reveal.
_INTERNAL = re.compile(r"https?://\S+|(?<![\w.])(?:/[\w.@+-]+){2,}/?|[A-Za-z]:\\\S+")
_NOT_FOUND = (
    "there is nothing here: the server answers POST /v1/chat/completions, /v1/responses, /v1/completions, "
    "and GET /v1/models"
)
_MAX_LENGTH = 1000  # Characters of an error message
_FAILED = "the model failed; the server's log says why"
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class RefusedError(Exception):
    """A request that the server refuses."""

    status: int  # HTTP status
    message: str  # the reason
    param: str | None = None  # the field at fault
    code: str | None = None  # machine-readable error code
    headers: dict[str, str] | None = None  # headers of the response, such as Retry-After

    def __str__(self) -> str:
        return self.message


def refusal(error: Exception) -> RefusedError:
    """Map an exception to an HTTP error."""
    match error:
        case RefusedError():
            return error
        case ConfigurationError():
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            return RefusedError(400, _INTERNAL.sub("…", str(error)[:_MAX_LENGTH]), code=code)
        case HTTPException():
            message = _NOT_FOUND if error.status_code in (404, 405) else str(error.detail)
            return RefusedError(error.status_code, message, headers=dict(error.headers or {}))
    logger.error("a request failed: %s", error, exc_info=not isinstance(error, LookaheadError))
    return RefusedError(500, _FAILED)


def _truncate(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"


@dataclass(eq=False)
class ErrorReplies:
    """Builds the responses to failed requests, with messages of bounded length."""

    on_error: Callable[[int], None]  # called with the HTTP status of each
    with_exceptions: bool = False  # whether responses have an exception's type and full text, for this user's programs

    def describe(self, error: Exception) -> tuple[RefusedError, dict[str, Any]]:
        """Report the status to `on_error`; return the refusal and the response's JSON content."""
        refused = refusal(error)
        self.on_error(refused.status)
        error_type = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
        body = {"message": _truncate(refused.message), "type": error_type, "param": _truncate(refused.param)}
        content: dict[str, Any] = {"error": body | {"code": refused.code}}
        if self.with_exceptions and isinstance(error, LookaheadError):
            content["lookahead"] = {"type": type(error).__name__, "text": str(error)}
        return refused, content

    def response(self, error: Exception) -> JSONResponse:
        """The response to a failed request."""
        refused, content = self.describe(error)
        return JSONResponse(content, refused.status, refused.headers)

    @property
    def handlers(self) -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
        """Exception handlers that make a Starlette application respond to every error this way."""

        async def answer(_: Request, error: Exception) -> Response:
            return self.response(error)

        return dict.fromkeys((RefusedError, LookaheadError, HTTPException, Exception), answer)
