"""Bodies of requests: read in time, bounded in every dimension, and checked without holding up other requests."""

import asyncio
import json
import re
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from lookahead_agent.errors import ConfigurationError, check_encodable
from lookahead_agent.generation.tool_calls import STRICT_NUMBERS, levels
from lookahead_agent.server.errors import RefusedError

Body = TypeVar("Body", bound=BaseModel)

_IN_PLACE = 1 << 14  # Bytes that are checked in the event loop: that takes less than a millisecond
_DEEPEST = 100  # Levels of lists and objects; a schema's level takes two
_MOST_VALUES = 100_000  # Values of a body beside the token ids of a prompt
_MOST_CONTAINERS = 50_000
"""Lists and objects among them: "[]," takes thirty times its memory, and Python's garbage collector looks at each."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""Also one without an end: what looks for an end at each quote would look forever."""
_MOST_HELD = 64 << 20  # Bytes of all bodies that are on their way, of which any may come slowly

_TOO_LONG = "the body is longer than {} bytes"
_TOO_MANY = "the body has too many values: more than any prompt or schema of these models"
_TOO_DEEP = f"the body is nested in more than {_DEEPEST} levels"


class BodyReader:
    """Reads the bodies of requests, each of which has so many seconds to arrive."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._held = 0
        self._checking = asyncio.Semaphore(1)

    async def read(self, request: Request, model: type[Body], longest: int, token_ids: int) -> Body:
        """The body of a request, of at most `longest` bytes, whose prompt may have `token_ids` of them."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            # A browser sends no JSON to another site without asking it.
            raise RefusedError(415, "the body must be JSON: send it with Content-Type: application/json")
        length = request.headers.get("content-length", "")
        if length.isdecimal() and int(length) > longest:
            raise RefusedError(413, _TOO_LONG.format(longest))
        data = await self.arrived(request, longest)
        if len(data) <= _IN_PLACE:
            return _checked(data, model, token_ids)
        # One at a time: what a body is read into takes several times its memory.
        async with self._checking:
            return await asyncio.to_thread(_checked, data, model, token_ids)

    async def arrived(self, request: Request, longest: int) -> bytes:
        """The bytes of a body, of at most `longest`."""
        pieces: list[bytes] = []
        length = 0
        try:
            async with asyncio.timeout(self._seconds):
                async for piece in request.stream():
                    pieces.append(piece)
                    length += len(piece)
                    self._held += len(piece)
                    if length > longest:
                        raise RefusedError(413, _TOO_LONG.format(longest))
                    if self._held > max(_MOST_HELD, 4 * longest):
                        raise RefusedError(
                            429, "many long requests arrive: try again later", headers={"Retry-After": "1"}
                        )
        except TimeoutError:
            # The rest of the request may still come.
            late = f"the body did not arrive within {self._seconds:g} s"
            raise RefusedError(408, late, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise RefusedError(499, "the client has gone") from None
        finally:
            self._held -= length
        return b"".join(pieces)


def _checked(data: bytes, model: type[Body], token_ids: int) -> Body:
    document = _document(data, _MOST_VALUES + token_ids)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise RefusedError(400, f"{name or 'body'}: {problem['msg']}", param=name or None) from None


def _document(data: bytes, most_values: int) -> Any:
    # Counted before they are made, exactly where that is needed; a function lets other threads come between its calls.
    if _containers(data) > _MOST_CONTAINERS and _containers(_STRING.sub(lambda _: b"", data)) > _MOST_CONTAINERS:
        raise RefusedError(400, _TOO_MANY)
    try:
        text = data.decode()
        document = json.loads(text, **STRICT_NUMBERS)
    except RecursionError:
        raise RefusedError(400, _TOO_DEEP) from None
    except UnicodeDecodeError as error:
        raise RefusedError(400, f"the body is not in UTF-8: byte {error.start} is wrong") from None
    except ValueError as error:
        raise RefusedError(400, f"the body is no JSON: {error}") from None
    values = 0
    for level, inner in enumerate(levels([document])):
        values += len(inner)
        if level == _DEEPEST:
            raise RefusedError(400, _TOO_DEEP)
        if values > most_values:
            raise RefusedError(400, _TOO_MANY)
    if "\\ud" in text or "\\uD" in text:
        try:
            check_encodable(document, "body")
        except ConfigurationError as error:
            raise RefusedError(400, str(error)) from None
    return document


def _containers(data: bytes) -> int:
    return data.count(b"{") + data.count(b"[")
