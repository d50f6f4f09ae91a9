"""How many of a draft's steps stand, on prompts that it has not learnt from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lookahead_agent.align.prompts import Prompt
from lookahead_agent.align.rows import append_rows
from lookahead_agent.bench.row_file import RowFile
from lookahead_agent.bench.statistics import Estimate, estimate
from lookahead_agent.chat.model import ChatLookahead
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
        done = _of(draft, rows)
        missing = [prompt for prompt in prompts if prompt.id not in done]
        if missing:
            llm.start(progress)
        title = f"Measuring the draft {draft} training"
        append_rows(
            missing, len(prompts) - len(missing), partial(_measure, llm, draft), rows, _AT_ONCE, title, progress
        )
        done = _of(draft, rows)
    return [done[prompt.id] for prompt in prompts]


def _of(draft: str, rows: RowFile) -> dict[str, AcceptanceRow]:
    found = map(AcceptanceRow.model_validate, rows.rows)
    return {row.prompt: row for row in found if row.draft == draft}


async def _measure(llm: ChatLookahead, draft: str, prompt: Prompt) -> AcceptanceRow:
    message = await llm.ainvoke(list(prompt.messages))
    figures = message.response_metadata["lookahead"]
    return AcceptanceRow(prompt=prompt.id, draft=draft, steps=figures["steps"], accepted=figures["accepted"])


def share(rows: Sequence[AcceptanceRow]) -> float:
    """The share of all steps that the draft wrote."""
    return sum(row.accepted for row in rows) / max(sum(row.steps for row in rows), 1)


def gain(before: Sequence[AcceptanceRow], after: Sequence[AcceptanceRow]) -> Estimate:
    """How much larger the share of all steps is, with the interval that it has over prompts.

    Args:
        before: A row of each prompt.
        after: Of the same prompts, in the same order.

    Raises:
        MissingExtraError: SciPy is not installed.
    """

    def larger(chosen: Sequence[float]) -> float:
        prompts = [int(number) for number in chosen]
        return share([after[number] for number in prompts]) - share([before[number] for number in prompts])

    return estimate(larger, range(len(before)))
