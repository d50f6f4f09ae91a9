"""Where the states of graphs are kept, so that an interrupted run goes on: an SQLite file, or a PostgreSQL database.

A saved state names the Python types of its values, and LangGraph calls any function that is named there. So a writer
of the file could run code in the process that reads it. `checkpointer` makes only types again that cannot do harm.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from lookahead_agent.errors import ConfigurationError, extra_imports

_SQLITE = b"SQLite format 3\0"
# Named, for agents import no chat model.
_REPLY_CHUNK = ("lookahead_agent.chat.events", "ReplyChunk")
_POSTGRES = ("postgresql://", "postgres://")


@contextmanager
def checkpointer(place: str | Path, *, allow: Iterable[type] = ()) -> Iterator[BaseCheckpointSaver[str]]:
    """A checkpointer, ready for use.

    LangGraph makes values of the types again that it holds for safe (messages, documents, dates, paths and the like),
    chunks of replies, and types in `allow`. Others come back as plain data, with a warning in the log.

    Args:
        place: A file, which is made if it is not there, or the address of a PostgreSQL database
            ("postgresql://user:password@host:5432/name"), whose tables are.
        allow: Further types of values, such as the models and dataclasses of your own states.

    Raises:
        ConfigurationError: Nothing can be kept there.
        MissingExtraError: A database's driver is not installed.
    """
    database = str(place) if str(place).startswith(_POSTGRES) else None
    opened, its_error = _sqlite(Path(place)) if database is None else _postgres(database)
    try:
        with opened as saver:
            saver.serde = JsonPlusSerializer(allowed_msgpack_modules=(_REPLY_CHUNK, *allow))
            saver.setup()
            yield saver
    except its_error as error:
        # The address has a password in it, and the driver's message only host, port and name.
        where = place if database is None else "the database"
        raise ConfigurationError(f"the checkpoints cannot be kept in {where}: {error}") from error


def _sqlite(file: Path) -> tuple[AbstractContextManager[Any], type[Exception]]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():  # SQLite would take a short file of another kind for an empty database, and write over it
            with file.open("rb") as opened:
                begin = opened.read(len(_SQLITE))
            if begin not in (b"", _SQLITE):
                raise ConfigurationError(f"{file} is no SQLite file: choose another for the checkpoints")
    except OSError as error:
        raise ConfigurationError(f"the checkpoints cannot be kept in {file}: {error}") from error
    return SqliteSaver.from_conn_string(str(file)), sqlite3.Error


def _postgres(address: str) -> tuple[AbstractContextManager[Any], type[Exception]]:
    with extra_imports("checkpoints in PostgreSQL need its driver: pip install 'lookahead-agent[postgres]'"):
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver
    return PostgresSaver.from_conn_string(address), psycopg.Error
