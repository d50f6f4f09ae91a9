"""States of graphs in SQLite and in a PostgreSQL server that the test starts."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from langchain_core.runnables import RunnableConfig
from langgraph.types import Command

from graphs.react import build_react
from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from tests.unit.test_graphs import THOUGHT, call, model, notes, write_note


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
    llm = model({"You think": THOUGHT, "You solve": [call("write_note", text="tea"), "Done."]})
    config: RunnableConfig = {"configurable": {"thread_id": "t"}}
    with checkpointer(place) as saver:
        graph = build_react(llm, [write_note], saver, ask_before=["write_note"])
        assert graph.invoke({"question": "Note it."}, config)["__interrupt__"]
        assert notes == []
    with checkpointer(place) as saver:  # another process, as far as the graph can tell
        graph = build_react(llm, [write_note], saver, ask_before=["write_note"])
        assert graph.invoke(Command(resume=True), config)["answer"] == "Done."
    assert notes == ["tea"]


def test_sqlite(tmp_path: Path) -> None:
    ask_and_resume(tmp_path / "deep" / "checkpoints.sqlite")


def test_postgres(database: str) -> None:
    ask_and_resume(database)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a database, but long enough to be looked at as one" * 20)
    with pytest.raises(ConfigurationError, match=r"notes\.txt"), checkpointer(file):
        pytest.fail("opened")


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
