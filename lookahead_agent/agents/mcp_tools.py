"""Tools of MCP servers as LangChain tools, by an adapter for MCP's own client.

`langchain-mcp-adapters` up to 0.3.2 needs `mcp` below 2. vLLM 0.32 needs `mcp` 2, so the two cannot be installed
together.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack, ExitStack, asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING, Any, Self

from langchain_core.tools import BaseTool, ToolException
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from lookahead_agent.agents.mcp_files import McpServer as McpServer
from lookahead_agent.agents.mcp_files import read_servers as read_servers
from lookahead_agent.agents.tool_schemas import check_tool_schema, misfit, without_named_references
from lookahead_agent.agents.tool_use import truncate
from lookahead_agent.errors import ConfigurationError, extra_imports, validation_message
from lookahead_agent.system.background import result_of
from lookahead_agent.system.urls import hide_passwords

if TYPE_CHECKING:
    from anyio.from_thread import BlockingPortal
    from mcp.client.client import Client
    from mcp.types import Tool

    from lookahead_agent.agents.mcp_transports import HttpAnswers, Program

logger = logging.getLogger(__name__)

_START_TIMEOUT = 60.0  # Seconds for a server to start and to list its tools
_TIMEOUT = 120.0  # Seconds for a call
_REST = "ask for less at once"
_MAX_TOOLS = 1_000  # tools of one server
_MAX_PAGES = 100
_MAX_NAME_LENGTH = 128  # characters, MCP's own limit
_MAX_DESCRIPTION_LENGTH = 10_000


@contextmanager
def open_mcp_tools(
    servers: Mapping[str, McpServer], *, start_seconds: float | None = None, seconds: float | None = None
) -> Iterator[list[tuple[str, BaseTool]]]:
    """Connect to servers, and close the connections at the end.

    Yields the tools, each with its server's name; their metadata are MCP's annotations, such as `readOnlyHint`. The
    tools work in `invoke`, and in `ainvoke` of any event loop. A call to a server that has exited returns an error.
    A warning names each tool that cannot be used, which is left out.

    Args:
        servers: The servers by name.
        start_seconds: Timeout for a server to start, and again to list its tools; None: 60.
        seconds: Timeout of a call to a server without its own; None: 120.

    Raises:
        MissingExtraError: `mcp` is not installed.
        ConfigurationError: A server does not start, or does not answer in time.
    """
    starting = _START_TIMEOUT if start_seconds is None else start_seconds
    calling = _TIMEOUT if seconds is None else seconds
    with extra_imports("MCP servers need mcp 2: pip install 'lookahead-agent[mcp]'"):
        from anyio.from_thread import start_blocking_portal
        from mcp.client.client import Client

        from lookahead_agent.agents.mcp_transports import HttpAnswers, Program, leave_out
    # `closing` hides the caller's exception from the stack: task groups would wrap it.
    with closing(ExitStack()) as stack:
        tools: list[tuple[str, BaseTool]] = []
        for name, server in servers.items():
            # Each server has an event loop of its own: a message that takes long to read delays no other server.
            portal = stack.enter_context(start_blocking_portal(name=f"lookahead-agent-mcp-{name}"))
            program: Program | HttpAnswers = HttpAnswers()
            if server.command is not None:
                program = Program([server.command, *server.args], server.env, server.cwd)
            try:
                connection = portal.wrap_async_context_manager(
                    _connect(Client, name, server, program, starting, calling)
                )
                client = connection.__enter__()
                stack.callback(_close, connection, name)
                listed = portal.call(_list_tools, client, starting)
            except TimeoutError as error:
                raise ConfigurationError(
                    f"the MCP server {name!r} does not work: it did not answer within {starting:g} s"
                ) from error
            except Exception as error:
                problem = hide_passwords(_problem(error, program), server.url or "")
                raise ConfigurationError(f"the MCP server {name!r} does not work: {problem}") from error
            for tool in listed:
                try:
                    tools.append((name, _as_langchain_tool(portal, client, program, name, tool)))
                except ValueError as error:
                    leave_out(name, tool.name, str(error))
        yield tools


@asynccontextmanager
async def _connect(
    client: type[Client],
    name: str,
    server: McpServer,
    program: Program | HttpAnswers,
    start_seconds: float,
    seconds: float,
) -> AsyncIterator[Client]:
    from mcp.client.sse import sse_client
    from mcp.client.streamable_http import streamable_http_client

    from lookahead_agent.agents.mcp_transports import MAX_MESSAGE, Program, without_odd_tools

    async with AsyncExitStack() as stack:
        transport: Any
        if isinstance(program, Program):
            transport = program.run()
        elif server.type == "sse":
            create_client = program.create_client
            transport = sse_client(server.url or "", headers=server.headers, httpx_client_factory=create_client)
        else:
            http = await stack.enter_async_context(program.create_client(headers=server.headers))
            transport = streamable_http_client(server.url or "", http_client=http, max_sse_event_size=MAX_MESSAGE)
        async with asyncio.timeout(start_seconds):
            own = client(without_odd_tools(transport, name), read_timeout_seconds=server.timeout or seconds, cache=None)
            connection = await stack.enter_async_context(own)
        yield connection


def _close(connection: AbstractContextManager[Client], server: str) -> None:
    try:
        connection.__exit__(None, None, None)
    except Exception as error:  # the server had exited before, as its calls have reported
        logger.info("the connection to the MCP server %s had ended: %s", server, _problem(error))


async def _list_tools(client: Client, seconds: float) -> list[Tool]:
    """List all tools of a server, page by page. Raises ValueError if there are too many."""
    tools: list[Tool] = []
    cursor = None
    async with asyncio.timeout(seconds):
        for _ in range(_MAX_PAGES):
            page = await client.list_tools(cursor=cursor)
            tools += page.tools
            if len(tools) > _MAX_TOOLS:
                raise ValueError(f"it has more than {_MAX_TOOLS:,} tools")
            if (cursor := page.next_cursor) is None:
                return tools
    raise ValueError(f"its list of tools has more than {_MAX_PAGES} pages")


class _McpTool(BaseTool):
    begin: Callable[[dict[str, Any]], Future[str]] = Field(exclude=True, repr=False)
    """Starts a call in the connection's own event loop."""

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if isinstance(self.args_schema, dict):
            check_tool_schema(self.args_schema)
            self.args_schema = without_named_references(self.args_schema)
        return self

    # All parameters are positional-only or variadic, because a server's arguments may have any name.
    def _run(self, /, **arguments: Any) -> str:
        return result_of(self.begin(arguments))

    async def _arun(self, /, **arguments: Any) -> str:
        return await asyncio.wrap_future(self.begin(arguments))


def _as_langchain_tool(
    portal: BlockingPortal, client: Client, program: Program | HttpAnswers, server: str, tool: Tool
) -> BaseTool:
    from mcp.types import CallToolRequest, CallToolRequestParams, CallToolResult, InputRequiredResult

    answer: TypeAdapter[CallToolResult | InputRequiredResult] = TypeAdapter(CallToolResult | InputRequiredResult)

    async def call(arguments: dict[str, Any]) -> str:
        request = CallToolRequest(params=CallToolRequestParams(name=tool.name, arguments=arguments))
        try:
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()  # a lone surrogate ends the connection
            # `Client.call_tool` would check the result with the server's regular expressions, which may take hours.
            result = await client.session.send_request(request, answer)
        except Exception as error:
            if _is_unreadable(error):
                return f"{_describe_carried_out(server)} its result cannot be read: {_problem(error)}"
            limit = f": {program.problem}" if program.problem else ""
            raise ToolException(f"{_explain_failure(error, server)}{limit}") from error
        if isinstance(result, InputRequiredResult):
            raise ToolException(f"the MCP server {server!r} asks for input, which calls from here cannot give")
        texts = [*map(_text, result.content)]
        if result.structured_content is not None and not _has_data(texts, result.structured_content):
            texts.append(json.dumps(result.structured_content, ensure_ascii=False))
        text = "\n".join(texts)
        if result.is_error:
            raise ToolException(truncate(text, _REST) or "the tool failed and did not say why")
        problem = misfit(result.structured_content, tool.output_schema)
        if problem is not None:
            text = (
                f"{_describe_carried_out(server)} its result does not fit the tool's output schema: {problem}\n{text}"
            )
        return truncate(text, _REST)

    def begin(arguments: dict[str, Any]) -> Future[str]:
        try:
            return portal.start_task_soon(call, arguments)
        except RuntimeError:
            raise ToolException(f"the connection to the MCP server {server!r} is closed") from None

    if not 0 < len(tool.name) <= _MAX_NAME_LENGTH:
        raise ValueError(f"a name has 1 to {_MAX_NAME_LENGTH} characters")
    description = "".join(
        char if char.isprintable() or char == "\n" else " " for char in tool.description or tool.title or tool.name
    )
    try:
        created = _McpTool(
            name=re.sub(r"[^A-Za-z0-9_-]", "_", tool.name),
            description=truncate(description, "the rest is left out", _MAX_DESCRIPTION_LENGTH),
            args_schema={"properties": {}, **tool.input_schema},
            begin=begin,
            metadata=tool.annotations.model_dump(by_alias=True, exclude_none=True) if tool.annotations else {},
            handle_tool_error=True,
        )
        convert_to_openai_tool(created)
    except Exception as error:  # LangChain resolves fewer references than JSON has
        raise ValueError(_problem(error)[:300]) from error
    return created


def _describe_carried_out(server: str) -> str:
    return f"the MCP server {server!r} has carried out the call, which need not be repeated, but"


def _is_unreadable(error: Exception) -> bool:
    """Whether a server answered the call with a result that cannot be read."""
    from mcp.shared.exceptions import MCPError
    from mcp.types import PARSE_ERROR

    return isinstance(error, ValidationError) or (isinstance(error, MCPError) and error.code == PARSE_ERROR)


def _explain_failure(error: Exception, server: str) -> str:
    """Say whether a call that has no result may have been carried out."""
    from mcp.shared.exceptions import MCPError
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    if isinstance(error, MCPError) and error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
        return f"the MCP server {server!r} gave no result, and may have carried out the call: {_problem(error)}"
    return f"the MCP server {server!r} did not carry out the call: {_problem(error)}"


def _has_data(texts: list[str], data: Any) -> bool:
    """Whether the parts of a result have its structured content too, as MCP asks of servers."""
    # Servers wrap what is not an object: `{"result": [1, 2]}`.
    wrapped = data["result"] if isinstance(data, dict) and data.keys() == {"result"} else data
    parts = [_json_or_text(text) for text in texts]
    return any(part in (parts, texts, *parts, *texts) for part in (data, wrapped)) if texts else False


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _text(block: Any) -> str:
    """Convert a part of a result to text; images and other media become a placeholder."""
    if block.type == "text":
        return str(block.text)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return str(block.resource.text)
    if block.type == "resource_link":
        return f"({block.name}: {block.uri})"
    return f"({block.type} of the type {getattr(block, 'mime_type', None) or 'unknown'}, which is not shown)"


def _problem(error: BaseException, program: Program | HttpAnswers | None = None) -> str:
    """Describe an error on one line, with what its program wrote about it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    message = validation_message(error) if isinstance(error, ValidationError) else str(error)
    parts = [" ".join(message.split()) or type(error).__name__, program.explain() if program is not None else ""]
    return ": ".join(part[:500].encode(errors="replace").decode() for part in parts if part)
