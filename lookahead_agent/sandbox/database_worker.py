"""Runs one SELECT on PostgreSQL, MySQL, MariaDB or DuckDB, read-only, in a process of its own.

Another interpreter runs this file's text (`python -I -c`). It reads a JSON object from its standard input, and writes
{"columns": [...], "rows": [...], "problem": ...} to the descriptor that its argument names. Each row is a list of
numbers, texts and None.
"""

import json
import re
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

READS = re.compile(
    r"(?:\s|--[^\n]*\n|/\*(?!!).*?\*/|\()*(?:select|with|values|table|explain|show|desc|describe)\b", re.I | re.S
)
COLUMNS = """
    SELECT table_schema, table_name, column_name, data_type, ordinal_position FROM information_schema.columns
    WHERE table_schema NOT IN ('information_schema', 'pg_catalog', 'mysql', 'performance_schema', 'sys')
"""
# PostgreSQL's own views of the schema have these.
MATERIALIZED_VIEWS = """
    UNION ALL SELECT nspname, relname, attname, format_type(atttypid, NULL), attnum FROM pg_attribute
    JOIN pg_class ON pg_class.oid = attrelid JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relkind = 'm' AND attnum > 0 AND NOT attisdropped AND has_table_privilege(attrelid, 'SELECT')
"""
# Types whose values are not exactly those of a type of Python: a month has no fixed length, and `infinity` is no date.
POSTGRES_TEXTS = ("date", "time", "timetz", "timestamp", "timestamptz", "interval", "numeric", "json", "jsonb")
DUCKDB_TEXTS = re.compile(r"\b(?:DATE|TIME|TIMESTAMP\w*|TIMETZ|INTERVAL|DECIMAL)\b")
END = re.compile(r";(?:\s|--[^\n]*|/\*.*?\*/)*\Z", re.DOTALL)
MAX_TEXT = 2_000
ONLY_READS = "only SELECT statements are carried out: nothing can be changed or attached"

_INTO_FILE = re.compile(r"\b(?:out|dump)file\b", re.IGNORECASE)


@contextmanager
def open_cursor(address: str, seconds: float) -> Iterator[Any]:
    """Connect to a database for reading only; yield a cursor."""
    from sqlalchemy import NullPool, create_engine, make_url

    url = make_url(address)
    kind, milliseconds = url.get_backend_name(), round(seconds * 1000)
    if kind == "duckdb":
        import duckdb

        # The settings exclude other files, the network, extensions and changes of the settings.
        config = {"enable_external_access": False, "memory_limit": "256MB", "threads": 1, "lock_configuration": True}
        with duckdb.connect(url.database or "", read_only=True, config=config) as connection:
            yield connection.cursor()
        return
    options: dict[str, Any] = {}
    if kind == "postgresql":
        url = url.set(drivername="postgresql+psycopg")
    elif kind in ("mysql", "mariadb"):
        from pymysql.constants import FIELD_TYPE
        from pymysql.converters import conversions

        url = url.set(drivername=f"{kind}+pymysql")
        texts = (FIELD_TYPE.TIME, FIELD_TYPE.DATE, FIELD_TYPE.DATETIME, FIELD_TYPE.TIMESTAMP, FIELD_TYPE.NEWDECIMAL)
        options = {
            "init_command": "SET SESSION TRANSACTION READ ONLY",
            "conv": {key: value for key, value in conversions.items() if key not in texts},
        }
    else:
        raise ValueError("only SQLite, PostgreSQL, MySQL, MariaDB and DuckDB are read")
    with create_engine(url, poolclass=NullPool, connect_args=options).connect() as connection:
        driver: Any = connection.connection.driver_connection
        if kind == "postgresql":
            from psycopg.types.string import TextLoader

            for name in POSTGRES_TEXTS:
                driver.adapters.register_loader(name, TextLoader)
            driver.rollback()
            # These are settings of the transaction, and not of the connection: a pool of connections takes no options.
            driver.read_only = True
            driver.execute(f"SET LOCAL statement_timeout = {milliseconds}")
            # DECLARE takes one SELECT only, and psycopg sends it as one statement.
            yield driver.cursor(name="lookahead")
            return
        from pymysql.cursors import SSCursor

        with driver.cursor() as cursor:
            mariadb = connection.dialect.is_mariadb  # type: ignore[attr-defined]
            limit = f"max_statement_time = {seconds}" if mariadb else f"max_execution_time = {milliseconds}"
            cursor.execute(f"SET SESSION {limit}")
            cursor.execute("START TRANSACTION READ ONLY")
        yield driver.cursor(SSCursor)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the columns and rows of a statement; without one, a row for each column of the tables."""
    statement = request["statement"]
    # DuckDB has other statements that read, such as FROM and SUMMARIZE, and parses them itself.
    is_duckdb = request["url"].startswith("duckdb")
    if statement is not None and not is_duckdb and READS.match(statement) is None:
        raise ValueError(ONLY_READS)
    # A transaction for reading only lets such a SELECT write a file of the server.
    if statement is not None and request["url"].startswith(("mysql", "mariadb")) and _INTO_FILE.search(statement):
        raise ValueError("only SELECT statements that return rows are carried out: none with OUTFILE or DUMPFILE")
    with open_cursor(request["url"], request["seconds"]) as cursor:
        if statement is not None and is_duckdb:
            kinds = [str(parsed.type).rpartition(".")[2] for parsed in cursor.extract_statements(statement)]
            if len(kinds) > 1:
                raise ValueError("only SELECT statements are carried out, one at a time")
            if kinds not in (["SELECT"], ["EXPLAIN"]):
                raise ValueError(ONLY_READS)
        if statement is not None:
            cursor.execute(with_texts(cursor, statement) if is_duckdb else statement)
        else:
            views = MATERIALIZED_VIEWS if request["url"].startswith("postgresql") else ""
            cursor.execute(f"{COLUMNS}{views} ORDER BY 1, 2, 5")
        names = [column[0] for column in cursor.description or ()]
        rows: list[list[Any]] = []
        size = 0
        # One more row than is shown says that there are more.
        while len(rows) <= request["rows"] and size < request["size"] and (row := cursor.fetchone()) is not None:
            rows.append([plain(value) for value in row])
            size += sum(len(str(value)) + 3 for value in rows[-1])
    return {"columns": names, "rows": rows, "problem": None}


def with_texts(cursor: Any, statement: str) -> str:
    """Return a statement of DuckDB with dates, times, intervals and decimals as DuckDB writes them."""
    import duckdb

    statement = END.sub("", statement)
    try:
        described = cursor.execute(f"DESCRIBE {statement}").fetchall()
    except duckdb.Error:  # it describes something itself, or is wrong, as its own error says
        return statement
    if not any(DUCKDB_TEXTS.search(kind) for _, kind, *_ in described):
        return statement
    columns = []
    for number, (name, kind, *_) in enumerate(described):
        value = f"CAST(c{number} AS VARCHAR)" if DUCKDB_TEXTS.search(kind) else f"c{number}"
        columns.append(value + ' AS "' + name.replace('"', '""') + '"')
    given = ", ".join(f"c{number}" for number in range(len(columns)))
    return f"SELECT {', '.join(columns)} FROM ({statement}\n) AS given({given})"


def plain(value: object) -> object:
    """Return a value as JSON has it; the beginning of a long text."""
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return f"({len(value)} bytes)"
    if isinstance(value, (list, dict)):
        return json.dumps(value, ensure_ascii=False, default=str)[:MAX_TEXT]
    return str(value)[:MAX_TEXT]


def main() -> None:
    """Answer the request on standard input."""
    request = json.loads(sys.stdin.read())
    resource.setrlimit(resource.RLIMIT_DATA, (request["memory"], request["memory"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["seconds"] + request["start"])
    found: dict[str, Any] = {}
    try:
        found = answer(request)
    except ModuleNotFoundError as error:
        found["problem"] = f"the package {error.name} is not installed: pip install 'lookahead-agent[sql]'"
    except ValueError as error:
        found["problem"] = str(error)
    except Exception as error:  # each driver has its own errors
        message = str(getattr(error, "orig", None) or error).partition("\nLINE 1: DECLARE")[0]
        if request["statement"] is not None and re.search(r"read.only", message, re.I):
            message = f"only SELECT statements are carried out: {message}"
        found["problem"] = f"the database says: {message[:2000]}"
    with open(int(sys.argv[1]), "w", encoding="utf-8") as results:
        print(json.dumps(found), file=results)


if __name__ == "__main__":
    main()
