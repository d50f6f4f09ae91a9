"""Settings of all tests: a runtime directory of their own, Hypothesis without deadlines, garbage collection."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile

from hypothesis import settings

from lookahead_agent.generation.server_backend import RUNTIME_DIR_VARIABLE

# Tests must not find a daemon that the user keeps running. The path is short, because a socket is in it.
os.environ[RUNTIME_DIR_VARIABLE] = tempfile.mkdtemp(prefix="lookahead-")

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
    """Remove the runtime directory, and unfreeze imported objects: libraries warn at exit of unfinalized ones."""
    shutil.rmtree(os.environ[RUNTIME_DIR_VARIABLE], ignore_errors=True)
    gc.unfreeze()
