"""Runs one SELECT on a SQLite database, in a process of its own.

Another interpreter runs this file's text (`python -I -S -c`), so it imports the standard library only. It reads a JSON
object from its standard input, and writes {"text": ..., "problem": ...} to the descriptor that its argument names.
"""

import json
import os
import re
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from typing import Any

# The only actions of a statement, besides pragmas that read: SQLite itself denies all others (writing, ATTACH, loading
# extensions).
ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
# Pragmas that read, also as table-valued functions. Only those of the first set take an argument.
DESCRIPTIONS = frozenset({
    "table_info", "table_xinfo", "index_list", "index_info", "index_xinfo", "foreign_key_list", "foreign_key_check",
    "integrity_check", "quick_check",
})  # fmt: skip
READ_PRAGMAS = DESCRIPTIONS | {
    "table_list", "function_list", "module_list", "pragma_list", "collation_list", "compile_options", "encoding",
    "user_version", "application_id", "schema_version", "data_version", "page_count", "page_size", "freelist_count",
}  # fmt: skip
VIRTUAL_TABLES = """
    SELECT name FROM sqlite_master WHERE type = 'table' AND sql LIKE 'CREATE VIRTUAL TABLE%'
    UNION ALL SELECT name FROM pragma_module_list UNION ALL SELECT 'pragma_' || name FROM pragma_pragma_list
"""
TABLES = """
    SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND substr(name, 1, 7) <> 'sqlite_' ORDER BY name
"""
MAX_CELL_LENGTH = 500
MAX_NAMED = 8
# Longer type names, such as NVARCHAR(160), cost many tokens and tell a model little.
MAX_TYPE_LENGTH = 8
SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 8 << 20,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 1_000,  # virtual tables read with variables
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def authorise(action: int, first: str | None, second: str | None = None, *_: str | None) -> int:
    """Allow or deny an action of a statement, as SQLite's authorizer callback."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    if action == sqlite3.SQLITE_PRAGMA:
        reads = first in DESCRIPTIONS or (first in READ_PRAGMAS and second is None)
        return sqlite3.SQLITE_OK if reads else sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def open_virtual_tables(connection: sqlite3.Connection) -> None:
    """Open the virtual tables (JSON, full text, R-trees, pragmas), for which SQLite prepares statements that write.

    SQLite keeps them open, so that statements can read them when writing is denied.
    """
    for (name,) in connection.execute(VIRTUAL_TABLES).fetchall():
        # The module may need arguments, or the table may be damaged: a statement that reads it raises the error.
        with suppress(sqlite3.Error):
            connection.execute(f"""SELECT * FROM "{name.replace('"', '""')}" LIMIT 0""")


def access(path: str) -> str:
    """Return how to open a database. In the mode WAL, SQLite would create `-wal` and `-shm` even to read."""
    with open(path, "rb") as file:
        is_wal = file.read(20)[18:] == b"\x02\x02"
    if not is_wal:
        return "mode=ro"
    if os.path.exists(f"{path}-wal") and os.path.exists(f"{path}-shm"):
        return "mode=ro&readonly_shm=1"  # another process has it open, or has crashed
    # Nothing is left to apply: no process has the database open. `answer` sees whether one changed it meanwhile.
    return "mode=ro&immutable=1"


def state(path: str) -> tuple[object, ...]:
    """Return what changes when a process writes to a database."""
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, os.path.exists(f"{path}-wal")


def connect(path: str, how: str, memory: int, seconds: float) -> sqlite3.Connection:
    """Open the database as `access` says, with SQLite's limits."""
    from pathlib import Path

    # Waits for another process's write lock, but not until SIGALRM.
    connection = sqlite3.connect(f"{Path(path).as_uri()}?{how}", uri=True, timeout=seconds / 2)
    # Sorting uses no disk. SQLite's heap limit acts before the process's own limit.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {memory // 2}")
    connection.execute("PRAGMA cache_size = -4096")
    for limit, value in SQLITE_LIMITS.items():
        connection.setlimit(limit, value)
    open_virtual_tables(connection)
    connection.set_authorizer(authorise)
    return connection


def explain_error(error: Exception, seconds: float) -> str:
    """Describe an error so that a model can act on it."""
    message = "out of memory" if isinstance(error, MemoryError) else str(error)
    known = {
        "authoriz|prohibited": "only SELECT statements are carried out: nothing can be changed or attached",
        "interrupted": f"the statement took more than {seconds:g} s",
        "one statement at a time": "one statement at a time",
        "out of memory": "the statement needs more memory than it may have: ask for less, or for fewer rows",
        "file is not a database|unable to open|malformed": f"this is not a SQLite database: {message}",
    }
    return next((text for words, text in known.items() if re.search(words, message)), f"SQLite says: {message}")


def cell(value: object) -> str:
    """Format a value on one line, numbers with 15 digits as in SQLite's own shell, but whole ones with all."""
    if isinstance(value, float) and not value.is_integer():
        value = float(f"{value:.15g}")
    text = "NULL" if value is None else f"({len(value)} bytes)" if isinstance(value, bytes) else str(value)
    shown = " ".join(text[:MAX_CELL_LENGTH].splitlines())
    return (
        shown if len(text) <= MAX_CELL_LENGTH else f"{shown}\u2026 (cut: {MAX_CELL_LENGTH} of {len(text):,} characters)"
    )


def schema(connection: sqlite3.Connection, characters: int) -> str:
    """Describe each table and view on a line: `Album(AlbumId INTEGER, Title, ArtistId INTEGER)`, without long types."""
    # Shadow tables of a full-text index; SQLite before 3.37 does not mark them.
    shadow_tables = {row[1] for row in connection.execute("PRAGMA main.table_list") if row[2] == "shadow"}
    lines: list[str] = []
    size = 0
    for (name,) in connection.execute(TABLES):
        if name in shadow_tables:
            continue
        if size > 2 * characters:  # enough to be truncated
            break
        try:
            lines.append(f"{quote_name(connection, name)}({', '.join(columns(connection, name))})")
        except sqlite3.OperationalError as error:  # a view of a dropped table
            lines.append(f"{quote_name(connection, name)} cannot be read: {error}")
        size += len(lines[-1]) + 1
    return "\n".join(lines)


def describe_columns(connection: sqlite3.Connection, message: str) -> str:
    """Say where an error's column exists: " (there are Album.ArtistId, Artist.ArtistId)"; "" if it is nowhere."""
    found = re.match(r"(?:ambiguous column name|no such column): (?:.*\.)?(.+)", message)
    if found is None:
        return ""
    # SQLite keeps the data of a virtual table in tables that no one asks about.
    hidden = {row[1] for row in connection.execute("PRAGMA table_list") if row[2] == "shadow"}
    tables = [
        name
        for (name,) in connection.execute(TABLES).fetchall()
        if name not in hidden
        and found[1].lower() in {row[1].lower() for row in pragma(connection, "table_xinfo", name)}
    ]
    if not tables:
        return ""
    column = quote_name(connection, found[1])
    named = ", ".join(f"{quote_name(connection, name)}.{column}" for name in tables[:MAX_NAMED])
    return f" (there {'is' if len(tables) == 1 else 'are'} {named})"


def pragma(connection: sqlite3.Connection, name: str, table: str) -> sqlite3.Cursor:
    """Return the rows of a pragma that describes a table."""
    argument = '"' + table.replace('"', '""') + '"'
    return connection.execute(f"PRAGMA main.{name}({argument})")


def columns(connection: sqlite3.Connection, table: str) -> list[str]:
    """List the columns, each with its type if that is short, and with the column that it references."""
    referred = {
        column.lower(): (other, key) for _, _, other, column, key, *_ in pragma(connection, "foreign_key_list", table)
    }
    found = []
    for _, name, kind, _, _, _, hidden in pragma(connection, "table_xinfo", table):
        if hidden == 1:  # a hidden column of a virtual table
            continue
        words = [quote_name(connection, name)]
        short = kind.partition("(")[0].strip()
        if short.isalpha() and len(short) <= MAX_TYPE_LENGTH and "CHAR" not in short.upper():
            words.append(short.upper())
        other, key = referred.get(name.lower(), (None, None))
        if other is not None and (key is None or key.lower() != name.lower()):  # no key: the primary key
            key_part = "" if key is None else f"({quote_name(connection, key)})"
            words.append(f"REFERENCES {quote_name(connection, other)}{key_part}")
        found.append(" ".join(words))
    return found


def quote_name(connection: sqlite3.Connection, name: str) -> str:
    """Quote a name as a statement needs it, on one line."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        try:
            connection.execute(f"SELECT {name} FROM (SELECT 1 AS {name})")
            return name
        except sqlite3.OperationalError:  # a keyword
            pass
    return '"' + " ".join(name.replace('"', '""').splitlines()) + '"'


def answer(request: dict[str, Any]) -> str:
    """Return the answer to a request.

    Raises ValueError if an immutable database changes meanwhile.
    """
    path = request["database"]
    before, how = state(path), access(path)
    try:
        text = select(request, how)
    except sqlite3.Error:
        if "immutable" not in how or state(path) == before:
            raise
    else:
        if "immutable" not in how or state(path) == before:
            return text
    raise ValueError("another program changed the database meanwhile: ask again")


def select(request: dict[str, Any], how: str) -> str:
    """Return the header and as many rows as are shown, read one by one; without a statement, the schema."""
    with closing(connect(request["database"], how, request["memory"], request["seconds"])) as connection:
        end = time.monotonic() + request["seconds"]
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        connection.text_factory = lambda data: data.decode("utf-8", errors="replace")
        if request["statement"] is None:
            return schema(connection, request["characters"])
        try:
            cursor = connection.execute(request["statement"])
        except sqlite3.OperationalError as error:
            raise sqlite3.OperationalError(f"{error}{describe_columns(connection, str(error))}") from None
        if cursor.description is None:
            raise ValueError("only SELECT statements are carried out")
        return table([column[0] for column in cursor.description], cursor, request)


def table(names: Sequence[str], values: Iterable[Sequence[object]], request: dict[str, Any]) -> str:
    """Return a header and as many rows as are shown; a single value alone."""
    lines = [" | ".join(map(cell, names))]
    size = len(lines[0])
    for number, row in enumerate(values):
        line = " | ".join(map(cell, row))
        size += len(line) + 1
        # A single row may be longer: the caller truncates it.
        if number == request["rows"] or (number and size > request["characters"]):
            return "\n".join([*lines, f"(more than {number} rows: ask for fewer, or count and sum them in SQL)"])
        lines.append(line)
    if len(lines) == 2 and len(names) == 1:
        return lines[1] or "(an empty text)"  # a single value alone can be the argument of another call
    return "\n".join(lines if len(lines) > 1 else [*lines, "(no rows)"])


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.read())
    resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    # SQLite calls no progress handler inside a function: there the signal kills the process.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"] + 0.1)
    text, problem = "", None
    try:
        text = answer(request)
    except ValueError as error:
        problem = str(error)
    except OSError as error:
        problem = f"the database cannot be read: {error.strerror}"
    except (sqlite3.Error, sqlite3.Warning, MemoryError) as error:
        problem = explain_error(error, request["seconds"])
    with open(int(sys.argv[1]), "w", encoding="utf-8") as results:
        print(json.dumps({"text": text, "problem": problem}), file=results)


if __name__ == "__main__":
    main()
