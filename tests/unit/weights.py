"""Bytes of a safetensors file."""

from __future__ import annotations

import json


def weights(size: int) -> bytes:
    """A file of `size` bytes with one tensor."""
    header_size = 128  # room for the header, which may be padded with spaces
    tensor_size = size - 8 - header_size
    header = {"weight": {"dtype": "U8", "shape": [tensor_size], "data_offsets": [0, tensor_size]}}
    return header_size.to_bytes(8, "little") + json.dumps(header).ljust(header_size).encode() + b"w" * tensor_size
