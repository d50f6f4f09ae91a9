"""What all tests share."""

from __future__ import annotations

import gc
import os
import tempfile

from hypothesis import settings

from lookahead_agent.generation.server_backend import RUNTIME_DIR_VARIABLE

# Engines that whoever runs the tests keeps in the background are not what is tested. A short path: it is a socket's.
os.environ[RUNTIME_DIR_VARIABLE] = tempfile.mkdtemp(prefix="lookahead-")

# Time is never asserted: a busy machine is no fault.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# What is imported for tests stays: looking through it for garbage, again and again, takes a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from here on, among what tests make."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Else libraries complain at the end that they were not taken apart."""
    gc.unfreeze()
