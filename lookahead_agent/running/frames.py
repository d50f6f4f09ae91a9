"""What goes over the keeper's socket: frames of JSON, each after its length in four bytes.

A connection carries one order (for a reply, "status" or "stop") and what comes of it. Closing it takes the order back.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from lookahead_agent.errors import ConfigurationError, EngineError

Frame = dict[str, Any]

LONGEST = 64 << 20
"""Bytes of a frame."""


async def receive(reader: asyncio.StreamReader) -> Frame | None:
    """The next frame; None at the end.

    Raises:
        EngineError: What comes is no frame, or half a one.
    """
    try:
        length = int.from_bytes(await reader.readexactly(4), "big")
        if length > LONGEST:
            raise EngineError(f"a frame of {length} bytes")
        frame = json.loads(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise EngineError("the process at the other end ended in the middle of what it sent") from None
        return None
    except ConnectionError:
        return None
    except (ValueError, RecursionError) as error:
        raise EngineError(f"a frame that is not JSON: {error}") from None
    if not isinstance(frame, dict):
        raise EngineError("a frame that is no JSON object")
    return frame


def send(writer: asyncio.StreamWriter, frame: Frame) -> None:
    """Send a frame.

    Raises:
        ConfigurationError: It holds what JSON cannot say, or is too long.
    """
    try:
        content = json.dumps(frame).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{error}: use_daemon=False takes engines of this process") from None
    if len(content) > LONGEST:
        raise ConfigurationError(f"{len(content)} bytes are too long: use_daemon=False takes engines of this process")
    writer.write(len(content).to_bytes(4, "big") + content)
