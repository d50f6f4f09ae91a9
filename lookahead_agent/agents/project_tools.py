"""The tools that a new project can have: their sources, examples to use them on, and calls for a test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources


@dataclass(frozen=True)
class ProjectTool:
    """A tool that a project can have, and how its test calls it."""

    name: str
    source: str  # in `tools.py`, as Python
    question: str  # for it
    arguments: Mapping[str, str]  # of a call in the test
    result: str  # text in the call's result
    files: Mapping[str, str] = field(default_factory=dict)  # further files of the project, by path
    setup: str = ""  # lines of `tools.py` before the tools
    imports: Sequence[str] = ()  # that they need


_DATABASE = """
DATABASE = HERE / "shop.db"  # an example, made of shop.sql: put your own database here
if not DATABASE.exists():
    with closing(sqlite3.connect(DATABASE)) as connection:
        connection.executescript((HERE / "shop.sql").read_text(encoding="utf-8"))
"""


def _shop() -> str:
    return resources.files(__package__).joinpath("shop.sql").read_text("utf-8")


def project_tools() -> dict[str, ProjectTool]:
    """The tools that a project can have, by the words of `--tools`."""
    made = {
        "calculator": ProjectTool(
            "calculator",
            '"calculator"',
            "A bakery sells 24 trays of 18 rolls at $0.45 each. How much does it earn?",
            {"expression": "24 * 18 * 0.45"},
            "194.4",
        ),
        "sql": ProjectTool(
            "sql",
            'f"sql:{DATABASE}"',
            "How many sales are there in Porto?",
            {"statement": "SELECT count(*) FROM sales WHERE city = 'Porto'"},
            "13",
            {"shop.sql": _shop()},
            _DATABASE,
            ("import sqlite3", "from contextlib import closing"),
        ),
        "search_documents": ProjectTool(
            "search_documents",
            "f\"docs:{HERE / 'documents'}\"",
            "How long can goods be returned?",
            {"question": "returned goods"},
            "30 days",
            {"documents/returns.md": "# Returns\n\nGoods can be returned within 30 days. Opened tea cannot.\n"},
        ),
        "files": ProjectTool(
            "read_file",
            "f\"files:{HERE / 'files'}\"",
            "When is the delivery, according to notes.txt?",
            {"name": "notes.txt"},
            "Tuesday",
            {"files/notes.txt": "The delivery comes on Tuesday.\n"},
        ),
        "python": ProjectTool("python", '"python"', "What is the 20th prime number?", {"code": "print(6 * 7)"}, "42"),
        "http": ProjectTool(
            "http_get",
            '"http:example.org"',
            "What is the title of http://example.org/?",
            {"url": "http://localhost/"},
            "not allowed",
        ),
    }
    also = {"docs": "search_documents", "read_file": "files", "write_file": "files", "http_get": "http"}
    return made | {word: made[name] for word, name in also.items()}
