"""Searches a folder of documents (text, Markdown, PDF) by words and, if a model is given, by meaning.

Passages are cited by file and line, PDF pages by page. Words are ranked by BM25 (bm25s); with sentence embeddings too,
the two rankings are fused, so that a passage that either finds is found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from langchain_core.tools import BaseTool, ToolException, tool

logger = logging.getLogger(__name__)

_TEXTS = frozenset({".txt", ".md", ".markdown", ".rst", ".csv"})
_LINES = 12
_OVERLAP = 3
_LARGEST = 20 << 20
# Of reciprocal rank fusion: how little the very first ranks count for more than the next.
_FUSION = 60

Embed = Callable[[Sequence[str]], Any]
"""Vectors of texts, shape (n, d), of length 1: such as `SentenceTransformer(…).encode` with normalize_embeddings."""


@dataclass(frozen=True)
class Passage:
    """A piece of a document.

    Attributes:
        source: Where it is: "notes/tea.md:13-24", or "manual.pdf, page 3".
        text: What it says.
    """

    source: str
    text: str


class DocumentIndex:
    """Passages of a folder, ready to be searched.

    Args:
        folder: Read with all folders in it; files that are no text, and links that lead outside, are left out.
        embed: Makes vectors of texts; None: by words alone.

    Raises:
        ValueError: There is no such folder, or it has no documents.
    """

    def __init__(self, folder: str | Path, embed: Embed | None = None) -> None:
        root = Path(folder).resolve()
        if not root.is_dir():
            raise ValueError(f"there is no folder {root.name}")
        self.passages = [passage for path in _documents(root) for passage in _passages(root, path)]
        if not self.passages:
            raise ValueError(f"{root.name} has no documents: text, Markdown or PDF files")
        import bm25s

        texts = [passage.text for passage in self.passages]
        self._words = bm25s.BM25()
        self._words.index(_tokens(texts), show_progress=False)
        self._embed = embed
        self._vectors = embed(texts) if embed is not None else None

    def search(self, question: str, count: int = 4) -> list[Passage]:
        """The passages that fit a question best, the best first.

        Args:
            question: Words, or a question.
            count: How many at most.

        Raises:
            ValueError: The question is empty.
        """
        if not question.strip():
            raise ValueError("say what to search for")
        scores: dict[int, float] = {}
        for ranking in (self._by_words(question), self._by_meaning(question)):
            for rank, number in enumerate(ranking):
                scores[number] = scores.get(number, 0.0) + 1 / (_FUSION + rank)
        best = sorted(scores, key=lambda number: -scores[number])[:count]
        return [self.passages[number] for number in best]

    def _by_words(self, question: str) -> list[int]:
        tokens = _tokens([question])
        if not tokens.vocab:
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

    @tool
    def search_documents(question: str) -> str:
        """Search the documents. Returns passages with their sources, to be cited as [source]."""
        try:
            found = index.search(question, count)
        except ValueError as error:
            raise ToolException(str(error)) from error
        if not found:
            return "nothing fits: try other words"
        return "\n\n".join(f"[{passage.source}]\n{passage.text}" for passage in found)

    search_documents.handle_tool_error = True
    return search_documents


def _tokens(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def _documents(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        known = path.suffix.lower() in _TEXTS or path.suffix.lower() == ".pdf"
        if hidden or not known or not path.is_file() or not path.resolve().is_relative_to(root):
            continue
        if path.stat().st_size > _LARGEST:
            logger.warning("%s is left out: it is longer than %d bytes", path.name, _LARGEST)
            continue
        yield path


def _passages(root: Path, path: Path) -> Iterator[Passage]:
    name = path.relative_to(root).as_posix()
    if path.suffix.lower() == ".pdf":
        yield from _pages(path, name)
        return
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        logger.warning("%s is left out: it is no UTF-8 text", name)
        return
    for first in range(0, max(1, len(lines) - _OVERLAP), _LINES - _OVERLAP):
        part = lines[first : first + _LINES]
        if any(line.strip() for line in part):
            yield Passage(f"{name}:{first + 1}-{first + len(part)}", "\n".join(part).strip())


def _pages(path: Path, name: str) -> Iterator[Passage]:
    from pypdf import PdfReader
    from pypdf.errors import PyPdfError

    try:
        for number, page in enumerate(PdfReader(path).pages, 1):
            if text := page.extract_text().strip():
                yield Passage(f"{name}, page {number}", text)
    except PyPdfError as error:
        logger.warning("%s is left out: %s", name, error)
