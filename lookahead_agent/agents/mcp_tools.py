"""Tools of MCP servers as LangChain tools, by an adapter for MCP's own client.

`langchain-mcp-adapters` up to 0.3.2 needs `mcp` below 2. vLLM 0.32 needs `mcp` 2, so the two cannot be installed
together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast

from langchain_core.tools import BaseTool, ToolException
from pydantic import BaseModel, Field, ValidationError

from lookahead_agent.agents.tool_use import cut
from lookahead_agent.errors import ConfigurationError, extra_imports, validation_message

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp.client.client import Client
    from mcp.types import Tool

logger = logging.getLogger(__name__)

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_START_TIMEOUT = 30.0  # Seconds for a server to start and to list its tools
_TIMEOUT = 120.0  # Seconds for a call
_STDERR_LENGTH = 500


class McpServer(BaseModel):
    """An entry of `mcpServers`: a program that serves over its standard streams, or a URL."""

    command: str | None = None
    args: list[str] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)  # besides the variables that every program needs
    cwd: str | None = None  # working directory
    url: str | None = None  # of a running server
    type: Literal["stdio", "http", "streamable-http", "streamable_http", "sse"] | None = None
    headers: dict[str, str] = Field(default_factory=dict)  # of requests to the URL


class _McpFile(BaseModel):
    mcpServers: dict[str, McpServer]


def read_servers(file: Path) -> dict[str, McpServer]:
    """Read the servers of an `mcpServers` file by name, with `${NAME}` and `${NAME:-default}` from the environment.

    Raises:
        ConfigurationError: The file does not exist or is invalid, a variable is not set, or a server has neither a
            command nor a URL, or both.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        servers = _McpFile.model_validate(_expanded(content)).mcpServers
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigurationError(f"{file.name}: {validation_message(error)}") from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or a variable that is not set
        raise ConfigurationError(f"{file.name}: {error}") from None
    for name, server in servers.items():
        if (server.command is None) == (server.url is None):
            raise ConfigurationError(f"{file.name}: the server {name!r} needs either a command or a url")
    return servers


def _expanded(value: Any) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(_variable, value)
    if isinstance(value, list):
        return [_expanded(part) for part in value]
    return {key: _expanded(part) for key, part in value.items()} if isinstance(value, dict) else value


def _variable(match: re.Match[str]) -> str:
    if (text := os.environ.get(match[1], match[2])) is None:
        raise ValueError(f"the environment variable {match[1]} is not set")
    return text


@contextmanager
def open_mcp_tools(servers: Mapping[str, McpServer]) -> Iterator[list[tuple[str, BaseTool]]]:
    """Connect to servers, and close the connections at the end.

    Yields the tools, each with its server's name; their metadata are MCP's annotations, such as `readOnlyHint`. The
    tools work in `invoke`, and in `ainvoke` of any event loop. A call to a server that has exited returns an error.

    Raises:
        MissingExtraError: `mcp` is not installed.
        ConfigurationError: A server does not start, or does not answer within 30 s.
    """
    with extra_imports("MCP servers need mcp 2: pip install 'lookahead-agent[mcp]'"):
        from anyio.from_thread import start_blocking_portal
        from mcp.client.client import Client
    # `closing` hides the caller's exception from the stack: task groups would wrap it.
    with closing(ExitStack()) as stack:
        portal = stack.enter_context(start_blocking_portal(name="lookahead-agent-mcp"))
        tools: list[tuple[str, BaseTool]] = []
        for name, server in servers.items():
            errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))  # noqa: SIM115
            try:
                connection = portal.wrap_async_context_manager(_connect(Client, server, errors))
                client = connection.__enter__()
                stack.callback(_close, connection, name)
                listed = portal.call(_list_tools, client)
            except Exception as error:
                raise ConfigurationError(f"the MCP server {name!r} does not work: {_problem(error, errors)}") from error
            tools += [(name, _as_langchain_tool(portal, client, name, tool)) for tool in listed]
        yield tools


@asynccontextmanager
async def _connect(client: type[Client], server: McpServer, errors: IO[str]) -> AsyncIterator[Client]:
    from mcp.client.sse import sse_client
    from mcp.client.stdio import StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
    from mcp.shared._httpx_utils import create_mcp_http_client

    async with AsyncExitStack() as stack:
        transport: Any
        if server.command is not None:
            program = StdioServerParameters(command=server.command, args=server.args, env=server.env, cwd=server.cwd)
            transport = stdio_client(program, cast("TextIO", errors))
        elif server.type == "sse":
            transport = sse_client(server.url or "", headers=server.headers)
        else:
            http = await stack.enter_async_context(create_mcp_http_client(headers=server.headers))
            transport = streamable_http_client(server.url or "", http_client=http)
        async with asyncio.timeout(_START_TIMEOUT):
            connection = await stack.enter_async_context(client(transport, read_timeout_seconds=_TIMEOUT, cache=None))
        yield connection


def _close(connection: AbstractContextManager[Client], server: str) -> None:
    try:
        connection.__exit__(None, None, None)
    except Exception as error:  # the server had exited before, as its calls have reported
        logger.info("the connection to the MCP server %s had ended: %s", server, _problem(error))


async def _list_tools(client: Client) -> list[Tool]:
    """List all tools of a server, page by page."""
    tools: list[Tool] = []
    async with asyncio.timeout(_START_TIMEOUT):
        page = await client.list_tools()
        tools += page.tools
        while page.next_cursor is not None:
            page = await client.list_tools(cursor=page.next_cursor)
            tools += page.tools
    return tools


class _McpTool(BaseTool):
    begin: Callable[[dict[str, Any]], Future[str]] = Field(exclude=True, repr=False)
    """Starts a call in the connection's own event loop."""

    # All parameters are positional-only or variadic, because a server's arguments may have any name.
    def _run(self, /, **arguments: Any) -> str:
        return self.begin(arguments).result()

    async def _arun(self, /, **arguments: Any) -> str:
        return await asyncio.wrap_future(self.begin(arguments))


def _as_langchain_tool(portal: BlockingPortal, client: Client, server: str, tool: Tool) -> BaseTool:
    async def call(arguments: dict[str, Any]) -> str:
        try:
            result = await client.call_tool(tool.name, arguments)
        except Exception as error:
            raise ToolException(f"the MCP server {server!r} did not carry out the call: {_problem(error)}") from error
        text = "\n".join(map(_text, result.content))
        if not text and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        text = cut(text, "ask for less at once")
        if result.is_error:
            raise ToolException(text or "the tool failed and did not say why")
        return text

    def begin(arguments: dict[str, Any]) -> Future[str]:
        try:
            return portal.start_task_soon(call, arguments)
        except RuntimeError:
            raise ToolException(f"the connection to the MCP server {server!r} is closed") from None

    return _McpTool(
        name=re.sub(r"[^A-Za-z0-9_-]", "_", tool.name),
        description=tool.description or tool.title or tool.name,
        args_schema={"properties": {}, **tool.input_schema},
        begin=begin,
        metadata=tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else {},
        handle_tool_error=True,
    )


def _text(block: Any) -> str:
    """Convert a part of a result to text; images and other media become a placeholder."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"({block.name}: {block.uri})"
    return f"({block.type} of the type {getattr(block, 'mime_type', None) or 'unknown'}, which is not shown)"


def _problem(error: BaseException, errors: IO[str] | None = None) -> str:
    """Describe an error on one line, with the end of the server's stderr."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = f"it did not answer within {_START_TIMEOUT:g} s" if isinstance(error, TimeoutError) else str(error)
    parts = [message or type(error).__name__]
    if errors is not None:
        errors.seek(0)
        parts += [" ".join(errors.read()[-_STDERR_LENGTH:].split())]
    return ": ".join(filter(None, parts))
