"""The verifier and threshold that accept most at a stated risk, and tests of the risk on other problems."""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from lookahead_agent.bench.samples import environment
from lookahead_agent.calibration.pairs import LabelledPair
from lookahead_agent.calibration.scores import CANDIDATES, Candidate
from lookahead_agent.certificates.certificate import Certificate
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW
from lookahead_agent.certificates.risk import LEVEL, RISKS, ScoredPair, Threshold, check, thresholds
from lookahead_agent.errors import ConfigurationError

_AS_MANY = 0.02
"""By what share two verifiers may differ in what they accept, for the cheaper one to be taken."""


@dataclass(frozen=True)
class Fit:
    """A verifier's thresholds by risk, without the risks that it cannot keep."""

    candidate: Candidate
    of_risk: Mapping[float, Threshold]


@dataclass(frozen=True)
class SplitResult:
    """A stated risk on problems that calibration did not see, over several divisions of the problems."""

    risk: float  # as stated
    splits: int  # divisions
    certified: int  # divisions in which some threshold kept the risk
    kept: int  # of these, those in which the others' share of errors was no larger
    errors: float  # share of errors among the others' accepted pairs, over all of these divisions together
    accepted: float  # accepted share of the others' pairs, likewise


def scored(pairs: Mapping[str, LabelledPair], candidate: Candidate) -> dict[str, ScoredPair]:
    """Labelled pairs as a verifier sees them, by problem; pairs without a label are left out.

    Raises:
        ConfigurationError: One was not measured.
    """
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
                f"`lookahead-agent calibrate score --measures {missing}`"
            )
        found[problem] = ScoredPair(score, errors)
    return found


def fit(pairs: Mapping[str, LabelledPair], candidates: Sequence[Candidate]) -> list[Fit]:
    """Thresholds of verifiers, learnt from pairs by problem; the best may be taken for each risk.

    Raises:
        ConfigurationError: No threshold can be learnt from the pairs; see `thresholds`.
    """
    return [
        Fit(
            candidate,
            thresholds(list(scored(pairs, candidate).values()), candidate.grid, tests=len(candidates)),
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

    None where it was not asked about one of them, and of verifiers that judge a draft step alone: in use there is no
    pair then.
    """
    if candidate.draft_first:
        return None
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


def split_results(
    pairs: Mapping[str, LabelledPair],
    candidates: Sequence[Candidate],
    *,
    splits: int = 20,
    learn_from: float = 0.5,
) -> Iterator[SplitResult]:
    """Learn thresholds from a share of the problems and hold the others against them, again and again.

    Raises:
        ConfigurationError: No threshold can be learnt from the pairs; see `thresholds`.
    """
    known = {candidate.name: scored(pairs, candidate) for candidate in candidates}
    for of_candidate in known.values():
        check(list(of_candidate.values()))
    problems = sorted(next(iter(known.values())))
    counts: dict[float, list[tuple[int, int, int]]] = {risk: [] for risk in RISKS}
    for number in range(splits):
        mixed = random.Random(f"0 {number}").sample(problems, len(problems))
        split = min(max(int(len(mixed) * learn_from), 1), len(mixed) - 1)
        seen, others = mixed[:split], mixed[split:]
        fits = []
        for candidate in candidates:
            of_seen = [known[candidate.name][problem] for problem in seen]
            if len({pair.changes_outcome for pair in of_seen}) == 2:
                fits.append(Fit(candidate, thresholds(of_seen, candidate.grid, tests=len(candidates))))
        for risk in RISKS:
            if (chosen := best(fits, risk)) is not None:
                candidate, threshold = chosen
                of_others = [known[candidate.name][problem] for problem in others]
                accepted = [pair.changes_outcome for pair in of_others if pair.score >= threshold.value]
                counts[risk].append((len(accepted), sum(accepted), len(of_others)))
    for risk, of_risk in counts.items():
        accepted_pairs = sum(accepted for accepted, _, _ in of_risk)
        yield SplitResult(
            risk,
            splits,
            len(of_risk),
            sum(errors <= risk * accepted for accepted, errors, _ in of_risk),
            sum(errors for _, errors, _ in of_risk) / accepted_pairs if accepted_pairs else 0.0,
            accepted_pairs / sum(total for _, _, total in of_risk) if of_risk else 0.0,
        )


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
