"""Bytes of a safetensors file."""

from __future__ import annotations

import json


def weights(size: int) -> bytes:
    """A file that holds one tensor and has `size` bytes in all."""
    length = 128  # room for the header, which may be padded with spaces
    held = size - 8 - length
    header = {"weight": {"dtype": "U8", "shape": [held], "data_offsets": [0, held]}}
    return length.to_bytes(8, "little") + json.dumps(header).ljust(length).encode() + b"w" * held
