"""What happens to each step of a reply, for those who want to watch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StepEventKind = Literal["drafted", "written", "judged", "accepted", "committed", "rejected", "unused", "aborted"]


@dataclass(frozen=True)
class StepEvent:
    """Something that happened to a step.

    Attributes:
        kind: "drafted": the draft wrote it; "written": the target did; "judged": the verifier has decided about the
            draft's; "accepted": the draft's step is part of the reply; "committed": the target's is; "rejected": the
            draft's will not be used; "unused": the target's will not, since the draft's was; "aborted": it was
            stopped before it was complete.
        source: Whose step it is: "draft" or "target".
        position: Which step of the reply it would be, from 0.
        text: Its text, with the delimiter.
        started: When its writing (of "judged": its judging) began, in seconds since the reply did.
        ended: When that ended.
        verdict: What decided, in a word or two; None if the verifier was not asked.
        score: The measure that was held against the threshold, if there is one.
    """

    kind: StepEventKind
    source: Literal["draft", "target"]
    position: int
    text: str
    started: float
    ended: float
    verdict: str | None = None
    score: float | None = None


OnStep = Callable[[StepEvent], None]
