"""Checkpointers, from which interrupted runs of graphs resume: an SQLite file, or a PostgreSQL database.

A saved state names the Python types of its values, and LangGraph calls any function that is named there. A writer of
the file could thus run code in the process that reads it. `checkpointer` restores only harmless types.
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
# By name, because `agents` imports no chat model.
_REPLY_CHUNK = ("lookahead_agent.chat.events", "ReplyChunk")
_POSTGRES = ("postgresql://", "postgres://")


@contextmanager
def checkpointer(place: str | Path, *, allow: Iterable[type] = ()) -> Iterator[BaseCheckpointSaver[str]]:
    """Open a checkpointer.

    It restores the types that LangGraph considers safe (messages, documents, dates, paths and the like), reply chunks,
    and types in `allow`. Other values become plain data, with a warning in the log.

    Args:
        place: A file, which is created if missing, or the URL of a PostgreSQL database
            ("postgresql://user:password@host:5432/name"), whose tables are created.
        allow: Further types of values, such as the models and dataclasses of your own states.

    Raises:
        ConfigurationError: The file or database cannot be used.
        MissingExtraError: The database's driver is not installed.
    """
    database = str(place) if str(place).startswith(_POSTGRES) else None
    context, driver_error = _sqlite(Path(place)) if database is None else _postgres(database)
    try:
        with context as saver:
            saver.serde = JsonPlusSerializer(allowed_msgpack_modules=(_REPLY_CHUNK, *allow))
            saver.setup()
            yield saver
    except driver_error as error:
        # The URL contains a password; the driver's message has only host, port and name.
        where = place if database is None else "the database"
        raise ConfigurationError(f"the checkpoints cannot be kept in {where}: {error}") from error


def _sqlite(file: Path) -> tuple[AbstractContextManager[Any], type[Exception]]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():  # SQLite would overwrite a short file of another kind as if it were an empty database
            with file.open("rb") as opened:
                header = opened.read(len(_SQLITE))
            if header not in (b"", _SQLITE):
                raise ConfigurationError(f"{file} is no SQLite file: choose another for the checkpoints")
    except OSError as error:
        raise ConfigurationError(f"the checkpoints cannot be kept in {file}: {error}") from error
    return SqliteSaver.from_conn_string(str(file)), sqlite3.Error


def _postgres(url: str) -> tuple[AbstractContextManager[Any], type[Exception]]:
    with extra_imports("checkpoints in PostgreSQL need its driver: pip install 'lookahead-agent[postgres]'"):
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver
    return PostgresSaver.from_conn_string(url), psycopg.Error
