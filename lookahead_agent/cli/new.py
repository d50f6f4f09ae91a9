"""`lookahead-agent new`: a small project from a template."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from lookahead_agent.agents.new_project import PROJECTS, project_files
from lookahead_agent.cli.terminal import echo
from lookahead_agent.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z][\w.-]*")


def new(
    folder: Annotated[Path, typer.Argument(help="The project's folder, which must not exist yet.")],
    template: Annotated[str, typer.Option("--template", help=f"Which graph: {', '.join(PROJECTS)}.")] = "plan_execute",
) -> None:
    """Write a small project with a graph to change, and a test of it."""
    if template not in PROJECTS:
        raise typer.BadParameter(f"{template!r} is none of {', '.join(PROJECTS)}", param_hint="--template")
    if not _NAME.fullmatch(folder.name):
        raise typer.BadParameter(
            f"{folder.name!r} is no name for a project: letters, digits and -", param_hint="FOLDER"
        )
    if folder.exists():
        raise ConfigurationError(f"{folder} is there already: choose another folder")
    try:
        for name, text in project_files(folder.name, template).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{folder} cannot be written: {error.strerror}") from error
    echo(
        f"{folder}: agent.py is the graph, main.py runs it, test_agent.py tests it without a model.\n\n"
        f"    cd {folder}\n    pip install -e '.[dev]'\n    pytest\n    python main.py\n"
    )
