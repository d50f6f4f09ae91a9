"""Extracts the text of a PDF's pages. Another interpreter runs this file's text (`python -I -c`).

It reads the PDF from its standard input. It writes a result for each page, `{"page": its number from 1, "text": ...}`,
and a last one, `{"problem": ...}`: why it stops early, or None.
"""

import io
import json
import resource
import sys


def main(memory: int, seconds: int, results: int) -> None:
    """Read the PDF within bytes of memory and seconds of CPU time, and write to the descriptor `results`."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(results, "w", encoding="utf-8") as lines:
        try:
            from pypdf import PdfReader

            for number, page in enumerate(PdfReader(io.BytesIO(sys.stdin.buffer.read())).pages, 1):
                if text := page.extract_text().strip():
                    print(json.dumps({"page": number, "text": text}), file=lines, flush=True)
            problem = None
        except Exception as error:  # a damaged file can make the parser raise anything
            problem = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"problem": problem}), file=lines)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
