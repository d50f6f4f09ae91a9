"""Query SQLite, or PostgreSQL, MySQL, MariaDB and DuckDB through SQLAlchemy's URLs, read-only, for a model.

A statement runs in a process of its own, with 64 MiB of memory (512 MiB for other databases than SQLite). The process
is killed at the timeout, even inside a slow function of SQLite.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from langchain_core.tools import BaseTool

from lookahead_agent import sandbox
from lookahead_agent.agents.tool_use import MAX_RESULT_LENGTH, make_tool, truncate
from lookahead_agent.sandbox.sqlite_worker import table
from lookahead_agent.sandbox.worker import code_blocks
from lookahead_agent.system.urls import hide_passwords

_MEMORY = 64 << 20
# Characters for the notices about further rows and about a truncated header or row.
_NOTICES = 300
_LANGUAGES = ("sql", "sqlite", "sqlite3", "postgresql", "postgres", "mysql", "mariadb", "duckdb")
_LABEL = re.compile(r"\ufeff?\s*(?:(?:sql|(?:sql[ _]?)?(?:query|statement))\s*:|sql\s*\n)|\ufeff", re.IGNORECASE)
# Databases besides SQLite by the scheme of their URL, and the schemas whose tables need no prefix.
_SERVERS = ("postgresql", "postgres", "mysql", "mariadb", "duckdb")
_DEFAULT_SCHEMAS = ("public", "main")
_SERVER_MEMORY = 512 << 20
_MAX_COLUMNS = 5_000
_PASSED = ("HOME", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGSSLROOTCERT", "PGSSLMODE")
_URL = re.compile(r"(?P<scheme>file|[A-Za-z][\w+.-]+(?=://)):(?P<rest>.*)", re.DOTALL | re.IGNORECASE)
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


def schema(database: str | Path, limits: SqlLimits | None = None) -> str:
    """Return the tables and views of a database with their columns, one per line, at most 50,000 characters.

    Raises:
        ValueError: The database does not exist, or cannot be read now.
    """
    rest = "information_schema.columns" if _is_server(database) else "SELECT name, sql FROM sqlite_master"
    return truncate(_run_worker(database, None, limits or SqlLimits()), f"{rest} shows the others")


def query(database: str | Path, statement: str, limits: SqlLimits | None = None) -> str:
    """Run one SELECT statement.

    Args:
        database: SQLite file, or the URL of another database, see `make_sql_tool`.
        statement: SQL, at most 100,000 characters.
        limits: Limits of the statement.

    Returns:
        A header and one line per row, at most 50,000 characters. " | " separates cells of at most 500 characters. A
        result of one value is that value alone.

    Raises:
        ValueError: The statement is invalid, would change something, or takes too much time or memory; or the database
            is missing, locked or damaged. The message says which.
    """
    return truncate(_run_worker(database, _bare(statement), limits or SqlLimits()), _REST)


def _bare(statement: str) -> str:
    """Return a statement without the Markdown fence or the label that models write around it."""
    if statement.lstrip().startswith("`") or "```" in statement:
        statement = next(iter(code_blocks(statement, _LANGUAGES)), statement)
    return _LABEL.sub("", statement)


def database_path(address: str | Path) -> Path:
    """Return the file of a path, of a URL such as sqlite:///shop.db, or of SQLite's own URI, file:shop.db?mode=ro.

    Raises:
        ValueError: It is a URL of another kind, or names no file.
    """
    text = str(address)
    if (found := _URL.match(text)) is None:
        return Path(text).expanduser()
    scheme, rest = found["scheme"].lower(), found["rest"]
    if scheme == "file" or re.fullmatch(r"sqlite3?(\+\w+)?", scheme):
        # SQLAlchemy's URLs have three slashes before a relative path, and may hold a URI.
        name = rest.removeprefix("///") if scheme != "file" else re.sub(r"^//(localhost)?(?=/)", "", rest)
        name = re.split("[?#]", name.removeprefix("file:"))[0]
        if scheme == "file" or "file:" in rest:
            name = unquote(name)
        if not name or name == ":memory:" or (scheme != "file" and not rest.startswith("///")):
            raise ValueError("this URL names no file of a SQLite database: write sqlite:///shop.db or shop.db")
        return Path(name).expanduser()
    raise ValueError(
        f"{scheme}: is not a known database: SQLite, {', '.join(_SERVERS)} are read. Name another one by a tool of "
        "your own (module:tool) or of an MCP server"
    )


def _is_server(address: str | Path) -> bool:
    """Whether an address is the URL of another database than SQLite."""
    pattern = rf"(?:{'|'.join(_SERVERS)})(?:\+\w+)?://"
    return isinstance(address, str) and re.match(pattern, address, re.IGNORECASE) is not None


def _ask_server(url: str, statement: str | None, limits: SqlLimits) -> str:
    """Run a statement on another database; without a statement, describe its tables."""
    rows = limits.rows if statement is not None else _MAX_COLUMNS
    scheme, colon, rest = url.partition("://")
    request = {
        "url": re.sub(r"^postgres(?=\+|$)", "postgresql", scheme.lower()) + colon + rest,
        "statement": statement,
        "rows": rows,
        "seconds": limits.seconds,
        "start": _START_SECONDS,
        "memory": _SERVER_MEMORY,
        "size": _MAX_OUTPUT // 4,
    }
    try:
        finished = sandbox.run_child(
            [sys.executable, "-I", "-c", sandbox.program_text("database_worker")],
            json.dumps(request).encode(),
            seconds=limits.seconds + 2 * _START_SECONDS,
            output=_MAX_OUTPUT,
            results=True,
            # For ~/.pgpass, ~/.my.cnf and PGPASSWORD, so that the URL needs no password.
            environment={"PATH": "", **{key: value for key, value in os.environ.items() if key in _PASSED}},
        )
    except OSError as error:
        raise ValueError(f"the database cannot be asked now: {error.strerror}") from error
    if finished.stopped == "time" or finished.status == -signal.SIGALRM:
        what = "the statement" if statement is not None else "opening the database"
        raise ValueError(f"{what} took more than {limits.seconds:g} s")
    match next(finished.json_lines(), None):
        case {"problem": str(problem)}:
            shown = f"{url} cannot be opened (a SQLite database is named by its file): "
            raise ValueError(hide_passwords(problem if statement is not None else shown + problem, url))
        case {"columns": [*_], "rows": [*found]} if statement is None:
            note = "\n(there are more: ask information_schema.columns)" if len(found) > _MAX_COLUMNS else ""
            return _describe(found[:_MAX_COLUMNS]) + note
        case {"columns": [*names], "rows": [*found]}:
            return table(
                [str(name) for name in names], found, {"rows": rows, "characters": MAX_RESULT_LENGTH - _NOTICES}
            )
    raise ValueError("the statement used more than it may and was stopped")


def _describe(columns: Sequence[Sequence[Any]]) -> str:
    """Return a line for each table, from rows of schema, table, column, type and the column's number."""
    tables: dict[str, list[str]] = {}
    for place, name, column, kind, _ in columns:
        key = _quote(name) if place in _DEFAULT_SCHEMAS else f"{_quote(place)}.{_quote(name)}"
        short = str(kind).split("(")[0].upper()
        tables.setdefault(key, []).append(_quote(column) + (f" {short}" if "CHAR" not in short else ""))
    return "\n".join(f"{name}({', '.join(found)})" for name, found in tables.items())


def _quote(name: object) -> str:
    text = str(name)
    return text if re.fullmatch(r"[a-z_][a-z0-9_]*", text) else '"' + text.replace('"', '""') + '"'


def make_sql_tool(database: str | Path, limits: SqlLimits | None = None) -> BaseTool:
    """Create a tool for one database, whose description shows the model its tables.

    Args:
        database: A SQLite file, or its URL, see `database_path`; or SQLAlchemy's URL of PostgreSQL, MySQL, MariaDB or
            DuckDB. A transaction for reading only runs the statement. Use a role that may read only, too: on a server,
            a function may write outside of the transaction.
        limits: Limits of each statement.

    Raises:
        ValueError: The database does not exist, or cannot be read now.
    """
    source = database if _is_server(database) else database_path(database)
    kind = str(database).split(":")[0].split("+")[0].lower() if _is_server(database) else "SQLite"
    description = f"Ask the {kind} database with one SELECT statement. Its tables:\n{schema(source, limits)}"

    @make_tool(description=description, rest=_REST, read_only=True)
    def sql(statement: str) -> str:
        return query(source, statement, limits)

    return sql


def _run_worker(database: str | Path, statement: str | None, limits: SqlLimits) -> str:
    """Run a statement in a worker process: this process never opens the file."""
    if isinstance(database, str):
        if _is_server(database):
            return _ask_server(database, statement, limits)
        database = database_path(database)
    try:
        path = database.resolve()
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links
        raise ValueError(f"the database {database.name} cannot be opened: {error}") from None
    if not exists:
        raise ValueError(f"there is no database {database.name or database}")
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
