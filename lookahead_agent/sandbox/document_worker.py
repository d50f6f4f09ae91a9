"""Extracts the text of a document. Another interpreter runs this file's text (`python -I -c`).

It reads the document from its standard input. It writes a result for each part, `{"place": such as "page 3", "text":
...}`, with `"rows": true` if each line is a row of a table, and a last one, `{"problem": ...}`: why it stops early, or
None.
"""

import io
import json
import re
import resource
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from zipfile import ZipFile, is_zipfile

TextPart = tuple[str, str]
# Elements to leave out besides those that the library leaves out.
HIDDEN = [
    *("svg", "iframe", "object", "canvas", "video", "audio", "datalist"),
    *(
        "[style*='opacity:0;']",
        "[style$='opacity:0']",
        "[style*='opacity:0.0']",
        "[style*='left:-9999']",
        "[style*='text-indent:-9999']",
    ),
]
# A declaration that can hide an element.
SHOWN = re.compile(r"(?<![\w-])(display|visibility)\s*:\s*([\w-]+)\s*(!\s*important)?", re.IGNORECASE)
HIDING = frozenset({"none", "hidden", "collapse"})
# Groups of rules that hold on every screen.
UNCONDITIONAL = re.compile(r"@layer\b|@media\s+(?:only\s+)?(?:screen|all)\s*$", re.IGNORECASE)
IDS, CLASSES, TYPES = (
    re.compile(pattern)
    for pattern in (r"#[\w-]", r"\.[\w-]|\[|(?<!:):(?!:|is\b|not\b|where\b)[\w-]", r"(?:^|[\s>+~(])[a-zA-Z]")
)
MAX_RULES, MAX_SELECTOR, MAX_MATCHES, MAX_LEVELS = 2_000, 1_000, 200_000, 20
BULLET = "\x01"  # Lists have no bullets: an item is a line
EMPTY_ELEMENT = re.compile(r"<([a-zA-Z][\w:-]*)((?:\s[^<>]*?)?)/>")
VOID = frozenset(["area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"])
NO_SCRIPT = re.compile(r"<noscript(?=[\s>/])", re.IGNORECASE)
NO_SCRIPT_END = re.compile(r"</noscript[^<>]*>", re.IGNORECASE)
MAX_SPAN, MAX_DIGITS = 1_000, 10  # rows or columns of a cell of a page, and digits of their number
MAX_COPIED, MAX_COPIES = 200, 5_000  # characters of a cell that is repeated in the rows below; such cells of a page
MACRO_TYPE = b"application/vnd.ms-word.document.macroEnabled.main+xml"
MAIN_TYPE = b"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
# Elements of Word with text that is not in the document, or a second time.
DELETED = frozenset({"del", "moveFrom", "Fallback", "instrText", "delInstrText", "delText", "pPr", "rPr", "sdtPr"})
WORD_CHARACTERS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}
NOTES = ("footnotes", "endnotes", "comments")
MAX_COLUMNS = 63  # Columns of a table in Word
MAX_WHOLE = 2**53  # Whole numbers above are not exact
NUMBER = "\x01"  # Mark before a number of JSON
KEPT_NUMBER = re.compile(r'"\\u0001(-?(?:[0-9.eE+-]+|NaN|Infinity))"')
# A cell of a sheet with a formula without a value, or with an error.
UNCOUNTED = re.compile(rb'<f\b[^>]*(?:/>|>[^<]*</f>)\s*(?:<v\s*/>|<v></v>|</c>)|<c\b[^>]*\bt="e"')


def pdf(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield the pages that have text."""
    from pypdf import PdfReader

    for number, page in enumerate(PdfReader(io.BytesIO(data)).pages, 1):
        yield f"page {number}", page.extract_text()


def html(data: bytes, address: str) -> Iterator[TextPart]:
    """Yield the page as Markdown, with its title. `address` is the page's own, for relative links."""
    from html_to_markdown import ConversionOptions, PreprocessingOptions, convert

    text = as_shown(data.decode(errors="replace").replace(BULLET, ""))
    whole = PreprocessingOptions(enabled=True, remove_navigation=False, remove_forms=False)
    options = ConversionOptions(
        bullets=BULLET,
        sup_symbol="^",
        compact_tables=True,
        extract_metadata=False,
        inline_data_media="alt_text_only",
        exclude_selectors=HIDDEN,
        preprocessing=whole,
        base_url=address or None,
    )
    converted = convert(text, options)
    content = (converted.content or "").replace(f"{BULLET} ", "").replace(BULLET, "").strip()
    metadata = convert(text, ConversionOptions(preprocessing=whole)).metadata
    title = " ".join((metadata.document.title or "").split()) if metadata is not None else ""
    yield "", f"# {title}\n\n{content}" if title and title not in content else content
    if any("depth" in str(warning.kind) for warning in converted.warnings):
        raise ValueError("its elements are nested too deeply: the inner ones are left out")


def as_shown(text: str) -> str:
    """Return a page as a browser reads it: with all end tags, and with what its style sheets hide marked as hidden.

    Without end tags, the library takes the text of a hidden cell or item for that of the one before it.
    """
    from selectolax.lexbor import LexborHTMLParser

    if text.lstrip("\ufeff \t\r\n").startswith("<?xml"):
        text = EMPTY_ELEMENT.sub(
            lambda tag: tag[0] if tag[1].lower() in VOID else f"<{tag[1]}{tag[2]}></{tag[1]}>", text
        )
    # A browser runs scripts, and shows nothing of these elements.
    first, *others = NO_SCRIPT.split(text)
    ends = [NO_SCRIPT_END.split(other, 1) for other in others]
    page = LexborHTMLParser(first + "".join(end[-1] if len(end) > 1 else f"<noscript{end[0]}" for end in ends))
    if page.root is None:
        return text
    for node in page.css("dialog:not([open]), [popover]"):
        node.attrs["style"] = "display:none"
    mark_hidden(page)
    fill_rows(page)
    return page.html or ""


def fill_rows(page: Any) -> None:
    """Repeat each short cell of several rows of a page's tables in the rows below, so that each row is complete."""
    copies = 0
    for table in reversed(page.css("table:has([rowspan])")):
        below: dict[int, tuple[int, int, Any]] = {}  # rows that are left, columns, and the cell, by its column
        group = None
        for row in table.css("tr"):
            if table.mem_id not in (row.parent.mem_id, row.parent.parent.mem_id):  # the row is in an inner table
                continue
            if group != row.parent.mem_id:
                below, group = {}, row.parent.mem_id
            column = 0
            for each in [*(cell for cell in row.iter() if cell.tag in ("td", "th")), None]:
                while column in below:
                    left, columns, above = below.pop(column)
                    copy = above.clone()
                    row.insert_child(copy) if each is None else each.insert_before(copy)
                    if left > 1:
                        below[column] = left - 1, columns, above
                    column, copies = column + columns, copies + 1
                if each is None or copies > MAX_COPIES:
                    break
                rows, columns = (count_of(each, name) for name in ("rowspan", "colspan"))
                if not is_hidden_itself(each):
                    if rows > 1 and len(each.text(deep=True)) <= MAX_COPIED:
                        below[column] = rows - 1, columns, each
                        del each.attrs["rowspan"]
                    column += columns


def is_hidden_itself(node: Any) -> bool:
    """Whether a cell has an attribute that hides it, so that it is in no column."""
    declared = {match[1].lower(): match[2].lower() for match in SHOWN.finditer(node.attributes.get("style") or "")}
    return "hidden" in node.attributes or declared.get("display") == "none"


def count_of(node: Any, name: str) -> int:
    """Return the rows or columns of a table's cell."""
    number = node.attributes.get(name) or ""
    return max(1, min(int(number), MAX_SPAN)) if number.isdecimal() and len(number) < MAX_DIGITS else 1


def mark_hidden(page: Any) -> None:
    """Give each element of a page that its style sheets hide a style of its own that says so.

    Of the rules for an element, the one that wins in a browser decides, as if all conditions that show it were met, and
    none that hide it.
    """
    from selectolax.lexbor import LexborNode, SelectolaxError

    rules = [
        (selector, declaration)
        for style in page.css("style")
        for selectors, declarations, is_conditional in style_rules(style)
        for declaration in SHOWN.finditer(declarations)
        if not (is_conditional and declaration[2].lower() in HIDING)
        for selector in re.split(r",(?![^()]*\))", selectors)
    ]
    if not any(declaration[2].lower() in HIDING for _, declaration in rules):
        return
    winners: dict[tuple[str, int], tuple[tuple[int, ...], bool, LexborNode]] = {}
    matches = 0
    for selector, declaration in rules[:MAX_RULES]:
        try:
            nodes = page.css(selector.strip())
        except (SelectolaxError, ValueError):  # one that the library does not know, such as `::before`
            continue
        matches += len(nodes)
        if matches > MAX_MATCHES:
            break
        rank = (declaration[3] is not None, *(len(pattern.findall(selector)) for pattern in (IDS, CLASSES, TYPES)))
        for node in nodes:
            place = (declaration[1].lower(), node.mem_id)
            if place not in winners or winners[place][0] <= rank:
                winners[place] = rank, declaration[2].lower() in HIDING, node
    # A visible element may be inside of one whose visibility is "hidden".
    shows_inner: set[int] = set()
    for (name, _), (_, is_hidden, node) in winners.items():
        parent = node if name == "visibility" and not is_hidden else None
        while parent is not None and parent.mem_id not in shows_inner:
            shows_inner.add(parent.mem_id)
            parent = parent.parent
    for (name, number), (rank, is_hidden, node) in winners.items():
        own = {match[1].lower() for match in SHOWN.finditer(node.attributes.get("style") or "")}
        is_overridden = (name in own and not rank[0]) or (name == "visibility" and number in shows_inner)
        if is_hidden and not is_overridden and node.tag not in ("html", "body"):
            node.attrs["style"] = "display:none"


def style_rules(style: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the selectors and declarations of each rule of a `style` element, and whether it holds conditionally."""
    first, *others = (style.text(deep=True) or "").split("/*")
    # The end of a sheet closes the blocks that are open.
    sheet = first + "".join(other.partition("*/")[2] for other in others) + "}" * MAX_LEVELS
    media = f"@media {style.attributes.get('media') or 'all'}"
    opened: list[str] = []
    at = 0
    for brace in re.finditer("[{}]", sheet):
        part, at = sheet[at : brace.start()], brace.end()
        declarations, _, prelude = part.rpartition(";") if brace[0] == "{" else (part, "", "")
        selector = ""
        for outer in opened[: MAX_LEVELS + 1]:  # a rule's selector is before those inside of it, or in place of "&"
            if outer.startswith("@") or len(selector) > MAX_SELECTOR:
                continue
            inner = outer if not selector or "&" in outer else f"& {outer}"
            selector = (
                inner.replace("&", f":is({selector})" if selector else "&") if len(inner) < MAX_SELECTOR else inner
            )
        if selector and len(selector) < MAX_SELECTOR and len(opened) <= MAX_LEVELS:
            groups = [media, *(each for each in opened if each.startswith("@"))]
            yield selector, declarations, not all(map(UNCONDITIONAL.match, groups))
        if brace[0] == "{":
            opened.append(prelude.strip())
        elif opened:
            opened.pop()


def docx(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield paragraphs and tables of a Word document as Markdown, its headers and footers, its notes and comments.

    Insertions and the contents of controls and text boxes are among them, deletions are not.
    """
    from docx import Document
    from docx.oxml import parse_xml
    from docx.text.paragraph import Paragraph

    document = Document(io.BytesIO(without_macros(data)))
    blocks = []
    for block in word_blocks(document.element.body):
        if local_name(block) == "tbl":
            blocks.append(markdown_table(list(word_rows(block))))
        elif text := word_text(block).strip():
            style = Paragraph(block, document).style
            name = (style.name or "") if style is not None else ""
            level = name.removeprefix("Heading ")
            hashes = "#" * int(level) if name.startswith("Heading ") and level.isdecimal() else "#" * (name == "Title")
            blocks.append(f"{hashes} {text}" if hashes else text)
    yield "", "\n\n".join(blocks)
    around = [
        part
        for section in document.sections
        for kind in ("header", "footer")
        for part in (getattr(section, f"{which}{kind}") for which in ("first_page_", "even_page_", ""))
    ]
    texts = [word_line(part._element) for part in around if not part.is_linked_to_previous]
    yield "headers and footers", "\n".join(dict.fromkeys(filter(str.strip, texts)))
    for relation in document.part.rels.values():
        kind = relation.reltype.rpartition("/")[2]
        if not relation.is_external and kind in NOTES:
            notes = parse_xml(relation.target_part.blob)
            numbered = [(attribute(note, "id"), word_line(note).strip()) for note in notes]
            yield (
                kind,
                "\n".join(f"[^{number}] {text}" if kind != "comments" else text for number, text in numbered if text),
            )


def without_macros(data: bytes) -> bytes:
    """Return a document with macros under the type of one without them, the only one that the library reads."""
    with ZipFile(io.BytesIO(data)) as archive:
        if MACRO_TYPE not in archive.read("[Content_Types].xml"):
            return data
        copy = io.BytesIO()
        with ZipFile(copy, "w") as changed:
            for name in dict.fromkeys(archive.namelist()):
                content = archive.read(name)
                changed.writestr(
                    name, content.replace(MACRO_TYPE, MAIN_TYPE) if name == "[Content_Types].xml" else content
                )
    return copy.getvalue()


def local_name(element: Any) -> str:
    """Return the name of an XML element without its namespace; "" for a comment."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""


def attribute(element: Any, name: str) -> str | None:
    """Return an attribute of an XML element by its name without a namespace."""
    return next((value for key, value in element.attrib.items() if key.rpartition("}")[2] == name), None)


def word_inner(element: Any, *names: str) -> Iterator[Any]:
    """Yield the outermost elements of these names inside of another, also those of controls and insertions."""
    for child in element:
        name = local_name(child)
        if name in names:
            yield child
        elif name not in DELETED:
            yield from word_inner(child, *names)


def word_blocks(element: Any) -> Iterator[Any]:
    """Yield the paragraphs and tables of a part of a Word document; those of a text box follow its paragraph."""
    for block in word_inner(element, "p", "tbl"):
        yield block
        for box in word_inner(block, "txbxContent") if local_name(block) == "p" else ():
            yield from word_blocks(box)


def word_text(element: Any) -> str:
    """Return the text of a paragraph, without text boxes."""
    texts = []
    for child in element:
        name = local_name(child)
        if name == "t":
            texts.append(child.text or "")
        elif name in ("footnoteReference", "endnoteReference"):
            texts.append(f"[^{attribute(child, 'id')}]")
        elif name not in DELETED and name != "txbxContent":
            texts.append(WORD_CHARACTERS.get(name) or word_text(child))
    return "".join(texts)


def word_line(element: Any) -> str:
    """Return the text of a cell, a note or a header on one line; the cells of a table in it end in ";"."""
    return " ".join(
        "; ".join(text for row in word_rows(block) for text in row) if local_name(block) == "tbl" else word_text(block)
        for block in word_blocks(element)
    )


def word_rows(table: Any) -> Iterator[list[str]]:
    """Yield the rows of a table; each cell of a merged range has its text."""
    above: list[str] = []
    for row in word_inner(table, "tr"):
        cells = [""] * word_count(row, "trPr", "gridBefore", default=0)
        for each in word_inner(row, "tc"):
            merged = next(word_inner(each, "vMerge"), None)
            is_below = merged is not None and attribute(merged, "val") != "restart" and len(cells) < len(above)
            text = above[len(cells)] if is_below else word_line(each)
            cells += [text] * word_count(each, "tcPr", "gridSpan", default=1)
        above = cells
        yield cells


def word_count(element: Any, properties: str, name: str, default: int) -> int:
    """Return a number of columns among the properties of a row or cell, at most what Word allows."""
    for child in element:
        if local_name(child) == properties:
            for found in child:
                if local_name(found) == name and (attribute(found, "val") or "").isdecimal():
                    return min(int(attribute(found, "val") or 0), MAX_COLUMNS)
    return default


def pptx(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield the slides of a presentation with their notes."""
    from pptx import Presentation

    for number, slide in enumerate(Presentation(io.BytesIO(data)).slides, 1):
        texts = list(shape_texts(slide.shapes))
        if slide.has_notes_slide and (frame := slide.notes_slide.notes_text_frame) is not None:
            texts.append(frame.text)
        yield f"slide {number}", "\n\n".join(filter(str.strip, texts))


def shape_texts(shapes: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of shapes, also of tables and groups."""
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from shape_texts(shape.shapes)
        elif shape.has_text_frame:
            yield shape.text_frame.text
        elif getattr(shape, "has_table", False):
            yield markdown_table([[cell.text for cell in row.cells] for row in shape.table.rows])
        elif getattr(shape, "has_chart", False):
            yield chart_text(shape.chart)
        else:
            yield diagram_text(shape)


def chart_text(chart: Any) -> str:
    """Return a chart's title and, for each of its plots, a table of its values."""
    title = chart.chart_title.text_frame.text if chart.has_title and chart.chart_title.has_text_frame else ""
    tables = []
    for plot in chart.plots:
        series = [(each.name, list(each.values)) for each in plot.series]
        labels = [str(label) for label in plot.categories]
        count = max([len(labels), *(len(values) for _, values in series)])
        labels += [""] * (count - len(labels))
        rows = [
            [
                label,
                *(
                    "" if number >= len(values) or values[number] is None else cell(values[number])
                    for _, values in series
                ),
            ]
            for number, label in enumerate(labels)
        ]
        tables.append(markdown_table([["", *(name for name, _ in series)], *rows]))
    return "\n\n".join(filter(None, [title, *tables]))


def diagram_text(shape: Any) -> str:
    """Return the texts of a diagram (SmartArt) on lines; "" for another shape."""
    for element in shape.element.iter():
        if local_name(element) == "relIds" and (data_id := attribute(element, "dm")) is not None:
            from pptx.oxml import parse_xml

            root = parse_xml(shape.part.related_part(data_id).blob)
            paragraphs = (node for node in root.iter() if local_name(node) == "p")
            texts = ("".join(node.text or "" for node in each.iter() if local_name(node) == "t") for each in paragraphs)
            return "\n".join(filter(str.strip, texts))
    return ""


def sheets(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield the sheets of a workbook; a line is a row."""
    from python_calamine import CalamineWorkbook

    book = CalamineWorkbook.from_filelike(io.BytesIO(data))
    uncounted = formulas_and_errors(data)
    for name in book.sheet_names:
        sheet = book.get_sheet_by_name(name)
        rows = sheet.to_python(skip_empty_area=False)
        for (row, column), text in uncounted.get(name, {}).items():
            rows += [[""] * len(rows[0] if rows else ()) for _ in range(row + 1 - len(rows))]
            rows[row] += [""] * (column + 1 - len(rows[row]))
            rows[row][column] = rows[row][column] or text
        for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
            fill_merged(rows, top, left, bottom, right)
        yield f"sheet {' '.join(name.split())}", "\n".join(" | ".join(map(cell, row)) for row in rows)


def formulas_and_errors(data: bytes) -> dict[str, dict[tuple[int, int], str]]:
    """Return the cells of an Excel workbook with a formula without a value, or an error, by sheet, row and column.

    Programs that write workbooks compute no values, and the library has neither these cells nor errors.
    """
    from xml.etree import ElementTree

    found: dict[str, dict[tuple[int, int], str]] = {}
    if not is_zipfile(io.BytesIO(data)):
        return found
    with ZipFile(io.BytesIO(data)) as archive:
        names = set(archive.namelist())
        if not {"xl/workbook.xml", "xl/_rels/workbook.xml.rels"} <= names:
            return found
        relations = ElementTree.fromstring(archive.read("xl/_rels/workbook.xml.rels"))
        targets = {relation.get("Id"): relation.get("Target", "") for relation in relations}
        for sheet in ElementTree.fromstring(archive.read("xl/workbook.xml")).iter():
            target = targets.get(attribute(sheet, "id"), "") if local_name(sheet) == "sheet" else ""
            path = target.removeprefix("/") if target.startswith("/") else f"xl/{target}"
            if path in names and UNCOUNTED.search(content := archive.read(path)) is not None:
                found[sheet.get("name", "")] = dict(uncounted_cells(content))
    return found


def uncounted_cells(content: bytes) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield row, column and text of the cells of a sheet's XML with an error, or with a formula without a value."""
    from xml.etree import ElementTree

    for _, element in ElementTree.iterparse(io.BytesIO(content)):
        name = local_name(element)
        if name == "c" and (place := re.fullmatch(r"([A-Z]{1,3})(\d{1,7})", element.get("r", ""))) is not None:
            column = 0
            for letter in place[1]:
                column = column * 26 + ord(letter) - ord("A") + 1
            inner = {local_name(child): child.text or "" for child in element}
            text = inner.get("v", "") if element.get("t") == "e" else ""
            # The value of a text's formula may be an empty text.
            if "f" in inner and not inner.get("v") and element.get("t") != "str":
                text = f"={inner['f']}" if inner["f"] else "(a formula without a value)"
            if text and int(place[2]):
                yield (int(place[2]) - 1, column - 1), text
        if name == "row":
            element.clear()


def fill_merged(rows: list[list[Any]], top: int, left: int, bottom: int, right: int) -> None:
    """Give each cell of a merged range its value, so that rows and columns keep it; a title's columns stay empty."""
    if top >= len(rows) or left >= len(rows[top]):
        return
    value = rows[top][left]
    has_others = any(cell != "" for row in rows[top : bottom + 1] for cell in [*row[:left], *row[right + 1 :]])
    for row in rows[top : bottom + 1]:
        row[left : right + 1 if has_others else left + 1] = [value] * len(
            row[left : right + 1 if has_others else left + 1]
        )


def notebook(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield the cells of a notebook with the texts that they returned."""
    for number, part in enumerate(json.loads(data)["cells"], 1):
        texts = [join_lines(part.get("source"))]
        for output in part.get("outputs", ()):
            shown = output.get("data") or {}
            # The plain text of an object that shows itself otherwise is its type: `<IPython.core.display.HTML object>`.
            is_type = re.fullmatch(r"\s*<[^<>]*>\s*", join_lines(shown.get("text/plain"))) is not None
            kinds = ["text/plain", "text/markdown", "text/html", "text/latex", "application/json"]
            kind = next((kind for kind in kinds[is_type:] if shown.get(kind)), "text/plain")
            error = ": ".join(filter(None, (output.get("ename"), output.get("evalue"))))
            text = join_lines(output.get("text") or shown.get(kind) or error)
            texts.append("".join(part for _, part in html(text.encode(), "")) if kind == "text/html" else text)
        yield f"cell {number}", "\n\n".join(filter(str.strip, texts))


def structure(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield a JSON document with a line for each value; an item of a list is a part of its own."""

    def keep(number: str) -> str:
        return f"{NUMBER}{number}"

    def dump(value: Any, indent: int | None) -> str:
        return KEPT_NUMBER.sub(r"\1", json.dumps(value, ensure_ascii=False, indent=indent))

    # Numbers stay as they are written: 3.10 may be a version, and a float has 17 digits.
    value = json.loads(data, object_pairs_hook=unique_names, parse_float=keep, parse_int=keep, parse_constant=keep)
    if not isinstance(value, list):
        yield "", dump(value, 1)
        return
    for number, item in enumerate(value, 1):
        yield f"item {number}", dump(item, 1 if len(str(item)) > 400 else None)


def unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError if two of its values have one name, since one would be lost."""
    if len(values := dict(pairs)) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return values


READERS = {
    "pdf": pdf, "html": html, "docx": docx, "pptx": pptx, "sheets": sheets, "ipynb": notebook, "json": structure,
}  # fmt: skip


def cell(value: object) -> str:
    """Format a value of a table on one line."""
    if isinstance(value, float):
        value = f"{value:.0f}" if value.is_integer() and abs(value) < MAX_WHOLE else f"{value:.15g}"
    return " ".join(str(value).replace("|", "/").split())


def markdown_table(rows: list[list[str]]) -> str:
    """Format rows as a Markdown table, whose first row has the names of the columns."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join([*lines[:1], "|" + " --- |" * len(rows[0]), *lines[1:]]) if rows else ""


def join_lines(text: object) -> str:
    """Return a text of a notebook, which may be a list of lines."""
    if isinstance(text, dict):
        return json.dumps(text, ensure_ascii=False)
    return "".join(map(str, text)) if isinstance(text, list) else str(text or "")


def main(kind: str, address: str, memory: int, seconds: int, results: int) -> None:
    """Read the document within bytes of memory and seconds of CPU time, and write to the descriptor `results`."""
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open(results, "w", encoding="utf-8") as lines:
        try:
            for place, text in READERS[kind](sys.stdin.buffer.read(), address):
                if text.strip():
                    print(json.dumps({"place": place, "text": text, "rows": kind == "sheets"}), file=lines, flush=True)
            problem = None
        except ModuleNotFoundError as error:
            problem = f"the package {error.name} is not installed: pip install 'lookahead-agent[tools]'"
        except BaseException as error:  # a damaged file can make the parser raise anything
            problem = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"problem": problem}), file=lines)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
