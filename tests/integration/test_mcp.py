"""Real MCP servers over stdio and HTTP, without a model: sync and async calls, errors, and shutdown."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.tool_sources import open_tools

SERVER = Path(__file__).with_name("mcp_server.py")


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    shop = {"command": sys.executable, "args": [str(SERVER)], "env": {"CURRENCY": "EUR"}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"shop": shop}}))
    return tmp_path / "servers.json"


def call(tool: BaseTool, **arguments: Any) -> ToolMessage:
    message = tool.invoke({"name": tool.name, "args": arguments, "id": "1", "type": "tool_call"})
    assert isinstance(message, ToolMessage)
    return message


def server_processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if str(SERVER) in child.cmdline()]


def remaining_processes() -> list[psutil.Process]:
    """Return the servers that still run: on a loaded machine, the system lets a process end late."""
    psutil.wait_procs(server_processes(), 30)
    return server_processes()


def test_tools_of_an_mcp_server_work_in_sync_and_async_calls(servers: Path) -> None:
    with open_tools(["calculator"], servers) as tools:
        named = {tool.name: tool for tool in tools}
        assert list(named) == ["calculator", "price", "stock_add", "long", "end"]
        assert (
            describe_tools([named["price"]]) == '- price(item: string, config: string = "shop"): The price of an item.'
        )
        assert named["price"].metadata == {"readOnlyHint": True}
        assert call(named["price"], item="tea").text == "tea: 3.50 (shop, EUR)"
        # LangChain's own methods have a parameter "config", too.
        assert call(named["price"], item="tea", config="own").text == "tea: 3.50 (own, EUR)"
        invalid = call(named["price"])
        assert (invalid.status, "Field required" in invalid.text) == ("error", True)
        truncated = call(named["long"]).text
        assert len(truncated) <= 50_000
        assert "200,000 characters" in truncated

        async def concurrent_calls() -> list[Any]:
            return await asyncio.gather(*(named["stock_add"].ainvoke({"a": 1, "b": number}) for number in range(5)))

        assert asyncio.run(concurrent_calls()) == ["1", "2", "3", "4", "5"]
        assert asyncio.run(concurrent_calls()) == ["1", "2", "3", "4", "5"], "another event loop gets the same results"
        assert len(server_processes()) == 1
    assert remaining_processes() == []
    closed = call(named["price"], item="tea")
    assert (closed.status, closed.text) == ("error", "the connection to the MCP server 'shop' is closed")


def test_call_to_a_server_that_exits_returns_an_error_message(servers: Path) -> None:
    with open_tools([], servers) as tools:
        named = {tool.name: tool for tool in tools}
        for name, arguments in (("end", {}), ("price", {"item": "tea"})):
            message = call(named[name], **arguments)
            assert message.status == "error"
            unknown = "the MCP server 'shop' gave no result, and may have carried out the call: Connection closed"
            assert message.text == unknown


@pytest.mark.parametrize(
    ("transport", "path", "entry"), [("streamable-http", "mcp", {}), ("sse", "sse", {"type": "sse"})]
)
def test_running_server_is_reached_over_http(transport: str, path: str, entry: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), transport, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < end
                time.sleep(0.05)
            server = {"url": f"http://127.0.0.1:{port}/{path}", "headers": {"Authorization": "Bearer x"}, **entry}
            (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"shop": server}}))
            with open_tools([], tmp_path / "servers.json") as tools:
                named = {tool.name: tool for tool in tools}
                assert call(named["stock_add"], a=1, b=2).text == "3"
                process.kill()
                process.wait()
                unreachable = call(named["stock_add"], a=1, b=2)
                assert (unreachable.status, "'shop' gave no result, and may have carried out" in unreachable.text) == (
                    "error",
                    True,
                )
        finally:
            process.kill()


def test_tools_of_two_servers_with_equal_names_are_named_after_their_servers(servers: Path) -> None:
    shop = json.loads(servers.read_text())["mcpServers"]["shop"]
    servers.write_text(json.dumps({"mcpServers": {"shop": shop, "other": shop}}))
    with open_tools([], servers) as tools:
        named = {tool.name: tool for tool in tools}
        assert len(tools) == 8
        assert call(named["other_price"], item="tea").text == "tea: 3.50 (shop, EUR)"
    assert remaining_processes() == []
