"""The command line with a tiny pair: the words of a command for a process of its own, and the command in this one."""

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
    """The words of the command `name` with a pair."""
    return [str(COMMAND), name, "--model", str(pair[0]), "--draft", str(pair[1]), *ENGINE, *arguments]


def run_here(words: list[str], capsys: pytest.CaptureFixture[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in this process, which has imported already what takes a new one longer than most commands."""
    capsys.readouterr()
    code = run_command(words[1:])
    said = capsys.readouterr()
    return subprocess.CompletedProcess(words, code, said.out, said.err)
