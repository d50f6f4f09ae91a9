"""The tool `sql` on a PostgreSQL server and on DuckDB."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import duckdb
import psycopg
import pytest

from lookahead_agent.agents.tool_sources import load_tools
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.urls import hide_passwords
from tests.unit import test_checkpoints
from tools.sql import SqlLimits, make_sql_tool, query

postgres = test_checkpoints.database
LIMITS = SqlLimits(seconds=20)
ROWS = "SELECT i, 'n' || i, 1.5 FROM generate_series(1, 100) AS s(i)"


def check(url: str, attacks: tuple[str, ...]) -> None:
    tool = make_sql_tool(url, LIMITS)
    assert "\nitems(id INTEGER, name, price " in tool.description
    for statement, result in (
        ("SELECT count(*) FROM items", "100"),
        ("SELECT id, name FROM items WHERE name LIKE 'n1%' ORDER BY id LIMIT 2", "id | name\n1 | n1\n10 | n10"),
        ("```sql\nSELECT 7\n```", "7"),
        ("SELECT id FROM items WHERE id > 200", "id\n(no rows)"),
    ):
        assert tool.invoke({"statement": statement}) == result
    assert query(url, "SELECT id FROM items", SqlLimits(2, 20)).endswith(
        "\n(more than 2 rows: ask for fewer, or count and sum them in SQL)"
    )
    for attack in attacks:
        with pytest.raises(ValueError, match=r"only SELECT|the database says"):
            query(url, attack, LIMITS)
    assert query(url, "SELECT count(*) FROM items", LIMITS) == "100"


def test_postgres_is_read_and_not_written(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS items; DROP SEQUENCE IF EXISTS numbers; CREATE SEQUENCE numbers")
        connection.execute("CREATE TABLE items (id INTEGER, name VARCHAR(9), price NUMERIC)")
        connection.execute(f"INSERT INTO items {ROWS}")
    check(
        postgres,
        (
            "INSERT INTO items VALUES (0)", "SELECT 1; COMMIT; DROP TABLE items", "SELECT nextval('numbers')",
            "WITH x AS (DELETE FROM items RETURNING 1) SELECT * FROM x", "COPY items TO PROGRAM 'id'", "TABLE nothing",
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"statement timeout|more than 1 s"):
        query(postgres, "SELECT pg_sleep(60)", SqlLimits(seconds=1))


def test_postgres_gives_values_that_python_has_no_type_for_as_it_writes_them(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as connection:
        connection.execute("DROP SCHEMA IF EXISTS app CASCADE; CREATE SCHEMA app; CREATE TABLE app.orders AS SELECT 7")
        connection.execute("CREATE MATERIALIZED VIEW app.totals AS SELECT 1.50 AS total")
    values = (
        "SELECT interval '1 month', date 'infinity', timestamp '0044-03-15 BC', 0.0000000, 4111111111111111::float8, "
        "array[interval '1 mon'], '{\"a\":1.10}'::json"
    )
    row = '1 mon | infinity | 0044-03-15 00:00:00 BC | 0.0000000 | 4111111111111111.0 | ["1 mon"] | {"a":1.10}'
    assert query(postgres, values, LIMITS).endswith(f"\n{row}")
    own = f"{postgres}&options=-csearch_path%3Dapp%20-cdefault_transaction_read_only%3Doff"
    assert query(own, "SELECT * FROM orders", LIMITS) == "7"
    with pytest.raises(ValueError, match="must be set before any query"):
        query(own, "SELECT set_config('transaction_read_only', 'off', false)", LIMITS)
    assert "app.totals(total NUMERIC)" in make_sql_tool(postgres, LIMITS).description


def test_duckdb_is_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE items (id INTEGER, name VARCHAR, price DOUBLE)")
        connection.execute(f"INSERT INTO items {ROWS}")
    copy = f"COPY items TO '{tmp_path}/x.csv'"
    check(
        f"duckdb:///{path}",
        (
            "INSERT INTO items VALUES (0)", copy, f"SELECT 1; {copy}", "SELECT * FROM read_csv('/etc/passwd')",
            f"SELECT 1; ATTACH '{tmp_path}/z.db' AS z", "SELECT 1; SET memory_limit = '9GB'",
        ),
    )  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.duckdb"]
    assert query(f"duckdb:///{path}", "FROM items LIMIT 1", LIMITS).startswith("id | name | price\n1 | n1 | ")
    values = (
        "SELECT interval '1 month' AS a, date 'infinity' AS a, 0::decimal(9, 8), "
        "timestamp_ns '2024-01-01 00:00:00.123456789', {'d': date '2024-01-02'}, 4111111111111111::double "
        "FROM items ORDER BY id DESC LIMIT 1; -- the end"
    )
    row = "1 month | infinity | 0.00000000 | 2024-01-01 00:00:00.123456789 | {'d': 2024-01-02} | 4111111111111111.0"
    result = query(f"duckdb:///{path}", values, LIMITS)
    assert result.startswith("a | a | ")
    assert result.endswith(f"\n{row}")
    with pytest.raises(ValueError, match="one at a time"):
        query(f"DuckDB:///{path}", "SELECT 1; SELECT 2", LIMITS)
    with pytest.raises(ValueError, match=r"cannot be opened .*the database says: IO Error"):
        make_sql_tool(f"duckdb:///{tmp_path}/gone.duckdb", LIMITS)


@pytest.mark.parametrize("scheme", ["mysql", "mariadb", "mysql+pymysql"])
@pytest.mark.parametrize(
    "statement",
    ["SELECT 1 INTO OUTFILE '/tmp/x'", "select 1 into/**/dumpfile '/x'", "SELECT 1 /*! INTO OUTFILE '/x' */"],
)
def test_no_select_writes_a_file_of_a_mysql_server(scheme: str, statement: str) -> None:
    """A transaction for reading only does not refuse them. Without a server, connecting would be the error."""
    with pytest.raises(ValueError, match="only SELECT statements that return rows"):
        query(f"{scheme}://nobody@127.0.0.1:1/shop", statement, LIMITS)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:hunter2@host/db", "postgresql://host/db?user=me&password=hunter2", "mysql://me@h/x?passwd=hunter2",
        "postgresql://me:hun@hunter2@host:5432/db", "postgresql://me:a%2Fhunter2%40@host/db", "oracle://me:a/hunter2@h/x",
        "postgresql://me:hunter2@[::1]:5432/db?sslpassword=hunter2",
    ],
)  # fmt: skip
def test_no_text_has_a_password_of_a_url(url: str) -> None:
    for text in (f"the tool sql:{url} cannot be made", f"could not log in: {unquote(url)}"):
        hidden = hide_passwords(text, url)
        assert "hunter2" not in hidden
        assert hidden.startswith(text[:20])
    with pytest.raises(ConfigurationError) as caught:
        load_tools([f"nothing.{url}"])
    assert "hunter2" not in str(caught.value)
