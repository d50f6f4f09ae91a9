from __future__ import annotations

import datetime
import json
import logging
import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import docx
import numpy as np
import openpyxl
import pptx
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


def test_building_an_index_logs_nothing_at_the_programs_level(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_search_tool(folder)
        assert not logging.getLogger("bm25s").isEnabledFor(logging.DEBUG)


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


@pytest.mark.parametrize(
    ("text", "question"),
    [
        ("東京の天気は晴れです。大阪は雨です。", "東京"),
        ("年次有給休暇は二十日です。", "有給休暇は何日ですか"),
        ("举头望明月，低头思故乡。", "故乡"),
        ("緑茶", "茶"),
        ("초과근무는 사전 승인이 필요합니다.", "초과근무 승인"),
        (unicodedata.normalize("NFD", "초과근무는 사전 승인이"), "승인"),
        ("कर्मचारियों को बीस दिन की छुट्टी मिलती है।", "छुट्टी"),
        ("พนักงานลาพักร้อนได้สิบวัน", "ลาพักร้อน"),
        (unicodedata.normalize("NFD", "Die Kündigungsfrist beträgt drei Monate."), "KÜNDIGUNGSFRIST"),
        ("Die Kündigungsfrist beträgt drei Monate.", unicodedata.normalize("NFD", "Kündigungsfristen")),
        ("Le délai de préavis est de trois mois.", "delai preavis"),
        ("Les employés sont payés.", "employée"),
        ("Срок уведомления составляет три месяца.", "сроки"),
        ("Employees receive refunds.", "employee refund"),
        ("Full ｗｉｄｔｈ", "width"),
        ("في المدرسة الجديدة", "المدرسه"),
        ("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645 کتاب", "\u0645\u064a\u062e\u0648\u0627\u0647\u0645"),
        ("بسیار مهم: ایران کشور", "ايران كشور"),
        ("המלכים החדשים", "מלך"),
        ("ובספרים שלנו", "ספר"),
        ("ILIK SU", "ılık su"),
        ("Łódź", "lodz"),
        ("smørrebrød på dansk", "smorrebrod"),
        ("\u0958\u0932\u092e", "\u0915\u0932\u092e"),
        ("agree\u00adment", "agreement"),
        ("max_retry_count = 5", "retry count"),
        ("set maxRetryCount", "retry"),
    ],
)
def test_words_of_many_languages_are_found(text: str, question: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text(text)
    (tmp_path / "b.md").write_text("Something else.")
    assert DocumentIndex(tmp_path).search(question)[0].source == "a.md:1-1"


def test_rows_keep_the_names_of_their_columns(tmp_path: Path) -> None:
    rows = [["order", "customer", "total_eur"], *([f"{number}", f"Customer{number}", "7"] for number in range(1, 60))]
    for name, delimiter in (("a.csv", ","), ("b.csv", ";"), ("c.tsv", "\t")):
        (tmp_path / name).write_text("\n".join(map(delimiter.join, rows)))
    table = ["| " + " | ".join(row) + " |" for row in rows]
    (tmp_path / "d.md").write_text("\n".join(["# Orders", "", table[0], "|---|---|---|", *table[1:]]))
    wide = [[f"column{number}" for number in range(900)], [f"value{number}" for number in range(900)]]
    (tmp_path / "wide.csv").write_text("\n".join(map(",".join, wide)))
    (tmp_path / "lines.csv").write_text('a,b\n1,"two\nlines"\n' + "3,needle\n" * 20)
    index = DocumentIndex(tmp_path)
    found = {passage.source.partition(":")[0]: passage for passage in index.search("Customer40", 20)}
    assert sorted(found) == ["a.csv", "b.csv", "c.tsv", "d.md"]
    assert all("total_eur" in passage.text and "Customer40" in passage.text for passage in found.values())
    assert found["a.csv"].source == "a.csv:37-48"
    assert "column700: value700" in index.search("value700")[0].text
    assert {passage.source for passage in index.search("needle")} == {"lines.csv:1-13", "lines.csv:14-23"}


def test_documents_of_many_kinds_are_read(tmp_path: Path) -> None:
    document = docx.Document()
    document.add_heading("Contract", 1)
    document.add_table(2, 1).cell(1, 0).text = "wordcell"
    document.save(str(tmp_path / "a.docx"))
    book = openpyxl.Workbook()
    book.active.append(["name", "price"])
    book.active.append(["sheetcell", 2.5])
    book.save(tmp_path / "b.xlsx")
    slides = pptx.Presentation()
    slides.slides.add_slide(slides.slide_layouts[0]).shapes.title.text = "slidetitle"
    slides.save(str(tmp_path / "c.pptx"))
    (tmp_path / "d.html").write_text("<title>T</title><p>pagetext<p hidden>secret")
    (tmp_path / "e.ipynb").write_text(json.dumps({"cells": [{"source": ["celltext"]}]}))
    (tmp_path / "f.json").write_text(json.dumps([{"city": "Köln"}]))
    (tmp_path / "g.jsonl").write_text('{"a": "jsonline"}\n{}')
    (tmp_path / "README").write_text("readmetext")
    (tmp_path / "h.yaml").write_bytes("a: utfsixteen".encode("utf-16"))
    (tmp_path / "i.csv").write_bytes("Stadt;Größe\nKöln;groß\nMünchen;größer\n".encode("cp1252"))
    (tmp_path / "j.txt").write_bytes("Срок уведомления составляет три месяца. Это важно для всех.".encode("cp1251"))
    (tmp_path / "k.txt").write_bytes("年次有給休暇は二十日です。申請は上司に出してください。".encode("cp932"))
    (tmp_path / "l.txt").write_bytes("返品は三十日以内です。".encode("iso2022_jp"))
    index = DocumentIndex(tmp_path)
    for question, source in (
        ("wordcell", "a.docx"), ("sheetcell", "b.xlsx, sheet Sheet, rows 1-2"), ("slidetitle", "c.pptx, slide 1"),
        ("pagetext", "d.html"), ("celltext", "e.ipynb, cell 1"), ("city", "f.json, item 1"),
        ("jsonline", "g.jsonl:1-2"),
        ("readmetext", "README:1-1"), ("utfsixteen", "h.yaml:1-1"), ("München", "i.csv:1-3"), ("месяца", "j.txt:1-1"),
        ("有給休暇", "k.txt:1-1"), ("返品", "l.txt:1-1"),
    ):  # fmt: skip
        assert [passage.source for passage in index.search(question, 1)] == [source], question
    assert index.search("secret") == []
    assert sorted(index.left_out) == ["i.csv", "j.txt", "k.txt", "l.txt"]
    assert index.left_out["i.csv"].startswith("it is not UTF-8, and was read as cp1252")


def test_documents_keep_what_is_nested_merged_or_declared(tmp_path: Path) -> None:
    from docx import Document
    from openpyxl import Workbook

    book = Workbook()
    for row in (["Sales"], ["Region", "2024", None], ["North", 1, 2], [None, 3, datetime.date(2024, 2, 1)]):
        book.active.append(row)
    for cells in ("A1:C1", "B2:C2", "A3:A4"):
        book.active.merge_cells(cells)
    book.save(tmp_path / "a.xlsx")
    word = Document()
    word.add_table(1, 1).cell(0, 0).add_table(1, 2).cell(0, 1).text = "innercell"
    word.sections[0].footer.paragraphs[0].text = "footertext"
    word.save(str(tmp_path / "b.docx"))
    (tmp_path / "c.html").write_bytes("<meta charset=windows-1255><p>שלום".encode("cp1255"))
    (tmp_path / "d.xml").write_bytes('<?xml version="1.0" encoding="iso-8859-9"?><a>İstanbul</a>'.encode("iso8859_9"))
    outputs = [{"data": {"text/html": ["<b>htmlout", "put</b>"]}}, {"data": {"image/png": "x"}}, {"evalue": "boom"}]
    (tmp_path / "e.ipynb").write_text(json.dumps({"cells": [{"source": "x", "outputs": outputs}]}))
    index = DocumentIndex(tmp_path)
    assert [passage.text for passage in index.passages] == [
        "Sales |  | \nRegion | 2024 | 2024\nNorth | 1 | 2\nNorth | 3 | 2024-02-01", "| ; innercell |\n| --- |",
        "footertext", "שלום", '<?xml version="1.0" encoding="iso-8859-9"?><a>İstanbul</a>',
        "x\n\n**htmloutput**\n\nboom",
    ]  # fmt: skip
    assert index.left_out == {}


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1255", "מחיר: 12"), ("cp1255", "רשימת מחירים 2024: תה ירוק 12, קפה 15."), ("cp874", "ราคา 12 บาท"),
        ("cp1254", "Çay fiyatı 12 lira"), ("cp866", "Цена 12 рублей"), ("cp1251", "Цена 12 рублей"),
        ("koi8_r", "Цена 12 рублей"), ("cp1252", "café à la crème"), ("cp1250", "Zielona herbata kosztuje 25 złotych"),
        ("gb18030", "绿茶价格12元"), ("cp932", "緑茶は12円です"), ("cp949", "녹차 가격 12원"),
    ],
)  # fmt: skip
def test_short_texts_of_other_encodings_are_read_and_what_is_unsure_is_said(
    tmp_path: Path, encoding: str, text: str
) -> None:
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    (tmp_path / "b.html").write_bytes("<p>שלום</p>".encode("iso8859_8"))
    index = DocumentIndex(tmp_path)
    assert index.passages[0].text == text
    assert re.match(f"it is not UTF-8, and was read as {encoding.replace('_', '.')}", index.left_out["a.txt"])
    assert index.left_out["b.html"].endswith("which is unsure: save it as UTF-8")


def test_documents_that_are_left_out_are_named_with_the_reason(folder: Path) -> None:
    (folder / "scan.pdf").unlink(missing_ok=True)
    write_pdf(folder / "scan.pdf", "")
    (folder / "bad.docx").write_bytes(b"PK\3\4 tea")
    (folder / "id_rsa").write_text("tea")
    (folder / "secrets").mkdir()
    (folder / "secrets" / "zebra.txt").write_text("zebra")
    (folder / "empty.md").write_text("")
    tool = make_search_tool(folder)
    answer = tool.invoke({"question": "zebra"})
    for reason in (
        "scan.pdf: it has no text", "bad.docx: it is left out from where it cannot be read: BadZipFile",
        "id_rsa: its name is a secret's", "secrets: its name is a secret's",
        "picture.png: it is not text and no kind that is read: .docm",
        "empty.md: it is empty", "link.txt: it is a link", "broken.pdf: it is left out",
    ):  # fmt: skip
        assert reason in answer
    assert answer.startswith("nothing fits: try other words (not searched: ")


def test_changed_documents_are_read_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def embed(texts: Sequence[str]) -> np.ndarray:
        calls.append(len(texts))
        return np.ones((len(texts), 1))

    (tmp_path / "a.md").write_text("The code is 1111.")
    (tmp_path / "b.md").write_text("Bonn has a zebra.")
    (tmp_path / "c.md").write_text("This stays.")
    index = DocumentIndex(tmp_path, embed)
    (tmp_path / "new.md").write_text("The giraffe lives in Ulm.")
    (tmp_path / "a.md").write_text("The code is 2222.")
    (tmp_path / "b.md").unlink()
    assert "Ulm" in index.search("giraffe")[0].text
    assert index.search("code")[0].text == "The code is 2222."
    assert not any("zebra" in passage.text for passage in index.search("zebra"))
    assert calls == [1, 1, 1, 1, 1, 1, 1, 1], "documents and questions, and none twice"


def test_empty_or_missing_folder_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no documents"):
        DocumentIndex(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        make_search_tool(tmp_path / "nowhere")
