"""Answers questions about a folder of documents and a small database: this project's documentation and results.

    python examples/ask_our_docs.py "How many replies of the policy exact were correct, and what does it promise?"

A supervisor gives tasks to two specialists, and passes on what they find. One searches the documents by words and by
meaning and cites them by file and line, the other asks the database, which it cannot change.
"""

from __future__ import annotations

import json
import lzma
import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import build_supervisor, template

DOCS = Path(__file__).parents[1] / "docs"
QUESTION = "How many replies of the policy exact were correct, and what does the policy exact promise?"


def load_measurements(database: Path) -> None:
    """Put the rows of the measurements into a table."""
    measured = DOCS / "measurements" / "verifiers-gsm8k-30.jsonl.xz"
    with (
        closing(sqlite3.connect(database)) as connection,
        connection,
        lzma.open(measured, "rt", encoding="utf-8", newline="\n") as rows,
    ):
        connection.execute(
            "CREATE TABLE replies (policy TEXT, problem TEXT, is_correct INTEGER, seconds REAL, tokens INTEGER, "
            "steps INTEGER, accepted_steps INTEGER)"
        )
        for line in rows:
            row = json.loads(line)
            (call,) = row["calls"]
            values = [call["policy"], row["problem"], row["correct"], row["seconds"]]
            values += [call["output_tokens"], call["steps"], call["accepted"]]
            connection.execute("INSERT INTO replies VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def build(llm: Any, database: Path) -> Any:
    """The graph, on the documents and the database."""
    documents = template("tools", "search_documents").make_search_tool(DOCS, count=2)
    sql = template("tools", "sql").make_sql_tool(database)
    specialists = {"librarian": [documents], "statistician": [sql]}
    return build_supervisor(llm, specialists)


def main(question: str) -> None:
    """Answer a question."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "measurements.sqlite"
        load_measurements(database)
        with ChatLookahead(policies=template("graphs", "supervisor").POLICIES, temperature=0, max_tokens=200) as llm:
            *found, answer = build(llm, database).invoke({"messages": [("user", question)]})["messages"]
    for message in found:
        if message.type == "tool":
            print(f"{message.name}: {message.text}")
    print(f"\n{answer.text}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else QUESTION)
