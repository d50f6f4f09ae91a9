"""Measured costs of a pair, kept in a file."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from lookahead_agent.cost_model.costs import MachineCosts
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import writable, write_whole


def read_costs(file: Path | None) -> MachineCosts | None:
    """What was measured; None if there is no file yet.

    Raises:
        ConfigurationError: It is something else.
    """
    if file is None or not file.exists():
        return None
    try:
        return MachineCosts.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigurationError(f"{file} has no measured costs: choose another --costs, or delete it") from error


def write_costs(file: Path, measured: MachineCosts) -> None:
    """Keep what was measured.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    with writable(file):
        write_whole(file, measured.model_dump_json(indent=1) + "\n")
