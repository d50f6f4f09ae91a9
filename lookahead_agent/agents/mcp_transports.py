"""Transports to MCP servers that bound what a server sends: MCP's own transports read messages of any length."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import anyio
import httpx2
from anyio.abc import ByteReceiveStream, Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.client.stdio import get_default_environment
from mcp.os.posix.utilities import terminate_posix_process_tree
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.shared.message import SessionMessage
from mcp.types import PARSE_ERROR, ErrorData, JSONRPCError, JSONRPCResponse, jsonrpc_message_adapter
from mcp_types.methods import validate_server_result
from mcp_types.version import LATEST_HANDSHAKE_VERSION
from pydantic import ValidationError

from lookahead_agent.errors import validation_message

if TYPE_CHECKING:
    from mcp.client._transport import TransportStreams

logger = logging.getLogger(__name__)

MAX_MESSAGE = 16 << 20  # Bytes of one message
_EXIT_SECONDS = 2.0  # time for a program to end after its input, and again after SIGTERM
_STDERR_LENGTH = 500  # Characters of the end of a program's stderr
_ENDED = (anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)


class Program:
    """A server's program, which communicates over its standard streams.

    Args:
        command: The program and its arguments.
        env: Variables besides those that every program needs.
        folder: Its working directory; None: the current one.

    Attributes:
        problem: Why the connection ended, if the program broke a limit; "" otherwise.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: str | None) -> None:
        self._command, self._env, self._folder = command, env, folder
        self._stderr = b""
        self.problem = ""

    def explain(self) -> str:
        """Return the broken limit or the end of the program's stderr, on one line."""
        return self.problem or " ".join(self._stderr.decode(errors="replace")[-_STDERR_LENGTH:].split())

    @asynccontextmanager
    async def run(self) -> AsyncIterator[TransportStreams]:
        """Start the program; at the end, close its input, and kill it if it does not end.

        Raises:
            OSError: The program cannot be started.
        """
        process = await anyio.open_process(
            self._command,
            env={**get_default_environment(), **self._env},
            cwd=self._folder,
            start_new_session=True,
        )
        stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
        assert stdin is not None
        assert stdout is not None
        assert stderr is not None
        received, incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        outgoing, sent = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            lines = BufferedByteReceiveStream(stdout)
            async with received:
                try:
                    while True:
                        await received.send(_parse(await lines.receive_until(b"\n", MAX_MESSAGE)))
                except anyio.DelimiterNotFound:
                    self.problem = f"it sent a message of more than {MAX_MESSAGE >> 20} MiB"
                except RecursionError:
                    self.problem = "it sent a message that is nested too deeply"
                except _ENDED:
                    pass
            if self.problem:
                with suppress(ProcessLookupError):
                    process.kill()
            # A program that still writes would wait for a reader, and not end.
            await _drain(stdout)

        async def write() -> None:
            with suppress(*_ENDED):
                async with sent:
                    async for message in sent:
                        text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                        await stdin.send(text.encode() + b"\n")
            await received.aclose()  # pending requests end, because no answer can follow

        async def keep_stderr(text: bytes) -> None:
            self._stderr = (self._stderr + text)[-4 * _STDERR_LENGTH :]

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(write)
            tasks.start_soon(_drain, stderr, keep_stderr)
            try:
                yield incoming, outgoing
            finally:
                with anyio.CancelScope(shield=True):
                    await _stop(process)
                for stream in (received, incoming, outgoing, sent):
                    stream.close()
                tasks.cancel_scope.cancel()


async def _drain(stream: ByteReceiveStream, keep: Any = None) -> None:
    with suppress(*_ENDED):
        while True:
            piece = await stream.receive()
            if keep is not None:
                await keep(piece)


async def _stop(process: Process) -> None:
    """Close a program's input, and kill it with its children unless it ends within some seconds."""
    assert process.stdin is not None
    with suppress(*_ENDED):
        await process.stdin.aclose()
    await _wait(process)
    await terminate_posix_process_tree(process, _EXIT_SECONDS)
    await _wait(process)
    # Closes the pipes, even if a child that left the process group holds their other ends.
    transport = getattr(getattr(process, "_process", None), "_transport", None)
    if transport is not None:
        transport.close()


async def _wait(process: Process) -> None:
    # `process.wait` would also wait for the pipes, which a child of the program may hold.
    with anyio.move_on_after(_EXIT_SECONDS):
        while process.returncode is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)


class _ListedTools:
    """A stream of messages in which lists of tools have only tools that MCP's client can read.

    It would refuse a whole list for one tool.
    """

    def __init__(self, messages: Any, server: str) -> None:
        self._messages, self._server = messages, server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._messages, name)

    async def receive(self) -> SessionMessage | Exception:
        message: SessionMessage | Exception = await self._messages.receive()
        if isinstance(message, SessionMessage) and isinstance(answer := message.message, JSONRPCResponse):
            tools = answer.result.get("tools")
            if isinstance(tools, list):
                answer.result["tools"] = [tool for tool in map(self._read, tools) if tool is not None]
        return message

    def _read(self, tool: Any) -> dict[str, Any] | None:
        if not isinstance(tool, dict):
            leave_out(self._server, str(tool), "it is not an object")
            return None
        try:
            json.dumps(tool, ensure_ascii=False).encode()
            readable = tool | {"inputSchema": _object_schema(tool.get("inputSchema"))}
            # Only results of another kind, which are not compared with their schema, have another type.
            if not _is_of_object(readable.get("outputSchema")):
                del readable["outputSchema"]
            validate_server_result("tools/list", LATEST_HANDSHAKE_VERSION, {"tools": [readable]})
        except UnicodeEncodeError:
            problem = "it has a lone surrogate, which no message can carry"
        except ValidationError as error:
            problem = validation_message(error)
        except Exception as error:  # too many levels are one of several errors
            problem = str(error)
        else:
            return readable
        leave_out(self._server, str(tool.get("name")), problem)
        return None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None

    async def __aenter__(self) -> Self:
        await self._messages.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> Any:
        return await self._messages.__aexit__(*error)


def _object_schema(schema: Any) -> Any:
    """Return the schema of a tool's arguments; servers leave out its type, write nulls, or have no schema."""
    if schema is None or schema is True:
        return {"type": "object"}
    if not isinstance(schema, dict):
        return schema
    return {"type": "object", **{key: value for key, value in schema.items() if value is not None}}


def _is_of_object(schema: Any) -> bool:
    return schema is None or (isinstance(schema, dict) and schema.get("type") == "object")


@asynccontextmanager
async def without_odd_tools(transport: Any, server: str) -> AsyncIterator[TransportStreams]:
    """Open a transport to a server, and leave out of its lists the tools that cannot be read."""
    async with transport as (incoming, outgoing):
        yield _ListedTools(incoming, server), outgoing


def leave_out(server: str, tool: str, problem: str) -> None:
    """Warn that a server's tool is left out."""
    logger.warning("the MCP server %r: its tool %r is left out: %s", server, tool[:100], problem[:500])


def _parse(line: bytes) -> SessionMessage | Exception:
    """Parse a message. An unreadable answer becomes an error answer, so that its request ends at once."""
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        problem = error
    try:
        message = json.loads(line)
    except ValueError:
        return problem  # no message at all, such as a line of a log
    if not isinstance(message, Mapping) or "method" in message or not isinstance(message.get("id"), (int, str)):
        return problem
    if isinstance(result := message.get("result"), Mapping) and isinstance(result.get("tools"), list):
        return SessionMessage(JSONRPCResponse(jsonrpc="2.0", id=message["id"], result=result))
    reason = validation_message(problem) if isinstance(problem, ValidationError) else str(problem)
    answer = ErrorData(code=PARSE_ERROR, message=f"its answer is not a message of MCP: {reason}"[:500])
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=message["id"], error=answer))


# An escape in JSON: a pair of surrogates, a lone one, or another.
_ESCAPE = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(?P<lone>u[dD][89a-fA-F]..)|.)", re.DOTALL)


class _ReadableStream(httpx2.AsyncByteStream):
    """A body by lines, in which a lone surrogate is six letters: MCP's client can read no message that has one."""

    def __init__(self, stream: httpx2.AsyncByteStream, *, is_message: bool) -> None:
        self._stream = stream
        self._is_message = is_message  # whether the body is one message, and not a stream of events

    async def __aiter__(self) -> AsyncIterator[bytes]:
        line = bytearray()
        size = 0  # Bytes of the message; MCP's client itself limits the events of a stream, once it gets their lines
        async for piece in self._stream:
            end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
            size = len(piece) + (size if self._is_message or not end else 0)
            if size > MAX_MESSAGE:
                raise httpx2.StreamError(f"it sent a message of more than {MAX_MESSAGE >> 20} MiB")
            if end:
                yield _readable(bytes(line) + piece[:end])
                line.clear()
            line += piece[end:]
        yield _readable(bytes(line))

    async def aclose(self) -> None:
        await self._stream.aclose()


def _readable(text: bytes) -> bytes:
    return _ESCAPE.sub(lambda escape: b"\\" * (1 + (escape["lone"] is not None)) + escape[0][1:], text)


async def _refuse_compression(request: httpx2.Request) -> None:
    request.headers["Accept-Encoding"] = "identity"  # a small compressed body can be a huge message


async def _bound_body(response: httpx2.Response) -> None:
    if response.headers.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise httpx2.StreamError("it compressed its answer, which was not asked for")
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    is_message = not response.headers.get("Content-Type", "").startswith("text/event-stream")
    response.stream = _ReadableStream(response.stream, is_message=is_message)


class HttpAnswers:
    """The answers of a server over HTTP.

    Attributes:
        problem: Why the server cannot be used, if it answered with an error's status; "" otherwise.
    """

    def __init__(self) -> None:
        self.problem = ""

    def explain(self) -> str:
        """Return the last status of an error."""
        return self.problem

    def create_client(
        self,
        headers: dict[str, str] | None = None,
        timeout: httpx2.Timeout | None = None,
        auth: httpx2.Auth | None = None,
    ) -> httpx2.AsyncClient:
        """Create MCP's HTTP client with bounded answers."""
        client = create_mcp_http_client(headers, timeout, auth)
        client.event_hooks = {"request": [_refuse_compression], "response": [_bound_body, self._note_status]}
        return client

    async def _note_status(self, response: httpx2.Response) -> None:
        # A server need not have a stream of its own events (GET), or an end of the session (DELETE).
        if response.request.method == "POST" or not response.is_error:
            failed = f"it answered {response.status_code} {response.reason_phrase}".rstrip()
            self.problem = failed if response.is_error else ""
