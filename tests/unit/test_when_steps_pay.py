"""The table of `docs/how-to/gpu.md` with the predicted speeds of draft steps on a GPU."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_page_has_the_computed_speeds() -> None:
    rows = runpy.run_path(str(DOCS / "measurements" / "when_steps_pay.py"))["rows"]()
    page = (DOCS / "how-to" / "gpu.md").read_text(encoding="utf-8")
    # The first row takes seconds; the others differ in their costs only.
    assert next(rows) in page.splitlines()
