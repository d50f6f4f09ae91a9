"""Reads the tensors of a GGUF file, without its vocabulary, which takes gguf's own reader most of its time."""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_ALIGNMENT = "general.alignment"


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of blocks, which hold several weights of a row each."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    blocks: np.ndarray[Any, np.dtype[np.uint8]]  # mapped, shape (rows, bytes) for a matrix


class _Header:
    """The header's values, one after another; struct.error or ValueError for a damaged file."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.offset = content, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.content, self.offset)
        self.offset += struct.calcsize(f"<{form}")
        return value

    def text(self) -> str:
        size = self.number("Q")
        self._skip(size)
        return self.content[self.offset - size : self.offset].decode()

    def value(self, kind: int) -> Any:
        """A value; None for an array, whose elements are skipped."""
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_FORMATS[kind])
        element, count = self.number("I"), self.number("Q")
        if element in _FORMATS:
            self._skip(count * struct.calcsize(f"<{_FORMATS[element]}"))
            return None
        for _ in range(count):
            if element == _STRING:
                self._skip(self.number("Q"))
            else:
                self.value(element)
        return None

    def _skip(self, size: int) -> None:
        self.offset += size
        if self.offset > len(self.content):
            raise ValueError("the file ends within its header")


def read_gguf(file: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    """The values of a GGUF file's metadata, without arrays, and its tensors, which are mapped.

    Raises ValueError, KeyError or struct.error for a damaged file, or one of another byte order.
    """
    with file.open("rb") as opened:
        content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)  # torch takes no read-only memory
    header = _Header(content)
    if content[:4] != b"GGUF":
        raise ValueError(f"{file.name} is not a GGUF file")
    header.offset = 4
    if (version := header.number("I")) not in (2, 3):
        raise ValueError(f"{file.name} has the version {version} of GGUF, and 2 and 3 are supported")
    tensor_count, value_count = header.number("Q"), header.number("Q")
    values = {}
    for _ in range(value_count):
        name = header.text()
        values[name] = header.value(header.number("I"))
    infos = []
    for _ in range(tensor_count):
        name = header.text()
        shape = tuple(header.number("Q") for _ in range(header.number("I")))[::-1]  # GGUF's first is the innermost
        infos.append((name, shape, GGMLQuantizationType(header.number("I")), header.number("Q")))
    alignment = values.get(_ALIGNMENT) or 32
    data = header.offset + -header.offset % alignment
    return values, [_tensor(content, name, shape, kind, data + offset) for name, shape, kind, offset in infos]


def _tensor(
    content: mmap.mmap, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, offset: int
) -> GGUFTensor:
    block, size = GGML_QUANT_SIZES[kind]
    if not shape or shape[-1] % block:
        raise ValueError(f"{name} has the shape {shape} in blocks of {block}")
    blocks = (*shape[:-1], shape[-1] // block * size)
    count = int(np.prod(blocks, dtype=np.int64))
    return GGUFTensor(name, kind, shape, np.frombuffer(content, np.uint8, count, offset).reshape(blocks))
