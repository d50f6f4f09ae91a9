"""The verifier and threshold that accept most at a stated risk."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lookahead_agent.bench.samples import environment
from lookahead_agent.calibration.pairs import LabelledPair
from lookahead_agent.calibration.scores import CANDIDATES, GRID, Candidate
from lookahead_agent.certificates.certificate import Certificate
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW
from lookahead_agent.certificates.risk import LEVEL, RISKS, ScoredPair, Threshold, thresholds
from lookahead_agent.errors import ConfigurationError

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
            raise ConfigurationError(
                f"the pair of {problem!r} has no {missing}: measure it with "
                f"`lookahead-agent calibrate collect --measures {missing}`"
            )
        found[problem] = ScoredPair(score, errors)
    return found


def fit(pairs: Mapping[str, LabelledPair], candidates: Sequence[Candidate]) -> list[Fit]:
    """Thresholds of verifiers, learnt from pairs by problem; the best may be taken for each risk."""
    return [
        Fit(
            candidate,
            thresholds(list(scored(pairs, candidate).values()), GRID, tests=len(candidates)),
        )
        for candidate in candidates
    ]


def best(fits: Sequence[Fit], risk: float) -> tuple[Candidate, Threshold] | None:
    """The verifier that accepts most at a risk, with its threshold; None: none keeps it.

    Of those that accept about as many it is the one that costs least: the order of `CANDIDATES`.
    """
    found = [
        (each.candidate, each.of_risk[max(keeps)])
        for each in fits
        if (keeps := [other for other in each.of_risk if other <= risk])
    ]
    most = max((threshold.accepted for _, threshold in found), default=0)
    about_as_many = [one for one in found if one[1].accepted >= (1 - _AS_MANY) * most]
    by_cost = list(CANDIDATES)
    return min(about_as_many, key=lambda one: by_cost.index(one[0].name), default=None)


def count_disputed(pairs: Mapping[str, LabelledPair], candidate: Candidate, threshold: Threshold) -> int | None:
    """The number of accepted pairs that the target disputes, asked as `DriftMonitor` asks it.

    None where it was not asked about one of them.
    """
    known = scored(pairs, candidate)
    count = 0
    for problem, pair in known.items():
        if pair.score < threshold.value or pairs[problem].row.same_text:
            continue
        aligned = pairs[problem].scores.get("p_swapped")
        if aligned is None:
            return None
        count += aligned < DISPUTED_BELOW
    return count


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
