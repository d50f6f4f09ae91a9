"""Reads the small JSON files of a model's folder, which may be damaged or hostile."""

import json
from pathlib import Path
from typing import Any

_MAX_JSON = 64 << 20  # bytes of a file; the weight map of the largest models has a tenth


def read_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object, at most 64 MiB; raises ValueError, which says what is wrong, or OSError."""
    if not file.is_file():  # a pipe would never end
        raise ValueError("it is no file")
    if file.stat().st_size > _MAX_JSON:
        raise ValueError(f"it has more than {_MAX_JSON >> 20} MiB")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value
