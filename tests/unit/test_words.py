"""Pages and code use the terms of docs/reference/glossary.md, and pages have short active sentences."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
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


LIBRARY = [path for path in CODE if path.startswith("lookahead_agent/") and path.endswith(".py")]
_PARTICIPLE = re.compile(
    r"_*(?:[a-z]+ed|built|chosen|cut|drawn|found|given|held|hidden|kept|known|left|made|sent|shown|taken|told|written)"
    r"(?:_(?:ahead|by|for|from|in|of|on|to|with))?"
    r"|_*[a-z]+ing"
)
"""A participle that is the whole name, or that a preposition follows; "cached_folder" is a noun."""
OTHER_WORDS = {"embedding", "feed", "mapping", "proceed", "sampling", "speed", "thinking"}


def test_functions_are_not_participles() -> None:
    """A function is a verb, or a noun for what it returns; properties are not functions."""
    found = [
        f"{file}: {node.name}"
        for file in LIBRARY
        for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and _PARTICIPLE.fullmatch(node.name)
        and node.name.strip("_") not in OTHER_WORDS
        and not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    assert found == []


def test_a_type_name_is_one_thing() -> None:
    """Counts classes and module-level aliases; the parts of OpenAI's protocol have that protocol's names."""
    files: dict[str, list[str]] = defaultdict(list)
    for file in LIBRARY:
        module = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        names = [node.name for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
        for node in module.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.append(node.targets[0].id)
        for name in names:
            is_type = re.match(r"_?[A-Z]", name) and not name.isupper()
            if is_type and file != "lookahead_agent/server/protocol.py":
                files[name].append(file)
    assert {name: found for name, found in files.items() if len(found) > 1} == {}
