"""What killed processes leave behind, and places without shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lookahead_agent.engines.crash_report import no_shared_memory
from lookahead_agent.engines.processes import PARENT, create_locked, remove_stale
from lookahead_agent.engines.shared_draft import SharedDraftBuffer, _made
from lookahead_agent.errors import EngineStartError


def test_what_a_killed_process_has_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    script = (
        "import os, tempfile, sys\n"
        "from lookahead_agent.engines.processes import create_locked\n"
        "folder, _ = create_locked(lambda: tempfile.mkdtemp(prefix='la-', dir=sys.argv[1]))\n"
        "(folder / 'socket').touch()\n"
        "print(folder, flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    other = tmp_path / "another-folder"
    other.mkdir()
    (tmp_path / "la-link").symlink_to(other)
    file = tmp_path / "la-file"
    _, lock = create_locked(lambda: file.touch() or str(file))  # type: ignore[func-returns-value]
    remove_stale(tmp_path, "la-")
    assert (folder / "socket").exists(), "it is in use"
    process.kill()
    process.communicate()
    remove_stale(tmp_path, "la-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another-folder", "la-file", "la-link"]
    os.close(lock)
    remove_stale(tmp_path, "la-")
    assert not file.exists()


def test_the_next_process_removes_the_sockets_of_a_killed_one(tmp_path: Path) -> None:
    short = Path(f"/tmp/la-test-{os.getpid()}")
    short.mkdir()
    script = (
        "import os, signal; from lookahead_agent.engines.processes import Spawner\n"
        "with Spawner().starting(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    try:
        for _ in range(3):
            died = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(short)}, check=False)
            assert died.returncode == -signal.SIGKILL
            (left,) = short.iterdir()
            (left / "socket").touch()
    finally:
        subprocess.run(["rm", "-r", short], check=True)


def test_a_worker_whose_parent_was_killed_before_it_looked_ends(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", ""])
    parent.wait()
    main = "import runpy, time; runpy.run_module('lookahead_agent.engines.worker_main', run_name='__mp_main__')"
    command = [sys.executable, "-c", f"{main}; time.sleep(60)"]
    worker = subprocess.run(command, env={**os.environ, PARENT: str(parent.pid)}, timeout=50, check=False)
    assert worker.returncode == -signal.SIGKILL


def test_a_board_is_where_there_is_room_for_it(tmp_path: Path) -> None:
    nowhere = tmp_path / "none"
    path, lock = _made([nowhere, tmp_path])
    assert path.parent == tmp_path
    assert path.stat().st_blocks * 512 >= path.stat().st_size, "its memory is there before it is written to"
    os.close(lock)
    with pytest.raises(EngineStartError, match="no file of shared memory can be made"):
        SharedDraftBuffer(nowhere)
    board = SharedDraftBuffer(tmp_path)
    assert not path.exists(), "nobody locked it any more"
    board.forget_file()
    board.forget_file()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["/no/such/folder", "/proc"])
def test_a_place_without_shared_memory_is_told_with_what_helps(folder: str) -> None:
    assert "--shm-size" in (no_shared_memory(Path(folder)) or "")


def test_shared_memory_that_is_there(tmp_path: Path) -> None:
    assert no_shared_memory(tmp_path) is None
