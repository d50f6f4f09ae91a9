"""Query a SQLite database, read-only, for a model.

A statement runs in a process of its own, with 64 MiB of memory. The process is killed at the timeout, even inside a
slow function of SQLite.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from langchain_core.tools import BaseTool

from lookahead_agent import sandbox
from lookahead_agent.agents.tool_use import MAX_RESULT_LENGTH, cut, make_tool
from lookahead_agent.sandbox.worker import code_blocks

_MEMORY = 64 << 20
# Characters for the notices about further rows and about a truncated header or row.
_NOTICES = 300
_LANGUAGES = ("sql", "sqlite", "sqlite3", "postgresql", "postgres", "mysql", "mariadb", "duckdb")
_LABEL = re.compile(r"\s*(?:sql|(?:sql[ _]?)?(?:query|statement))\s*:", re.IGNORECASE)
_MAX_OUTPUT = 4 << 20
_REST = "select fewer columns, or parts of them with substr()"
_MAX_COPY = 256 << 20
# Seconds to start the process, besides the statement's timeout.
_START_SECONDS = 10.0


@dataclass(frozen=True)
class SqlLimits:
    """Limits of one statement.

    Attributes:
        rows: Maximum number of rows.
        seconds: Timeout of the statement.
    """

    rows: int = 50
    seconds: float = 5.0


def schema(database: Path) -> str:
    """Return the tables and views of a database with their columns, one per line, at most 50,000 characters.

    Raises:
        ValueError: The database does not exist, or cannot be read now.
    """
    return cut(_run_worker(database, None, SqlLimits()), "SELECT name, sql FROM sqlite_master shows the others")


def query(database: Path, statement: str, limits: SqlLimits | None = None) -> str:
    """Run one SELECT statement.

    Args:
        database: SQLite file.
        statement: SQL, at most 100,000 characters.
        limits: Limits of the statement.

    Returns:
        A header and one line per row, at most 50,000 characters. " | " separates cells of at most 500 characters. A
        result of one value is that value alone.

    Raises:
        ValueError: The statement is invalid, would change something, or takes too much time or memory; or the database
            is missing, locked or damaged. The message says which.
    """
    return cut(_run_worker(database, _bare(statement), limits or SqlLimits()), _REST)


def _bare(statement: str) -> str:
    """Return a statement without the Markdown fence or the label that models write around it."""
    if statement.lstrip().startswith("`") or "```" in statement:
        statement = next(iter(code_blocks(statement, _LANGUAGES)), statement)
    return _LABEL.sub("", statement)


def make_sql_tool(database: str | Path, limits: SqlLimits | None = None) -> BaseTool:
    """Create a tool for one database, whose description shows the model its tables.

    Raises:
        ValueError: The database does not exist, or cannot be read now.
    """
    path = Path(database)
    description = f"Ask the SQLite database with one SELECT statement. Its tables:\n{schema(path)}"

    @make_tool(description=description, rest=_REST, read_only=True)
    def sql(statement: str) -> str:
        return query(path, statement, limits)

    return sql


def _run_worker(database: Path, statement: str | None, limits: SqlLimits) -> str:
    """Run a statement in a worker process: this process never opens the file."""
    try:
        path = database.resolve()
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        raise ValueError(f"the database {database.name} cannot be opened: {error}") from None
    if not exists:
        raise ValueError(f"there is no database {database.name}")
    if _has_unread_log(path):
        return _on_a_copy(path, statement, limits)
    return _ask(path, statement, limits)


def _has_unread_log(path: Path) -> bool:
    """Whether a write-ahead log is left over that no process reads: SQLite would create files beside it to read it."""
    log = Path(f"{path}-wal")
    return log.exists() and log.stat().st_size > 0 and not Path(f"{path}-shm").exists()


def _on_a_copy(path: Path, statement: str | None, limits: SqlLimits) -> str:
    """Run a statement on a copy of a database and its log, in a folder for temporary files."""
    log = Path(f"{path}-wal")
    try:
        if path.stat().st_size + log.stat().st_size > _MAX_COPY:
            raise ValueError(
                f"{path.name} has changes in {log.name}, which no program has finished, and is too large to copy: "
                f"open it once with the program that wrote it, or with sqlite3 {path.name} .tables"
            )
        with tempfile.TemporaryDirectory(prefix="lookahead-sql-") as folder:
            copy = Path(folder, "database")
            shutil.copyfile(path, copy)
            shutil.copyfile(log, f"{copy}-wal")
            # SQLite reads a log through this file, and builds it if it is empty.
            Path(f"{copy}-shm").touch()
            return _ask(copy, statement, limits)
    except OSError as error:
        raise ValueError(f"{path.name} cannot be copied to read its log: {error.strerror}") from error


def _ask(path: Path, statement: str | None, limits: SqlLimits) -> str:
    request = {
        "database": str(path),
        "statement": statement,
        "rows": limits.rows,
        "seconds": limits.seconds,
        "memory": _MEMORY,
        "characters": MAX_RESULT_LENGTH - _NOTICES,
    }
    try:
        finished = sandbox.run_child(
            [sys.executable, "-I", "-S", "-c", sandbox.program_text("sqlite_worker")],
            json.dumps(request).encode(),
            seconds=limits.seconds + _START_SECONDS,
            output=_MAX_OUTPUT,
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
