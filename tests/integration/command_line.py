"""The command line as a process of its own, with a tiny pair."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.conftest import TINY_ENGINE

COMMAND = Path(sys.executable).parent / "lookahead-agent"
ENGINE = [part for name, value in TINY_ENGINE.items() for part in ("--engine-arg", f"{name}={value}")]


def command(pair: tuple[Path, Path], name: str, *arguments: str) -> list[str]:
    """The words of the command `name` with a pair."""
    return [str(COMMAND), name, "--model", str(pair[0]), "--draft", str(pair[1]), *ENGINE, *arguments]
