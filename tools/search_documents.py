"""Search a folder of documents by words in many languages and, with an embedding model, by meaning.

Text of any kind, HTML, PDF, Word, PowerPoint, Excel, OpenDocument sheets, notebooks and JSON are read, and read again
when they change. Passages are cited by file and line, pages and the like by their number. Long lines and pages are
split into passages, and each passage of a table has the names of its columns. BM25 (bm25s) ranks by words. With
sentence embeddings, rank fusion returns the passages that either ranking finds.

Documents may be untrusted: links are not followed, and only regular files of at most 20 MiB are read. A process of its
own parses each document that is not text, with a limit of 20 seconds and 512 MiB.
"""

from __future__ import annotations

import codecs
import csv
import io
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_core.tools import BaseTool

from lookahead_agent.agents.search_words import Words
from lookahead_agent.agents.tool_use import make_tool
from lookahead_agent.sandbox.documents import KINDS, find_declared_encoding, read_parts
from lookahead_agent.sandbox.protected_names import protection
from lookahead_agent.sandbox.working_folder import read_regular

logger = logging.getLogger(__name__)

_ROWS_SUFFIXES = frozenset({".csv", ".tsv", ".tab"})
_IGNORED_FOLDERS = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})
_LINES = 12
_OVERLAP = 3
_MAX_PASSAGE_LENGTH = 4_000
_MAX_QUESTION_LENGTH = 10_000
_MAX_BYTES = 20 << 20
# Bytes by which the encoding of a text is detected; the encodings of texts with mostly, and with few, ASCII letters.
_SAMPLE = 64 << 10
_LATIN = ("cp1252", "cp1250", "cp1254", "cp1257", "mac_roman", "cp850")
_OTHERS = (
    "cp1251", "koi8_r", "cp866", "cp1253", "cp1255", "cp1256", "cp874", "cp932", "euc_jis_2004", "gb18030", "big5",
    "cp949",
)  # fmt: skip
# Below this confidence, which is that of a few words, the encoding may be another one.
_SURE = 0.2
# The beginnings of files that are not text.
_SIGNATURES = (
    b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"PK\3\4", b"%PDF-", b"\x1f\x8b", b"\x7fELF", b"RIFF", b"OggS", b"ID3",
    b"\xd0\xcf\x11\xe0", b"BZh", b"7z\xbc\xaf", b"MZ",
)  # fmt: skip
_CONTROLS = bytes({*range(32)} - {*b"\t\n\r\f\v\b\x1b"})
_ISO_2022_JP = re.compile(rb"\x1b\$[@B]")  # the only common encoding of Japanese that has 7 bits
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip
_SEPARATOR = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$")
_SHOWN = 10
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
        document_seconds: Timeout of one document that is not text.
        seconds: Timeout of reading all documents.
        passages: Maximum number of passages of one document.
        size: Maximum number of characters of all passages; each counts 200 more, for its place in the index.
    """

    documents: int = 10_000
    document_seconds: float = 20.0
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
    """A search index of a folder's passages. Each search reads new and changed documents first.

    Args:
        folder: Read recursively, up to 10,000 documents. Links, special files, hidden files and secrets are skipped.
        embed: Computes the vectors of texts; None: search by words only.
        limits: Limits of reading the folder.

    Raises:
        ValueError: The folder does not exist, cannot be read, or has no documents.
    """

    def __init__(self, folder: str | Path, embed: Embed | None = None, limits: SearchLimits | None = None) -> None:
        self._limits = limits or SearchLimits()
        try:
            self._root = Path(folder).expanduser().resolve()
            exists = self._root.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
            raise ValueError(f"the folder {Path(folder).name} cannot be opened: {error}") from None
        if not exists:
            raise ValueError(f"there is no folder {self._root.name}")
        self._embed = embed
        self._words = Words()
        self._lock = threading.Lock()
        self._documents: dict[str, _Document] = {}
        self.passages: list[Passage] = []
        self.left_out: dict[str, str] = {}
        """Why a document, or a part of it, is not searched, by its name."""
        with self._lock:
            self._refresh()
        if not self.passages:
            raise ValueError(f"{self._root.name} has no documents that can be read{self.notice()}")

    def notice(self) -> str:
        """Say which documents are not searched, and why; "" if all are."""
        if not self.left_out:
            return ""
        shown = "; ".join(f"{name}: {reason}" for name, reason in list(self.left_out.items())[:_SHOWN])
        more = f"; and {len(self.left_out) - _SHOWN} more" if len(self.left_out) > _SHOWN else ""
        return f" (not searched: {shown}{more})"

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
        with self._lock:
            self._refresh()
            for ranking in (self._by_words(question), self._by_meaning(question)):
                for rank, number in enumerate(ranking):
                    scores[number] = scores.get(number, 0.0) + 1 / (_RRF_K + rank)
            best = sorted(scores, key=lambda number: -scores[number])[:count]
            return [self.passages[number] for number in best]

    def _refresh(self) -> None:
        """Read the documents that are new or have changed, forget removed ones, and index all passages."""
        limits = self._limits
        end, room = time.monotonic() + limits.seconds, limits.size
        documents: dict[str, _Document] = {}
        left_out: dict[str, str] = {}
        rest = ""
        try:
            files = list(_files(self._root, left_out))
        except OSError as error:
            if self._documents:  # what was read before can still be searched
                logger.warning("%s cannot be read now: %s", self._root.name, error.strerror)
                return
            files = []
        for name, path in files:
            if not rest and len(documents) == limits.documents:
                rest = f"the folder has more than {limits.documents} documents"
            if not rest and (seconds := end - time.monotonic()) <= 0:
                rest = f"the folder takes more than {limits.seconds:g} s to read"
            if rest:
                left_out[name] = rest
                continue
            version = _version(path)
            known = self._documents.get(name)
            if known is None or known.version is None or known.version != version:
                before, known = known, _Document(version)
                _read(known, path, name, min(seconds, limits.document_seconds))
                if known.version is None and before is not None and before.passages:
                    known = before  # it cannot be opened now
                if len(known.passages) > limits.passages:
                    known.problem = f"it has more than {limits.passages} passages: the others are left out"
                    del known.passages[limits.passages :]
                known.words = self._words.of_document([passage.text for passage in known.passages])
            size = sum(len(passage.text) + _PASSAGE_OVERHEAD for passage in known.passages)
            if size > room:
                rest = "the folder has too much text"
                left_out[name] = rest
                continue
            room -= size
            documents[name] = known
            if known.problem is not None:
                left_out[name] = known.problem
        for name, reason in left_out.items():
            if self.left_out.get(name) != reason:
                logger.warning("%s: %s", name, reason)
        changed = [name for name, each in documents.items() if self._documents.get(name) is not each]
        if not changed and documents.keys() == self._documents.keys():
            self.left_out = left_out
            return
        self._index(documents)
        self._documents, self.left_out = documents, left_out

    def _index(self, documents: dict[str, _Document]) -> None:
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.NOTSET)  # the import sets it to DEBUG, whatever the program's level
        passages = [passage for each in documents.values() for passage in each.passages]
        words = [passage_words for each in documents.values() for passage_words in each.words]
        # BM25 fails if no document has a word, such as "!!!".
        self._bm25 = bm25s.BM25() if any(words) else None
        if self._bm25 is not None:
            self._bm25.index(words, show_progress=False)
        if self._embed is not None:
            import numpy as np

            for each in documents.values():
                if each.vectors is None and each.passages:
                    each.vectors = self._embed([passage.text for passage in each.passages])
            self._vectors = np.concatenate([each.vectors for each in documents.values() if each.passages] or [[]])
        self.passages = passages

    def _by_words(self, question: str) -> list[int]:
        words = self._words.of_question(question)
        if self._bm25 is None or not words:
            return []
        limit = min(50, len(self.passages))
        numbers, scores = self._bm25.retrieve([words], k=limit, show_progress=False)
        return [int(number) for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]

    def _by_meaning(self, question: str) -> list[int]:
        if self._embed is None or not self.passages:
            return []
        similarities = self._vectors @ self._embed([question])[0]
        return [int(number) for number in (-similarities).argsort()[:50]]


def make_search_tool(folder: str | Path, embed: Embed | None = None, count: int = 4) -> BaseTool:
    """Create the tool `search_documents` for one folder.

    Raises:
        ValueError: The folder does not exist, or has no documents.
    """
    index = DocumentIndex(folder, embed)
    description = "Search the documents. Returns passages with their sources, to be cited as [source]."

    @make_tool(description=description, rest="ask for something more particular", read_only=True)
    def search_documents(question: str) -> str:
        found = index.search(question, count)
        if not found:
            return f"nothing fits: try other words{index.notice()}"
        return "\n\n".join(f"[{passage.source}]\n{_quote(passage.text)}" for passage in found)

    return search_documents


def _quote(text: str) -> str:
    """Indent lines that begin with "[", so that none can pass for the source of another passage."""
    return "\n".join(f" {line}" if line.startswith("[") else line for line in text.split("\n"))


@dataclass
class _Document:
    """A document as it was read: its passages with their words and vectors, and why a part of it is left out."""

    version: tuple[int, ...] | None
    passages: list[Passage] = field(default_factory=list)
    problem: str | None = None
    words: list[list[str]] = field(default_factory=list)
    vectors: Any = None


def _version(path: Path) -> tuple[int, ...] | None:
    """Return what changes when a file is written; None if it cannot be known."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino


def _files(root: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of a folder's files, without hidden ones; `left_out` gets links and secrets.

    Raises OSError if the folder itself cannot be listed.
    """

    def report(error: OSError) -> None:
        if error.filename == str(root):
            raise error
        left_out[_format_name(root, Path(error.filename))] = f"it cannot be listed: {error.strerror}"

    for parent, folders, files in os.walk(root, onerror=report, followlinks=False):
        secret = {name for name in folders if protection(name, (), writing=False) is not None}
        for name in sorted(folders):
            if Path(parent, name).is_symlink():
                left_out[_format_name(root, Path(parent, name))] = "it is a link: links are not followed"
            elif name in secret and not name.startswith("."):
                left_out[_format_name(root, Path(parent, name))] = "its name is a secret's"
        folders[:] = sorted({*folders} - secret - _IGNORED_FOLDERS)
        for name in sorted(files):
            if name.startswith("."):
                continue
            path = Path(parent, name)
            if path.is_symlink():
                left_out[_format_name(root, path)] = "it is a link: links are not followed"
            elif protection(name, (), writing=False) is not None:
                left_out[_format_name(root, path)] = "its name is a secret's"
            else:
                yield _format_name(root, path), path


def _format_name(root: Path, path: Path) -> str:
    name = path.relative_to(root).as_posix()
    # A line break in the name could forge another file's citation.
    return name if name.isprintable() else ascii(name)


def _read(document: _Document, path: Path, name: str, seconds: float) -> None:
    """Read a document's passages and its problem, if any."""
    try:
        data = read_regular(path, _MAX_BYTES)
    except OSError as error:
        document.version = None  # it is tried again
        document.problem = f"it cannot be opened: {error.strerror}"
        return
    except ValueError as error:
        document.problem = f"it {error}"
        return
    suffix = path.suffix.lower()
    kind = KINDS.get(suffix)
    if not data.strip():
        document.problem = "it is empty"
    elif kind in (None, "html", "json", "ipynb"):
        _read_text(document, data, name, suffix, kind, seconds)
    else:
        _read_parts(document, data, name, str(kind), seconds)
    if not document.passages and document.problem is None:
        document.problem = "it has no text (only pictures of it?)"


def _read_text(document: _Document, data: bytes, name: str, suffix: str, kind: str | None, seconds: float) -> None:
    text, encoding = _decode(data)
    if text is None:
        document.problem = "it is not text"
        if kind is None:
            document.problem += f" and no kind that is read: {', '.join(sorted(KINDS))}"
        return
    problem = None if encoding is None else f"it is not UTF-8, and was read as {encoding}"
    if kind is not None:
        _read_parts(document, text.encode(errors="replace"), name, kind, seconds)
        if kind == "html" or document.passages:
            document.problem = document.problem or problem
            return
    document.problem = problem  # JSON that is damaged, or of lines, is read as text
    lines = text.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n").split("\n")
    if suffix in _ROWS_SUFFIXES:
        document.passages += _of_rows(f"{name}:", lines, _records(lines))
    else:
        document.passages += _of_lines(f"{name}:", lines)


def _decode(data: bytes) -> tuple[str | None, str | None]:
    """Return a text, or None for other data, and the encoding if it was detected, with how sure that is."""
    for mark, encoding in _BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return data.decode(encoding, errors="replace"), None
    if b"\0" in data[:_SAMPLE]:
        half = len(data[:_SAMPLE]) // 2
        for encoding, zeros in (("utf-16-le", data[1:_SAMPLE:2]), ("utf-16-be", data[0:_SAMPLE:2])):
            if zeros.count(0) > half * 0.7 and data[:_SAMPLE].count(0) < half * 1.1:
                return data.decode(encoding, errors="replace"), encoding
        return None, None
    sample = data[:_SAMPLE]
    if _ISO_2022_JP.search(sample):
        return data.decode("iso2022_jp", errors="replace"), "iso2022_jp"
    if (len(sample) - len(sample.translate(None, _CONTROLS))) * 50 > len(sample):
        return None, None
    try:
        return data.decode("utf-8"), None
    except UnicodeDecodeError:
        if data.startswith(_SIGNATURES):
            return None, None
        import webencodings
        from chardet import detect

        if (declared := webencodings.lookup(find_declared_encoding(data) or "")) is not None:
            text: str = webencodings.decode(data, declared, errors="replace")[0]
            return text, None

    high = sum(byte > 127 for byte in sample)
    letters = high + sum(65 <= byte & 0xDF <= 90 for byte in sample if byte < 128)
    # With few ASCII letters, each byte may be a letter of another script.
    names = _LATIN if high * 20 < letters * 9 else _OTHERS
    found = detect(sample, include_encodings=names, compat_names=False, prefer_superset=True)
    if (detected := found["encoding"]) is None:
        return None, None
    unsure = "" if found["confidence"] > _SURE else ", which is unsure: save it as UTF-8"
    return data.decode(detected, errors="replace"), f"{detected}{unsure}"


def _read_parts(document: _Document, data: bytes, name: str, kind: str, seconds: float) -> None:
    try:
        parts, problem = read_parts(data, kind, seconds)
    except OSError as error:
        document.version = None  # it is tried again
        document.problem = f"it cannot be read now: {error.strerror}"
        return
    for part in parts:
        source = f"{name}, {part.place}" if part.place else name
        lines = part.text.split("\n")
        if part.is_table:
            rows = [(number, number + 1, line.split(" | ")) for number, line in enumerate(lines) if line.strip(" |")]
            document.passages += _of_rows(f"{source}, rows ", lines, rows)
        elif kind == "pdf" or len(lines) <= _LINES:
            document.passages += _split(source, part.text.strip())
        else:
            document.passages += _of_lines(f"{source}, lines ", lines)
    if problem is not None:
        document.problem = f"it is left out from where it cannot be read: {problem}"


def _of_lines(source: str, lines: Sequence[str]) -> Iterator[Passage]:
    """Yield passages of lines that overlap; one that begins in a Markdown table begins with the table's header."""
    headers: list[int | None] = [None] * len(lines)
    for number in range(2, len(lines)):
        if "|" in lines[number]:
            begins = "|" in lines[number - 2] and "-" in lines[number - 1] and _SEPARATOR.match(lines[number - 1])
            headers[number] = number - 2 if begins else headers[number - 1]
    for first in range(0, max(1, len(lines) - _OVERLAP), _LINES - _OVERLAP):
        part = lines[first : first + _LINES]
        if not any(line.strip() for line in part):
            continue
        place = f"{source}{first + 1}-{first + len(part)}"
        header = headers[first]
        before = [] if header is None else lines[header : min(first, header + 2)]
        if sum(map(len, [*before, *part])) + len(part) > _MAX_PASSAGE_LENGTH and before:
            for number, line in enumerate(part, first):
                names = [] if headers[number] is None else _cells(lines[headers[number] or 0])
                cells = _cells(line)
                yield from _split(f"{source}{number + 1}-{number + 1}", _label(names, cells) if names else line)
        else:
            yield from _split(place, "\n".join([*before, *part]).strip())


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _label(names: Sequence[str], cells: Sequence[str]) -> str:
    """Return a row of a wide table with a line for each value."""
    labels = [*names, *[""] * max(0, len(cells) - len(names))]
    return "\n".join(f"{label}: {cell}" if label else cell for label, cell in zip(labels, cells, strict=False) if cell)


Record = tuple[int, int, list[str]]
"""A row of a table: its first line, the line after its last, and its cells."""


def _records(lines: Sequence[str]) -> list[Record]:
    """Return the rows of a CSV file, whose cells may have line breaks."""
    first = next((line for line in lines if line.strip()), "")
    reader = csv.reader(io.StringIO("\n".join(lines)), delimiter=max(",;\t|", key=first.count))
    records: list[Record] = []
    try:
        for cells in reader:
            begin = records[-1][1] if records else 0
            records.append((begin, reader.line_num, cells))
    except csv.Error:  # a cell is too long: an open quotation mark
        records += [(number, number + 1, [lines[number]]) for number in range(reader.line_num - 1, len(lines))]
    return [record for record in records if any(cell.strip() for cell in record[2])]


def _of_rows(source: str, lines: Sequence[str], records: Sequence[Record]) -> Iterator[Passage]:
    """Yield passages of a table's rows, each with the header, which is the first row of several cells."""
    at = next((number for number, record in enumerate(records) if sum(map(bool, record[2])) > 1), 0)
    header = "\n".join(lines[records[at][0] : records[at][1]]) if records else ""
    names = [name.strip() for name in records[at][2]] if records else []
    rows: list[Record] = []
    size = 0
    for number, record in enumerate([*records, None]):
        length = 0 if record is None else sum(map(len, lines[record[0] : record[1]])) + 1
        if rows and (record is None or len(rows) == _LINES or len(header) + size + length > _MAX_PASSAGE_LENGTH):
            place = f"{source}{rows[0][0] + 1}-{rows[-1][1]}"
            text = "\n".join("\n".join(lines[begin:end]) for begin, end, _ in rows)
            has_header = number - len(rows) <= at
            if len(header) + size > _MAX_PASSAGE_LENGTH and not has_header:
                text = _label(names, rows[0][2])
            elif not has_header:
                text = f"{header}\n{text}"
            yield from _split(place, text)
            rows, size = [], 0
        if record is not None:
            rows.append(record)
            size += length


def _split(source: str, text: str) -> Iterator[Passage]:
    """Yield the passage, split if it is too long."""
    if len(text) <= _MAX_PASSAGE_LENGTH:
        yield Passage(source, text)
        return
    for start in range(0, len(text), _MAX_PASSAGE_LENGTH):
        part = text[start : start + _MAX_PASSAGE_LENGTH]
        if part.strip():
            yield Passage(f"{source}, characters {start + 1:,}-{start + len(part):,}", part)
