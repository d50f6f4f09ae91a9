"""One HTML page of a run: works offline, on a phone, and shows markup in a model's text as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path

from lookahead_agent.models.cache import write_whole
from lookahead_agent.trace.timeline import Call

_PLACE = "/*CALLS*/"


def page(calls: Sequence[Call]) -> str:
    """The page's HTML."""
    template = files("lookahead_agent.trace").joinpath("page.html").read_text(encoding="utf-8")
    # No text can end the script element that it is in: "<" is written as an escape of JSON.
    data = json.dumps([asdict(call) for call in calls]).replace("<", "\\u003c")
    return template.replace(_PLACE, data)


def write_page(calls: Sequence[Call], path: str | Path) -> None:
    """Write the page to a file.

    Raises:
        OSError: It cannot be written there.
    """
    write_whole(Path(path), page(calls))
