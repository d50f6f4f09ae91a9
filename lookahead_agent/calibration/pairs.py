"""Pairs of steps with the outcomes of their continuations, in an append-only file of rows.

A row has the pair of a problem, the outcomes of its continuations, or its scores by verifiers. A problem has one pair,
so that pairs are independent of each other.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import comb
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from lookahead_agent.decoding.step import Step
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.system.jsonl import Row, RowFile
from lookahead_agent.verifiers.arithmetic import false_only_in


@dataclass(frozen=True)
class OutcomeRule:
    """Labels a pair by how often the target reaches the correct answer from the draft's step and from its own.

    A few continuations from each step come first. Only a suspected pair gets more, and a one-sided exact test of
    Fisher's on these alone decides.
    """

    seeds: int = 4  # continuations from each step at first
    margin: int = 2  # shortfall of correct continuations from which the draft's step is suspected
    confirm: int = 12  # continuations from each step of a suspected pair
    level: float = 0.01  # level of the test

    def is_suspected(self, draft: Sequence[bool], target: Sequence[bool]) -> bool:
        """Whether the first continuations from the draft's step fall short by the margin."""
        return sum(target[: self.seeds]) - sum(draft[: self.seeds]) >= self.margin

    def count_missing(self, draft: Sequence[bool], target: Sequence[bool]) -> int:
        """The number of continuations from each step that the rule still needs."""
        if len(draft) < self.seeds:
            return self.seeds - len(draft)
        return self.seeds + self.confirm - len(draft) if self.is_suspected(draft, target) else 0

    def changes_outcome(self, draft: Sequence[bool], target: Sequence[bool]) -> bool:
        """Whether the draft's step makes the outcome worse, given whether each continuation was correct."""
        if not self.is_suspected(draft, target):
            return False
        return fisher(sum(draft[self.seeds :]), sum(target[self.seeds :]), self.confirm) <= self.level


def fisher(draft: int, target: int, count: int) -> float:
    """The one-sided p-value of Fisher's exact test on correct continuations, of `count` from each step."""
    correct = draft + target
    tables = sum(comb(count, d) * comb(count, correct - d) for d in range(max(0, correct - count), draft + 1))
    return tables / comb(2 * count, correct)


class _Row(BaseModel):
    problem: str


class PairRow(_Row):
    """Two steps from the same prefix; both are None if the reply had no position with two comparable steps."""

    kind: Literal["pair"] = "pair"
    fingerprint: str  # Hash of the problem's question and answer
    question: str
    answer: str | None  # the correct answer; None: unknown
    before: str = ""  # the reply up to the two steps
    before_ids: tuple[int, ...] = ()  # tokens of `before`, in the target's vocabulary
    position: int = 0  # position of the two steps in the reply, from 0
    positions: int = 0  # number of positions with a comparable pair
    reply: str = ""  # the target's whole reply
    draft: Step | None = None
    target: Step | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # settings that all pairs of a file share
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @property
    def pair(self) -> StepPair:
        """The pair as a verifier sees it."""
        assert self.draft is not None
        assert self.target is not None
        return StepPair(self.question, self.before, self.draft, self.target, self.position)


class OutcomesRow(_Row):
    """Whether each continuation from the draft's and from the target's step reached the answer, in order."""

    kind: Literal["outcomes"] = "outcomes"
    answer: str | None
    draft: list[bool]
    target: list[bool]


class ScoresRow(_Row):
    """Scores of a pair by measure (see `fit.measure`); `judge` is the model that judged, None: the target."""

    kind: Literal["scores"] = "scores"
    scores: dict[str, float]
    judge: str | None = None


@dataclass
class LabelledPair:
    """A pair with its outcomes and scores."""

    row: PairRow
    outcomes: OutcomesRow | None = None
    scores: dict[str, float] = field(default_factory=dict)
    judge: str | None = None  # the model that judged; None: the target
    rule: OutcomeRule = field(default_factory=OutcomeRule)

    @property
    def changes_outcome(self) -> bool | None:
        """Whether accepting the draft's step changes the outcome; None: not known yet.

        It does if the step has false arithmetic that the target's lacks, or if the rule labels its outcome as worse.
        """
        pair = self.row.pair
        if pair.same_text:
            return False
        if false_only_in(pair.draft.text, pair.target.text):
            return True
        known = self.outcomes
        if known is None or self.rule.count_missing(known.draft, known.target):
            return None
        return self.rule.changes_outcome(known.draft, known.target)


def pair_file(path: Path) -> RowFile:
    """Open the file of pairs at a path; ConfigurationError if there is none."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}: collect pairs with `lookahead-agent calibrate collect`")
    return RowFile(path)


def pair_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows of pairs, one for each problem, even if no pair was found."""
    return [row for row in rows if row.get("kind") == "pair"]


_ROWS: TypeAdapter[PairRow | OutcomesRow | ScoresRow] = TypeAdapter(
    Annotated[PairRow | OutcomesRow | ScoresRow, Field(discriminator="kind")]
)


def labelled_pairs(rows: Iterable[Row], rule: OutcomeRule | None = None) -> dict[str, LabelledPair]:
    """Combine the rows of a file into pairs by problem; problems without a pair are left out."""
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
        except ValidationError as error:
            raise _foreign_row(number, validation_message(error)) from error
        except KeyError as error:
            raise _foreign_row(number, f"no pair of {error} precedes it") from error
    return {problem: pair for problem, pair in found.items() if pair.row.draft is not None}


def _foreign_row(number: int, problem: str) -> ConfigurationError:
    return ConfigurationError(f"row {number} is not of `lookahead-agent calibrate`: {problem}")
