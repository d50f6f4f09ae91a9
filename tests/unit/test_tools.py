"""Results and refusals of the agent's tools."""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from lookahead_agent.agents.tool_sources import load_tools
from lookahead_agent.errors import ConfigurationError
from tools.calculator import calculator
from tools.files import make_file_tools, read_text, write_text
from tools.http_get import HttpLimits, fetch, make_http_tool
from tools.python_code import make_python_tool, run_python
from tools.search_documents import make_search_tool
from tools.sql import SqlLimits, database_path, make_sql_tool, query, schema


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "shop.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE items (name TEXT, price REAL, picture BLOB)")
        rows = [(f"item {number}", number * 1.5, b"x" * 9) for number in range(100)]
        connection.executemany("INSERT INTO items VALUES (?, ?, ?)", rows)
    connection.close()
    return path


def test_sql_returns_rows_as_text(database: Path) -> None:
    assert query(database, "SELECT count(*) AS n, sum(price) FROM items") == "n | sum(price)\n100 | 7425.0"
    assert query(database, "SELECT 0.1 + 0.2, 1e300") == "0.1 + 0.2 | 1e300\n0.3 | 1e+300"
    assert query(database, "SELECT name FROM items LIMIT 2") == "name\nitem 0\nitem 1"
    assert query(database, "SELECT picture, NULL FROM items LIMIT 1") == "picture | NULL\n(9 bytes) | NULL"
    assert query(database, "SELECT name FROM items WHERE price < 0") == "name\n(no rows)"
    assert query(database, "SELECT name FROM items", SqlLimits(rows=2)).splitlines()[-1].startswith("(more than 2 rows")
    assert query(
        database, "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x+1 FROM n WHERE x<5) SELECT max(x) FROM n"
    )
    sql = make_sql_tool(database)
    assert sql.description.endswith("Its tables:\nitems(name TEXT, price REAL, picture BLOB)")
    assert sql.invoke({"statement": "SELECT max(price) FROM items"}) == "148.5"
    assert "no such column" in sql.invoke({"statement": "SELECT colour FROM items"})


def test_sql_errors_name_the_tables_of_a_column(tmp_path: Path) -> None:
    path = tmp_path / "music.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("""
            CREATE TABLE artist (id INTEGER, name TEXT);
            CREATE TABLE "album of" (id INTEGER, artist INTEGER, "the title" TEXT);
        """)
    sql = make_sql_tool(path)
    error = sql.invoke({"statement": 'SELECT ID FROM artist JOIN "album of" ON artist = artist.id'})
    assert error.endswith('ambiguous column name: ID (there are "album of".ID, artist.ID)')
    error = sql.invoke({"statement": 'SELECT a."the title" FROM artist a'})
    assert error.endswith('no such column: a.the title (there is "album of"."the title")')
    assert sql.invoke({"statement": "SELECT sold FROM artist"}).endswith("no such column: sold")


def test_schema_lists_tables_and_columns_without_indexes(tmp_path: Path) -> None:
    path = tmp_path / "shop.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript("""
            CREATE TABLE Employee (
                EmployeeId INTEGER NOT NULL, Name NVARCHAR(160), Salary NUMERIC(10,2) DEFAULT 0, Born DATETIME,
                CONSTRAINT PK_Employee PRIMARY KEY (EmployeeId)
            );
            CREATE INDEX IFK_EmployeeName ON Employee (Name);
            CREATE TABLE Customer (
                CustomerId INTEGER, RepId INTEGER, EmployeeId INTEGER, "order" TEXT, "two words",
                Twice AS (CustomerId * 2),
                CONSTRAINT FK_Rep FOREIGN KEY (RepId) REFERENCES Employee (EmployeeId) ON DELETE NO ACTION,
                FOREIGN KEY (EmployeeId) REFERENCES Employee (EmployeeId)
            );
            CREATE TABLE "group" (x REFERENCES Employee, "a""b\nc");
            CREATE VIEW Rich AS SELECT Name FROM Employee WHERE Salary > 100;
            CREATE VIEW Old AS SELECT Name FROM Gone;
        """)
    assert schema(path).splitlines() == [
        'Customer(CustomerId INTEGER, RepId INTEGER REFERENCES Employee(EmployeeId), EmployeeId INTEGER, "order" TEXT, '
        '"two words", Twice)',
        "Employee(EmployeeId INTEGER, Name, Salary NUMERIC, Born DATETIME)",
        "Old cannot be read: no such table: main.Gone",
        "Rich(Name)",
        '"group"(x REFERENCES Employee, "a""b c")',
    ]
    assert query(path, "SELECT name FROM pragma_table_info('group')") == 'name\nx\na"b c'


def test_long_schema_is_truncated_with_a_note(tmp_path: Path) -> None:
    path = tmp_path / "wide.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        columns = ", ".join(f"column_{number}" for number in range(300))
        connection.executescript(";".join(f"CREATE TABLE table_{number} ({columns})" for number in range(60)))
    shown = schema(path)
    assert 45_000 < len(shown) <= 50_000
    assert "FROM sqlite_master shows the others" in shown.splitlines()[-1]


VIRTUAL = """
    CREATE TABLE orders(id INTEGER PRIMARY KEY, tags JSON);
    INSERT INTO orders VALUES (1, '["tea","gift"]'), (2, '["coffee"]');
    CREATE VIRTUAL TABLE notes USING fts5(title, body);
    INSERT INTO notes VALUES ('one', 'green tea'), ('two', 'black coffee');
    CREATE VIRTUAL TABLE words USING fts5vocab('notes', 'row');
    CREATE VIRTUAL TABLE old USING fts4(body);
    INSERT INTO old VALUES ('green tea');
    CREATE VIRTUAL TABLE area USING rtree(id, low, high);
    INSERT INTO area VALUES (1, 0, 10), (2, 20, 30);
"""


def test_virtual_tables_are_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "virtual.sqlite"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.executescript(VIRTUAL)
    before = path.read_bytes()
    assert "notes(title, body)\nold(body)\n" in schema(path)
    assert "area(id INT, low REAL, high REAL)" in schema(path)
    for statement, result in (
        ("SELECT o.id FROM orders o, json_each(o.tags) t WHERE t.value = 'tea'", "1"),
        ("SELECT count(*) FROM orders, json_tree(tags) WHERE type = 'text'", "3"),
        ("SELECT title FROM notes('coffee') ORDER BY rank", "two"),
        ("SELECT highlight(notes, 1, '<', '>') FROM notes WHERE notes MATCH 'tea'", "green <tea>"),
        ("SELECT count(*) FROM words", "6"),
        ("SELECT offsets(old) FROM old WHERE body MATCH 'tea'", "0 0 6 3"),
        ("SELECT id FROM area WHERE low > 5", "2"),
        ("SELECT count(*) FROM pragma_table_info('orders')", "2"),
        ("PRAGMA user_version", "0"), ("SELECT 7\n```", "7"), ("sql\nSELECT 7", "7"), ("\ufeffSELECT 7", "7"),
        ("```sql\nSELECT 7\n```", "7"), ("`SELECT 7`", "7"), ("SQL: SELECT 7", "7"), ("Query:\n```\nSELECT 7", "7"),
    ):  # fmt: skip
        assert query(path, statement) == result, statement
    with pytest.raises(ValueError, match=r"ambiguous column name: id \(there are area\.id, orders\.id\)$"):
        query(path, "SELECT id FROM orders, area")  # the tables in which SQLite keeps an index have an "id" too
    for statement in (
        "INSERT INTO notes(notes) VALUES ('rebuild')", "SELECT optimize(old) FROM old", "DELETE FROM area_node",
        "UPDATE sqlite_master SET sql = ''", "PRAGMA user_version = 5", "SELECT * FROM pragma_user_version(5)",
        "SELECT * FROM pragma_database_list", "PRAGMA hard_heap_limit = 0", "CREATE VIRTUAL TABLE z USING fts5(a)",
        "WITH x AS (SELECT 1) DELETE FROM orders", "SELECT rtreecheck('area')", "SELECT fts3_tokenizer('simple')",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"only SELECT|SQLite says"):
            query(path, statement)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["virtual.sqlite"])


def test_a_database_is_named_by_its_path_or_url(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(database.parent)
    monkeypatch.setenv("HOME", str(database.parent))
    name = database.name
    for address in (
        name, f"~/{name}", f"sqlite:///{name}", f"sqlite:///{database}", f"sqlite+pysqlite:///{name}?timeout=5",
        f"sqlite:///file:{name}?mode=ro&uri=true", f"file:{name}?mode=ro", f"file://{database}", f"file:%73{name[1:]}",
    ):  # fmt: skip
        assert database_path(address).resolve() == database.resolve(), address
        assert make_sql_tool(address).invoke({"statement": "SELECT count(*) FROM items"}) == "100"
    for address in ("postgresql://u:pass-w0rd@none.invalid/shop", "oracle://u:pass-w0rd@db/shop"):
        with pytest.raises(ValueError, match="SQLite") as caught:
            make_sql_tool(address)
        with pytest.raises(ConfigurationError, match="SQLite") as outer:
            load_tools([f"sql:{address}"])
        assert "pass-w0rd" not in f"{caught.value} {outer.value}"
    for address in ("sqlite://", "sqlite:///:memory:"):
        with pytest.raises(ValueError, match="names no file"):
            make_sql_tool(address)


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM items",
        "INSERT INTO items VALUES ('x', 1, NULL)",
        "UPDATE items SET price = 0",
        "DROP TABLE items",
        "CREATE TABLE other (x)",
        "CREATE TEMP TABLE other (x)",
        "ATTACH DATABASE 'other.sqlite' AS other",
        "ATTACH ':memory:' AS m",
        "PRAGMA writable_schema = 1",
        "PRAGMA journal_mode = DELETE",
        "VACUUM INTO 'copy.sqlite'",
        "SELECT load_extension('evil')",
        "BEGIN; DELETE FROM items",
        "SELECT 1; DROP TABLE items",
        "REINDEX",
        "",
    ],
)
def test_sql_changes_nothing(database: Path, statement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(database.parent)
    with pytest.raises(ValueError, match=r"only SELECT|one statement|SQLite says"):
        query(database, statement)
    assert query(database, "SELECT count(*) FROM items") == "100"
    assert os.listdir(database.parent) == ["shop.sqlite"]


def test_endless_sql_is_stopped_at_the_time_limit(database: Path) -> None:
    endless = "WITH RECURSIVE n(x) AS (VALUES(1) UNION ALL SELECT x+1 FROM n) SELECT sum(x) FROM n"
    with pytest.raises(ValueError, match=r"more than 0\.2 s"):
        query(database, endless, SqlLimits(seconds=0.2))


def test_sql_tool_raises_for_a_missing_or_invalid_database(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no database"):
        make_sql_tool(tmp_path / "none.sqlite")
    (tmp_path / "text.sqlite").write_text("hello " * 100)
    with pytest.raises(ValueError, match="not a SQLite database"):
        make_sql_tool(tmp_path / "text.sqlite")


def test_read_only_hint_is_false_only_for_tools_that_write(tmp_path: Path, database: Path) -> None:
    (tmp_path / "a.md").write_text("tea")
    tools = [
        calculator, make_sql_tool(database), make_search_tool(tmp_path), make_http_tool(["example.org"]),
        *make_file_tools(tmp_path), make_python_tool(isolation="none"),
    ]  # fmt: skip
    hints = {tool.name: (tool.metadata or {})["readOnlyHint"] for tool in tools}
    assert [name for name, read_only in hints.items() if not read_only] == ["write_file", "python"]


@pytest.mark.parametrize("suffixes", [("",), ("", "-wal", "-shm"), ("", "-wal"), None])
def test_databases_in_wal_mode_are_read_without_files_beside_them(
    suffixes: tuple[str, ...] | None, tmp_path: Path
) -> None:
    """A database that its program has closed, or has left after a crash, or after one without `-shm`, or still has."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with contextlib.closing(sqlite3.connect((folder if suffixes is None else tmp_path) / "a.db")) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE t (x)")
        connection.execute("INSERT INTO t VALUES (1), (2)")
        connection.commit()
        if suffixes == ("",):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        for suffix in suffixes or ():
            shutil.copy(tmp_path / f"a.db{suffix}", folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        folder.chmod(0o555)
        try:
            assert (query(folder / "a.db", "SELECT sum(x) FROM t"), schema(folder / "a.db")) == ("3", "t(x)")
        finally:
            folder.chmod(0o755)
        after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after.keys() == before.keys()
    assert suffixes is None or after == before


def test_file_tools_read_and_write_text_files(tmp_path: Path) -> None:
    read, write = make_file_tools(tmp_path)
    assert write.invoke({"name": "notes/plan.md", "text": "one\ntwo\nthree"}) == "wrote 13 bytes to notes/plan.md"
    assert read.invoke({"name": "notes/plan.md"}) == "one\ntwo\nthree"
    assert read_text(tmp_path, "notes/plan.md", 2, 1) == "two\n(1 more lines)"
    assert "notes/" in read.invoke({"name": "missing.txt"})
    assert "is a folder; it has plan.md" in read.invoke({"name": "notes"})
    (tmp_path / "picture").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in read.invoke({"name": "picture"})
    assert "longer than" in write.invoke({"name": "big", "text": "x" * (2 << 20)})
    with pytest.raises(ValueError, match="no folder"):
        make_file_tools(tmp_path / "nowhere")
    assert "has 3 lines: there is none from first_line=4 on" in read.invoke({"name": "notes/plan.md", "first_line": 4})
    late = read.invoke({"name": "notes/plan.md", "first_line": 3, "first_character": 6})
    assert "has 5 characters from first_line=3 on" in late


def test_half_a_character_is_written_nowhere(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"the text: character 1 is the lone surrogate U\+D800, half"):
        write_text(tmp_path, "a.txt", "é\ud800")
    with pytest.raises(ConfigurationError, match=r"the code: character 7 is the lone surrogate U\+D800, half"):
        run_python("print('\ud800')", isolation="none")
    assert list(tmp_path.iterdir()) == []


def test_files_keep_their_line_ends(tmp_path: Path) -> None:
    read, write = make_file_tools(tmp_path)
    path = tmp_path / "f.txt"
    for data in (b"a\r\nb\r\n", b"a\nb\n", b"a\r\nb\n", b"a\nb", b"a\r\nb", b"a\n\n\n", b"a\rb", b""):
        path.write_bytes(data)
        write.invoke({"name": "f.txt", "text": read.invoke({"name": "f.txt"})})
        assert path.read_bytes() == data
    path.write_bytes(b"a\r\nb\r\n")
    assert write.invoke({"name": "f.txt", "text": "a\nc\n"}) == "wrote 6 bytes to f.txt"
    assert path.read_bytes() == b"a\r\nc\r\n", "a model writes line feeds only"
    path.write_bytes(b"a\rb\rc\r")  # as on old Macs
    assert read_text(tmp_path, "f.txt", 2, 1) == "b\r(1 more lines)"
    assert "has 3 lines: there is none from first_line=4 on" in read.invoke({"name": "f.txt", "first_line": 4})
    assert write.invoke({"name": "f.txt", "text": "a\nd"}) == "wrote 3 bytes to f.txt"
    assert path.read_bytes() == b"a\rd"


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/../../secret", "link/secret", "direct", "", ".", "a\0b", "~/../../x/../.."]
)
def test_file_tools_refuse_paths_outside_the_folder(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("hidden")
    (root / "link").symlink_to(tmp_path)
    (root / "direct").symlink_to(tmp_path / "secret")
    for attempt in (lambda: read_text(root, name), lambda: write_text(root, name, "overwritten")):
        with pytest.raises(ValueError, match=r"outside|needs a name"):
            attempt()
    assert (tmp_path / "secret").read_text() == "hidden"


Handler = Callable[[httpx.Request], httpx.Response]
PUBLIC = "93.184.216.34"


def streamed(response: httpx.Response) -> httpx.Response:
    """A response with an unread stream: httpx reads `content` at once."""
    return httpx.Response(response.status_code, headers=response.headers, stream=httpx.ByteStream(response.content))


def get(url: str, handler: Handler, address: str = PUBLIC, limits: HttpLimits | None = None) -> str:
    allowed = ["example.org", ".example.com", "127.0.0.1", "localhost", "[::1]", "::1"]
    return fetch(
        url,
        allowed,
        limits,
        resolving=lambda *_: [address],
        transport=httpx.MockTransport(lambda request: streamed(handler(request))),
    )


def test_pages_are_fetched_as_text() -> None:
    page = "<html><head><title>x</title></head><body><script>evil()</script><h1>Tea</h1><p>Leaves &amp; water.</p>"
    requests: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, html=page)

    assert get("https://example.org/tea?x=1", handler) == "# x\n\n# Tea\n\nLeaves & water."
    assert requests[0].url.host == PUBLIC, "the request goes to the address that was checked"
    assert requests[0].headers["Host"] == "example.org"
    assert requests[0].extensions["sni_hostname"] == "example.org"
    assert get("http://www.example.com/", lambda _: httpx.Response(200, json={"a": 1})) == '{"a":1}'
    assert get(
        "http://example.org", lambda _: httpx.Response(200, text="x" * 99), limits=HttpLimits(text=9)
    ).startswith("x" * 9 + "\n")


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "0.0.0.0",
        "::1",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:127.0.0.1",
        "224.0.0.1",
        "100.64.0.1",
    ],
)
def test_private_addresses_are_not_fetched(address: str) -> None:
    with pytest.raises(ValueError, match="private address"):
        get("http://example.org/", lambda _: httpx.Response(200, text="secret"), address)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://evil.org/", "not allowed"),
        ("http://example.org.evil.org/", "not allowed"),
        ("http://notexample.com/", "not allowed"),
        ("http://example.org@evil.org/", "user name"),
        ("http://user:pass@example.org/", "user name"),
        ("file:///etc/passwd", "not an http"),
        ("gopher://example.org/", "not an http"),
        ("example.org", "not an http"),
        ("http://example.org:99999/", "port"),
    ],
)
def test_urls_with_another_host_scheme_or_user_raise(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get(url, lambda _: httpx.Response(200, text="secret"))


def test_localhost_is_refused_even_if_it_is_allowed() -> None:
    tool = make_http_tool(["localhost", "localhost:1"])
    for port in ("", ":80", ":443", ":1"):
        assert "private address" in tool.invoke({"url": f"http://localhost{port}/"})
    assert "not allowed at the port 2" in tool.invoke({"url": "http://localhost:2/"})
    with pytest.raises(ValueError, match="name the hosts"):
        make_http_tool([])


def test_redirects_are_checked_like_the_first_url() -> None:
    def redirect_to(location: str) -> Handler:
        return lambda request: (
            httpx.Response(302, headers={"Location": location})
            if request.url.path == "/start"
            else httpx.Response(200, text="arrived")
        )

    assert get("http://example.org/start", redirect_to("/end")) == "arrived"
    for location in ("http://evil.org/", "file:///etc/passwd"):
        with pytest.raises(ValueError, match=r"not allowed|not an http"):
            get("http://example.org/start", redirect_to(location))
    with pytest.raises(ValueError, match="redirects"):
        get("http://example.org/start", redirect_to("/start"))


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(404), "answered 404 Not Found"),
        (httpx.Response(422, json={"detail": "city is missing"}), 'answered 422 .*: {"detail":"city is missing"}'),
        (httpx.Response(403, html="<p>Sign <b>in</b>.</p>"), r"answered 403 Forbidden: Sign \*\*in\*\*\."),
        (httpx.Response(500, content=b"\x89PNG", headers={"Content-Type": "image/png"}), "500 Internal Server Error$"),
        (httpx.Response(200, content=b"x" * 2000), "longer than 1000 bytes"),
        (httpx.Response(404, text="no such city" + "." * 2000), r"answered 404 Not Found: no such city\.\.\."),
        (httpx.Response(404, content=b"why", headers={"Content-Type": "application/octet-stream"}), "Not Found: why$"),
        (
            httpx.Response(200, content=b"%PDF-1.7\n", headers={"Content-Type": "application/pdf"}),
            "pdf, which is not text",
        ),
        (httpx.Response(200, content=b"PK\0", headers={"Content-Type": "application/zip"}), "zip, which is not text"),
        (httpx.Response(200, content=b"x", headers={"Content-Type": "image/png"}), "image/png"),
    ],
)
def test_unusable_responses_raise(response: httpx.Response, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get("http://example.org/", lambda _: response, limits=HttpLimits(size=1000))


@pytest.mark.parametrize(
    ("html", "text"),
    [
        ("<table><tr><th>Year<th>2024<tr><td>Sales<td>12</table>", "| Year | 2024 |\n| --- | --- |\n| Sales | 12 |"),
        ("<select><option>2024<option>2025</select><button>Next</button><button>Back</button>", "2024 2025 Next Back"),
        ("<p>10<sup>6</sup>", "10^6^"),
        ("<a href='next?page=2'>Next</a>", "[Next](http://example.org/a/next?page=2)"),
        ("<title>Report</title><p>x", "# Report\n\nx"),
        ("<img src=/a.png alt='7 %'>", "![7 %](http://example.org/a.png)"),
        ("<ul><li>12<li>34</ul>", "12\n34"),
        (
            "<style>.h{display:none} .m{display:none} @media print{.m{display:block}}</style><p class=h>1<p hidden>2"
            "<p style='display:none'>3<p style='visibility: hidden'>4<input type=hidden value=5><p class=m>Tea.",
            "Tea.",
        ),
        (
            "<style>p.k, .a.b{display:none}</style><p class=k>1<p class='a b'>2<canvas>3</canvas><video>4</video>"
            "<datalist><option>5</datalist><p style='position:absolute;left:-9999px'>6<p style='opacity:0'>7"
            "<p class=a>x",
            "x",
        ),
        (
            "<style>@import 'a'; .a .b, .a > i:first-child {display:none} .u{ color:red; .v{display:none} }"
            ".s{visibility:hidden} .s .t{visibility:visible} #n{display:none!important} .a .b::before{display:block}"
            "@media screen{ [lang=xx] ~ em{display:none</style><div class=a><i>1</i><p class=b>2</p></div><div class=u>"
            "<b class=v>3</b></div><p class=s>4</p><p class=s><b class=t>Tea</b></p><p id=n style=display:block>5</p>"
            "<p lang=xx></p><em>6</em>",
            "**Tea**",
        ),
        (
            "<style>.a .b{display:none} div.a p.b{display:block} @media print{p{display:none}} html{visibility:hidden}"
            "@supports (x:y){.a .b{display:none!important}} @media (min-width:9px){.c{display:block}} p.c{display:none}"
            ".a .d{display:none}</style><style media=print>.b{display:none}</style><!-- <style>p{display:none}</style>"
            "--><div class=a><p class=b>1</p><p class=d style=display:block>2</p></div><p class=b>3</p>",
            "1\n\n2\n\n3",
        ),
    ],
)
def test_pages_become_markdown(html: str, text: str) -> None:
    assert " ".join(get("http://example.org/a/b", lambda _: httpx.Response(200, html=html)).split(" ")) == text


@pytest.mark.parametrize(
    "kind",
    ["application/ld+json", "application/rss+xml", "application/atom+xml", "application/yaml", "text/yaml",
     "application/x-ndjson", "application/problem+json", "application/toml", "text/csv", "application/x-python",
     "application/vnd.oai.openapi", "application/octet-stream", "application/vnd.github.raw", "message/rfc822", ""],
)  # fmt: skip
def test_types_of_text_are_shown_as_they_are(kind: str) -> None:
    response = httpx.Response(200, content=b"a: <b>1</b>", headers={"Content-Type": kind})
    assert get("http://example.org/", lambda _: response) == "a: <b>1</b>"


def test_pages_declare_their_encoding_and_their_end() -> None:
    for page in ("<meta charset=latin1><p>Köln", "<meta http-equiv=x content='text/html; charset=latin1'><p>Köln"):
        response = httpx.Response(200, content=page.encode("latin1"), headers={"Content-Type": "text/html"})
        assert get("http://example.org/", lambda _, response=response: response) == "Köln"
    for data in ("Köln".encode("cp1252"), "Köln".encode()):  # as browsers read a page that names no encoding
        response = httpx.Response(200, content=data, headers={"Content-Type": "text/plain"})
        assert get("http://example.org/", lambda _, response=response: response) == "Köln"
    with pytest.raises(ValueError, match="has 3 characters: there is none from first_character=9 on"):
        fetch(
            "http://example.org", ["example.org"], first_character=9, resolving=lambda *_: [PUBLIC],
            transport=httpx.MockTransport(lambda _: streamed(httpx.Response(200, text="abc"))),
        )  # fmt: skip


def test_connect_timeout_raises() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectTimeout("timed out")

    with pytest.raises(ValueError, match="cannot be reached: the time is over"):
        get("http://example.org/", handler)
