"""Scores of pairs by the measures of verifiers, and the policies whose thresholds can be learnt from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from lookahead_agent.calibration.pairs import LabelledPair, PairRow
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.judge import JudgeVerifier
from lookahead_agent.verifiers.prefilter import rejection

Measure = Literal["similarity", "p_aligned", "p_swapped"]
"""Cosine similarity; the judge's p(aligned), and the same with the two steps in each other's place."""

MEASURES: tuple[Measure, ...] = get_args(Measure)

JUDGED = frozenset({"p_aligned", "p_swapped"})
"""What a judge measures."""


async def measure(engines: EngineSet, row: PairRow, names: Sequence[Measure]) -> dict[str, float]:
    """Measure a pair with the embedder and the judge."""
    pair = row.pair
    found: dict[str, float] = {}
    for name in names:
        if name == "similarity":
            assert engines.embedder is not None
            found[name] = await engines.embedder.similarity(pair.draft.text.strip(), pair.target.text.strip())
        else:
            assert engines.judge is not None
            asked = pair if name == "p_aligned" else pair.swapped
            found[name] = (await JudgeVerifier(engines.judge, 0.0).verify(asked)).score or 0.0  # none: too long
    return found


@dataclass(frozen=True)
class Candidate:
    """A verifier whose threshold can be learnt."""

    name: str
    measure: Measure  # the measure that the threshold is of, and the policy's field for it
    fields: Mapping[str, Any]  # of its policy, without the threshold

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that decide about a pair."""
        return (*self._compared, "similarity") if self._rules.verifier == "cascade" else self._compared

    @property
    def decides(self) -> tuple[str, ...]:
        """Roles of the models on which the scores depend."""
        asked = {"similarity": "embedding", "p_aligned": "judge"}
        return ("target", "draft", *(role for name, role in asked.items() if name in self.measures))

    def score(self, pair: LabelledPair) -> float | None:
        """The score that decides about a pair, infinite where no threshold matters; None: it was not measured."""
        if pair.row.same_text:
            return math.inf
        of_pair = pair.row.pair
        texts = of_pair.draft.text.strip(), of_pair.target.text.strip()
        if self._rules.compares_results and rejection(*texts) is not None:
            return -math.inf
        if not all(name in pair.scores for name in self.measures):
            return None
        if self._rules.verifier == "cascade":
            similarity, ask_from = pair.scores["similarity"], self._rules.ask_judge_from
            if similarity >= self._rules.similarity:
                return math.inf
            if ask_from is None or similarity < ask_from:
                return -math.inf
        return min(pair.scores[name] for name in self._compared)

    def policy(self, threshold: float) -> VerifierPolicy:
        """The policy with a threshold."""
        return VerifierPolicy.model_validate({**self.fields, self.measure: threshold})

    @property
    def _compared(self) -> tuple[Measure, ...]:
        """The measures whose minimum is compared with the threshold: two where both orders are asked."""
        return (self.measure, "p_swapped") if self._rules.both_orders else (self.measure,)

    @cached_property
    def _rules(self) -> VerifierPolicy:
        """The policy without its threshold."""
        return VerifierPolicy.model_validate(self.fields)


GRID = tuple(number / 100 for number in range(101))
"""Thresholds to choose from, fixed before any pair is seen."""
CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        Candidate("embedding", "similarity", {"verifier": "embedding"}),
        Candidate("embedding+results", "similarity", {"verifier": "embedding", "same_numbers": True}),
        Candidate("judge", "p_aligned", {"verifier": "judge", "same_numbers": False}),
        Candidate("judge+results", "p_aligned", {"verifier": "judge", "same_numbers": True}),
        Candidate("both orders", "p_aligned", {"verifier": "judge", "both_orders": True}),
        Candidate(
            "cascade",
            "p_aligned",
            {"verifier": "cascade", "similarity": 0.95, "ask_judge_from": 0.65, "both_orders": True},
        ),
    )
}
"""Verifiers by name; "+results" compares numbers, units and equations first, and so do "both orders" and "cascade"."""
