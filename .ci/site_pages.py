"""Pages of the site that are no files of docs/: README, the changelog, the options of commands, and linked sources."""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ABOVE = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}
COMMAND_LINE = "reference/command-line.md"
_LINK = re.compile(r"(?P<before>\]\(|(?:src|href)=\")(?P<to>[^)\"#:]+)(?P<part>#[^)\"]*)?(?P<after>[)\"])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds README and the changelog, and a page for each source that any page links to."""
    for name, source in ABOVE.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    linked = {
        target
        for file in files.documentation_pages()
        for match in _LINK.finditer(file.content_string)
        if (target := _in_repository(match["to"], file.src_uri)) and not _published(target)
    }
    for target in sorted(linked):
        files.append(File.generated(config, _page_of(target), content=_source_page(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Points the links out of docs/ at the pages made of them, and appends every option to the page of commands."""
    here = page.file.src_uri
    if here == COMMAND_LINE:
        markdown += _options()
    folder = str(Path(here).parent)

    def pointed(match: re.Match[str]) -> str:
        target = _in_repository(match["to"], here)
        if target is None or here.startswith("source/"):
            return match[0]
        place = _published(target) or _page_of(target)
        return f"{match['before']}{relpath(place, folder)}{match['part'] or ''}{match['after']}"

    return _LINK.sub(pointed, markdown)


def _in_repository(link: str, page: str) -> str | None:
    """The file or folder of the repository that a link of a page names; None where it is none."""
    folder = ROOT if page in ABOVE else (ROOT / "docs" / page).parent
    path = Path(normpath(folder / link))
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) and path.exists() else None


def _published(target: str) -> str | None:
    """Where a file of the repository is in the site; None where it is not."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return next((name for name, source in ABOVE.items() if source == target), None)


def _page_of(target: str) -> str:
    return f"source/{target}.md"


def _source_page(path: Path) -> str:
    """A file, or the files of a folder, to read and to copy."""
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in {".py", ".sh"})
    parts = [f"# {path.name}"]
    for file in files:
        heading = [] if file == path else [f"## {file.name}"]
        language = {".py": "python", ".sh": "bash"}.get(file.suffix, "text")
        parts += [*heading, f"~~~~{language}\n{file.read_text()}~~~~"]
    return "\n\n".join(parts) + "\n"


def _options() -> str:
    """Every command with its options, as `--help` shows them."""
    from lookahead_agent.cli.app import app

    group: Any = typer.main.get_command(app)
    parts = ["", "## Options"]
    pending = [(name, group.get_command(None, name)) for name in group.list_commands(None)]
    while pending:
        name, command = pending.pop(0)
        parts += [f"### {name}", (command.help or "").split("\n\n")[0]]
        rows = [
            f"| {', '.join(f'`{name}`' for name in each.opts)} | {(each.help or '').replace('|', chr(92) + '|')} |"
            for each in command.params
            if each.name not in ("install_completion", "show_completion")
        ]
        if rows:
            parts.append("\n".join(["| option | |", "|---|---|", *rows]))
        subcommands = getattr(command, "commands", {})
        pending = [(f"{name} {each}", subcommand) for each, subcommand in subcommands.items()] + pending
    return "\n\n".join(parts) + "\n"
