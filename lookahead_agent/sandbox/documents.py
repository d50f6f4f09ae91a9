"""Extracts the text of untrusted documents in a process of its own, with limits of time, memory and text."""

import math
import re
import sys
from dataclasses import dataclass

from lookahead_agent.sandbox.child import program_text, run_child

_MEMORY = 512 << 20
_TEXT = 16 << 20
# A page's own declaration, of its beginning: `<meta charset=...>` or `<?xml ... encoding=...?>`.
_DECLARED = re.compile(
    rb"""<(?:meta\b[^>]{0,200}?\bcharset|\?xml\b[^>]{0,200}?\bencoding)\s*=\s*["']?\s*([\w.:-]{1,40})""", re.IGNORECASE
)

KINDS = {
    ".pdf": "pdf", ".html": "html", ".htm": "html", ".xhtml": "html", ".docx": "docx", ".docm": "docx",
    ".pptx": "pptx", ".pptm": "pptx", ".xlsx": "sheets", ".xlsm": "sheets", ".xlsb": "sheets", ".xls": "sheets",
    ".ods": "sheets", ".ipynb": "ipynb", ".json": "json",
}  # fmt: skip
"""The reader of the worker for each suffix of a name; other documents are text."""


@dataclass(frozen=True)
class DocumentPart:
    """A part of a document's text.

    Attributes:
        place: Its location in the document, such as "page 3"; "" for the whole document.
        text: Markdown, or rows.
        is_table: Whether each line of the text is a row of a table.
    """

    place: str
    text: str
    is_table: bool = False


def find_declared_encoding(data: bytes) -> str | None:
    """Return the encoding that a page or an XML document names at its beginning; None: it names none."""
    found = _DECLARED.search(data[:1024])
    return found[1].decode() if found is not None else None


def read_parts(data: bytes, kind: str, seconds: float, address: str = "") -> tuple[list[DocumentPart], str | None]:
    """Return the parts of a document that have text, and why the reader stopped early, or None.

    Args:
        data: The document; HTML and JSON as UTF-8.
        kind: One of the values of `KINDS`.
        seconds: Timeout.
        address: URL of an HTML page, for its relative links.

    Raises:
        OSError: No process can be started.
    """
    command = [sys.executable, "-I", "-c", program_text("document_worker"), kind, address]
    limits = [str(_MEMORY), str(math.ceil(seconds) + 1)]
    finished = run_child([*command, *limits], data, seconds=seconds, output=_TEXT, results=True)
    problem: str | None = f"its process ended with status {finished.status}"
    parts = []
    for result in finished.json_lines():
        match result:
            case {"place": str(place), "text": str(text), "rows": bool(rows)}:
                # A font may map letters to lone surrogates, which no message can carry.
                place, text = (each.encode(errors="replace").decode() for each in (place, text))
                parts.append(DocumentPart(place if place.isprintable() else ascii(place), text, rows))
            case {"problem": None}:
                problem = None
            case {"problem": str(reason)}:
                problem = ascii(reason)[1:-1]
    stop_reasons = {"time": f"it takes more than {seconds:g} s", "output": "it has too much text"}
    return parts, stop_reasons.get(finished.stopped or "", problem)
