"""An MCP server over stdio without MCP's library, which answers as its first argument says, a JSON object.

`tools` are the listed tools and `result` is the result of each call. `act` names a way to misbehave.
"""

import json
import os
import sys
import time
from typing import Any


def tool(name: str) -> dict[str, Any]:
    """A tool with one argument."""
    return {"name": name, "description": "A tool.", "inputSchema": {"properties": {"x": {}}, "type": "object"}}


def send(message: dict[str, Any]) -> None:
    """Write a message."""
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer requests until the input ends."""
    given = json.loads(sys.argv[1])
    act = given.get("act")
    page = 0
    if act == "endless line":
        while True:
            sys.stdout.write("x" * 65536)
    if act == "stderr":
        for _ in range(1000):
            sys.stderr.write("e" * 65536)
    if act == "garbage":
        sys.stdout.write("no message\n[]\n{\n" * 100)
    for line in sys.stdin:
        request = json.loads(line)
        method, number = request.get("method"), request.get("id")
        if number is None:
            continue
        if method == "initialize":
            while act == "silent start":
                time.sleep(60)
            version = request["params"]["protocolVersion"]
            about = {
                "protocolVersion": version,
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "", "version": ""},
            }
            send({"id": number, "result": about})
        elif method == "tools/list":
            page += 1
            endless = {"nextCursor": str(page)} if act == "pages" else {}
            listed = [tool(f"t{page}")] if act == "pages" else given.get("tools", [tool("t")])
            listed = [tool(f"t{index}") for index in range(1001)] if act == "many tools" else listed
            send({"id": number, "result": {"tools": listed, **endless}})
        elif method == "tools/call":
            if act == "exit":
                os._exit(3)
            while act == "stream":
                send({"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
            if act == "asks":
                send({"id": 1, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 9}})
                refusal = json.loads(sys.stdin.readline())["error"]["message"]
                send({"id": number, "result": {"content": [{"type": "text", "text": refusal}]}})
            elif act == "error":
                send({"id": number, "error": {"code": -32603, "message": "SystemExit"}})
            elif act == "deep":
                sys.stdout.write('{"jsonrpc": "2.0", "id": ' + str(number) + ', "result": ' + "[" * 300_000 + "\n")
                sys.stdout.flush()
            elif act == "huge":
                send({"id": number, "result": {"content": [{"type": "text", "text": "x" * (17 << 20)}]}})
            elif act != "silent":
                fine = {"content": [{"type": "text", "text": "fine"}]}
                send({"id": number, "result": given.get("result", fine)})
        else:
            send({"id": number, "error": {"code": -32601, "message": "unknown"}})


if __name__ == "__main__":
    main()
