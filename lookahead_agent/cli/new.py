"""`lookahead-agent new`: writes a small project from a template."""

import os
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer
from packaging.utils import canonicalize_name

from lookahead_agent.agents.new_project import PROJECTS, project_files, required_packages
from lookahead_agent.cli.options import choices
from lookahead_agent.cli.terminal import echo
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.files import writable

_TOOLS = ("calculator", "sql", "search_documents", "read_file", "write_file", "python", "http_get")

_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
"""A valid package name, short enough for the file names of an installed package."""


def new(
    folder: Annotated[Path, typer.Argument(help="The project's folder, which must not exist yet.")],
    template: Annotated[str, typer.Option("--template", help=f"Which graph: {', '.join(PROJECTS)}.")] = "plan_execute",
    tools: Annotated[str, typer.Option(help=f"Of {', '.join(_TOOLS)}, with commas between them.")] = "calculator",
) -> None:
    """Write a small project with a graph and tools to change, and a test of both."""
    if template not in PROJECTS:
        raise typer.BadParameter(f"{template!r} is none of {', '.join(PROJECTS)}", param_hint="--template")
    chosen = choices(tools, _TOOLS, "--tools")
    if not _NAME.fullmatch(folder.name):
        raise typer.BadParameter(
            f"{folder.name!r} is not a name for a project: it begins with a letter, ends with a letter or a digit, has "
            "no others than those of ASCII and - . _ between them, and at most 100 in all",
            param_hint="FOLDER",
        )
    if canonicalize_name(folder.name) in required_packages():
        raise typer.BadParameter(
            f"{folder.name!r} is the name of a package that the project needs: choose another", param_hint="FOLDER"
        )
    if "\0" in str(folder):
        raise ConfigurationError(f"{folder} cannot be written: no name has a null byte")
    if os.path.lexists(folder):
        raise ConfigurationError(f"{folder} is there already: choose another folder")
    with writable(folder):
        folder.mkdir()
        try:
            for name, text in project_files(folder.name, template, chosen).items():
                path = folder / name
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
        except BaseException:  # no partial project is left
            shutil.rmtree(folder, ignore_errors=True)
            raise
    echo(
        f"{folder}: agent.py is the graph, tools.py has its tools, main.py runs it, test_agent.py tests it without a "
        "model.\n\n"
        f"    cd {folder}\n    pip install -e '.[dev]'\n    pytest\n    python main.py\n"
    )
