"""One SELECT on a SQLite database, in a process of its own.

Another interpreter is given this text (`python -I -S -c`), so it imports the standard library only. It reads a JSON
object from its standard input, and writes {"text": ..., "problem": ...} to the descriptor that its argument names.
"""

import json
import re
import resource
import signal
import sqlite3
import sys
import time
from contextlib import closing
from typing import Any

# What a statement may do; everything else (writing, ATTACH, PRAGMA, loading extensions) is refused by SQLite itself.
ALLOWED = frozenset({sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE})
FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "readfile", "writefile", "edit", "fts3_tokenizer"})
SCHEMA_PRAGMAS = frozenset({"table_list", "table_xinfo", "foreign_key_list"})
TABLES = """
    SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND substr(name, 1, 7) <> 'sqlite_' ORDER BY name
"""
LONGEST_CELL = 500
MOST_NAMED = 8
# Longer names of types, such as NVARCHAR(160), tell a model little for many tokens.
LONGEST_TYPE = 8
SQLITE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 8 << 20,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 100_000,
    sqlite3.SQLITE_LIMIT_COLUMN: 500,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 100,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_FUNCTION_ARG: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 1_000,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 0,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 0,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}


def authorise(action: int, first: str | None, second: str | None = None, *_: str | None) -> int:
    """SQLite's question whether a statement may do something."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


def authorise_schema(action: int, first: str | None, *others: str | None) -> int:
    """As `authorise`, and the pragmas that tell of tables and columns."""
    told = action == sqlite3.SQLITE_PRAGMA and first in SCHEMA_PRAGMAS
    return sqlite3.SQLITE_OK if told else authorise(action, first, *others)


def connect(path: str, memory: int, seconds: float) -> sqlite3.Connection:
    """The database, to be read only, with SQLite's limits."""
    from pathlib import Path

    # Waits for another process that writes to the database, but not until the signal.
    connection = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, timeout=seconds / 2)
    # Sorting needs no disk, and asks for too much before the process is refused it.
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute(f"PRAGMA hard_heap_limit = {memory // 2}")
    connection.execute("PRAGMA cache_size = -4096")
    for limit, value in SQLITE_LIMITS.items():
        connection.setlimit(limit, value)
    connection.set_authorizer(authorise)
    return connection


def explained(error: Exception, seconds: float) -> str:
    """What a model can do something with."""
    said = "out of memory" if isinstance(error, MemoryError) else str(error)
    known = {
        "not authorized|prohibited": "only SELECT statements are carried out: nothing can be changed or attached",
        "interrupted": f"the statement took more than {seconds:g} s",
        "one statement at a time": "one statement at a time",
        "out of memory": "the statement needs more memory than it may have: ask for less, or for fewer rows",
        "file is not a database|unable to open|malformed": f"this is not a SQLite database: {said}",
    }
    return next((told for words, told in known.items() if re.search(words, said)), f"SQLite says: {said}")


def cell(value: object) -> str:
    """A value in one line, numbers to 15 digits as SQLite's own shell shows them."""
    if isinstance(value, float):
        value = float(f"{value:.15g}")
    text = "NULL" if value is None else f"({len(value)} bytes)" if isinstance(value, bytes) else str(value)
    shown = " ".join(text[:LONGEST_CELL].splitlines())
    return shown if len(text) <= LONGEST_CELL else f"{shown}\u2026 (cut: {LONGEST_CELL} of {len(text):,} characters)"


def schema(connection: sqlite3.Connection, characters: int) -> str:
    """A line for each table and view: `Album(AlbumId INTEGER, Title, ArtistId INTEGER)`, without long types."""
    connection.set_authorizer(authorise_schema)
    # The tables inside of a full-text index; SQLite before 3.37 does not tell them from others.
    inside = {row[1] for row in connection.execute("PRAGMA main.table_list") if row[2] == "shadow"}
    lines: list[str] = []
    size = 0
    for (name,) in connection.execute(TABLES):
        if name in inside:
            continue
        if size > 2 * characters:  # more than is shown
            break
        try:
            lines.append(f"{quoted(connection, name)}({', '.join(columns(connection, name))})")
        except sqlite3.OperationalError as error:  # a view of what is there no more
            lines.append(f"{quoted(connection, name)} cannot be read: {error}")
        size += len(lines[-1]) + 1
    return "\n".join(lines)


def found_columns(connection: sqlite3.Connection, said: str) -> str:
    """Where the column of an error is: " (there are Album.ArtistId, Artist.ArtistId)"; "" where it is nowhere."""
    found = re.match(r"(?:ambiguous column name|no such column): (?:.*\.)?(.+)", said)
    if found is None:
        return ""
    connection.set_authorizer(authorise_schema)
    tables = [
        name
        for (name,) in connection.execute(TABLES).fetchall()
        if found[1].lower() in {row[1].lower() for row in pragma(connection, "table_xinfo", name)}
    ]
    if not tables:
        return ""
    column = quoted(connection, found[1])
    named = ", ".join(f"{quoted(connection, name)}.{column}" for name in tables[:MOST_NAMED])
    return f" (there {'is' if len(tables) == 1 else 'are'} {named})"


def pragma(connection: sqlite3.Connection, name: str, table: str) -> sqlite3.Cursor:
    """The rows of a pragma that tells of a table."""
    argument = '"' + table.replace('"', '""') + '"'
    return connection.execute(f"PRAGMA main.{name}({argument})")


def columns(connection: sqlite3.Connection, table: str) -> list[str]:
    """Each column with its type, where that is short, and with the column of another table that it refers to."""
    referred = {
        column.lower(): (other, key) for _, _, other, column, key, *_ in pragma(connection, "foreign_key_list", table)
    }
    found = []
    for _, name, kind, _, _, _, hidden in pragma(connection, "table_xinfo", table):
        if hidden == 1:  # a column that only statements of its virtual table name
            continue
        words = [quoted(connection, name)]
        short = kind.partition("(")[0].strip()
        if short.isalpha() and len(short) <= LONGEST_TYPE and "CHAR" not in short.upper():
            words.append(short.upper())
        other, key = referred.get(name.lower(), (None, None))
        if other is not None and (key is None or key.lower() != name.lower()):  # no key: the other's primary one
            of_other = "" if key is None else f"({quoted(connection, key)})"
            words.append(f"REFERENCES {quoted(connection, other)}{of_other}")
        found.append(" ".join(words))
    return found


def quoted(connection: sqlite3.Connection, name: str) -> str:
    """A name as a statement has to write it, in one line."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        try:
            connection.execute(f"SELECT {name} FROM (SELECT 1 AS {name})")
            return name
        except sqlite3.OperationalError:  # a keyword
            pass
    return '"' + " ".join(name.replace('"', '""').splitlines()) + '"'


def answer(given: dict[str, Any]) -> str:
    """Header and rows, read one by one and only as far as they are shown; without a statement, the tables."""
    with closing(connect(given["database"], given["memory"], given["seconds"])) as connection:
        end = time.monotonic() + given["seconds"]
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        connection.text_factory = lambda data: data.decode("utf-8", errors="replace")
        if given["statement"] is None:
            return schema(connection, given["characters"])
        try:
            cursor = connection.execute(given["statement"])
        except sqlite3.OperationalError as error:
            raise sqlite3.OperationalError(f"{error}{found_columns(connection, str(error))}") from None
        if cursor.description is None:
            raise ValueError("only SELECT statements are carried out")
        lines = [" | ".join(cell(column[0]) for column in cursor.description)]
        size = len(lines[0])
        for number, row in enumerate(cursor):
            line = " | ".join(map(cell, row))
            size += len(line) + 1
            # One row alone may be longer: it is cut where it is shown.
            if number == given["rows"] or (number and size > given["characters"]):
                return "\n".join([*lines, f"(more than {number} rows: ask for fewer, or count and sum them in SQL)"])
            lines.append(line)
    if len(lines) == 2 and len(cursor.description) == 1:
        return lines[1]  # one value stands for itself, so that another call can take it as it is
    return "\n".join(lines if len(lines) > 1 else [*lines, "(no rows)"])


def main() -> None:
    """Answer the question on standard input."""
    given = json.loads(sys.stdin.read())
    resource.setrlimit(resource.RLIMIT_DATA, (given["memory"], given["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # the shared index of a write-ahead log
    # The progress handler is not asked inside a function: the signal ends the process there.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, given["seconds"] + 0.1)
    text, problem = "", None
    try:
        text = answer(given)
    except ValueError as error:
        problem = str(error)
    except (sqlite3.Error, sqlite3.Warning, MemoryError) as error:
        problem = explained(error, given["seconds"])
    with open(int(sys.argv[1]), "w", encoding="utf-8") as results:
        print(json.dumps({"text": text, "problem": problem}), file=results)


if __name__ == "__main__":
    main()
