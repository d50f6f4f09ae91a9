"""States of graphs in SQLite and in a PostgreSQL server that the test starts."""

from __future__ import annotations

import datetime
import decimal
import json
import os
import pwd
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import ormsgpack
import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

from graphs.react import build_react
from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.agents.new_project import project_files
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.testing import scripted_chat, scripted_replies
from tests.unit.test_graphs import notes, write_note


def program(name: str) -> str:
    """A program of PostgreSQL, which Debian does not put on the path."""
    found = shutil.which(name) or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None
    )
    assert found is not None, "`make test` installs PostgreSQL"
    return found


def not_root() -> Callable[[], None] | None:
    """What makes a child process another user: PostgreSQL refuses to be root."""
    if os.getuid() != 0:
        return None
    user = pwd.getpwnam("postgres")

    def change() -> None:
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)

    return change


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a database in a server of its own, reached by a socket in its folder."""
    folder = Path("/tmp") / f"lookahead-postgres-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    data = folder / "data"

    def pg(name: str, *arguments: str) -> None:
        command = [program(name), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, preexec_fn=not_root())

    try:
        pg("initdb", "-D", str(data), "-U", "tester", "--auth=trust", "--no-sync")
        options = f"-k {folder} -c listen_addresses='' -c fsync=off"
        pg("pg_ctl", "-D", str(data), "-o", options, "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql://tester@/postgres?host={folder}"
        finally:
            pg("pg_ctl", "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ask_and_resume(place: str | Path) -> None:
    """A run that waits for an answer goes on from what was kept."""
    notes.clear()
    decisions = ['{"name": "write_note", "arguments": {"text": "tea"}}', '{"name": "ready_to_answer", "arguments": {}}']
    script: dict[str, Any] = {"You think": "I write it down.", "You carry out": decisions, "You answer": "Done."}
    llm = scripted_chat(scripted_replies(**script))
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    with checkpointer(place) as saver:
        graph = build_react(llm, [write_note], saver, ask_before=["write_note"])
        assert graph.invoke({"messages": [("human", "Note it.")]}, config)["__interrupt__"]
        assert notes == []
    with checkpointer(place) as saver:  # another process, as far as the graph can tell
        graph = build_react(llm, [write_note], saver, ask_before=["write_note"])
        resume: Any = Command(resume={"decisions": [{"type": "approve"}]})
        assert graph.invoke(resume, config)["messages"][-1].text == "Done."
    assert notes == ["tea"]


def test_sqlite(tmp_path: Path) -> None:
    ask_and_resume(tmp_path / "deep" / "checkpoints.sqlite")


def test_postgres(database: str) -> None:
    ask_and_resume(database)


class Finding(BaseModel):
    """A type of a user's own state."""

    text: str


@dataclass
class Place:
    """Another."""

    page: int


class Notes(TypedDict):
    found: Any


def runs(command: str) -> ormsgpack.Ext:
    """What a state holds where reading it is to run a command."""
    return ormsgpack.Ext(0, ormsgpack.packb(("os", "system", command)))


def crafted(state: bytes, command: str) -> bytes:
    """A kept state in which a value is such a thing."""
    found = ormsgpack.unpackb(state, ext_hook=lambda code, data: ormsgpack.Ext(code, data))
    found["channel_values"]["found"] = [runs(command)]
    return ormsgpack.packb(found)


def remembering(saver: Any) -> Any:
    builder = StateGraph(Notes)
    builder.add_node("look", lambda state: {"found": state["found"]})
    builder.add_edge(START, "look")
    builder.add_edge("look", END)
    return builder.compile(checkpointer=saver)


CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}


def test_a_crafted_file_runs_no_code(tmp_path: Path) -> None:
    file, marker = tmp_path / "c.sqlite", tmp_path / "marker"
    with checkpointer(file) as saver:
        remembering(saver).invoke({"found": "tea"}, CONFIG)
    with closing(sqlite3.connect(file)) as connection:
        for key, state in connection.execute("SELECT rowid, checkpoint FROM checkpoints").fetchall():
            connection.execute(
                "UPDATE checkpoints SET checkpoint = ? WHERE rowid = ?", (crafted(state, f"touch {marker}"), key)
            )
        connection.execute("UPDATE writes SET type = 'msgpack', value = ?", (ormsgpack.packb(runs(f"touch {marker}")),))
        connection.commit()
    with checkpointer(file) as saver:
        graph = remembering(saver)
        assert graph.get_state(CONFIG).values == {"found": [f"touch {marker}"]}
        assert list(graph.get_state_history(CONFIG))
        graph.invoke({"found": "more"}, CONFIG)
    assert not marker.exists()
    with SqliteSaver.from_conn_string(str(file)) as lax:  # what LangGraph does by itself, or this shows nothing
        list(lax.list(CONFIG))
    assert marker.exists()


def test_a_crafted_database_runs_no_code(database: str, tmp_path: Path) -> None:
    import psycopg

    marker = tmp_path / "marker"
    with checkpointer(database) as saver:
        remembering(saver).invoke({"found": ["tea"]}, CONFIG)  # a list is kept in a blob of its own
    with psycopg.connect(database) as connection:
        state = ormsgpack.packb([runs(f"touch {marker}")])
        changed = connection.execute(
            "UPDATE checkpoint_blobs SET type = 'msgpack', blob = %s WHERE channel = 'found' AND thread_id = 't'",
            (state,),
        )
        assert changed.rowcount
    with checkpointer(database) as saver:
        assert remembering(saver).get_state(CONFIG).values == {"found": [f"touch {marker}"]}
    assert not marker.exists()


VALUES = [
    HumanMessage("How?"),
    AIMessage("So.", tool_calls=[{"name": "f", "args": {"x": 1}, "id": "1"}]),
    Document("text", metadata={"page": 1}),
    datetime.date(2025, 1, 1),
    decimal.Decimal("1.5"),
    {"a", "b"},
    Path("a/b"),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_states_hold_comes_back(value: Any, tmp_path: Path) -> None:
    with checkpointer(tmp_path / "c.sqlite") as saver:
        graph = remembering(saver)
        graph.invoke({"found": value}, CONFIG)
        assert graph.get_state(CONFIG).values["found"] == value


def test_types_of_ones_own_come_back_if_they_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite"
    found = [Finding(text="tea"), Place(3)]
    with checkpointer(file, allow=[Finding, Place]) as saver:
        graph = remembering(saver)
        graph.invoke({"found": found}, CONFIG)
        assert graph.get_state(CONFIG).values["found"] == found
    with checkpointer(file) as saver:
        assert remembering(saver).get_state(CONFIG).values["found"] == [{"text": "tea"}, {"page": 3}]


def test_the_projects_of_the_langgraph_server_are_as_strict() -> None:
    own = json.loads((Path(__file__).parents[2] / "langgraph.json").read_text(encoding="utf-8"))
    new = json.loads(project_files("x", "react")["langgraph.json"])
    for settings in (own, new):
        assert settings["env"]["LANGGRAPH_STRICT_MSGPACK"] == "true"
        assert settings["checkpointer"]["serde"] == {"allowed_msgpack_modules": None, "pickle_fallback": False}


def test_an_error_of_the_run_is_not_one_of_the_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), checkpointer(tmp_path / "c.sqlite"):
        raise BrokenPipeError


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for text in ("x", "not a database, but long enough to be looked at as one" * 20):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"notes\.txt"), checkpointer(file):
            pytest.fail("opened")
        assert file.read_text() == text
    file.write_text("")
    with checkpointer(file):
        pass


def test_a_database_that_is_not_there_and_its_password(tmp_path: Path) -> None:
    address = f"postgresql://somebody:secret@/nowhere?host={tmp_path}"
    with pytest.raises(ConfigurationError, match="cannot be kept in the database") as raised, checkpointer(address):
        pytest.fail("opened")
    assert "secret" not in str(raised.value)


def test_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with (
        pytest.raises(MissingExtraError, match=r"lookahead-agent\[postgres\]"),
        checkpointer("postgresql://localhost/x"),
    ):
        pytest.fail("opened")


def test_a_chunk_in_a_state_is_one_again_and_its_call_is_not_completed(tmp_path: Path) -> None:
    begun = '<tool_call>{"name": "write_note", "arguments": {"text": "ab'
    llm = scripted_chat(begun, policy="off").bind_tools([write_note])

    def stream(state: dict[str, Any]) -> dict[str, Any]:
        first, *others = llm.stream("q")
        return {"reply": sum(others, first)}

    graph = StateGraph(_Streamed).add_node("stream", stream).add_edge(START, "stream")
    thread: RunnableConfig = {"configurable": {"thread_id": "1"}}
    with checkpointer(tmp_path / "states.sqlite") as saver:
        graph.compile(checkpointer=saver).invoke({"reply": None}, thread)
    with checkpointer(tmp_path / "states.sqlite") as saver:
        reply = graph.compile(checkpointer=saver).get_state(thread).values["reply"]
    assert isinstance(reply, AIMessageChunk)
    assert (reply.tool_calls, len(reply.invalid_tool_calls)) == ([], 1)


class _Streamed(TypedDict):
    reply: Any
