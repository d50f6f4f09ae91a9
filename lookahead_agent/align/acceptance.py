"""How many of a draft's steps stand, on prompts that it has not learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lookahead_agent import background
from lookahead_agent.align.prompts import Prompt
from lookahead_agent.bench.row_file import RowFile
from lookahead_agent.chat_model import ChatLookahead
from lookahead_agent.progress import Progress

_AT_ONCE = 8


class AcceptanceRow(BaseModel):
    """One reply.

    Attributes:
        prompt: The prompt's id.
        draft: Which draft: "before" or "after" training.
        steps: Steps of the reply.
        accepted: Those of them that the draft wrote.
    """

    model_config = ConfigDict(frozen=True)

    prompt: str
    draft: str
    steps: int
    accepted: int


def measure_acceptance(
    llm: ChatLookahead, draft: str, prompts: Sequence[Prompt], file: Path, progress: Progress
) -> list[AcceptanceRow]:
    """Have target and draft reply to prompts, where that is not done yet.

    Args:
        llm: The chat model, with a policy that commands steps.
        draft: Which draft it has.
        prompts: What is asked.
        file: Rows, appended; a rerun goes on.
        progress: Told how far it is.

    Raises:
        EngineError: An engine failed; a rerun goes on.
    """
    with RowFile(file).writing() as rows:
        known = [AcceptanceRow.model_validate(row) for row in rows.rows]
        done = {row.prompt: row for row in known if row.draft == draft}
        missing = [prompt for prompt in prompts if prompt.id not in done]
        if missing:
            llm.start(progress)
        with progress.task(f"Measuring the draft {draft} training", len(prompts)) as task:
            for begin in range(0, len(missing), _AT_ONCE):
                task.advance(len(prompts) - len(missing) + begin)
                for row in background.run(_replies(llm, draft, missing[begin : begin + _AT_ONCE], rows)):
                    done[row.prompt] = row
    return [done[prompt.id] for prompt in prompts]


async def _replies(llm: ChatLookahead, draft: str, prompts: Sequence[Prompt], rows: RowFile) -> list[AcceptanceRow]:
    async def one(prompt: Prompt) -> AcceptanceRow:
        message = await llm.ainvoke(list(prompt.messages))
        figures = message.response_metadata["lookahead"]
        return AcceptanceRow(prompt=prompt.id, draft=draft, steps=figures["steps"], accepted=figures["accepted"])

    found = []
    async with aclosing(background.as_they_come(one(prompt) for prompt in prompts)) as come:
        async for row in come:
            rows.append(row.model_dump())
            found.append(row)
    return found


def share(rows: Sequence[AcceptanceRow]) -> float:
    """The share of all steps that the draft wrote."""
    return sum(row.accepted for row in rows) / max(sum(row.steps for row in rows), 1)
