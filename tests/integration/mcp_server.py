"""An MCP server for `test_mcp.py`, over stdio or, with a transport and a port as arguments, over HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations

server = MCPServer("shop")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def price(item: str, config: str = "shop") -> str:
    """The price of an item."""
    return f"{item}: 3.50 ({config}, {os.environ.get('CURRENCY')})"


@server.tool(name="stock.add")
async def add(a: int, b: int) -> int:
    """Add two numbers, slowly."""
    await asyncio.sleep(0.05)
    return a + b


@server.tool()
def long() -> str:
    """More than a model can read."""
    return "x" * 200_000


@server.tool()
def end() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if sys.argv[1:]:
        server.run(sys.argv[1], port=int(sys.argv[2]))
    else:
        server.run("stdio")
