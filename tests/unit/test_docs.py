"""Python snippets in the documentation run, and the files and packages that pages name exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lookahead_agent
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REPLY = "First this.\n\nThen that.\n\nIt is 4."
SERVER = "reference/server.md"


def snippets(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


EVERY_PAGE = [page.relative_to(DOCS).as_posix() for page in sorted(DOCS.rglob("*.md"))]
PAGES = [page for page in EVERY_PAGE if snippets(DOCS / page)]


def scripted(**fields: Any) -> Any:
    """Create a page's chat model, on scripted engines unless it names a server."""
    engines = {"model", "draft_model", "precision", "draft_precision", "engine_args", "draft_engine_args"}
    if "base_url" in fields:
        return lookahead_agent.ChatLookahead(**fields)
    lookahead_agent.ChatLookahead.model_validate(fields | {"model": "qwen2.5-coder-1.5b", "draft_model": None})
    return scripted_chat(REPLY, **{name: value for name, value in fields.items() if name not in engines})


@pytest.mark.parametrize("page", [page for page in PAGES if page != SERVER])
def test_python_snippets_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snippets of a page run in order, in one namespace."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"ChatLookahead": scripted}
    for code in snippets(DOCS / page):
        exec(re.sub(r"^from lookahead_agent import ChatLookahead$", "", code, flags=re.MULTILINE), names)


def test_python_snippet_of_the_server_page_prints_the_reply(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = snippets(DOCS / SERVER)
    with serving(scripted_chat(REPLY, policies={"planner": "exact"})) as (url, _):
        exec(code.replace("http://127.0.0.1:8000", url), {})
    assert capsys.readouterr().out == f"{REPLY} 1.0\n"


@pytest.mark.parametrize("page", ["../README.md", "../CONTRIBUTING.md", *EVERY_PAGE])
def test_files_named_in_a_page_exist(page: str) -> None:
    """Paths in backticks: tests, modules of the library, graphs, tools and examples."""
    text = (DOCS / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|sh|ipynb))`", text))
    roots = [ROOT, ROOT / "lookahead_agent", ROOT / "tests"]
    assert [file for file in sorted(named) if not any((root / file).is_file() for root in roots)] == []


def test_contributing_lists_the_packages_in_import_order() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (`[a-z_/`, ]+`) \|", text.partition("| package |")[2], re.MULTILINE)
    order = re.findall(r"`([a-z_]+)/`", "".join(table))
    packages = {path.parent.name for path in (ROOT / "lookahead_agent").glob("*/__init__.py")}
    assert packages == set(order)
    imports = [
        (package, imported)
        for package in order
        for file in (ROOT / "lookahead_agent" / package).rglob("*.py")
        for imported in re.findall(
            r"^ *from lookahead_agent\.([a-z_]+)", file.read_text(encoding="utf-8"), re.MULTILINE
        )
        if imported in packages
    ]
    assert [(package, imported) for package, imported in imports if order.index(imported) > order.index(package)] == []
