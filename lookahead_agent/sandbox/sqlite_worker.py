"""One SELECT on a SQLite database, in a process of its own.

The text of this file is handed to another interpreter (`python -I -S -c`), so it imports the standard library only. It
reads a JSON object from its standard input and writes a line of JSON, {"text": ..., "problem": ...}, to the descriptor
that its argument names.
"""

from __future__ import annotations

import json
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
SCHEMA = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite_%' ORDER BY name"
LONGEST_CELL = 500
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


def authorise(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """SQLite's question whether a statement may do something."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").lower() in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in ALLOWED else sqlite3.SQLITE_DENY


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
    said = str(error)
    if "not authorized" in said or "prohibited" in said:
        return "only SELECT statements are carried out: nothing can be changed or attached"
    if "interrupted" in said:
        return f"the statement took more than {seconds:g} s"
    if "one statement at a time" in said:
        return "one statement at a time"
    if isinstance(error, MemoryError) or "out of memory" in said:
        return "the statement needs more memory than it may have: ask for less, or for fewer rows"
    if "file is not a database" in said or "unable to open" in said or "malformed" in said:
        return f"this is not a SQLite database: {said}"
    return f"SQLite says: {said}"


def cell(value: object) -> str:
    """A value in one line."""
    text = "NULL" if value is None else f"({len(value)} bytes)" if isinstance(value, bytes) else str(value)
    shown = " ".join(text[:LONGEST_CELL].splitlines())
    return shown if len(text) <= LONGEST_CELL else f"{shown}… (cut: {LONGEST_CELL} of {len(text):,} characters)"


def answer(given: dict[str, Any]) -> str:
    """Header and rows, read one by one and only as far as they are shown; without a statement, the tables."""
    with closing(connect(given["database"], given["memory"], given["seconds"])) as connection:
        end = time.monotonic() + given["seconds"]
        connection.set_progress_handler(lambda: time.monotonic() > end, 10_000)
        connection.text_factory = lambda data: data.decode("utf-8", errors="replace")
        if given["statement"] is None:
            return "\n".join(str(row[0]) for row in connection.execute(SCHEMA))
        cursor = connection.execute(given["statement"])
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
