"""Python snippets in the documentation run, and the files and packages that pages name exist."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import lookahead_agent
from lookahead_agent.hardware.diagnostics import _EXTRAS, _SANDBOX_FIX
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


def test_python_snippets_of_the_server_page_print_the_reply(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(scripted_chat(REPLY, policies={"planner": "exact"})) as (url, _):
        for code in snippets(DOCS / SERVER):
            exec(code.replace("http://127.0.0.1:8000", url), {})
    assert capsys.readouterr().out == f"{REPLY} 1.0\n" * 2 + f"{REPLY}\n" * 2


@pytest.mark.parametrize("page", ["../README.md", "../CONTRIBUTING.md", *EVERY_PAGE])
def test_files_named_in_a_page_exist(page: str) -> None:
    """Paths in backticks: tests, modules of the library, graphs, tools and examples."""
    text = (DOCS / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|sh|ipynb))`", text))
    roots = [ROOT, ROOT / "lookahead_agent", ROOT / "tests"]
    assert [file for file in sorted(named) if not any((root / file).is_file() for root in roots)] == []


def _extras() -> dict[str, list[str]]:
    """Return the extras of the package, with the distributions of each."""
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    return {extra: [canonicalize_name(Requirement(line).name) for line in lines] for extra, lines in written.items()}


def test_extras_named_in_pages_and_messages_exist_and_every_extra_is_in_the_readme() -> None:
    folders = ("docs", "examples", "graphs", "lookahead_agent", "tools")
    texts = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".md", ".py", ".txt")]
    named: dict[str, set[str]] = {}
    for path in (*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for extras in re.findall(r"lookahead-agent\[([a-z,]+)\]", path.read_text(encoding="utf-8")):
            for extra in extras.split(","):
                named.setdefault(extra, set()).add(str(path.relative_to(ROOT)))
    assert {extra: files for extra, files in named.items() if extra not in _extras()} == {}
    documented = set(re.findall(r"`([a-z]+)`", "".join(re.findall(r"^\| (`[a-z`, ]+`) \|", _install(), re.MULTILINE))))
    assert documented == _extras().keys() - {"dev"}
    assert _EXTRAS.keys() == documented - {"cpu", "gpu", "sandbox"}, "`doctor` checks every extra"
    assert "[sandbox]" in _SANDBOX_FIX, "and names the one that only some systems need"


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in EVERY_PAGE)])
def test_pages_install_the_package_from_a_clone_as_it_is_on_no_index(page: str) -> None:
    installed = re.findall(r"pip install '([^']*lookahead-agent)\[[a-z,]+\]([^']*)'", (ROOT / page).read_text("utf-8"))
    assert [
        each for each in installed if each not in (("./lookahead-agent", ""), ("lookahead-agent", " @ git+https://…"))
    ] == []


def _install() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8").partition("## Install")[2].partition("\n## ")[0]


def test_message_about_a_missing_package_names_an_extra_that_has_it() -> None:
    checked = 0
    distributions = packages_distributions()
    for path in (ROOT / "lookahead_agent").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = {  # of variables
            target.id: ast.unparse(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.With) and "extra_imports(" in ast.unparse(node.items[0].context_expr)):
                continue
            (argument,) = node.items[0].context_expr.args  # type: ignore[attr-defined]
            message = texts.get(argument.id, "") if isinstance(argument, ast.Name) else ast.unparse(argument)
            found = re.findall(r"\[([a-z]+)\]", message)
            assert found, f"{path}: {message} names no extra"
            providers: set[str] = set()
            for statement in node.body:
                match statement:
                    case ast.ImportFrom(module=str(module)):
                        modules = [module]
                    case ast.Import(names=names):
                        modules = [name.name for name in names]
                    case _:
                        continue
                for module in modules:
                    providers.update(map(canonicalize_name, distributions.get(module.partition(".")[0], [])))
            own = providers == {"lookahead-agent"}  # a module of the library, which imports the package
            assert own or all(providers & {*_extras()[extra]} for extra in found), f"{path}: {message}"
            checked += 1
    assert checked >= 5


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
