"""Reads the small JSON files of a model's folder, which may be damaged or hostile."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lookahead_agent.errors import IntegrityError

_MAX_COUNT = 1 << 31
_MAX_JSON = 64 << 20  # bytes of a file; the weight map of the largest models has a tenth


def read_object(file: Path) -> dict[str, Any]:
    """Read a file with one JSON object, at most 64 MiB; raises ValueError, which says what is wrong, or OSError."""
    if not file.is_file():  # a pipe would never end
        raise ValueError("it is not a file")
    if file.stat().st_size > _MAX_JSON:
        raise ValueError(f"it has more than {_MAX_JSON >> 20} MiB")
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a model's folder; raises IntegrityError if it cannot be read."""
    file = folder / "config.json"
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise IntegrityError(f"{file} cannot be read: {error}") from error


def read_object_in(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object in a field of a configuration; empty if there is none."""
    found = config.get(name)
    return found if isinstance(found, dict) else {}


def read_weight_names(folder: Path) -> set[str]:
    """The names of the weights in a model's folder; empty without safetensors files. Raises IntegrityError."""
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            weight_map = read_object(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index.name} has no weight_map")
            return set(weight_map)
        names: set[str] = set()
        for file in folder.glob("*.safetensors"):
            with open(file, "rb") as opened:  # its header is a JSON object, after eight bytes with its length
                size = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(min(size, _MAX_JSON)))
            if not isinstance(header, dict):
                raise ValueError(f"the header of {file.name} is not a JSON object")
            names |= set(header)
    except (OSError, ValueError, RecursionError) as error:
        raise IntegrityError(f"the names of the weights in {folder} cannot be read: {error}") from error
    return names


def read_count(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """Return the first of some fields of a configuration that is present, else `default`.

    Raises IntegrityError if the field is not a positive whole number, or is missing without a default.
    """
    name, value = next(((name, config[name]) for name in names if config.get(name) is not None), (names[-1], default))
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MAX_COUNT:
        raise IntegrityError(f"{name} in config.json is not a positive whole number: {repr(value)[:80]}")
    return value
