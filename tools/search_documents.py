"""Search a folder of documents (text, Markdown, PDF) by words and, with an embedding model, by meaning.

Passages are cited by file and line, PDF pages by page. Long lines and pages are split into passages. BM25 (bm25s) ranks
by words. With sentence embeddings, rank fusion returns the passages that either ranking finds.

Documents may be untrusted: links are not followed, and only regular files of at most 20 MiB are read. A PDF is parsed
in a process of its own, with a limit of 20 seconds and 512 MiB.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.tools import BaseTool

from lookahead_agent import sandbox
from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox.working_folder import read_regular

logger = logging.getLogger(__name__)

_TEXT_SUFFIXES = frozenset({".txt", ".md", ".markdown", ".rst", ".csv"})
_LINES = 12
_OVERLAP = 3
_MAX_PASSAGE_LENGTH = 4_000
_MAX_QUESTION_LENGTH = 10_000
_MAX_BYTES = 20 << 20
_PDF_MEMORY = 512 << 20
_PDF_TEXT = 16 << 20
_PASSAGE_OVERHEAD = 200
# The constant k of reciprocal rank fusion: a larger k gives the first ranks less weight.
_RRF_K = 60

Embed = Callable[[Sequence[str]], Any]
"""Returns vectors of length 1, shape (n, d), as `SentenceTransformer(…).encode` does with normalize_embeddings."""


@dataclass(frozen=True)
class SearchLimits:
    """Limits of reading a folder.

    Attributes:
        documents: Maximum number of documents.
        pdf_seconds: Timeout of one PDF.
        seconds: Timeout of reading all documents.
        passages: Maximum number of passages of one document.
        size: Maximum number of characters of all passages; each counts 200 more, for its place in the index.
    """

    documents: int = 10_000
    pdf_seconds: float = 20.0
    seconds: float = 600.0
    passages: int = 20_000
    size: int = 100 << 20


@dataclass(frozen=True)
class Passage:
    """A piece of a document.

    Attributes:
        source: Location: "notes/tea.md:13-24", or "manual.pdf, page 3"; with ", characters 4,001-8,000" if it is a part
            of a longer line or page.
        text: Content.
    """

    source: str
    text: str


class DocumentIndex:
    """A search index of a folder's passages.

    Args:
        folder: Read recursively, up to 10,000 documents. Other types of files, links and special files are skipped.
        embed: Computes the vectors of texts; None: search by words only.
        limits: Limits of reading the folder.

    Raises:
        ValueError: The folder does not exist, cannot be read, or has no documents.
    """

    def __init__(self, folder: str | Path, embed: Embed | None = None, limits: SearchLimits | None = None) -> None:
        limits = limits or SearchLimits()
        try:
            root = Path(folder).resolve()
            exists = root.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
            raise ValueError(f"the folder {Path(folder).name} cannot be opened: {error}") from None
        if not exists:
            raise ValueError(f"there is no folder {root.name}")
        self.passages = list(_read_folder(root, limits))
        if not self.passages:
            raise ValueError(f"{root.name} has no documents: text, Markdown or PDF files")
        import bm25s

        texts = [passage.text for passage in self.passages]
        tokens = _tokens(texts)
        # BM25 fails if no document has a word, such as "!!!".
        self._bm25 = bm25s.BM25() if any(tokens.ids) else None
        if self._bm25 is not None:
            self._bm25.index(tokens, show_progress=False)
        self._embed = embed
        self._vectors = embed(texts) if embed is not None else None

    def search(self, question: str, count: int = 4) -> list[Passage]:
        """Return the passages that match a question best, the best first.

        Args:
            question: Words, or a question.
            count: Maximum number of passages.

        Raises:
            ValueError: The question is empty, or longer than 10,000 characters.
        """
        if not question.strip():
            raise ValueError("say what to search for")
        if len(question) > _MAX_QUESTION_LENGTH:
            raise ValueError(f"the question is longer than {_MAX_QUESTION_LENGTH:,} characters")
        scores: dict[int, float] = {}
        for ranking in (self._by_words(question), self._by_meaning(question)):
            for rank, number in enumerate(ranking):
                scores[number] = scores.get(number, 0.0) + 1 / (_RRF_K + rank)
        best = sorted(scores, key=lambda number: -scores[number])[:count]
        return [self.passages[number] for number in best]

    def _by_words(self, question: str) -> list[int]:
        tokens = _tokens([question])
        if self._bm25 is None or not tokens.vocab:
            return []
        limit = min(50, len(self.passages))
        numbers, scores = self._bm25.retrieve(tokens, k=limit, show_progress=False)
        return [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _by_meaning(self, question: str) -> list[int]:
        if self._embed is None:
            return []
        similarities = self._vectors @ self._embed([question])[0]
        return [int(number) for number in (-similarities).argsort()[:50]]


def make_search_tool(folder: str | Path, embed: Embed | None = None, count: int = 4) -> BaseTool:
    """Create the tool `search_documents` for one folder.

    Raises:
        ValueError: The folder does not exist, or has no documents.
    """
    index = DocumentIndex(folder, embed)

    @make_tool(rest="ask for something more particular", read_only=True)
    def search_documents(question: str) -> str:
        """Search the documents. Returns passages with their sources, to be cited as [source]."""
        found = index.search(question, count)
        if not found:
            return "nothing fits: try other words"
        return "\n\n".join(f"[{passage.source}]\n{_quoted(passage.text)}" for passage in found)

    return search_documents


def _quoted(text: str) -> str:
    """Indent lines that begin with "[", so that none can pass for the source of another passage."""
    return "\n".join(f" {line}" if line.startswith("[") else line for line in text.split("\n"))


def _tokens(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def _read_folder(root: Path, limits: SearchLimits) -> Iterator[Passage]:
    """Yield the passages of all documents within the limits; the log names what is left out."""
    end, room = time.monotonic() + limits.seconds, limits.size
    for path in _documents(root, limits.documents):
        if (seconds := end - time.monotonic()) <= 0:
            logger.warning(
                "%s takes more than %g s to read: %s and what follows is left out", root.name, limits.seconds, path.name
            )
            return
        for number, passage in enumerate(_passages(root, path, min(seconds, limits.pdf_seconds))):
            room -= len(passage.text) + _PASSAGE_OVERHEAD
            if room < 0:
                logger.warning("%s has too much text: %s and what follows is left out", root.name, passage.source)
                return
            if number == limits.passages:
                logger.warning("%s has more than %d passages: the others are left out", passage.source, number)
                break
            yield passage


def _documents(root: Path, limit: int) -> Iterator[Path]:
    count = 0
    for parent, folders, files in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent, name)
            known = path.suffix.lower() in _TEXT_SUFFIXES or path.suffix.lower() == ".pdf"
            if name.startswith(".") or not known:
                continue
            if count == limit:
                logger.warning("%s has more than %d documents: the others are left out", root.name, count)
                return
            count += 1
            yield path


def _passages(root: Path, path: Path, pdf_seconds: float) -> Iterator[Passage]:
    name = path.relative_to(root).as_posix()
    if not name.isprintable():  # a line break in the name could forge another file's citation
        name = ascii(name)
    try:
        data = read_regular(path, _MAX_BYTES)
    except OSError as error:
        logger.warning("%s is left out: %s", name, error.strerror)
        return
    except ValueError as error:
        logger.warning("%s is left out: it %s", name, error)
        return
    if path.suffix.lower() == ".pdf":
        yield from _pages(data, name, pdf_seconds)
        return
    try:
        lines = data.decode("utf-8").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError:
        logger.warning("%s is left out: it is no UTF-8 text", name)
        return
    for first in range(0, max(1, len(lines) - _OVERLAP), _LINES - _OVERLAP):
        part = lines[first : first + _LINES]
        if any(line.strip() for line in part):
            yield from _split(f"{name}:{first + 1}-{first + len(part)}", "\n".join(part).strip())


def _pages(data: bytes, name: str, seconds: float) -> Iterator[Passage]:
    limits = (str(_PDF_MEMORY), str(math.ceil(seconds) + 1))
    command = [sys.executable, "-I", "-c", sandbox.program_text("pdf_worker"), *limits]
    try:
        finished = sandbox.run_child(command, data, seconds=seconds, output=_PDF_TEXT, results=True)
    except OSError as error:
        logger.warning("%s is left out: it cannot be read now: %s", name, error.strerror)
        return
    problem: str | None = f"its process ended with status {finished.status}"
    for result in finished.json_lines():
        match result:
            case {"page": int(number), "text": str(text)}:
                # A font may map letters to lone surrogates, which no message can carry.
                yield from _split(f"{name}, page {number}", text.encode(errors="replace").decode())
            case {"problem": None}:
                problem = None
            case {"problem": str(reason)}:
                problem = ascii(reason)[1:-1]
    stop_reasons = {"time": f"it takes more than {seconds:g} s", "output": "it has too much text"}
    if (problem := stop_reasons.get(finished.stopped or "", problem)) is not None:
        logger.warning("%s is left out from where it cannot be read: %s", name, problem)


def _split(source: str, text: str) -> Iterator[Passage]:
    """Yield the passage, split if it is too long."""
    if len(text) <= _MAX_PASSAGE_LENGTH:
        yield Passage(source, text)
        return
    for start in range(0, len(text), _MAX_PASSAGE_LENGTH):
        part = text[start : start + _MAX_PASSAGE_LENGTH]
        if part.strip():
            yield Passage(f"{source}, characters {start + 1:,}-{start + len(part):,}", part)
