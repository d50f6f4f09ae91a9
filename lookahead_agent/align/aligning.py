"""From prompts to a draft that follows its target better, or to the knowledge that it does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lookahead_agent.align.acceptance import gain, measure_acceptance, share
from lookahead_agent.align.prompts import Prompt
from lookahead_agent.align.replies import write_replies
from lookahead_agent.align.training import Agreement, Training, train
from lookahead_agent.chat.model import ChatLookahead
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
        gain: The 95 % interval, over prompts, of how much larger that is; None: there was only one prompt.
        tokens: Share of the target's tokens that the draft would have written, before and after.
        kept: Whether the trained draft was kept: more of its steps stand than chance alone explains, so that the whole
            interval is above 0, and no fewer of its tokens agree.
        draft: Its folder, if it was.
    """

    model_config = ConfigDict(frozen=True)

    steps_before: float
    steps_after: float
    gain: tuple[float, float] | None = None
    tokens: Agreement
    kept: bool
    draft: str | None


class _Order(BaseModel):
    """What a folder's acceptance and trained draft come from: another order needs another folder."""

    model_config = ConfigDict(frozen=True)

    draft: str
    policy: str
    how: Training
    learnt: list[str]
    held_back: list[str]


@dataclass(frozen=True)
class Aligning:
    """How a draft is aligned.

    Attributes:
        alone: Makes a chat model of the target alone.
        together: Makes one of the target with a draft, from the draft's folder, which commands steps.
        draft: Folder of the draft.
        policy: By which steps are accepted, for the record.
        replies: How many it learns from.
        held_back: How many prompts it is measured on.
        how: How it is trained.
        out: Folder of all that is written.
    """

    alone: Callable[[], ChatLookahead]
    together: Callable[[str], ChatLookahead]
    draft: Path
    policy: str
    replies: int
    held_back: int
    how: Training
    out: Path


def align(prompts: Sequence[Prompt], given: Aligning, progress: Progress) -> Aligned:
    """Have a draft learn from its target's replies, and keep it if it follows the target better.

    The last prompts are held back. Interrupted, a rerun goes on; done, it says what was found.

    Args:
        prompts: What the target is asked.
        given: How.
        progress: Told how far it is.

    Raises:
        ConfigurationError: Too few prompts, or files in `out` of another order.
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
    _keep_to(_order(given, learnt, held_back), given.out / "order.json")
    result = given.out / "aligned.json"
    if result.is_file():
        return Aligned.model_validate_json(result.read_text(encoding="utf-8"))
    with given.alone() as llm:
        rows = write_replies(llm, [*learnt, *held_back], given.out / "replies.jsonl", progress)
    measured = given.out / "acceptance.jsonl"
    with given.together(str(given.draft)) as llm:
        before = measure_acceptance(llm, "before", held_back, measured, progress)
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
        after = measure_acceptance(llm, "after", held_back, measured, progress)
    larger = gain(before, after)
    kept = (larger.low or 0.0) > 0 and agreement.after > agreement.before - _TOLERANCE
    found = Aligned(
        steps_before=share(before),
        steps_after=share(after),
        gain=None if larger.low is None or larger.high is None else (larger.low, larger.high),
        tokens=agreement,
        kept=kept,
        draft=str(folder) if kept else None,
    )
    write_whole(result, found.model_dump_json(indent=1))
    if not kept:
        shutil.rmtree(folder)
    return found


def _order(given: Aligning, learnt: Sequence[Prompt], held_back: Sequence[Prompt]) -> _Order:
    return _Order(
        draft=given.draft.name,
        policy=given.policy,
        how=given.how,
        learnt=[prompt.id for prompt in learnt],
        held_back=[prompt.id for prompt in held_back],
    )


def _keep_to(order: _Order, file: Path) -> None:
    """Write down what a folder is for, or check that it is for this."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file():
        write_whole(file, order.model_dump_json(indent=1))
    elif _Order.model_validate_json(file.read_text(encoding="utf-8")) != order:
        raise ConfigurationError(
            f"{file.parent} is for other prompts, another draft, policy or training: choose another folder, or keep "
            "its replies.jsonl and delete the rest to train anew from the same replies"
        )
