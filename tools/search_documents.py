"""Searches a folder of documents (text, Markdown, PDF) by words and, if a model is given, by meaning.

Passages are cited by file and line, PDF pages by page; long lines and pages are several passages. Words are ranked by
BM25 (bm25s); with sentence embeddings too, the two rankings are fused, so that a passage that either finds is found.

Documents may be somebody else's: links are not followed, only regular files are read, as far as 20 MiB, and a PDF is
read in a process of its own, which has 20 seconds and 512 MiB.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.tools import BaseTool

from lookahead_agent import sandbox
from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox.working_folder import read_regular

logger = logging.getLogger(__name__)

_TEXTS = frozenset({".txt", ".md", ".markdown", ".rst", ".csv"})
_LINES = 12
_OVERLAP = 3
_LONGEST_PASSAGE = 4_000
_LONGEST_QUESTION = 10_000
_LARGEST = 20 << 20
_PDF_MEMORY = 512 << 20
_PDF_TEXT = 16 << 20
# Of reciprocal rank fusion: how little the very first ranks count for more than the next.
_FUSION = 60

Embed = Callable[[Sequence[str]], Any]
"""Vectors of texts, shape (n, d), of length 1: such as `SentenceTransformer(…).encode` with normalize_embeddings."""


@dataclass(frozen=True)
class SearchLimits:
    """What reading a folder may cost.

    Attributes:
        documents: Documents that are read.
        pdf_seconds: Time that a PDF may take.
    """

    documents: int = 10_000
    pdf_seconds: float = 20.0


@dataclass(frozen=True)
class Passage:
    """A piece of a document.

    Attributes:
        source: Where it is: "notes/tea.md:13-24", or "manual.pdf, page 3"; with ", characters 4,001-8,000" if it is a
            part of a line or page that is longer.
        text: What it says.
    """

    source: str
    text: str


class DocumentIndex:
    """Passages of a folder, ready to be searched.

    Args:
        folder: Read with all folders in it, up to 10,000 documents. Files that are no text, links, and what is no
            regular file are left out.
        embed: Makes vectors of texts; None: by words alone.
        limits: What reading the folder may cost.

    Raises:
        ValueError: There is no such folder, it cannot be read, or it has no documents.
    """

    def __init__(self, folder: str | Path, embed: Embed | None = None, limits: SearchLimits | None = None) -> None:
        limits = limits or SearchLimits()
        try:
            root = Path(folder).resolve()
            there = root.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
            raise ValueError(f"the folder {Path(folder).name} cannot be opened: {error}") from None
        if not there:
            raise ValueError(f"there is no folder {root.name}")
        self.passages = [
            passage
            for path in _documents(root, limits.documents)
            for passage in _passages(root, path, limits.pdf_seconds)
        ]
        if not self.passages:
            raise ValueError(f"{root.name} has no documents: text, Markdown or PDF files")
        import bm25s

        texts = [passage.text for passage in self.passages]
        tokens = _tokens(texts)
        # BM25 has no statistics of documents without a word, such as "!!!".
        self._words = bm25s.BM25() if any(tokens.ids) else None
        if self._words is not None:
            self._words.index(tokens, show_progress=False)
        self._embed = embed
        self._vectors = embed(texts) if embed is not None else None

    def search(self, question: str, count: int = 4) -> list[Passage]:
        """The passages that fit a question best, the best first.

        Args:
            question: Words, or a question.
            count: How many at most.

        Raises:
            ValueError: The question is empty, or longer than 10,000 characters.
        """
        if not question.strip():
            raise ValueError("say what to search for")
        if len(question) > _LONGEST_QUESTION:
            raise ValueError(f"the question is longer than {_LONGEST_QUESTION:,} characters")
        scores: dict[int, float] = {}
        for ranking in (self._by_words(question), self._by_meaning(question)):
            for rank, number in enumerate(ranking):
                scores[number] = scores.get(number, 0.0) + 1 / (_FUSION + rank)
        best = sorted(scores, key=lambda number: -scores[number])[:count]
        return [self.passages[number] for number in best]

    def _by_words(self, question: str) -> list[int]:
        tokens = _tokens([question])
        if self._words is None or not tokens.vocab:
            return []
        most = min(50, len(self.passages))
        numbers, scores = self._words.retrieve(tokens, k=most, show_progress=False)
        return [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _by_meaning(self, question: str) -> list[int]:
        if self._embed is None:
            return []
        similarities = self._vectors @ self._embed([question])[0]
        return [int(number) for number in (-similarities).argsort()[:50]]


def make_search_tool(folder: str | Path, embed: Embed | None = None, count: int = 4) -> BaseTool:
    """The tool `search_documents` for one folder.

    Raises:
        ValueError: There is no such folder, or it has no documents.
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
    """A passage none of whose lines can be taken for the source of another."""
    return "\n".join(f" {line}" if line.startswith("[") else line for line in text.split("\n"))


def _tokens(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def _documents(root: Path, most: int) -> Iterator[Path]:
    found = 0
    for parent, folders, files in os.walk(root, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent, name)
            known = path.suffix.lower() in _TEXTS or path.suffix.lower() == ".pdf"
            if name.startswith(".") or not known:
                continue
            if found == most:
                logger.warning("%s has more than %d documents: the others are left out", root.name, found)
                return
            found += 1
            yield path


def _passages(root: Path, path: Path, pdf_seconds: float) -> Iterator[Passage]:
    name = path.relative_to(root).as_posix()
    if not name.isprintable():  # with a line break in its name, a file could be cited as another
        name = ascii(name)
    try:
        data = read_regular(path, _LARGEST)
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
            yield from _bounded(f"{name}:{first + 1}-{first + len(part)}", "\n".join(part).strip())


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
                # A font may say that its letters are lone surrogates, which no message can carry.
                yield from _bounded(f"{name}, page {number}", text.encode(errors="replace").decode())
            case {"problem": None}:
                problem = None
            case {"problem": str(said)}:
                problem = ascii(said)[1:-1]
    why = {"time": f"it takes more than {seconds:g} s", "output": "it has too much text"}
    if (problem := why.get(finished.stopped or "", problem)) is not None:
        logger.warning("%s is left out from where it cannot be read: %s", name, problem)


def _bounded(source: str, text: str) -> Iterator[Passage]:
    """The passage, or several, where it is too long for one."""
    if len(text) <= _LONGEST_PASSAGE:
        yield Passage(source, text)
        return
    for start in range(0, len(text), _LONGEST_PASSAGE):
        part = text[start : start + _LONGEST_PASSAGE]
        if part.strip():
            yield Passage(f"{source}, characters {start + 1:,}-{start + len(part):,}", part)
