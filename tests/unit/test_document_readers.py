"""The readers of documents lose no text: each is called without a process of its own."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from zipfile import ZipFile

import docx
import openpyxl
import pptx
import pytest
from docx.oxml import parse_xml
from pptx.chart.data import CategoryChartData
from pptx.enum.chart import XL_CHART_TYPE

from lookahead_agent.sandbox import document_worker as worker

W = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
CONTROL = f"<w:sdt {W}><w:sdtContent>{{}}</w:sdtContent></w:sdt>"


def paragraph(text: str) -> str:
    return f"<w:p {W}><w:r><w:t>{text}</w:t></w:r></w:p>"


def save(document: object) -> bytes:
    data = io.BytesIO()
    document.save(data)  # type: ignore[attr-defined]
    return data.getvalue()


def read(reader: Callable[[bytes, str], Iterator[tuple[str, str]]], data: bytes) -> dict[str, str]:
    return {place: text for place, text in reader(data, "") if text.strip()}


def add_part(data: bytes, name: str, kind: str, content: str) -> bytes:
    """Add a part to a Word document."""
    content_type = f"application/vnd.openxmlformats-officedocument.wordprocessingml.{kind}+xml"
    override = f'<Override PartName="/word/{name}" ContentType="{content_type}"/>'
    relation = f"http://schemas.openxmlformats.org/officeDocument/2006/relationships/{kind}"
    changes = {
        "[Content_Types].xml": ("</Types>", f"{override}</Types>"),
        "word/_rels/document.xml.rels": (
            "</Relationships>", f'<Relationship Id="rIdNew" Type="{relation}" Target="{name}"/></Relationships>',
        ),
    }  # fmt: skip
    copy = io.BytesIO()
    with ZipFile(io.BytesIO(data)) as old, ZipFile(copy, "w") as new:
        for entry in old.namelist():
            before, after = changes.get(entry, ("", ""))
            text = old.read(entry)
            new.writestr(entry, text.replace(before.encode(), after.encode()) if before else text)
        new.writestr(f"word/{name}", content)
    return copy.getvalue()


def test_word_documents_keep_controls_insertions_boxes_notes_and_merged_cells() -> None:
    document = docx.Document()
    run = "<w:r><w:t>{}</w:t></w:r>"
    for before, inner in (
        ("added ", f"<w:ins {W}>{run.format('insertion')}</w:ins>"),
        ("removed", f"<w:del {W}><w:r><w:delText> deletion</w:delText></w:r></w:del>"),
        ("in line ", CONTROL.format(run.format("control"))),
        ("field ", f'<w:fldSimple {W} w:instr="DATE">{run.format("date")}</w:fldSimple>'),
        ("place ", f"<w:smartTag {W}>{run.format('tag')}</w:smartTag>"),
        ("box", f"<w:r {W}><w:pict><w:txbxContent>{paragraph('boxed')}</w:txbxContent></w:pict></w:r>"),
        ("note", f'<w:r {W}><w:footnoteReference w:id="2"/></w:r>'),
    ):
        document.add_paragraph(before)._p.append(parse_xml(inner))
    document.element.body.insert(0, parse_xml(CONTROL.format(paragraph("block"))))
    table = document.add_table(3, 2)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "wide"
    table.cell(1, 0).merge(table.cell(2, 0)).text = "high"
    table.cell(1, 1).text, table.cell(2, 1).text = "1", "2"
    cells = "".join(f"<w:tc>{paragraph(text)}</w:tc>" for text in ("row", "3"))
    table._tbl.append(parse_xml(CONTROL.format(f"<w:tr>{cells}</w:tr>")))
    document.sections[0].different_first_page_header_footer = True
    document.sections[0].first_page_header.paragraphs[0].text = "first page"
    notes = f'<w:footnotes {W}><w:footnote w:id="2">{paragraph("small print")}</w:footnote></w:footnotes>'
    assert read(worker.docx, add_part(save(document), "footnotes.xml", "footnotes", notes)) == {
        "": "block\n\nadded insertion\n\nremoved\n\nin line control\n\nfield date\n\nplace tag\n\nbox\n\nboxed\n\n"
        "note[^2]\n\n| wide | wide |\n| --- | --- |\n| high | 1 |\n| high | 2 |\n| row | 3 |",
        "headers and footers": "first page",
        "footnotes": "[^2] small print",
    }


def test_word_documents_with_macros_are_read() -> None:
    document = docx.Document()
    document.add_heading("Title", 2)
    data = io.BytesIO()
    with ZipFile(io.BytesIO(save(document))) as old, ZipFile(data, "w") as new:
        for entry in old.namelist():
            new.writestr(entry, old.read(entry).replace(worker.MAIN_TYPE, worker.MACRO_TYPE))
    assert read(worker.docx, data.getvalue()) == {"": "## Title"}


def test_charts_of_slides_are_tables() -> None:
    slides = pptx.Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[6])
    chart = CategoryChartData()
    chart.categories = ["East", "West"]
    chart.add_series("2023", (1.5, 2))
    chart.add_series("2024", (3, None))
    slide.shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 9, 9, chart)
    assert read(worker.pptx, save(slides)) == {
        "slide 1": "|  | 2023 | 2024 |\n| --- | --- | --- |\n| East | 1.5 | 3 |\n| West | 2 |  |"
    }


def test_workbooks_keep_formulas_without_values_errors_and_all_digits() -> None:
    book = openpyxl.Workbook()
    book.active.append(["price", "number", "total", "rate"])
    book.active.append([2.5, 4111111111111111, "=A2*2", "#DIV/0!"])
    book.active["B4"] = "=SUM(B2:B3)"
    assert read(worker.sheets, save(book)) == {
        "sheet Sheet": "price | number | total | rate\n2.5 | 4111111111111111 | =A2*2 | #DIV/0!\n |  |  | \n"
        " | =SUM(B2:B3) |  | "
    }


def test_formula_whose_value_is_an_empty_text_stays_empty() -> None:
    empty, others = (
        '<c r="A1" t="str"><f>IF(1,"")</f><v></v></c>',
        '<c r="B1"><f>C1</f></c><c r="C1"><f t="shared"/></c>',
    )
    sheet = f'<worksheet xmlns="urn:x"><row r="1">{empty}{others}</row></worksheet>'
    assert worker.UNCOUNTED.search(sheet.encode()) is not None
    assert dict(worker.uncounted_cells(sheet.encode())) == {(0, 1): "=C1", (0, 2): "(a formula without a value)"}


def test_json_keeps_numbers_as_they_are_written() -> None:
    text = '{"version": 3.10, "id": 12345678901234567890.25, "far": 1e400, "n": NaN, "text": "1.50"}'
    assert "".join(read(worker.structure, f"[{text}]".encode()).values()) == text
    with pytest.raises(ValueError, match="a name occurs twice"):
        read(worker.structure, b'{"a": {"b": 1, "b": 2}}')


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"text/plain": "<IPython.core.display.Markdown object>", "text/markdown": ["**bo", "ld**"]}, "**bold**"),
        ({"text/plain": ["<Figure size 640x480>"], "text/html": "<i>h</i>"}, "*h*"),
        ({"text/plain": "<IPython.core.display.JSON object>", "application/json": {"a": None}}, '{"a": null}'),
        ({"text/plain": "   a\n0  1", "text/html": "<table></table>"}, "   a\n0  1"),
    ],
)
def test_outputs_of_notebooks_are_the_text_that_is_shown(data: dict[str, object], text: str) -> None:
    cells = [{"source": "x", "outputs": [{"data": data}, {"ename": "ValueError", "evalue": "boom"}]}]
    assert read(worker.notebook, json.dumps({"cells": cells}).encode()) == {
        "cell 1": f"x\n\n{text}\n\nValueError: boom"
    }


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<table><tr><th>a<th hidden>b<th>c<tr><td>1<td hidden>2<td>3</table>", "| a | c |\n| --- | --- |\n| 1 | 3 |"),
        ("<ul><li>a<li style='display: none'>secret<li>c</ul>", "a\nc"),
        ("<p>a<p style=display:none>secret<p>c", "a\n\nc"),
        ("<table><tr><th>a<tr hidden><td>secret<tr><td>3</table>", "| a |\n| --- |\n| 3 |"),
        ("a<dialog>secret</dialog><dialog open>b</dialog><i popover>secret</i>", "a\n\nb"),
        ("<head><noscript><img src=x></noscript></head>a<noscript>secret</noscript><p>b", "a\n\nb"),
        ("<script>'<noscript>'</script>shown", "shown"),
        ("<?xml version='1.0'?><html><head><title/><script src='x'/></head><body>a<br/>b</body></html>", "a  \nb"),
        (
            "<table><tr><th>r<th>y<th>n<tr><td rowspan=2>North<td>1<td>2<tr><td>3<td>4</table>",
            "| r | y | n |\n| --- | --- | --- |\n| North | 1 | 2 |\n| North | 3 | 4 |",
        ),
        (
            "<table><tr><th>a<th>b<tr><td rowspan=2 hidden>secret<td>1<td>2<tr><td>3<td>4</table>",
            "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |",
        ),
    ],
)
def test_pages_show_what_a_browser_shows_without_end_tags(page: str, text: str) -> None:
    assert "".join(part for _, part in worker.html(page.encode(), "")) == text


def test_page_that_is_nested_too_deeply_says_so() -> None:
    parts = worker.html(("<p>before</p>" + "<div>" * 1_100 + "inner").encode(), "")
    assert next(parts) == ("", "before")
    with pytest.raises(ValueError, match="nested too deeply"):
        next(parts)
