"""Prompts that are worked on a few at a time, each with a row in a file as soon as it is done."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from pydantic import BaseModel

from lookahead_agent.align.prompts import Prompt
from lookahead_agent.bench.row_file import RowFile
from lookahead_agent.engines import background
from lookahead_agent.progress import Progress

Work = Callable[[Prompt], Coroutine[Any, Any, BaseModel]]


def append_rows(
    prompts: Sequence[Prompt], done: int, work: Work, rows: RowFile, at_once: int, title: str, progress: Progress
) -> None:
    """Work on prompts, and append a row of each.

    Args:
        prompts: Those that have none yet.
        done: How many others have one.
        work: What is done.
        rows: The file, which nobody else writes to.
        at_once: Prompts at a time.
        title: What is done, for the progress.
        progress: Told how far it is.
    """
    with progress.task(title, done + len(prompts)) as task:
        for begin in range(0, len(prompts), at_once):
            task.advance(done + begin)
            background.run(_append(prompts[begin : begin + at_once], work, rows))


async def _append(prompts: Sequence[Prompt], work: Work, rows: RowFile) -> None:
    async with aclosing(background.as_they_come(work(prompt) for prompt in prompts)) as come:
        async for row in come:
            rows.append(row.model_dump())
