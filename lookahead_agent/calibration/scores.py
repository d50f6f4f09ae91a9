"""What verifiers measure of a pair, and the policies whose thresholds can be learnt from it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from lookahead_agent.calibration.pairs import LabelledPair, PairRow
from lookahead_agent.engine_set import EngineSet
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.verifiers import JudgeVerifier, LikelihoodVerifier, ScoreVerifier
from lookahead_agent.verifiers.protocol import DraftStep
from lookahead_agent.verifiers.results import different_results

Measure = Literal["similarity", "p_aligned", "score", "likelihood"]
"""Cosine similarity; the judge's p(aligned); the target's mark of the draft's step, from 0 to 9; the mean
log-probability of the draft's step under the target, in nats per token."""

MEASURES: tuple[Measure, ...] = get_args(Measure)


async def measure(engines: EngineSet, row: PairRow, names: Sequence[Measure]) -> dict[str, float]:
    """Measure a pair.

    Args:
        engines: Target, and embedder and judge where they are asked.
        row: The pair.
        names: What is measured.

    Raises:
        EngineError: An engine failed.
    """
    pair = row.pair
    target = engines.target
    step: DraftStep | None = None
    if "score" in names or "likelihood" in names:
        prompt = await asyncio.to_thread(target.tokenizer.chat_prompt, [{"role": "user", "content": row.question}])
        step = DraftStep(row.question, row.before, pair.draft, (*prompt, *row.before_ids))
    found: dict[str, float] = {}
    for name in names:
        if name == "similarity":
            assert engines.embedder is not None
            found[name] = await engines.embedder.similarity(pair.draft.text.strip(), pair.target.text.strip())
        elif name == "p_aligned":
            assert engines.judge is not None
            found[name] = (await JudgeVerifier(engines.judge, 0.0).verify(pair)).score or 0.0  # none: too long
        else:
            assert step is not None
            verifier = ScoreVerifier(target, 0.0) if name == "score" else LikelihoodVerifier(target, 0.0)
            verdict = await verifier.verify_draft(step)
            assert verdict.score is not None
            found[name] = verdict.score
    return found


@dataclass(frozen=True)
class Candidate:
    """A verifier whose threshold can be learnt.

    Attributes:
        name: Of the verifier, and whether it compares results first.
        measure: What is held against the threshold.
        grid: Thresholds to choose from, fixed before any pair is seen.
        fields: Of its policy, without the threshold.
    """

    name: str
    measure: Measure
    grid: tuple[float, ...]
    fields: Mapping[str, Any]

    @property
    def decides(self) -> tuple[str, ...]:
        """Roles of the models on which the scores depend."""
        more = {"similarity": ("embedding",), "p_aligned": ("judge",)}
        return ("target", "draft", *more.get(self.measure, ()))

    @property
    def draft_first(self) -> bool:
        """Whether draft steps are judged by themselves."""
        return self._rules.draft_first

    def score(self, pair: LabelledPair) -> float | None:
        """What decides about a pair, infinite where no threshold matters; None: it was not measured."""
        if not self.draft_first:
            if pair.row.same_text:
                return math.inf
            of_pair = pair.row.pair
            texts = of_pair.draft.text.strip(), of_pair.target.text.strip()
            if self._rules.compares_results and different_results(*texts) is not None:
                return -math.inf
        return pair.scores.get(self.measure)

    def policy(self, threshold: float) -> VerifierPolicy:
        """The policy with a threshold."""
        return VerifierPolicy.model_validate({**self.fields, self.measure: threshold})

    @cached_property
    def _rules(self) -> VerifierPolicy:
        """What is compared before the threshold matters."""
        return VerifierPolicy.model_validate(self.fields)


def _steps(low: float, high: float, step: float) -> tuple[float, ...]:
    count = round((high - low) / step)
    return tuple(round(low + step * number, 6) for number in range(count + 1))


CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        Candidate("embedding", "similarity", _steps(0.0, 1.0, 0.01), {"verifier": "embedding"}),
        Candidate(
            "embedding+results", "similarity", _steps(0.0, 1.0, 0.01), {"verifier": "embedding", "same_numbers": True}
        ),
        Candidate("judge", "p_aligned", _steps(0.0, 1.0, 0.01), {"verifier": "judge", "same_numbers": False}),
        Candidate("judge+results", "p_aligned", _steps(0.0, 1.0, 0.01), {"verifier": "judge", "same_numbers": True}),
        Candidate("score", "score", _steps(0.0, 9.0, 0.1), {"verifier": "score"}),
        Candidate("likelihood", "likelihood", _steps(-3.0, 0.0, 0.02), {"verifier": "likelihood"}),
    )
}
"""Verifiers by name; "+results" compares numbers, units and equations first."""
