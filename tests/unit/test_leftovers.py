"""Workers of a killed parent, files in shared memory, and systems without shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_agent.engines.processes import PARENT, shared_memory_problem
from lookahead_agent.engines.shared_draft import SharedDraftBuffer
from lookahead_agent.errors import EngineStartError


def test_worker_kills_itself_if_its_parent_has_already_ended() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    main = "import runpy, time; runpy.run_module('lookahead_agent.engines.worker_main', run_name='__mp_main__')"
    command = [sys.executable, "-c", f"{main}; time.sleep(60)"]
    worker = subprocess.run(command, env={**os.environ, PARENT: str(parent.pid)}, timeout=50, check=False)
    assert worker.returncode == -signal.SIGKILL


def test_shared_draft_buffer_allocates_its_memory_and_removes_its_file(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="no file of shared memory can be made"):
        SharedDraftBuffer(tmp_path / "none")
    buffer = SharedDraftBuffer(tmp_path)
    assert buffer.path.stat().st_blocks * 512 >= buffer.path.stat().st_size > 0
    buffer.forget_file()
    buffer.forget_file()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["/no/such/folder", "/proc"])
def test_unusable_shared_memory_is_reported_with_advice(folder: str) -> None:
    assert "--shm-size" in (shared_memory_problem(Path(folder)) or "")


def test_usable_shared_memory_is_no_problem(tmp_path: Path) -> None:
    assert shared_memory_problem(tmp_path) is None
