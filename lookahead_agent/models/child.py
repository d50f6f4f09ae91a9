"""Work on weights in a child process, so that its memory is returned and Ctrl-C ends it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Sequence

from lookahead_agent.errors import ConversionError, DiskSpaceError
from lookahead_agent.progress import Progress

_FULL = os.strerror(errno.ENOSPC).encode()
_PERCENT = re.compile(rb"(\d+)%\|")


def run_in_child(command: Sequence[str], title: str, progress: Progress) -> None:
    """Run a command and show how far it is, by the percentages of its progress bars.

    Args:
        command: Program and arguments.
        title: What it does, as a progress line and an error begin.
        progress: Told what is done.

    Raises:
        DiskSpaceError: It failed because the disk is full.
        ConversionError: It failed for another reason; the message ends with its last words.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with progress.task(title, 100) as task:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        assert process.stderr is not None
        tail = b""
        try:
            while chunk := os.read(process.stderr.fileno(), 4096):
                tail = (tail + chunk)[-4000:]
                if seen := _PERCENT.findall(chunk):
                    task.advance(float(seen[-1]))
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stderr.close()
    if process.returncode:
        words = tail.decode(errors="replace").strip().splitlines() or ["no message"]
        if _FULL in tail:
            raise DiskSpaceError(
                f"the disk is full: {title[0].lower()}{title[1:]} failed. Free some space and run again."
            )
        hint = " (not enough memory?)" if process.returncode in (-9, 137) else ""
        raise ConversionError(
            f"{title[0].lower()}{title[1:]} failed with exit code {process.returncode}{hint}: {words[-1]}. "
            "What it began from is kept: run again to try once more."
        )
