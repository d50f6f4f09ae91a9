from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from tools.search_documents import DocumentIndex, make_search_tool


def write_pdf(path: Path, *pages: str) -> None:
    writer = PdfWriter()
    font = DictionaryObject(
        {
            NameObject("/Type"): NameObject("/Font"),
            NameObject("/Subtype"): NameObject("/Type1"),
            NameObject("/BaseFont"): NameObject("/Helvetica"),
        }
    )
    for text in pages:
        page = writer.add_blank_page(300, 300)
        stream = DecodedStreamObject()
        stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode())
        page[NameObject("/Contents")] = writer._add_object(stream)
        page[NameObject("/Resources")] = DictionaryObject(
            {NameObject("/Font"): DictionaryObject({NameObject("/F1"): font})}
        )
    with path.open("wb") as file:
        writer.write(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "documents"
    (root / "notes").mkdir(parents=True)
    lines = [f"Line {number} about nothing in particular." for number in range(1, 31)]
    lines[19] = "Green tea is brewed at seventy degrees."
    (root / "notes" / "tea.md").write_text("\n".join(lines))
    (root / "opening.txt").write_text("The shop opens at nine and closes at six.")
    (root / ".hidden.txt").write_text("tea tea tea")
    (root / "picture.png").write_bytes(b"\x89PNG")
    (root / "latin.txt").write_bytes("Straße".encode("latin-1"))
    (tmp_path / "outside.txt").write_text("tea outside")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    write_pdf(root / "manual.pdf", "Descale the kettle monthly.", "The warranty lasts two years.")
    (root / "broken.pdf").write_bytes(b"%PDF-1.4 nothing")
    return root


def test_passages_are_cited_by_file_and_line_or_page(folder: Path) -> None:
    index = DocumentIndex(folder)
    best = index.search("How hot is green tea brewed?")[0]
    assert best.source == "notes/tea.md:19-30"
    assert "seventy degrees" in best.text
    assert index.search("warranty years")[0].source == "manual.pdf, page 2"
    assert index.search("zebra") == []
    assert not any("outside" in passage.text or "tea tea" in passage.text for passage in index.passages)


def test_search_tool_returns_cited_passages_or_a_hint(folder: Path) -> None:
    tool = make_search_tool(folder, count=1)
    assert tool.invoke({"question": "When does the shop close?"}).startswith("[opening.txt:1-1]\nThe shop opens")
    assert tool.invoke({"question": "zebra"}).startswith("nothing fits")
    assert tool.invoke({"question": " "}) == "say what to search for"


def test_embeddings_find_passages_without_a_common_word(folder: Path) -> None:
    def embed(texts: Sequence[str]) -> np.ndarray:
        """Embed texts about opening hours as one topic."""
        return np.array(
            [[1.0, 0.0] if any(word in text for word in ("opens", "hours")) else [0.0, 1.0] for text in texts]
        )

    assert DocumentIndex(folder).search("business hours") == []
    assert DocumentIndex(folder, embed).search("business hours")[0].source == "opening.txt:1-1"


def test_empty_or_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no documents"):
        DocumentIndex(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        make_search_tool(tmp_path / "nowhere")
