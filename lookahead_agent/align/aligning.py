"""From prompts to a draft that follows its target better, or to the knowledge that it does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lookahead_agent.align.acceptance import measure_acceptance, share
from lookahead_agent.align.prompts import Prompt
from lookahead_agent.align.replies import write_replies
from lookahead_agent.align.training import Agreement, Training, train
from lookahead_agent.chat_model import ChatLookahead
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import write_whole
from lookahead_agent.progress import Progress

_TOLERANCE = 0.01
"""By how much fewer tokens may agree in a draft whose steps are accepted more often."""


class Aligned(BaseModel):
    """What came of it.

    Attributes:
        steps_before: Share of the steps that the policy let stand of the draft's, on what was held back.
        steps_after: The same of the trained draft.
        tokens: Share of the target's tokens that the draft would have written, before and after.
        kept: Whether the trained draft was kept: more of its steps stand, and no fewer of its tokens.
        draft: Its folder, if it was.
    """

    model_config = ConfigDict(frozen=True)

    steps_before: float
    steps_after: float
    tokens: Agreement
    kept: bool
    draft: str | None


@dataclass(frozen=True)
class Aligning:
    """How a draft is aligned.

    Attributes:
        alone: Makes a chat model of the target alone.
        together: Makes one of the target with a draft, from the draft's folder, which commands steps.
        draft: Folder of the draft.
        replies: How many it learns from.
        held_back: How many prompts it is measured on.
        how: How it is trained.
        out: Folder of all that is written.
    """

    alone: Callable[[], ChatLookahead]
    together: Callable[[str], ChatLookahead]
    draft: Path
    replies: int
    held_back: int
    how: Training
    out: Path


def align(prompts: Sequence[Prompt], given: Aligning, progress: Progress) -> Aligned:
    """Have a draft learn from its target's replies, and keep it if it follows the target better.

    The last prompts are held back. Interrupted, a rerun goes on.

    Args:
        prompts: What the target is asked.
        given: How.
        progress: Told how far it is.

    Raises:
        ConfigurationError: Too few prompts, or files in `out` of something else.
        ConversionError: The training failed.
        EngineError: An engine failed.
    """
    needed = given.replies + given.held_back
    if len(prompts) < needed:
        raise ConfigurationError(
            f"there are {len(prompts)} different prompts, and {given.replies} replies to learn from and "
            f"{given.held_back} to measure on need {needed}: give more, or lower --replies or --held-back"
        )
    learnt, held_back = prompts[: given.replies], prompts[given.replies : needed]
    with given.alone() as llm:
        rows = write_replies(llm, [*learnt, *held_back], given.out / "replies.jsonl", progress)
    measured = given.out / "acceptance.jsonl"
    with given.together(str(given.draft)) as llm:
        before = share(measure_acceptance(llm, "before", held_back, measured, progress))
    folder = given.out / "draft"
    agreement = train(
        given.draft,
        [rows[prompt.id] for prompt in learnt],
        [rows[prompt.id] for prompt in held_back],
        given.how,
        folder,
        progress,
    )
    with given.together(str(folder)) as llm:
        after = share(measure_acceptance(llm, "after", held_back, measured, progress))
    kept = after > before and agreement.after > agreement.before - _TOLERANCE
    found = Aligned(
        steps_before=before, steps_after=after, tokens=agreement, kept=kept, draft=str(folder) if kept else None
    )
    write_whole(given.out / "aligned.json", found.model_dump_json(indent=1))
    if not kept:
        shutil.rmtree(folder)
    return found
