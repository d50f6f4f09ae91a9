"""Reads request bodies with a timeout and limits on every dimension, without blocking other requests."""

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.tool_calls import STRICT_NUMBERS, levels, reject_duplicates
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.system.texts import check_encodable

Body = TypeVar("Body", bound=BaseModel)

_MAX_INLINE = 1 << 14  # Bytes of a body that is parsed in the event loop, in less than a millisecond
_MAX_MEDIUM = 1 << 16  # Bytes of a body that never waits for a longer one
_MAX_DEPTH = 100  # Nesting of lists and objects; a level of a JSON schema takes two
_MAX_VALUES = 100_000  # Values of a body, not counting the token ids of a prompt
_MAX_CONTAINERS = 50_000
"""Lists and objects among them: a parsed "[]," takes 30 times its size, and the garbage collector traverses each."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A JSON string, terminated or not: a search for the closing quote from each opening one would be quadratic."""
_MAX_BUFFERED = 64 << 20  # Bytes of all bodies that are being received, possibly slowly

_TOO_LONG = "the body is longer than {} bytes"
_TOO_MANY = "the body has too many values: more than any prompt or schema of these models"
_TOO_DEEP = f"the body is nested in more than {_MAX_DEPTH} levels"


class BodyReader:
    """Reads request bodies, each of which must arrive within `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._buffered = 0
        self._slots = {size: asyncio.Semaphore(1) for size in ("medium", "long")}

    async def read_json(self, request: Request, max_bytes: int) -> bytes:
        """Read the bytes of a body of at most `max_bytes` bytes that says that it is JSON."""
        mime = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if mime != "application/json" and not (mime.startswith("application/") and mime.endswith("+json")):
            # A browser sends cross-origin JSON only after a CORS preflight.
            raise RefusedError(415, "the body must be JSON: send it with Content-Type: application/json")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > max_bytes:
            raise RefusedError(413, _TOO_LONG.format(max_bytes))
        return await self.read_bytes(request, max_bytes)

    def slot(self, data: bytes) -> AbstractAsyncContextManager[object]:
        """Return the context in which a body becomes a request: a long one at a time, and no shorter one waits for it.

        A parsed body takes several times its size in memory.
        """
        if len(data) <= _MAX_INLINE:
            return nullcontext()
        return self._slots["medium" if len(data) <= _MAX_MEDIUM else "long"]

    async def parse(self, data: bytes, model: type[Body], token_ids: int) -> Body:
        """Parse and validate a body, whose prompt may have up to `token_ids` token ids."""
        if len(data) <= _MAX_INLINE:
            return _parse_body(data, model, token_ids)
        return await asyncio.to_thread(_parse_body, data, model, token_ids)

    async def read_bytes(self, request: Request, max_bytes: int) -> bytes:
        """Read the bytes of a body of at most `max_bytes` bytes."""
        chunks: list[bytes] = []
        length = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    length += len(chunk)
                    self._buffered += len(chunk)
                    if length > max_bytes:
                        raise RefusedError(413, _TOO_LONG.format(max_bytes))
                    if length > _MAX_MEDIUM and self._buffered > max(_MAX_BUFFERED, 4 * max_bytes):
                        raise RefusedError(
                            429, "many long requests arrive: try again later", headers={"Retry-After": "1"}
                        )
        except TimeoutError:
            # Closed, since the rest of the body may still arrive.
            message = f"the body did not arrive within {self._seconds:g} s"
            raise RefusedError(408, message, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise RefusedError(499, "the client has gone") from None
        finally:
            self._buffered -= length
        return b"".join(chunks)


def validate(model: type[Body], document: Any, at: str = "") -> Body:
    """Validate a value, at a path in the body; raises RefusedError for its first problem."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in (*([at] if at else []), *problem["loc"]))
        message = problem["msg"].removeprefix("Value error, ")
        raise RefusedError(400, f"{name or 'body'}: {message}", param=name or None) from None


def _parse_body(data: bytes, model: type[Body], token_ids: int) -> Body:
    return validate(model, _parse_json(data, _MAX_VALUES + token_ids))


def _parse_json(data: bytes, max_values: int) -> Any:
    # Counted before parsing, without strings only if need be; `sub` with a function lets other threads run meanwhile.
    if _containers(data) > _MAX_CONTAINERS and _containers(_STRING.sub(lambda _: b"", data)) > _MAX_CONTAINERS:
        raise RefusedError(400, _TOO_MANY)
    try:
        text = data.decode()
        document = json.loads(text, object_pairs_hook=reject_duplicates, **STRICT_NUMBERS)
    except RecursionError:
        raise RefusedError(400, _TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"the body is not in UTF-8: byte {error.start} is wrong") from None
    except ValueError as error:
        raise RefusedError(400, f"the body is not JSON: {error}") from None
    values = 0
    for level, inner in enumerate(levels([document])):
        values += len(inner)
        if level == _MAX_DEPTH:
            raise RefusedError(400, _TOO_DEEP)
        if values > max_values:
            raise RefusedError(400, _TOO_MANY)
    if "\\ud" in text or "\\uD" in text:
        try:
            check_encodable(document, "body")
        except ConfigurationError as error:
            raise RefusedError(400, str(error)) from None
    return document


def _containers(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")
