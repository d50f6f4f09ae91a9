"""Pairs of steps with what followed from each, kept in a file of rows that only grows.

A row tells one thing of one problem's pair: the pair itself, the outcomes of continuations, scores of verifiers, or
what somebody said about it. A problem has one pair, so that pairs are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead_agent.bench.row_file import Row, RowFile
from lookahead_agent.calibration.harm import HarmRule
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.verifiers.arithmetic import false_only_in


class StepRow(BaseModel):
    """A step as it is kept: see `Step`."""

    token_ids: tuple[int, ...]
    text: str
    end: StepEnd

    @classmethod
    def of(cls, step: Step) -> StepRow:
        """A step's row."""
        return cls(token_ids=step.token_ids, text=step.text, end=step.end)

    @property
    def step(self) -> Step:
        """The step."""
        return Step(self.token_ids, self.text, self.end)


class PairRow(BaseModel):
    """Two steps from the same prefix.

    Attributes:
        problem: Id of the problem.
        fingerprint: Of its question and answer.
        question: What was asked.
        answer: The right answer; None: nobody knows it.
        before: The reply up to the two steps.
        before_ids: Its tokens, in the target's vocabulary.
        position: Which step of the reply they are, from 0.
        positions: How many positions there were to choose from.
        reply: The whole of the target's reply.
        draft: The draft's step; None, as `target`: no position had two steps that can stand for each other.
        target: The target's.
        settings: What else determines the rows of the file.
        environment: Versions and hardware.
    """

    model_config = ConfigDict(extra="ignore")

    kind: Literal["pair"] = "pair"
    problem: str
    fingerprint: str
    question: str
    answer: str | None
    before: str = ""
    before_ids: tuple[int, ...] = ()
    position: int = 0
    positions: int = 0
    reply: str = ""
    draft: StepRow | None = None
    target: StepRow | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)

    @property
    def pair(self) -> StepPair:
        """As a verifier is asked about it."""
        assert self.draft is not None
        assert self.target is not None
        return StepPair(self.question, self.before, self.draft.step, self.target.step, self.position)

    @property
    def same_text(self) -> bool:
        """Whether both steps say the same, letter for letter, so that nothing can follow from accepting the draft's."""
        return self.pair.same_text

    @property
    def false_arithmetic(self) -> list[str]:
        """Equations of the draft's step that do not hold and that the target's step has not."""
        pair = self.pair
        return false_only_in(pair.draft.text, pair.target.text)


class OutcomesRow(BaseModel):
    """What the target came to from each step.

    Attributes:
        problem: Whose pair.
        answer: What counted as right.
        draft: Whether each continuation from the draft's step was right, in order.
        target: The same from the target's step.
    """

    model_config = ConfigDict(extra="ignore")

    kind: Literal["outcomes"] = "outcomes"
    problem: str
    answer: str | None
    draft: list[bool]
    target: list[bool]


class ScoresRow(BaseModel):
    """What verifiers measure of a pair.

    Attributes:
        problem: Whose pair.
        scores: By name of the measure: see `scores`.
        judge: The model that judged, where that was not the target.
    """

    model_config = ConfigDict(extra="ignore")

    kind: Literal["scores"] = "scores"
    problem: str
    scores: dict[str, float]
    judge: str | None = None


class LabelRow(BaseModel):
    """What somebody said about a pair.

    Attributes:
        problem: Whose pair.
        harmful: Whether accepting the draft's step does harm; None: what was said before no longer holds.
    """

    model_config = ConfigDict(extra="ignore")

    kind: Literal["label"] = "label"
    problem: str
    harmful: bool | None


class LabelledPair(BaseModel):
    """Everything that is known of a pair.

    Attributes:
        row: The pair.
        outcomes: What followed; None: nothing was tried yet.
        scores: Of verifiers, by measure.
        judge: The model that judged; None: the target.
        said: What somebody said about it.
    """

    row: PairRow
    outcomes: OutcomesRow | None = None
    scores: dict[str, float] = Field(default_factory=dict)
    judge: str | None = None
    said: bool | None = None

    def harmful(self, rule: HarmRule) -> bool | None:
        """Whether accepting the draft's step does harm; None: not known yet.

        What somebody said goes first. Else a step does harm whose arithmetic is false, or from which the target comes
        to the right answer less often than from its own, by the rule.
        """
        if self.said is not None:
            return self.said
        if self.row.same_text:
            return False
        if self.row.false_arithmetic:
            return True
        known = self.outcomes
        if known is None or rule.missing(known.draft, known.target):
            return None
        return rule.harmful(known.draft, known.target)


def pair_file(path: Path) -> RowFile:
    """The file of pairs at a path.

    Raises:
        ConfigurationError: There is none, or it is something else.
    """
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}: collect pairs with `lookahead-agent calibrate collect`")
    return RowFile(path)


def pair_rows(rows: Iterable[Row]) -> list[Row]:
    """Of the rows of a file those of pairs, one of each problem, also where no pair was found."""
    return [row for row in rows if row.get("kind") == "pair"]


def labelled_pairs(rows: Iterable[Row]) -> dict[str, LabelledPair]:
    """Pairs by problem, with what is known of them, from the rows of a file; problems without a pair are left out.

    Raises:
        ConfigurationError: Other rows.
    """
    found: dict[str, LabelledPair] = {}
    for number, row in enumerate(rows, 1):
        try:
            _add(found, row)
        except (ValidationError, KeyError) as error:
            raise ConfigurationError(f"row {number} is none of `lookahead-agent calibrate`: {error!r}") from error
    return {problem: pair for problem, pair in found.items() if pair.row.draft is not None}


def _add(found: dict[str, LabelledPair], row: Row) -> None:
    match row.get("kind"):
        case "pair":
            of_pair = PairRow.model_validate(row)
            found[of_pair.problem] = LabelledPair(row=of_pair)
        case "outcomes":
            outcomes = OutcomesRow.model_validate(row)
            found[outcomes.problem].outcomes = outcomes
        case "scores":
            scores = ScoresRow.model_validate(row)
            pair = found[scores.problem]
            pair.scores |= scores.scores
            pair.judge = scores.judge or pair.judge
        case "label":
            label = LabelRow.model_validate(row)
            found[label.problem].said = label.harmful
        case kind:
            raise KeyError(kind)
