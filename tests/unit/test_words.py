"""Pages and code use the terms of docs/reference/glossary.md, and pages have short active sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RETIRED = {
    r"guided (?:targets?|pairs?|steps?|tokens?|speculation)": "shared draft",
    r"guess(?:es|ed|ing)?": "draft tokens, proposed",
    r"(?:may|might|can) stand(?! for)|steps? stands?|what stood": "is accepted",
    r"as (?:it|they) comes?": "by default",
    r"by (?:itself|themselves)": "automatically, alone",
    r"(?:un)?commanded|commands? (?:draft )?steps|a command to": "forced, forces step speculation",
    r"a permission": "a policy sets which draft steps may be accepted",
    r"rooms|borders?": "layers, break-even map",
    r"arms|fixed ways|ways of writing": "configurations",
    r"right answers?|(?:more|less) often right|answers right": "accuracy, correct answers",
    r"[Tt]he page of a run": "trace page",
    r"speculation_off|tokens_right|chosen_by|judged_by|commands_steps": "the name that replaced it",
    r"lookahead-agent (?:plan|machine)\b": "lookahead-agent estimate, ChatLookahead.explain()",
}
"""Patterns of retired terms, with their replacements."""
VAGUE_SUBJECT = re.compile(r"(?:What|Which|Whoever|Whatever|Of (?:those|these|two))\b")
"""Subjects that hide the actor."""
MAX_WORDS = 25
"""Maximum number of words in a sentence."""
REPORTS = ("depth", "modes", "templates", "gpu-h100-32b", "gpu-h100-8b", "gpu-h100-8b-mps")
EXCLUDED_PAGES = {f"docs/results/reports/{name}.md" for name in REPORTS}
PAGES = [
    page
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
    )
    if page not in EXCLUDED_PAGES
]

_CODE = re.compile(r"^(`{3,}|~{3,})[\s\S]*?^\1$|^(?: {4}|\t).*$", re.MULTILINE)
_ITEM = re.compile(r"^\s*(?:[-*>#|]|\d+\.|!\[)")


def prose(text: str) -> Iterator[str]:
    """The sentences of a page's paragraphs and list items, without code, tables and headings."""
    paragraph: list[str] = []
    for line in [*_CODE.sub("", text).splitlines(), ""]:
        if paragraph and (not line.strip() or _ITEM.match(line)):
            yield from sentences(" ".join(paragraph))
            paragraph = []
        if line.strip() and not line.lstrip().startswith(("|", "#", "![", ":::", "<!--")):
            paragraph.append(re.sub(r"^\s*(?:[-*>]|\d+\.)\s+", "", line).strip())


def sentences(paragraph: str) -> Iterator[str]:
    """The sentences of a paragraph, without emphasis and link targets; inline code counts as one word."""
    plain = re.sub(r"\]\([^)]*\)", "", re.sub(r"`[^`]*`", "`code`", paragraph)).replace("[", "").replace("**", "")
    yield from filter(None, re.split(r"(?<=[.!?])\s+(?=vLLM|[^a-z])", plain))


CODE = [
    path.relative_to(ROOT).as_posix()
    for folder in ("lookahead_agent", "graphs", "tools", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".toml", ".sh")
]


@pytest.mark.parametrize("file", [*PAGES, *CODE])
def test_no_retired_terms(file: str) -> None:
    """Covers pages, and the names, comments, docstrings and messages of the code."""
    text = (ROOT / file).read_text(encoding="utf-8")
    found = [
        f"{match[0]!r} (say: {replacement})"
        for pattern, replacement in RETIRED.items()
        for match in re.finditer(rf"(?<![\w-])(?:{pattern})(?![\w-])", text)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short_and_name_their_subject(page: str) -> None:
    found = list(prose((ROOT / page).read_text(encoding="utf-8")))
    assert [sentence for sentence in found if VAGUE_SUBJECT.match(sentence) and not sentence.endswith("?")] == []
    assert [sentence for sentence in found if len(sentence.split()) > MAX_WORDS] == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.startswith(("README", "docs/tutorial", "docs/how-to"))]
)
def test_sentences_have_at_most_one_number(page: str) -> None:
    """More numbers belong in a table."""
    found = prose((ROOT / page).read_text(encoding="utf-8"))
    assert [sentence for sentence in found if len(re.findall(r"(?<![\w.:-])\d[\d.,]*", sentence)) > 1] == []


def test_prose_yields_sentences_without_code_tables_and_headings() -> None:
    page = (
        "# What is it\n\nWhat it is, nobody knows. It\nis `a b c`.\n\n    What runs\n\n| What | is |\n\n- Which one?\n"
    )
    assert list(prose(page)) == ["What it is, nobody knows.", "It is `code`.", "Which one?"]
