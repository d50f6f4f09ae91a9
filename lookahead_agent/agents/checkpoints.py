"""Checkpointers, from which interrupted runs of graphs resume: an SQLite file, or a PostgreSQL database.

A saved state names the Python types of its values, and LangGraph calls any function that is named there. A writer of
the file could thus run code in the process that reads it. `checkpointer` restores only harmless types.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from lookahead_agent.chat.events import ReplyChunk
from lookahead_agent.errors import ConfigurationError, LookaheadError, extra_imports

_SQLITE = b"SQLite format 3\0"
_POSTGRES = ("postgresql://", "postgres://")


@contextmanager
def checkpointer(place: str | Path, *, allow: Iterable[type] = ()) -> Iterator[BaseCheckpointSaver[str]]:
    """Open a checkpointer, which serves `invoke` and `ainvoke` of graphs, in any thread and event loop.

    It restores the types that LangGraph considers safe (messages, documents, dates, paths and the like), reply chunks,
    and types in `allow`. Other values become plain data, with a warning in the log. Its methods raise
    ConfigurationError if the file or database fails, or if a checkpoint is damaged.

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
    # The URL contains a password; the driver's message has only host, port and name.
    where = str(place) if database is None else "the database"
    with ExitStack() as stack:
        try:
            saver = stack.enter_context(context)
            saver.place, saver.driver_error = where, driver_error
            saver.serde = JsonPlusSerializer(allowed_msgpack_modules=(ReplyChunk, *allow))
            saver.setup()
        except driver_error as error:
            raise ConfigurationError(f"the checkpoints cannot be kept in {where}: {error}") from error
        stack.callback(_close, saver)
        yield saver


def _sqlite(file: Path) -> tuple[AbstractContextManager[Any], type[Exception]]:
    from langgraph.checkpoint.sqlite import SqliteSaver

    class SqliteCheckpoints(_SyncAndAsync, SqliteSaver):
        pass

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():  # SQLite would overwrite a short file of another kind as if it were an empty database
            with file.open("rb") as opened:
                header = opened.read(len(_SQLITE))
            if header not in (b"", _SQLITE):
                raise ConfigurationError(f"{file} is not a SQLite file: choose another for the checkpoints")
    except OSError as error:
        raise ConfigurationError(f"the checkpoints cannot be kept in {file}: {error}") from error
    return SqliteCheckpoints.from_conn_string(str(file)), sqlite3.Error


def _postgres(url: str) -> tuple[AbstractContextManager[Any], type[Exception]]:
    with extra_imports("checkpoints in PostgreSQL need its driver: pip install 'lookahead-agent[postgres]'"):
        import psycopg
        from langgraph.checkpoint.postgres import PostgresSaver

    class PostgresCheckpoints(_SyncAndAsync, PostgresSaver):
        pass

    return PostgresCheckpoints.from_conn_string(url), psycopg.Error


def _close(saver: Any) -> None:
    """Close the connection, after the call that another thread may have begun; later calls raise."""
    with saver.lock:
        saver.conn.close()


class _SyncAndAsync(BaseCheckpointSaver[str]):
    """Adds the asynchronous methods to a synchronous saver: each runs in a thread, so no event loop waits for a disk.

    LangGraph's asynchronous savers belong to one event loop, and refuse synchronous calls there.
    """

    place = ""
    driver_error: type[Exception] = Exception

    @contextmanager
    def _explain(self, *, reading: bool) -> Iterator[None]:
        """Convert the driver's errors, and every error of reading, to ConfigurationError."""
        try:
            yield
        except LookaheadError:
            raise
        except self.driver_error as error:
            raise ConfigurationError(f"the checkpoints in {self.place} cannot be used: {error}") from error
        except Exception as error:
            if not reading:
                raise
            reason = f"{type(error).__name__}: {error}"[:500]
            raise ConfigurationError(
                f"a checkpoint in {self.place} is damaged; delete its thread, or choose another file: {reason}"
            ) from error

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        _ = config["configurable"]["thread_id"]  # KeyError without a thread: the caller's mistake
        with self._explain(reading=True):
            found = super().get_tuple(config)
            return found if found is None else _check(found)

    def list(self, config: RunnableConfig | None, **more: Any) -> Iterator[CheckpointTuple]:
        # The savers hold their lock until a caller has read all: another call would wait for ever.
        with self._explain(reading=True):
            found = [_check(each) for each in super().list(config, **more)]
        yield from found

    def put(self, *given: Any, **more: Any) -> RunnableConfig:
        with self._explain(reading=False):
            return super().put(*given, **more)

    def put_writes(self, *given: Any, **more: Any) -> None:
        with self._explain(reading=False):
            super().put_writes(*given, **more)

    def delete_thread(self, thread_id: str) -> None:
        with self._explain(reading=False):
            super().delete_thread(thread_id)

    def get_delta_channel_history(self, **given: Any) -> Mapping[str, Any]:
        with self._explain(reading=True):
            return super().get_delta_channel_history(**given)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(self, config: RunnableConfig | None, **more: Any) -> AsyncIterator[CheckpointTuple]:
        for found in await asyncio.to_thread(lambda: [*self.list(config, **more)]):
            yield found

    async def aput(self, *given: Any, **more: Any) -> RunnableConfig:
        return await asyncio.to_thread(self.put, *given, **more)

    async def aput_writes(self, *given: Any, **more: Any) -> None:
        await asyncio.to_thread(self.put_writes, *given, **more)

    async def adelete_thread(self, thread_id: str) -> None:
        await asyncio.to_thread(self.delete_thread, thread_id)

    async def adelete_for_runs(self, *given: Any, **more: Any) -> None:
        await asyncio.to_thread(self.delete_for_runs, *given, **more)

    async def acopy_thread(self, *given: Any, **more: Any) -> None:
        await asyncio.to_thread(self.copy_thread, *given, **more)

    async def aprune(self, *given: Any, **more: Any) -> None:
        await asyncio.to_thread(self.prune, *given, **more)

    async def aget_delta_channel_history(self, **given: Any) -> Mapping[str, Any]:
        return await asyncio.to_thread(lambda: self.get_delta_channel_history(**given))


def _check(found: CheckpointTuple) -> CheckpointTuple:
    """Return a checkpoint that has what LangGraph reads; raises TypeError or KeyError."""
    kinds = {"id": str, "channel_values": dict, "channel_versions": dict, "versions_seen": dict}
    for name, kind in kinds.items():
        if not isinstance(found.checkpoint[name], kind):  # type: ignore[literal-required]
            raise TypeError(f"its {name} is of the type {type(found.checkpoint[name]).__name__}")  # type: ignore[literal-required]
    if not isinstance(found.metadata, dict):
        raise TypeError("its metadata is not a dictionary")
    return found
