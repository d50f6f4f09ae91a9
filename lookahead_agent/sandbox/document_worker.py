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


def pdf(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield the pages that have text."""
    from pypdf import PdfReader

    for number, page in enumerate(PdfReader(io.BytesIO(data)).pages, 1):
        yield f"page {number}", page.extract_text()


def html(data: bytes, address: str) -> Iterator[TextPart]:
    """Yield the page as Markdown, with its title. `address` is the page's own, for relative links."""
    from html_to_markdown import ConversionOptions, PreprocessingOptions, convert

    text = mark_hidden(data.decode(errors="replace").replace(BULLET, ""))
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
    content = (convert(text, options).content or "").replace(f"{BULLET} ", "").replace(BULLET, "").strip()
    metadata = convert(text, ConversionOptions(preprocessing=whole)).metadata
    title = " ".join((metadata.document.title or "").split()) if metadata is not None else ""
    yield "", f"# {title}\n\n{content}" if title and title not in content else content


def mark_hidden(text: str) -> str:
    """Return a page in which each element that its style sheets hide has a style of its own that says so.

    Of the rules for an element, the one that wins in a browser decides, as if all conditions that show it were met, and
    none that hide it.
    """
    if "<style" not in text.lower():
        return text
    from selectolax.lexbor import LexborHTMLParser, LexborNode, SelectolaxError

    page = LexborHTMLParser(text)
    rules = [
        (selector, declaration)
        for style in page.css("style")
        for selectors, declarations, is_conditional in style_rules(style)
        for declaration in SHOWN.finditer(declarations)
        if not (is_conditional and declaration[2].lower() in HIDING)
        for selector in re.split(r",(?![^()]*\))", selectors)
    ]
    if not any(declaration[2].lower() in HIDING for _, declaration in rules):
        return text
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
    return page.html or ""


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
    """Yield paragraphs and tables of a Word document as Markdown, and its headers and footers."""
    from docx import Document
    from docx.table import Table

    def text_of(cell: Any) -> str:
        return " ".join(
            "; ".join(text_of(inner) for row in block.rows for inner in row.cells)
            if isinstance(block, Table)
            else block.text
            for block in cell.iter_inner_content()
        )

    blocks = []
    document = Document(io.BytesIO(data))
    for block in document.iter_inner_content():
        if isinstance(block, Table):
            blocks.append(markdown_table([[text_of(cell) for cell in row.cells] for row in block.rows]))
        elif text := block.text.strip():
            style = (block.style.name or "") if block.style is not None else ""
            level = style.removeprefix("Heading ")
            hashes = (
                "#" * int(level) if style.startswith("Heading ") and level.isdecimal() else "#" * (style == "Title")
            )
            blocks.append(f"{hashes} {text}" if hashes else text)
    yield "", "\n\n".join(blocks)
    around = [part for section in document.sections for part in (section.header, section.footer)]
    texts = [text_of(part) for part in around if not part.is_linked_to_previous]
    yield "headers and footers", "\n".join(dict.fromkeys(filter(str.strip, texts)))


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


def sheets(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield the sheets of a workbook; a line is a row."""
    from python_calamine import CalamineWorkbook

    book = CalamineWorkbook.from_filelike(io.BytesIO(data))
    for name in book.sheet_names:
        sheet = book.get_sheet_by_name(name)
        rows = sheet.to_python(skip_empty_area=False)
        for (top, left), (bottom, right) in sheet.merged_cell_ranges or ():
            fill_merged(rows, top, left, bottom, right)
        yield f"sheet {' '.join(name.split())}", "\n".join(" | ".join(map(cell, row)) for row in rows)


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
            kind = next((kind for kind in ("text/plain", "text/markdown", "text/html") if shown.get(kind)), "")
            text = join_lines(output.get("text") or shown.get(kind) or output.get("evalue"))
            texts.append("".join(part for _, part in html(text.encode(), "")) if kind == "text/html" else text)
        yield f"cell {number}", "\n\n".join(filter(str.strip, texts))


def structure(data: bytes, _: str) -> Iterator[TextPart]:
    """Yield a JSON document with a line for each value; an item of a list is a part of its own."""
    value = json.loads(data)
    if not isinstance(value, list):
        yield "", json.dumps(value, ensure_ascii=False, indent=1)
        return
    for number, item in enumerate(value, 1):
        yield f"item {number}", json.dumps(item, ensure_ascii=False, indent=1 if len(str(item)) > 400 else None)


READERS = {
    "pdf": pdf, "html": html, "docx": docx, "pptx": pptx, "sheets": sheets, "ipynb": notebook, "json": structure,
}  # fmt: skip


def cell(value: object) -> str:
    """Format a value of a table on one line."""
    return " ".join((f"{value:.15g}" if isinstance(value, float) else str(value)).replace("|", "/").split())


def markdown_table(rows: list[list[str]]) -> str:
    """Format rows as a Markdown table, whose first row has the names of the columns."""
    lines = ["| " + " | ".join(map(cell, row)) + " |" for row in rows]
    return "\n".join([*lines[:1], "|" + " --- |" * len(rows[0]), *lines[1:]]) if rows else ""


def join_lines(text: object) -> str:
    """Return a text of a notebook, which may be a list of lines."""
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
