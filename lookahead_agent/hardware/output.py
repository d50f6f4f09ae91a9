"""What another program prints, where it is there and works."""

from __future__ import annotations

import subprocess


def output_of(*command: str, seconds: float = 20) -> str | None:
    """What a program prints, without space around it; None if it is not there, fails, or takes longer.

    Args:
        command: The program and its arguments.
        seconds: How long it may take.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
