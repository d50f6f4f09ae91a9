"""Server-sent events, as the HTML standard has them."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterable, AsyncIterator


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[str]:
    """The data of each event of a body that comes in chunks, wherever these are cut.

    A line ends with a line feed, a carriage return, or both, and with no other character: those that `str.splitlines`
    takes for ends of lines too may stand in the data. An event that is not ended by an empty line counts, since some
    servers leave out the last one.
    """
    data: list[str] = []
    async for line in _lines(chunks):
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" ").decode(errors="replace"))
    if data:
        yield "\n".join(data)


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    parts: list[bytes] = []  # of the line that is not complete, joined once
    first, after_return = True, False
    async for chunk in chunks:
        if not chunk:
            continue
        if after_return:  # the line feed after it is of the same end
            chunk = chunk.removeprefix(b"\n")
        after_return = chunk.endswith(b"\r")
        *complete, rest = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in complete:
            whole = b"".join([*parts, line])
            parts.clear()
            yield whole.removeprefix(codecs.BOM_UTF8) if first else whole
            first = False
        parts.append(rest)
    if whole := b"".join(parts):
        yield whole.removeprefix(codecs.BOM_UTF8) if first else whole
