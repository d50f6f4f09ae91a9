"""A server of NVIDIA's Multi-Process Service (MPS), under which the kernels of a GPU's engines run at the same time."""

import os
import select
import shutil
import subprocess
import tempfile
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_START_SECONDS, _END_SECONDS = 20.0, 20.0
# The shell outlives this process: at a signal or the end of its input it ends the server, and removes the folder $1.
_SERVE = """
trap : HUP INT TERM
"$0" -d >/dev/null 2>&1 && echo started && read -r end
echo quit | "$0" >/dev/null 2>&1
for each in 1 2 3 4 5 6 7 8 9 10; do
    echo get_server_list | "$0" >/dev/null 2>&1 || break
    sleep 0.5
done
rm -rf "$1"
"""


class MPSUse(NamedTuple):
    """How engines on one GPU use the service."""

    explanation: str
    # Folder of the server's pipes (`CUDA_MPS_PIPE_DIRECTORY`); None: no server of this process
    folder: str | None = None


class MultiProcessService:
    """A server of this process with folders of its own; it runs while it has users, and ends with the process."""

    def __init__(self, program: str = "nvidia-cuda-mps-control") -> None:
        self._program = program
        self._lock = threading.Lock()
        self._users = 0
        self._folder: Path | None = None
        self._shell: subprocess.Popen[bytes] | None = None
        _SERVICES.add(self)

    def acquire(self) -> MPSUse:
        """Find a running server, else start one, which takes seconds; a use with a folder needs a `release`."""
        program = shutil.which(self._program)
        if program is None:
            return MPSUse(f"The engines of a GPU take turns, since {self._program} is not installed")
        with self._lock:
            if self._folder is not None and not self._answers(program, self._folder):
                self._end()
            if self._folder is None:
                if self._answers(program):
                    return MPSUse("The engines of a GPU run at the same time, under the running MPS server")
                self._folder = self._start(program)
            if self._folder is None:
                return MPSUse("The engines of a GPU take turns, since no MPS server starts")
            self._users += 1
            found = "The engines of a GPU run at the same time, under an MPS server that ends with them"
            return MPSUse(found, str(self._folder / "pipes"))

    def release(self) -> None:
        """End a use; the last one's end shuts the server down, once its engines have ended."""
        with self._lock:
            self._users = max(0, self._users - 1)
            if not self._users:
                self._end()

    def _start(self, program: str) -> Path | None:
        folder = Path(tempfile.mkdtemp(prefix="la-mps-"))
        for name in ("pipes", "logs"):
            (folder / name).mkdir()
        # A session of its own, since Ctrl-C is for the programs that use the server.
        self._shell = subprocess.Popen(
            ["sh", "-c", _SERVE, program, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(folder),
            start_new_session=True,
        )
        answer = self._shell.stdout
        if answer is not None and select.select([answer], [], [], _START_SECONDS)[0] and answer.readline():
            return folder
        self._end()
        return None

    def _answers(self, program: str, folder: Path | None = None) -> bool:
        """Whether the server with these pipes runs; None: the one that every program finds."""
        try:
            question = subprocess.run(
                [program],
                input=b"get_server_list\n",
                env=_environment(folder) if folder is not None else None,
                capture_output=True,
                timeout=_START_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            return False
        return question.returncode == 0

    def _end(self) -> None:
        shell, self._shell, self._folder, self._users = self._shell, None, None, 0
        if shell is not None:
            _close(shell.stdin)
            with suppress(subprocess.TimeoutExpired):  # it goes on without this process
                shell.wait(_END_SECONDS)
            _close(shell.stdout)

    def forget(self) -> None:
        """Leave the server to the parent, in a forked child: an open pipe would keep it alive."""
        self._lock = threading.Lock()
        shell, self._shell, self._folder, self._users = self._shell, None, None, 0
        if shell is not None:
            shell.returncode = 0  # not a child of this process
            _close(shell.stdin)
            _close(shell.stdout)


def _environment(folder: Path) -> dict[str, str]:
    """The variables of a server for all GPUs: a choice of GPUs would number them anew for its engines."""
    inherited = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**inherited, _PIPES: str(folder / "pipes"), _LOGS: str(folder / "logs")}


def _close(pipe: IO[bytes] | None) -> None:
    if pipe is not None:
        pipe.close()


def _forget_all() -> None:
    for service in list(_SERVICES):
        service.forget()


_SERVICES: "weakref.WeakSet[MultiProcessService]" = weakref.WeakSet()
SERVICE = MultiProcessService()
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_forget_all)
