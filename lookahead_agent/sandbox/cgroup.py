"""A cgroup for one run, if this process can create one: it counts kernel memory too, such as page tables."""

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
# Files of cgroup v1 and cgroup v2: the limits of memory, and of memory including swap.
_LIMITS = {
    "memory.limit_in_bytes": "{memory}", "memory.memsw.limit_in_bytes": "{memory}",
    "memory.max": "{memory}", "memory.swap.max": "0",
}  # fmt: skip


@contextmanager
def memory_cgroup(memory: int) -> Iterator[int | None]:
    """Create a cgroup with a memory limit. A process joins by writing 0 to the descriptor; None: it is not possible."""
    descriptor = None
    with ExitStack() as stack:
        with suppress(OSError):
            if (parent := parent_cgroup()) is not None:
                _tidy(parent)
                group = parent / f"{PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
                group.mkdir()
                stack.callback(_remove, group)
                for name, value in _LIMITS.items():
                    if (group / name).exists():
                        (group / name).write_text(value.format(memory=memory))
                descriptor = os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
                stack.callback(os.close, descriptor)
        yield descriptor


def parent_cgroup(root: Path = _ROOT, memberships: str | None = None) -> Path | None:
    """Find where to create a cgroup: in the process's own (v1) or its parent (v2), as only leaves hold processes."""
    memberships = _MEMBERSHIPS.read_text() if memberships is None else memberships
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return root / "memory" / path.lstrip("/")
        own = root / path.lstrip("/")
        # A sibling cgroup would escape this process's own limit.
        if not controllers and own != root and (own / "memory.max").read_text().strip() == "max":
            enabled = (own.parent / "cgroup.subtree_control").read_text().split()
            return own.parent if "memory" in enabled else None
    return None


def _tidy(parent: Path) -> None:
    """Remove the cgroups of processes that were killed."""
    for group in parent.glob(f"{PREFIX}-*"):
        if not Path("/proc", group.name.removeprefix(f"{PREFIX}-").partition("-")[0]).exists():
            with suppress(OSError):
                group.rmdir()


def _remove(group: Path) -> None:
    """Remove a cgroup. Killed processes may stay for a moment; a later run removes what is left then."""
    for _ in range(100):
        try:
            return group.rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY:
                return None
            time.sleep(0.01)
