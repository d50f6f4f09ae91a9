"""A cgroup for one run, where this process can make one: the kernel counts its own memory, such as page tables."""

import errno
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "lookahead-isolated"
_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIPS = Path("/proc/self/cgroup")
# In the first and the second version of cgroups: the limits of memory, and of memory with what is swapped out.
_LIMITS = {
    "memory.limit_in_bytes": "{memory}", "memory.memsw.limit_in_bytes": "{memory}",
    "memory.max": "{memory}", "memory.swap.max": "0",
}  # fmt: skip


@contextmanager
def memory_cgroup(memory: int) -> Iterator[int | None]:
    """A cgroup with so much memory, by a descriptor: who writes 0 to it is in it. None where none can be made."""
    descriptor = None
    with ExitStack() as stack:
        with suppress(OSError):
            if (above := place()) is not None:
                _tidy(above)
                group = above / f"{PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
                group.mkdir()
                stack.callback(_remove, group)
                for name, value in _LIMITS.items():
                    if (group / name).exists():
                        (group / name).write_text(value.format(memory=memory))
                descriptor = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
        yield descriptor


def place(root: Path = _ROOT, memberships: str | None = None) -> Path | None:
    """The cgroup to make one in: of version 1 its own, of version 2 the one above, for only leaves have processes."""
    memberships = _MEMBERSHIPS.read_text() if memberships is None else memberships
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / "memory" / path.lstrip("/")
        own = root / path.lstrip("/")
        # A limit of its own would be got around.
        if not controllers and own != root and (own / "memory.max").read_text().strip() == "max":
            enabled = (own.parent / "cgroup.subtree_control").read_text().split()
            return own.parent if "memory" in enabled else None
    return None


def _tidy(above: Path) -> None:
    """Remove what processes have left that were killed."""
    for group in above.glob(f"{PREFIX}-*"):
        if not Path("/proc", group.name.removeprefix(f"{PREFIX}-").partition("-")[0]).exists():
            with suppress(OSError):
                group.rmdir()


def _remove(group: Path) -> None:
    """Killed processes may be there for a moment; what is left then is removed by a later run."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                return None
            time.sleep(0.01)
