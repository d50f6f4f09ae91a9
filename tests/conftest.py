"""Settings of all tests: a runtime directory of their own, Hypothesis without deadlines, garbage collection."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

from hypothesis import settings

from lookahead_agent.generation.server_backend import RUNTIME_DIR_VARIABLE


def _remove_folder(owner: int, folder: str) -> None:
    """Remove a folder in the process that created it: forked children inherit this exit handler."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


# Tests must not find a daemon that the user keeps running. The path is short, because a socket is in it.
os.environ[RUNTIME_DIR_VARIABLE] = tempfile.mkdtemp(prefix="lookahead-")
atexit.register(_remove_folder, os.getpid(), os.environ[RUNTIME_DIR_VARIABLE])

# A busy machine must not fail a test, so examples have no deadline.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# Imported objects live to the end. Traversing them in every collection takes a tenth of the test time.
gc.disable()


def pytest_collection_finish() -> None:
    """Enable the garbage collector, for objects that tests create."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Unfreeze imported objects: otherwise libraries warn at exit that they were not finalized."""
    gc.unfreeze()
