"""How models judge the same pairs: how lenient each is, whether it minds the order, and with whom it agrees."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from lookahead_agent.bench.row_file import Row
from lookahead_agent.calibration.harm import HarmRule
from lookahead_agent.calibration.pairs import LabelledPair, labelled_pairs, pair_file
from lookahead_agent.certificates.drift import DISPUTED_BELOW
from lookahead_agent.errors import ConfigurationError

_ASKED = ("p_aligned", "p_swapped")


@dataclass(frozen=True)
class JudgeFigures:
    """A judge, of pairs with different texts.

    Attributes:
        judge: Its model.
        pairs: How many it judged.
        aligned: Share that it says are equivalent: p(aligned) of at least ½.
        flipped: Share of which it says something else with the steps in each other's place.
        bias: Mean of p(aligned) with the draft's step first, less the mean with the target's first.
        agrees: Share of pairs of which it says what the first judge does.
        kappa: The same beyond chance (Cohen's); None: one of them says the same of all pairs.
        area: How often a harmless pair has a larger p(aligned) than a harmful one (area under the curve); None: all are
            one or the other.
    """

    judge: str
    pairs: int
    aligned: float
    flipped: float
    bias: float
    agrees: float
    kappa: float | None
    area: float | None


def scores_beside(rows: Sequence[Row], path: Path) -> dict[str, LabelledPair]:
    """Pairs with the scores of another file, which may have nothing but scores.

    Args:
        rows: Of the file of pairs.
        path: The other file.

    Raises:
        ConfigurationError: It is not there, or has scores of other pairs.
    """
    own = [row for row in rows if row.get("kind") != "scores"]
    return labelled_pairs([*own, *(row for row in pair_file(path).rows if row.get("kind") == "scores")])


def judge_figures(files: Sequence[Mapping[str, LabelledPair]], rule: HarmRule) -> list[JudgeFigures]:
    """What is to be said of each judge.

    Args:
        files: The same pairs, by problem, as each of them judged; the first is whom the others are held against.
        rule: Which pairs are harmful.

    Raises:
        ConfigurationError: A judge was not asked about all pairs in both orders, or no pair has different texts.
    """
    problems = [problem for problem, pair in files[0].items() if not pair.row.same_text]
    if not problems:
        raise ConfigurationError("no pair has different texts: there is nothing to judge")
    for pairs in files:
        for problem in problems:
            if not pairs[problem].scores.keys() >= set(_ASKED):
                raise ConfigurationError(
                    f"the pair of {problem!r} was not judged in both orders: measure it with "
                    f"`lookahead-agent calibrate score --measures {','.join(_ASKED)}`"
                )
    first = [_says(files[0][problem]) for problem in problems]
    return [_figures([pairs[problem] for problem in problems], first, rule) for pairs in files]


def _figures(pairs: Sequence[LabelledPair], first: Sequence[bool], rule: HarmRule) -> JudgeFigures:
    says = [_says(pair) for pair in pairs]
    agrees = fmean(own == other for own, other in zip(says, first, strict=True))
    by_chance = fmean(says) * fmean(first) + (1 - fmean(says)) * (1 - fmean(first))
    return JudgeFigures(
        judge=next((pair.judge for pair in pairs if pair.judge), "the target"),
        pairs=len(pairs),
        aligned=fmean(says),
        flipped=fmean(own != _says(pair, "p_swapped") for own, pair in zip(says, pairs, strict=True)),
        bias=fmean(pair.scores["p_aligned"] - pair.scores["p_swapped"] for pair in pairs),
        agrees=agrees,
        kappa=(agrees - by_chance) / (1 - by_chance) if by_chance < 1 else None,
        area=_area(pairs, rule),
    )


def _says(pair: LabelledPair, asked: str = "p_aligned") -> bool:
    return pair.scores[asked] >= DISPUTED_BELOW


def _area(pairs: Sequence[LabelledPair], rule: HarmRule) -> float | None:
    of: dict[bool, list[float]] = {True: [], False: []}
    for pair in pairs:
        harmful = pair.harmful(rule)
        if harmful is not None:
            of[harmful].append(pair.scores["p_aligned"])
    if not of[True] or not of[False]:
        return None
    return fmean(
        (harmless > harmful) + (harmless == harmful) / 2 for harmless, harmful in itertools.product(of[False], of[True])
    )
