"""Checkpoints of graphs in SQLite and in a PostgreSQL server that a fixture starts."""

from __future__ import annotations

import asyncio
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
from langchain_core.tools import tool
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from pydantic import BaseModel

from graphs.react import build_react
from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.agents.new_project import project_files
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.testing import scripted_chat, scripted_replies

notes: list[str] = []


@tool
def write_note(text: str) -> str:
    """Write a note."""
    notes.append(text)
    return "written"


def program(name: str) -> str:
    """Return the path of a PostgreSQL program; Debian does not add its folder to PATH."""
    found = shutil.which(name) or next(
        (str(path) for path in sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))), None
    )
    assert found is not None, "`make test` installs PostgreSQL"
    return found


def drop_root() -> Callable[[], None] | None:
    """Return a `preexec_fn` that drops root, which PostgreSQL refuses to run as; None for other users."""
    if os.getuid() != 0:
        return None
    user = pwd.getpwnam("postgres")

    def set_user() -> None:
        os.setgid(user.pw_gid)
        os.setuid(user.pw_uid)

    return set_user


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a database in a temporary server, which listens on a Unix socket in its folder."""
    folder = Path("/tmp") / f"lookahead-postgres-{os.getpid()}"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    data = folder / "data"

    def pg(name: str, *arguments: str) -> None:
        command = [program(name), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=folder, preexec_fn=drop_root())

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


def interrupt_and_resume(storage: str | Path) -> None:
    """Interrupt a run for an approval and resume it from its checkpoint."""
    notes.clear()
    decisions = ['{"name": "write_note", "arguments": {"text": "tea"}}', '{"name": "ready_to_answer", "arguments": {}}']
    script: dict[str, Any] = {"You think": "I write it down.", "You carry out": decisions, "You answer": "Done."}
    llm = scripted_chat(scripted_replies(**script))
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    with checkpointer(storage) as saver:
        graph = build_react(llm, [write_note], saver, ask_before=["write_note"])
        assert graph.invoke({"messages": [("human", "Note it.")]}, config)["__interrupt__"]
        assert notes == []
    with checkpointer(storage) as saver:  # a new connection, as in another process
        graph = build_react(llm, [write_note], saver, ask_before=["write_note"])
        resume: Any = Command(resume={"decisions": [{"type": "approve"}]})
        assert graph.invoke(resume, config)["messages"][-1].text == "Done."
    assert notes == ["tea"]


def test_interrupted_run_resumes_from_sqlite(tmp_path: Path) -> None:
    interrupt_and_resume(tmp_path / "deep" / "checkpoints.sqlite")


def test_interrupted_run_resumes_from_postgres(database: str) -> None:
    interrupt_and_resume(database)


def count_in_threads_and_loops(storage: str | Path) -> None:
    """Run one thread of a graph in `invoke` and in `ainvoke` of several event loops, with one saver."""
    with checkpointer(storage) as saver:
        builder = StateGraph(Counted)
        builder.add_node("add", lambda state: {"count": state["count"] + 1})
        builder.add_edge(START, "add")
        graph: Any = builder.compile(checkpointer=saver)
        config: RunnableConfig = {"configurable": {"thread_id": "counted"}}

        async def step() -> int:
            found = await graph.ainvoke({}, config)
            assert (await graph.aget_state(config)).values == found
            history = [state async for state in graph.aget_state_history(config)]
            assert len(history) == 3 * found["count"]  # an input, the node, and its end
            others = [{"configurable": {"thread_id": f"{found}-{number}"}} for number in range(5)]
            await asyncio.gather(*(graph.ainvoke({"count": 0}, other) for other in others))
            await asyncio.gather(*(saver.adelete_thread(other["configurable"]["thread_id"]) for other in others))
            assert [state async for state in graph.aget_state_history(others[0])] == []
            return int(found["count"])

        graph.invoke({"count": 0}, config)
        assert [asyncio.run(step()), asyncio.run(step())] == [2, 3]
        states = graph.get_state_history(config)
        assert next(states).values == {"count": 3}
        assert graph.invoke({}, config) == {"count": 4}, "a history that is half read holds no lock"
        asyncio.run(graph.aupdate_state(config, {"count": 9}))
        assert graph.get_state(config).values == {"count": 9}
        saver.delete_thread("counted")
    with pytest.raises(ConfigurationError, match=r"checkpoints in .* cannot be used"):
        asyncio.run(saver.aget_tuple(config))


class Counted(TypedDict):
    count: int


def test_one_saver_serves_invoke_and_ainvoke_in_sqlite(tmp_path: Path) -> None:
    count_in_threads_and_loops(tmp_path / "c.sqlite")


def test_one_saver_serves_invoke_and_ainvoke_in_postgres(database: str) -> None:
    count_in_threads_and_loops(database)


def test_reading_of_checkpoints_leaves_the_event_loop_free(tmp_path: Path) -> None:
    with checkpointer(tmp_path / "c.sqlite") as saver:

        async def read() -> None:
            with saver.lock:  # type: ignore[attr-defined]
                reading = asyncio.create_task(saver.aget_tuple(CONFIG))
                await asyncio.sleep(0)  # would never return if the call took the lock here
                assert not reading.done()
            assert await reading is None

        asyncio.run(read())


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE checkpoints SET checkpoint = x'00'",
        "UPDATE checkpoints SET checkpoint = x'c1c1c1'",
        "UPDATE checkpoints SET checkpoint = x'80'",  # an empty mapping
        "UPDATE checkpoints SET checkpoint = x'93010203'",  # a list
        "UPDATE checkpoints SET checkpoint = NULL",
        "UPDATE checkpoints SET checkpoint = 7",
        "UPDATE checkpoints SET type = 'nothing'",
        "UPDATE checkpoints SET metadata = x'ff'",
        "UPDATE checkpoints SET metadata = '[1]'",
        "UPDATE writes SET value = x'c1'",
        "DROP TABLE writes",
    ],
)
def test_damaged_checkpoint_is_one_clear_error(statement: str, tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite"
    with checkpointer(file) as saver:
        graph_with(saver).invoke({"found": "tea"}, CONFIG)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(statement)
        connection.commit()
    with checkpointer(file) as saver:
        graph = graph_with(saver)
        if statement.startswith("DROP"):
            graph.invoke({"found": "tea"}, CONFIG)  # the tables of a new file are created
            return
        # Only the history reads the writes of earlier steps.
        reads: list[Callable[[], Any]] = [lambda: list(graph.get_state_history(CONFIG))]
        if "writes" not in statement:
            reads += [lambda: graph.get_state(CONFIG), lambda: graph.invoke({"found": "more"}, CONFIG)]
            reads += [lambda: asyncio.run(graph.aget_state(CONFIG))]
        for read in reads:
            with pytest.raises(ConfigurationError, match=r"a checkpoint in .*c\.sqlite is damaged; delete its thread"):
                read()
        saver.delete_thread("t")
        assert graph.invoke({"found": "more"}, CONFIG) == {"found": "more"}


def test_damaged_pages_of_a_file_are_one_clear_error(tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite"
    with checkpointer(file) as saver:
        graph_with(saver).invoke({"found": "tea" * 10_000}, CONFIG)
    content = file.read_bytes()
    for damaged in (content[:5000], content[:4096] + b"\x0d" + os.urandom(len(content) - 4097), content[:100]):
        file.write_bytes(damaged)
        with pytest.raises(ConfigurationError, match=r"c\.sqlite"), checkpointer(file) as saver:
            graph_with(saver).invoke({"found": "more"}, CONFIG)


class Finding(BaseModel):
    """A Pydantic model in the state of a user."""

    text: str


@dataclass
class Place:
    """A dataclass in the state of a user."""

    page: int


class Notes(TypedDict):
    found: Any


def exploit(command: str) -> ormsgpack.Ext:
    """A msgpack extension that runs a command if it is decoded unchecked."""
    return ormsgpack.Ext(0, ormsgpack.packb(("os", "system", command)))


def crafted(stored: bytes, command: str) -> bytes:
    """A checkpoint with such an extension in a channel."""
    checkpoint = ormsgpack.unpackb(stored, ext_hook=lambda code, data: ormsgpack.Ext(code, data))
    checkpoint["channel_values"]["found"] = [exploit(command)]
    return ormsgpack.packb(checkpoint)


def graph_with(saver: Any) -> Any:
    builder = StateGraph(Notes)
    builder.add_node("look", lambda state: {"found": state["found"]})
    builder.add_edge(START, "look")
    builder.add_edge("look", END)
    return builder.compile(checkpointer=saver)


CONFIG: RunnableConfig = {"configurable": {"thread_id": "t"}}


def test_crafted_sqlite_checkpoint_runs_no_code(tmp_path: Path) -> None:
    file, marker = tmp_path / "c.sqlite", tmp_path / "marker"
    with checkpointer(file) as saver:
        graph_with(saver).invoke({"found": "tea"}, CONFIG)
    with closing(sqlite3.connect(file)) as connection:
        for key, state in connection.execute("SELECT rowid, checkpoint FROM checkpoints").fetchall():
            connection.execute(
                "UPDATE checkpoints SET checkpoint = ? WHERE rowid = ?", (crafted(state, f"touch {marker}"), key)
            )
        connection.execute(
            "UPDATE writes SET type = 'msgpack', value = ?", (ormsgpack.packb(exploit(f"touch {marker}")),)
        )
        connection.commit()
    with checkpointer(file) as saver:
        graph = graph_with(saver)
        assert graph.get_state(CONFIG).values == {"found": [f"touch {marker}"]}
        assert list(graph.get_state_history(CONFIG))
        graph.invoke({"found": "more"}, CONFIG)
    assert not marker.exists()
    with SqliteSaver.from_conn_string(str(file)) as default:  # LangGraph's default runs it: the exploit is real
        list(default.list(CONFIG))
    assert marker.exists()


def test_crafted_postgres_checkpoint_runs_no_code(database: str, tmp_path: Path) -> None:
    import psycopg
    from langgraph.checkpoint.postgres import PostgresSaver

    marker = tmp_path / "marker"
    with checkpointer(database) as saver:
        graph_with(saver).invoke({"found": ["tea"]}, CONFIG)  # a list is stored in a separate blob
    with psycopg.connect(database) as connection:
        blob = ormsgpack.packb([exploit(f"touch {marker}")])
        changed = connection.execute(
            "UPDATE checkpoint_blobs SET type = 'msgpack', blob = %s WHERE channel = 'found' AND thread_id = 't'",
            (blob,),
        )
        assert changed.rowcount
    with checkpointer(database) as saver:
        assert graph_with(saver).get_state(CONFIG).values == {"found": [f"touch {marker}"]}
    assert not marker.exists()
    with PostgresSaver.from_conn_string(database) as default:  # as in SQLite, LangGraph's default runs it
        list(default.list(CONFIG))
    assert marker.exists()


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
def test_values_of_a_state_survive_a_checkpoint(value: Any, tmp_path: Path) -> None:
    with checkpointer(tmp_path / "c.sqlite") as saver:
        graph = graph_with(saver)
        graph.invoke({"found": value}, CONFIG)
        assert graph.get_state(CONFIG).values["found"] == value


def test_custom_types_are_restored_only_if_they_are_allowed(tmp_path: Path) -> None:
    file = tmp_path / "c.sqlite"
    values = [Finding(text="tea"), Place(3)]
    with checkpointer(file, allow=[Finding, Place]) as saver:
        graph = graph_with(saver)
        graph.invoke({"found": values}, CONFIG)
        assert graph.get_state(CONFIG).values["found"] == values
    with checkpointer(file) as saver:
        assert graph_with(saver).get_state(CONFIG).values["found"] == [{"text": "tea"}, {"page": 3}]


def test_langgraph_json_enables_strict_msgpack() -> None:
    repository = json.loads((Path(__file__).parents[2] / "langgraph.json").read_text(encoding="utf-8"))
    new_project = json.loads(project_files("x", "react")["langgraph.json"])
    for settings in (repository, new_project):
        assert settings["env"]["LANGGRAPH_STRICT_MSGPACK"] == "true"
        assert settings["checkpointer"]["serde"] == {"allowed_msgpack_modules": None, "pickle_fallback": False}


def test_error_of_a_run_passes_the_checkpointer_unchanged(tmp_path: Path) -> None:
    with pytest.raises(BrokenPipeError), checkpointer(tmp_path / "c.sqlite"):
        raise BrokenPipeError


def test_file_that_is_no_database_is_rejected_and_an_empty_one_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    for text in ("x", "not a database, but long enough to be looked at as one" * 20):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"notes\.txt"), checkpointer(file):
            pytest.fail("opened")
        assert file.read_text() == text
    file.write_text("")
    with checkpointer(file):
        pass


def test_error_of_an_unreachable_database_hides_the_password(tmp_path: Path) -> None:
    address = f"postgresql://somebody:secret@/nowhere?host={tmp_path}"
    with pytest.raises(ConfigurationError, match="cannot be kept in the database") as raised, checkpointer(address):
        pytest.fail("opened")
    assert "secret" not in str(raised.value)


def test_missing_postgres_driver_is_reported_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with (
        pytest.raises(MissingExtraError, match=r"lookahead-agent\[postgres\]"),
        checkpointer("postgresql://localhost/x"),
    ):
        pytest.fail("opened")


def test_restored_chunk_keeps_its_incomplete_tool_call_invalid(tmp_path: Path) -> None:
    incomplete = '<tool_call>{"name": "write_note", "arguments": {"text": "ab'
    llm = scripted_chat(incomplete, policy="off").bind_tools([write_note])

    def stream(state: dict[str, Any]) -> dict[str, Any]:
        first, *others = llm.stream("q")
        return {"reply": sum(others, first)}

    graph = StateGraph(StreamedState).add_node("stream", stream).add_edge(START, "stream")
    thread: RunnableConfig = {"configurable": {"thread_id": "1"}}
    with checkpointer(tmp_path / "states.sqlite") as saver:
        graph.compile(checkpointer=saver).invoke({"reply": None}, thread)
    with checkpointer(tmp_path / "states.sqlite") as saver:
        reply = graph.compile(checkpointer=saver).get_state(thread).values["reply"]
    assert isinstance(reply, AIMessageChunk)
    assert (reply.tool_calls, len(reply.invalid_tool_calls)) == ([], 1)


class StreamedState(TypedDict):
    reply: Any
