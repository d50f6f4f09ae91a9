"""The tool `sql` on a PostgreSQL server and on DuckDB."""

from __future__ import annotations

from pathlib import Path

import duckdb
import psycopg
import pytest

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
