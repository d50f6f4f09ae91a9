"""A real MCP server over standard streams, without a model: its tools in both worlds, and what ends it."""

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
from lookahead_agent.errors import ConfigurationError

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


def test_a_servers_tools(servers: Path) -> None:
    with open_tools(["calculator"], servers) as tools:
        made = {tool.name: tool for tool in tools}
        assert list(made) == ["calculator", "price", "stock_add", "long", "end"]
        assert (
            describe_tools([made["price"]]) == '- price(item: string, config: string = "shop"): The price of an item.'
        )
        assert made["price"].metadata == {"readOnlyHint": True}
        assert call(made["price"], item="tea").text == "tea: 3.50 (shop, EUR)"
        # "config" is also a parameter of LangChain's own.
        assert call(made["price"], item="tea", config="own").text == "tea: 3.50 (own, EUR)"
        wrong = call(made["price"])
        assert (wrong.status, "Field required" in wrong.text) == ("error", True)
        cut = call(made["long"]).text
        assert len(cut) <= 50_000
        assert "200,000 characters" in cut

        async def at_once() -> list[Any]:
            return await asyncio.gather(*(made["stock_add"].ainvoke({"a": 1, "b": number}) for number in range(5)))

        assert asyncio.run(at_once()) == ["1", "2", "3", "4", "5"]
        assert asyncio.run(at_once()) == ["1", "2", "3", "4", "5"], "also in another event loop"
        assert len(server_processes()) == 1
    assert server_processes() == []
    closed = call(made["price"], item="tea")
    assert (closed.status, closed.text) == ("error", "the connection to the MCP server 'shop' is closed")


def test_a_server_that_ends_is_a_result(servers: Path) -> None:
    with open_tools([], servers) as tools:
        made = {tool.name: tool for tool in tools}
        for name, arguments in (("end", {}), ("price", {"item": "tea"})):
            message = call(made[name], **arguments)
            assert message.status == "error"
            assert message.text == "the MCP server 'shop' did not carry out the call: Connection closed"


@pytest.mark.parametrize(
    ("transport", "path", "entry"), [("streamable-http", "mcp", {}), ("sse", "sse", {"type": "sse"})]
)
def test_servers_that_run_already(transport: str, path: str, entry: dict[str, str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([sys.executable, str(SERVER), transport, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 60
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert time.monotonic() < end
                time.sleep(0.05)
            address = {"url": f"http://127.0.0.1:{port}/{path}", "headers": {"Authorization": "Bearer x"}, **entry}
            (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": {"shop": address}}))
            with open_tools([], tmp_path / "servers.json") as tools:
                made = {tool.name: tool for tool in tools}
                assert call(made["stock_add"], a=1, b=2).text == "3"
                process.kill()
                process.wait()
                gone = call(made["stock_add"], a=1, b=2)
                assert (gone.status, "'shop' did not carry out the call" in gone.text) == ("error", True)
        finally:
            process.kill()


def test_two_servers_with_a_tool_of_one_name(servers: Path) -> None:
    shop = json.loads(servers.read_text())["mcpServers"]["shop"]
    servers.write_text(json.dumps({"mcpServers": {"shop": shop, "other": shop}}))
    clash = "two tools are called price, of the MCP server 'shop' and of the MCP server 'other'"
    with pytest.raises(ConfigurationError, match=clash), open_tools([], servers):
        pass
    assert server_processes() == []
