"""Scores of pairs by measure, and the verifier and threshold that accept most at a stated risk."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from lookahead_agent.bench.samples import environment
from lookahead_agent.calibration.pairs import LabelledPair, PairRow
from lookahead_agent.certificates.certificate import FORMS, Certificate
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW
from lookahead_agent.certificates.risk import LEVEL, RISKS, ScoredPair, Threshold, thresholds
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.judge import JudgeVerifier
from lookahead_agent.verifiers.results import rejection

Measure = Literal["similarity", "p_aligned", "p_swapped"]  # cosine; judge's p(aligned); p(aligned) of swapped steps

MEASURES: tuple[Measure, ...] = get_args(Measure)

JUDGED = frozenset({"p_aligned", "p_swapped"})  # measures that a judge gives


async def measure(engines: EngineSet, row: PairRow, names: Sequence[Measure]) -> dict[str, float]:
    """Measure a pair with the embedder and the judge; returns the scores by measure."""
    pair = row.pair
    scores: dict[str, float] = {}
    for name in names:
        if name == "similarity":
            assert engines.embedder is not None
            scores[name] = await engines.embedder.similarity(pair.draft.text.strip(), pair.target.text.strip())
        else:
            assert engines.judge is not None
            judged = pair if name == "p_aligned" else pair.swap()
            scores[name] = (await JudgeVerifier(engines.judge, 0.0).verify(judged)).score or 0.0  # None: too long
    return scores


@dataclass(frozen=True)
class ThresholdCandidate:
    """A verifier whose threshold can be learnt."""

    name: str
    measure: Measure  # the measure of the threshold, and the policy's field for it
    fields: Mapping[str, Any]  # the policy's fields, without the threshold

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that decide about a pair."""
        return (
            (*self._compared_measures, "similarity") if self._rules.verifier == "cascade" else self._compared_measures
        )

    @property
    def decides(self) -> tuple[str, ...]:
        """The roles of the models on which the scores depend."""
        asked = {"similarity": "embedding", "p_aligned": "judge"}
        return ("target", "draft", *(role for name, role in asked.items() if name in self.measures))

    def score(self, pair: LabelledPair) -> float | None:
        """The score that decides about a pair, infinite where the threshold does not matter; None: not measured."""
        steps = pair.row.pair
        if steps.same_text:
            return math.inf
        texts = steps.draft.text.strip(), steps.target.text.strip()
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
        return min(pair.scores[name] for name in self._compared_measures)

    def policy(self, threshold: float) -> VerifierPolicy:
        """The policy with this threshold."""
        return VerifierPolicy.model_validate({**self.fields, self.measure: threshold})

    @property
    def _compared_measures(self) -> tuple[Measure, ...]:
        """The measures whose minimum is compared with the threshold: two if the judge judges both orders."""
        return (self.measure, "p_swapped") if self._rules.both_orders else (self.measure,)

    @cached_property
    def _rules(self) -> VerifierPolicy:
        """The policy without its threshold."""
        return VerifierPolicy.model_validate(self.fields)


GRID = tuple(number / 100 for number in range(101))  # thresholds to choose from, fixed before any pair is seen
CANDIDATES: dict[str, ThresholdCandidate] = {
    name: ThresholdCandidate(name, form.measure, form.fields) for name, form in FORMS.items()
}
"""Verifiers by name, cheapest first."""

_TIE = 0.02  # relative difference in accepted pairs up to which the cheaper verifier is taken


@dataclass(frozen=True)
class Fit:
    """A verifier's thresholds by risk, without risks that it cannot keep."""

    candidate: ThresholdCandidate
    of_risk: Mapping[float, Threshold]


def score_pairs(pairs: Mapping[str, LabelledPair], candidate: ThresholdCandidate) -> dict[str, ScoredPair]:
    """Score labelled pairs for a verifier, by problem; pairs without a label are left out."""
    found = {}
    for problem, pair in pairs.items():
        is_error = pair.changes_outcome
        if is_error is None:
            continue
        score = candidate.score(pair)
        if score is None:
            missing = ",".join(name for name in candidate.measures if name not in pair.scores)
            command = f"lookahead-agent calibrate collect --measures {missing}"
            raise ConfigurationError(f"the pair of {problem!r} has no {missing}: measure it with `{command}`")
        found[problem] = ScoredPair(score, is_error)
    return found


def fit(pairs: Mapping[str, LabelledPair], candidates: Sequence[ThresholdCandidate]) -> list[Fit]:
    """Learn verifiers' thresholds from pairs by problem; their bounds allow for choosing the best verifier per risk."""
    tests = len(candidates)
    return [Fit(each, thresholds(list(score_pairs(pairs, each).values()), GRID, tests=tests)) for each in candidates]


def best(fits: Sequence[Fit], risk: float) -> tuple[ThresholdCandidate, Threshold] | None:
    """The verifier that accepts most at a risk, with its threshold; None if none keeps the risk.

    A tie goes to the verifier that costs least, by the order of `CANDIDATES`.
    """
    kept = [(fitted, [kept_risk for kept_risk in fitted.of_risk if kept_risk <= risk]) for fitted in fits]
    found = [(fitted.candidate, fitted.of_risk[max(risks)]) for fitted, risks in kept if risks]
    most = max((threshold.accepted for _, threshold in found), default=0)
    tied = [choice for choice in found if choice[1].accepted >= (1 - _TIE) * most]
    by_cost = list(CANDIDATES)
    return min(tied, key=lambda choice: by_cost.index(choice[0].name), default=None)


def count_disputed(
    pairs: Mapping[str, LabelledPair], candidate: ThresholdCandidate, threshold: Threshold
) -> int | None:
    """The number of accepted pairs that the target disputes, as in `DriftMonitor`; None if one was not judged."""
    accepted = [name for name, pair in score_pairs(pairs, candidate).items() if pair.score >= threshold.value]
    asked = [pairs[name].scores.get("p_swapped") for name in accepted if not pairs[name].row.pair.same_text]
    known = [aligned for aligned in asked if aligned is not None]
    return sum(aligned < DISPUTED_BELOW for aligned in known) if len(known) == len(asked) else None


def certificates_of(pairs: Mapping[str, LabelledPair], fits: Sequence[Fit], data: str) -> list[Certificate]:
    """Create the certificates of the best verifier at each risk; `data` is the digest of the file of pairs."""
    first = next(iter(pairs.values()))
    settings = first.row.settings
    models = settings["models"] | {"judge": first.judge}
    return [
        Certificate(
            risk=risk,
            models={role: models.get(role) for role in candidate.decides},
            precision=settings["precision"],
            delimiter=settings["delimiter"],
            verifier=candidate.name,
            policy=candidate.policy(threshold.value).model_dump(exclude_unset=True),
            threshold=threshold.value,
            level=LEVEL,
            tests=len(fits),
            pairs=threshold.pairs,
            accepted=threshold.accepted,
            errors=threshold.errors,
            bound=threshold.bound,
            disputed=count_disputed(pairs, candidate, threshold),
            rule=asdict(first.rule),
            data=data,
            date=datetime.date.today().isoformat(),
            environment=environment(),
        )
        for risk in RISKS
        if (chosen := best(fits, risk)) is not None
        for candidate, threshold in [chosen]
    ]
