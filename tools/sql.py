"""Lets a model ask a SQLite database, and only ask: it can change nothing.

A statement runs in a process of its own, with 64 MiB of memory, that is ended when its time is over, also inside a
function of SQLite that takes long.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from langchain_core.tools import BaseTool, ToolException, tool

from lookahead_agent import isolation

_MEMORY = 64 << 20
_LONGEST_ANSWER = 50_000
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
    """The tables of a database, as they were created.

    Raises:
        ValueError: There is no such database.
    """
    with closing(_connect(database)) as connection:
        found = connection.execute(
            "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY name"
        )
        return "\n".join(str(row[0]) for row in found)


def query(database: Path, statement: str, limits: SqlLimits | None = None) -> str:
    """Carry out one SELECT.

    Args:
        database: SQLite file.
        statement: SQL.
        limits: What it may cost.

    Returns:
        A header and a line for each row, cells parted by " | ", at most 50,000 characters.

    Raises:
        ValueError: The statement is wrong, wants to change something, or takes too much time or memory; the message
            says which.
    """
    limits = limits or SqlLimits()
    _connect(database).close()
    given = {
        "database": str(database.resolve()),
        "statement": statement,
        "rows": limits.rows,
        "seconds": limits.seconds,
        "memory": _MEMORY,
        "characters": _LONGEST_ANSWER,
    }
    finished = isolation.run_child(
        [sys.executable, "-I", "-S", "-c", isolation.program_text("sqlite_inside")],
        json.dumps(given).encode(),
        seconds=limits.seconds + _START,
        output=12 * _LONGEST_ANSWER,
    )
    if finished.stopped == "time" or finished.status == -signal.SIGALRM:
        raise ValueError(f"the statement took more than {limits.seconds:g} s")
    try:
        answer = json.loads(finished.output)
    except ValueError:
        raise ValueError("the statement used more than it may and was stopped") from None
    if answer["problem"] is not None:
        raise ValueError(answer["problem"])
    return str(answer["text"])


def make_sql_tool(database: str | Path, limits: SqlLimits | None = None) -> BaseTool:
    """A tool for one database, whose description shows the model its tables.

    Raises:
        ValueError: There is no such database.
    """
    path = Path(database)
    description = f"Ask the SQLite database with one SELECT statement. Its tables:\n{schema(path)}"

    @tool(description=description)
    def sql(statement: str) -> str:
        try:
            return query(path, statement, limits)
        except ValueError as error:
            raise ToolException(str(error)) from error

    sql.handle_tool_error = True
    return sql


def _connect(database: Path) -> sqlite3.Connection:
    path = database.resolve()
    if not path.is_file():
        raise ValueError(f"there is no database {database.name}")
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error as error:
        raise ValueError(f"{database.name} is not a SQLite database: {error}") from error
    return connection
