"""Errors in the form of OpenAI's API, without paths and addresses of this machine."""

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

# Absolute paths and addresses.
_INTERNAL = re.compile(r"https?://\S+|(?<![\w.])(?:/[\w.@+-]+){2,}/?|[A-Za-z]:\\\S+")
_ABSENT = "there is nothing here: the server answers POST /v1/chat/completions, /v1/completions, and GET /v1/models"
_MAX_LENGTH = 1000  # Characters of an error's text
_FAILED = "the model failed; the server's log says why"
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class RefusedError(Exception):
    """A request that is not carried out."""

    status: int  # of HTTP
    message: str  # why
    param: str | None = None  # the field that it is about
    code: str | None = None  # a word for programs
    headers: dict[str, str] | None = None  # of the answer, such as Retry-After

    def __str__(self) -> str:
        return self.message


def refusal(error: Exception) -> RefusedError:
    """How a client is told of an error."""
    match error:
        case RefusedError():
            return error
        case ConfigurationError():
            code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
            return RefusedError(400, _INTERNAL.sub("…", str(error)[:_MAX_LENGTH]), code=code)
        case HTTPException():
            message = _ABSENT if error.status_code in (404, 405) else str(error.detail)
            return RefusedError(error.status_code, message, headers=dict(error.headers or {}))
    logger.error("a request failed: %s", error, exc_info=not isinstance(error, LookaheadError))
    return RefusedError(500, _FAILED)


def _shortened(text: str | None) -> str | None:
    return text if text is None or len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"


@dataclass(eq=False)
class ErrorReplies:
    """Answers requests that fail, in texts of bounded length."""

    on_error: Callable[[int], None]  # is told the status of each
    with_exceptions: bool = False  # whether answers have them with their whole texts, for this user's programs

    def describe(self, error: Exception) -> tuple[RefusedError, dict[str, Any]]:
        """The refusal, and the content of the answer."""
        refused = refusal(error)
        self.on_error(refused.status)
        kind = _TYPES.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
        body = {"message": _shortened(refused.message), "type": kind, "param": _shortened(refused.param)}
        content: dict[str, Any] = {"error": body | {"code": refused.code}}
        if self.with_exceptions and isinstance(error, LookaheadError):
            content["lookahead"] = {"type": type(error).__name__, "text": str(error)}
        return refused, content

    def response(self, error: Exception) -> JSONResponse:
        """The answer."""
        refused, content = self.describe(error)
        return JSONResponse(content, refused.status, refused.headers)

    @property
    def handlers(self) -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
        """For an application whose every error is answered so."""

        async def answer(_: Request, error: Exception) -> Response:
            return self.response(error)

        return dict.fromkeys((RefusedError, LookaheadError, HTTPException, Exception), answer)
