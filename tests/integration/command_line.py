"""Commands on a tiny pair: the argument list for a subprocess, or a run in this process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_agent.cli.app import run_command
from tests.integration.conftest import TINY_ENGINE

COMMAND = Path(sys.executable).parent / "lookahead-agent"
ENGINE = [part for name, value in TINY_ENGINE.items() for part in ("--engine-arg", f"{name}={value}")]


def command(pair: tuple[Path, Path], name: str, *arguments: str) -> list[str]:
    """Argument list of the command `name` for a pair."""
    return [str(COMMAND), name, "--model", str(pair[0]), "--draft", str(pair[1]), *ENGINE, *arguments]


def run_in_process(argv: list[str], capsys: pytest.CaptureFixture[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process: the imports of a new process take longer than most commands."""
    capsys.readouterr()
    code = run_command(argv[1:])
    output = capsys.readouterr()
    return subprocess.CompletedProcess(argv, code, output.out, output.err)
