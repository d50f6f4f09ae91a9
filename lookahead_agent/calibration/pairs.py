"""Pairs of steps with what followed from each, kept in a file of rows that only grows.

A row tells one thing of one problem's pair: the pair itself, the outcomes of continuations, or scores of verifiers. A
problem has one pair, so that pairs are independent of each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from lookahead_agent.decoding.step import Step
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import Row, RowFile
from lookahead_agent.verifiers.arithmetic import false_only_in


@dataclass(frozen=True)
class OutcomeRule:
    """Decides by how often the target came to the correct answer from the draft's step and from its own.

    First a few continuations from each. Only of a suspected pair more are written, and a one-sided exact test of
    Fisher's on these alone decides.
    """

    seeds: int = 4  # continuations from each step at first
    margin: int = 2  # by how many of them the draft's step must fall short to be suspected
    confirm: int = 12  # continuations from each step of a suspected pair
    level: float = 0.01  # of the test

    def suspected(self, draft: Sequence[bool], target: Sequence[bool]) -> bool:
        """Whether the first continuations raise a suspicion."""
        return sum(target[: self.seeds]) - sum(draft[: self.seeds]) >= self.margin

    def missing(self, draft: Sequence[bool], target: Sequence[bool]) -> int:
        """Continuations from each step that the rule still needs."""
        if len(draft) < self.seeds:
            return self.seeds - len(draft)
        return self.seeds + self.confirm - len(draft) if self.suspected(draft, target) else 0

    def changes_outcome(self, draft: Sequence[bool], target: Sequence[bool]) -> bool:
        """Whether the draft's step changes the outcome for the worse, by whether each continuation was right."""
        if not self.suspected(draft, target):
            return False
        return fisher(sum(draft[self.seeds :]), sum(target[self.seeds :]), self.confirm) <= self.level


def fisher(draft: int, target: int, count: int) -> float:
    """One-sided p-value of Fisher's exact test of right continuations, of as many from each step."""
    right = draft + target
    ways = sum(comb(count, d) * comb(count, right - d) for d in range(max(0, right - count), draft + 1))
    return ways / comb(2 * count, right)


class _Row(BaseModel):
    problem: str


class PairRow(_Row):
    """Two steps from the same prefix; None of both: the reply had no position with two comparable steps."""

    kind: Literal["pair"] = "pair"
    fingerprint: str  # of the problem's question and answer
    question: str
    answer: str | None  # the correct answer; None: nobody knows it
    before: str = ""  # the reply up to the two steps
    before_ids: tuple[int, ...] = ()  # its tokens, in the target's vocabulary
    position: int = 0  # of the two steps in the reply, from 0
    positions: int = 0  # to choose from
    reply: str = ""  # the whole of the target's reply
    draft: Step | None = None
    target: Step | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # that the rows of a file share
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @property
    def pair(self) -> StepPair:
        """The pair as a verifier sees it."""
        assert self.draft is not None
        assert self.target is not None
        return StepPair(self.question, self.before, self.draft, self.target, self.position)


class OutcomesRow(_Row):
    """Whether each continuation from the draft's and from the target's step came to the answer, in order."""

    kind: Literal["outcomes"] = "outcomes"
    answer: str | None
    draft: list[bool]
    target: list[bool]


class ScoresRow(_Row):
    """Scores of verifiers by measure (see `scores`); `judge` is the model that judged, None: the target."""

    kind: Literal["scores"] = "scores"
    scores: dict[str, float]
    judge: str | None = None


@dataclass
class LabelledPair:
    """Everything that is known of a pair."""

    row: PairRow
    outcomes: OutcomesRow | None = None
    scores: dict[str, float] = field(default_factory=dict)
    judge: str | None = None  # the model that judged; None: the target
    rule: OutcomeRule = field(default_factory=OutcomeRule)

    @property
    def changes_outcome(self) -> bool | None:
        """Whether accepting the draft's step changes the outcome; None: not known yet.

        Its arithmetic is false, or the target comes to the correct answer less often than from its own, by the rule.
        """
        pair = self.row.pair
        if pair.same_text:
            return False
        if false_only_in(pair.draft.text, pair.target.text):
            return True
        known = self.outcomes
        if known is None or self.rule.missing(known.draft, known.target):
            return None
        return self.rule.changes_outcome(known.draft, known.target)


def pair_file(path: Path) -> RowFile:
    """The file of pairs at a path."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}: collect pairs with `lookahead-agent calibrate collect`")
    return RowFile(path)


def pair_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of pairs, one of each problem, also where no pair was found."""
    return [row for row in rows if row.get("kind") == "pair"]


_ROWS: TypeAdapter[PairRow | OutcomesRow | ScoresRow] = TypeAdapter(
    Annotated[PairRow | OutcomesRow | ScoresRow, Field(discriminator="kind")]
)


def labelled_pairs(rows: Iterable[Row], rule: OutcomeRule | None = None) -> dict[str, LabelledPair]:
    """Pairs by problem, with what is known of them, from the rows of a file; problems without a pair are left out."""
    found: dict[str, LabelledPair] = {}
    for number, row in enumerate(rows, 1):
        try:
            match _ROWS.validate_python(row):
                case PairRow() as pair:
                    found[pair.problem] = LabelledPair(pair, rule=rule or OutcomeRule())
                case OutcomesRow() as outcomes:
                    found[outcomes.problem].outcomes = outcomes
                case ScoresRow() as scores:
                    known = found[scores.problem]
                    known.scores |= scores.scores
                    known.judge = scores.judge or known.judge
        except (ValidationError, KeyError) as error:
            raise ConfigurationError(f"row {number} is none of `lookahead-agent calibrate`: {error!r}") from error
    return {problem: pair for problem, pair in found.items() if pair.row.draft is not None}
