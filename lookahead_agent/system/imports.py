"""Objects that a text names, such as `my_module:MyVerifier`, from the current folder or Python's path."""

import importlib
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any


def import_object(module: str, name: str) -> Any:
    """Import an object of a module; the current folder comes before Python's path."""
    here = str(Path.cwd())
    added = here not in sys.path
    if added:  # `sys.path` has the folder of the program's file, not the current one
        sys.path.insert(0, here)
    try:
        return attrgetter(name)(importlib.import_module(module))
    finally:
        if added:
            sys.path.remove(here)
