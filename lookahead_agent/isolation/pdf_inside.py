"""The text of a PDF's pages, in a process of its own.

The text of this file is handed to another interpreter (`python -I -c`). It reads the PDF from its standard input, and
writes a JSON array for each page: its number from 1, and its text.
"""

from __future__ import annotations

import io
import json
import resource
import sys


def main(memory: int) -> None:
    """Everything.

    Args:
        memory: Bytes of data that the process may have.
    """
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        for number, page in enumerate(PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages, 1):
            if text := page.extract_text().strip():
                print(json.dumps([number, text]), flush=True)
    except (
        PyPdfError,
        MemoryError,
        RecursionError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:
        # Broken files make a parser fail in every way.
        sys.exit(f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    main(int(sys.argv[1]))
