"""Lets a model ask a SQLite database, and only ask: it can change nothing."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from langchain_core.tools import BaseTool, ToolException, tool

# What a statement may do; everything else (writing, ATTACH, PRAGMA, loading extensions) is refused by SQLite itself.
_ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
_FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
_LONGEST_CELL = 500


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
        A header and a line for each row, cells parted by " | ".

    Raises:
        ValueError: The statement is wrong, wants to change something, or takes too long; the message says which.
    """
    limits = limits or SqlLimits()
    end = time.monotonic() + limits.seconds
    with closing(_connect(database)) as connection:
        connection.set_authorizer(_authorise)
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        try:
            cursor = connection.execute(statement)
            rows = cursor.fetchmany(limits.rows + 1)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ValueError(_explained(error, limits)) from error
        if cursor.description is None:
            raise ValueError("only SELECT statements are carried out")
        header = [column[0] for column in cursor.description]
    lines = [" | ".join(_cell(value) for value in row) for row in ([*header], *rows[: limits.rows])]
    if len(rows) > limits.rows:
        lines.append(f"(more than {limits.rows} rows: ask for fewer, or count and sum them in SQL)")
    elif not rows:
        lines.append("(no rows)")
    return "\n".join(lines)


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


def _authorise(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in _FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _explained(error: Exception, limits: SqlLimits) -> str:
    if "not authorized" in str(error) or "prohibited" in str(error):
        return "only SELECT statements are carried out: nothing can be changed or attached"
    if "interrupted" in str(error):
        return f"the statement took more than {limits.seconds:g} s"
    if "one statement at a time" in str(error):
        return "one statement at a time"
    return f"SQLite says: {error}"


def _cell(value: object) -> str:
    text = "NULL" if value is None else f"({len(value)} bytes)" if isinstance(value, bytes) else str(value)
    text = " ".join(text.splitlines())
    return text if len(text) <= _LONGEST_CELL else text[:_LONGEST_CELL] + "…"
