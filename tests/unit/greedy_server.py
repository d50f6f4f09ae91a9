"""A server whose every token follows from all tokens before it: `python greedy_server.py PORT [LIMIT]`.

A reply that goes on elsewhere is thus the same reply, and a repeated or lost token changes all later ones. After LIMIT
tokens of all replies, it prints a line and hangs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Iterator, Sequence
from itertools import count

_sent = count(1)  # numbers of the tokens of all replies


def tokens(prompt: Sequence[int], limit: int) -> Iterator[int]:
    """The tokens after a prompt of token ids."""
    state = zlib.crc32(b"".join(token.to_bytes(2) for token in prompt))
    for _ in range(limit):
        token = state % 90 + 1
        yield token
        state = zlib.crc32(token.to_bytes(2), state)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            body = json.loads(await reader.readexactly(int(fields.get(b"content-length", 0))) or b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            limit = body.get("max_tokens", 0)
            for number, token in enumerate(tokens(body.get("prompt", ()), limit), 1):
                choice = {"index": 0, "text": "", "token_ids": [token]}
                choice["finish_reason"] = "length" if number == limit else None
                _send(writer, json.dumps({"choices": [choice]}))
                await writer.drain()
                await _hang_at_limit()
            _send(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")
    except (OSError, asyncio.IncompleteReadError):
        writer.close()


async def _hang_at_limit() -> None:
    number, limit = next(_sent), sys.argv[2:3]
    if limit == [str(number)]:
        print("hangs", flush=True)
    if limit and number >= int(limit[0]):
        await asyncio.Event().wait()
    await asyncio.sleep(0)  # so that the replies advance in turns


def _send(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%s\r\n" % (len(event), event))


async def _serve(port: int) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
