"""Scores of pairs by the measures of verifiers, and the verifier and threshold that accept most at a stated risk."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from lookahead_agent.bench.samples import environment
from lookahead_agent.calibration.pairs import LabelledPair, PairRow
from lookahead_agent.certificates.certificate import Certificate
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW
from lookahead_agent.certificates.risk import LEVEL, RISKS, ScoredPair, Threshold, thresholds
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.judge import JudgeVerifier
from lookahead_agent.verifiers.prefilter import rejection

Measure = Literal["similarity", "p_aligned", "p_swapped"]  # cosine; the judge's p(aligned); that of swapped steps

MEASURES: tuple[Measure, ...] = get_args(Measure)

JUDGED = frozenset({"p_aligned", "p_swapped"})  # measures of a judge


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
        of_pair = pair.row.pair
        if of_pair.same_text:
            return math.inf
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


_CASCADE = {"verifier": "cascade", "similarity": 0.95, "ask_judge_from": 0.65, "both_orders": True}
GRID = tuple(number / 100 for number in range(101))  # thresholds to choose from, fixed before any pair is seen
CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        Candidate("embedding", "similarity", {"verifier": "embedding"}),
        Candidate("embedding+results", "similarity", {"verifier": "embedding", "same_numbers": True}),
        Candidate("judge", "p_aligned", {"verifier": "judge", "same_numbers": False}),
        Candidate("judge+results", "p_aligned", {"verifier": "judge", "same_numbers": True}),
        Candidate("both orders", "p_aligned", {"verifier": "judge", "both_orders": True}),
        Candidate("cascade", "p_aligned", _CASCADE),
    )
}
"""Verifiers by name; "+results" compares numbers, units and equations first, and so do "both orders" and "cascade"."""

_AS_MANY = 0.02  # By what share two verifiers may differ in what they accept, for the cheaper one to be taken


@dataclass(frozen=True)
class Fit:
    """A verifier's thresholds by risk, without the risks that it cannot keep."""

    candidate: Candidate
    of_risk: Mapping[float, Threshold]


def scored(pairs: Mapping[str, LabelledPair], candidate: Candidate) -> dict[str, ScoredPair]:
    """Labelled pairs as a verifier sees them, by problem; pairs without a label are left out."""
    found = {}
    for problem, pair in pairs.items():
        errors = pair.changes_outcome
        if errors is None:
            continue
        score = candidate.score(pair)
        if score is None:
            missing = ",".join(name for name in candidate.measures if name not in pair.scores)
            command = f"lookahead-agent calibrate collect --measures {missing}"
            raise ConfigurationError(f"the pair of {problem!r} has no {missing}: measure it with `{command}`")
        found[problem] = ScoredPair(score, errors)
    return found


def fit(pairs: Mapping[str, LabelledPair], candidates: Sequence[Candidate]) -> list[Fit]:
    """Thresholds of verifiers, learnt from pairs by problem; the best may be taken for each risk."""
    tests = len(candidates)
    return [Fit(each, thresholds(list(scored(pairs, each).values()), GRID, tests=tests)) for each in candidates]


def best(fits: Sequence[Fit], risk: float) -> tuple[Candidate, Threshold] | None:
    """The verifier that accepts most at a risk, with its threshold; None: none keeps it.

    Of those that accept about as many it is the one that costs least: the order of `CANDIDATES`.
    """
    kept = [(each, [other for other in each.of_risk if other <= risk]) for each in fits]
    found = [(each.candidate, each.of_risk[max(risks)]) for each, risks in kept if risks]
    most = max((threshold.accepted for _, threshold in found), default=0)
    about_as_many = [one for one in found if one[1].accepted >= (1 - _AS_MANY) * most]
    by_cost = list(CANDIDATES)
    return min(about_as_many, key=lambda one: by_cost.index(one[0].name), default=None)


def count_disputed(pairs: Mapping[str, LabelledPair], candidate: Candidate, threshold: Threshold) -> int | None:
    """The accepted pairs that the target disputes, asked as by `DriftMonitor`; None: it was not asked about one."""
    accepted = [name for name, pair in scored(pairs, candidate).items() if pair.score >= threshold.value]
    asked = [pairs[name].scores.get("p_swapped") for name in accepted if not pairs[name].row.pair.same_text]
    known = [aligned for aligned in asked if aligned is not None]
    return sum(aligned < DISPUTED_BELOW for aligned in known) if len(known) == len(asked) else None


def certificates_of(pairs: Mapping[str, LabelledPair], fits: Sequence[Fit], data: str) -> list[Certificate]:
    """Certificates of the best verifier at each risk, learnt from the pairs of a file with this digest."""
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
