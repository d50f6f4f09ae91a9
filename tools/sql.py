"""Lets a model ask a SQLite database, and only ask: it can change nothing.

A statement runs in a process of its own, with 64 MiB of memory, that is ended when its time is over, also inside a
function of SQLite that takes long.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent import sandbox
from lookahead_agent.agents.tool_use import LONGEST_RESULT, cut, make_tool

_MEMORY = 64 << 20
# Of the line that says that there are more rows, and how a long header or row is cut.
_REMARKS = 300
_LONGEST_OUTPUT = 4 << 20
_REST = "select fewer columns, or parts of them with substr()"
# For the start of the process, which is no time of the statement's.
_START = 10.0


@dataclass(frozen=True)
class SqlLimits:
    """What a question may cost.

    Attributes:
        rows: Rows that are returned.
        seconds: Time that a statement may take.
    """

    rows: int = 50
    seconds: float = 5.0


def schema(database: Path) -> str:
    """The tables and views of a database with their columns, a line each, at most 50,000 characters.

    Raises:
        ValueError: There is no such database, or it cannot be read now.
    """
    return cut(_asked(database, None, SqlLimits()), "SELECT name, sql FROM sqlite_master shows the others")


def query(database: Path, statement: str, limits: SqlLimits | None = None) -> str:
    """Carry out one SELECT.

    Args:
        database: SQLite file.
        statement: SQL, at most 100,000 characters.
        limits: What it may cost.

    Returns:
        A header and a line for each row, cells parted by " | ", each at most 500 characters, and 50,000 in all. A
        result of one value is that value alone.

    Raises:
        ValueError: The statement is wrong, wants to change something, or takes too much time or memory, or the database
            is gone, locked or broken; the message says which.
    """
    return cut(_asked(database, statement, limits or SqlLimits()), _REST)


def make_sql_tool(database: str | Path, limits: SqlLimits | None = None) -> BaseTool:
    """A tool for one database, whose description shows the model its tables.

    Raises:
        ValueError: There is no such database, or it cannot be read now.
    """
    path = Path(database)
    description = f"Ask the SQLite database with one SELECT statement. Its tables:\n{schema(path)}"

    @make_tool(description=description, rest=_REST, read_only=True)
    def sql(statement: str) -> str:
        return query(path, statement, limits)

    return sql


def _asked(database: Path, statement: str | None, limits: SqlLimits) -> str:
    """Ask in a process of its own: this one never opens the file, whatever it is."""
    try:
        path = database.resolve()
        there = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links in a circle
        raise ValueError(f"the database {database.name} cannot be opened: {error}") from None
    if not there:
        raise ValueError(f"there is no database {database.name}")
    given = {
        "database": str(path),
        "statement": statement,
        "rows": limits.rows,
        "seconds": limits.seconds,
        "memory": _MEMORY,
        "characters": LONGEST_RESULT - _REMARKS,
    }
    try:
        finished = sandbox.run_child(
            [sys.executable, "-I", "-S", "-c", sandbox.program_text("sqlite_worker")],
            json.dumps(given).encode(),
            seconds=limits.seconds + _START,
            output=_LONGEST_OUTPUT,
            results=True,
        )
    except OSError as error:
        raise ValueError(f"the database cannot be asked now: {error.strerror}") from error
    if finished.stopped == "time" or finished.status == -signal.SIGALRM:
        raise ValueError(f"the statement took more than {limits.seconds:g} s")
    match next(finished.json_lines(), None):
        case {"text": str(text), "problem": None}:
            return text
        case {"problem": str(problem)}:
            raise ValueError(problem)
    raise ValueError("the statement used more than it may and was stopped")
