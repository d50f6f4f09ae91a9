"""The predicted speed of measured lookahead, as one measured cause after another enters the prediction.

The paper's formula (section 3.3) knows the acceptance rate, the cost ratio and the depth. The simulation of the
scheduler adds the length of the replies, a target that is slower beside a draft and in a batch, the time of verdicts,
and steps of different lengths. The rest is scheduling: prefills, engines and event loop that wait for each other,
acceptances that come in runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lookahead_agent.bench.config import BASELINE
from lookahead_agent.bench.samples import Results, Sample, acceptance_of
from lookahead_agent.bench.summary import by_configuration, pairs, rate_ratio
from lookahead_agent.policy import as_policy
from lookahead_agent.theory.formulas import asynchronous_speedup, synchronous_speedup
from lookahead_agent.theory.simulation import Draw, Durations, always, simulate

_REPLIES = 200


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured speed of lookahead against the target alone.

    Attributes:
        depth: γ.
        alpha: Measured acceptance rate.
        c: Measured cost ratio: seconds of a draft step over those of a step of the target alone.
        stages: The cause that enters, and the speedup that is predicted from then on.
        measured: Tokens per second over the target's alone: the median over problems.
    """

    task: str
    configuration: str
    depth: int
    alpha: float
    c: float
    stages: tuple[tuple[str, float], ...]
    measured: float


def predict(results: Results) -> list[Prediction]:
    """Predictions for each configuration of plain questions in the mode "lr"."""
    groups = by_configuration(results.samples)
    found = []
    for (task, _), samples in groups.items():
        baseline = [each for each in groups.get((task, BASELINE), []) if each.block == samples[0].block]
        if samples[0].mode == "lr" and samples[0].workload == "questions":
            found.append(_predict(samples, baseline))
    return [prediction for prediction in found if prediction is not None]


def _predict(samples: Sequence[Sample], baseline: Sequence[Sample]) -> Prediction | None:
    calls = [call for sample in samples for call in sample.calls]
    alone = [seconds for sample in baseline for call in sample.calls for seconds in call.times.target]
    draft = [seconds for call in calls for seconds in call.times.draft]
    target = [seconds for call in calls for seconds in call.times.target]
    verdicts = [seconds for call in calls for seconds in call.times.verifier] or [0.0]
    paired = pairs(samples, baseline)
    if not (alone and draft and target and paired):
        return None
    policy = as_policy(calls[0].policy)
    alpha = acceptance_of(calls)
    step_alone, draft_step, target_step = (float(np.mean(seconds)) for seconds in (alone, draft, target))
    length = max(1, round(float(np.median([call.steps for call in calls]))))
    formula = synchronous_speedup if policy.synchronous else asynchronous_speedup

    def simulated(draft: Draw, target: Draw, verifier: Draw) -> float:
        replies = [
            simulate(
                alpha,
                policy.steps_ahead,
                Durations(target, draft, verifier),
                steps=length,
                width=policy.width,
                synchronous=policy.synchronous,
                hedge=policy.hedge,
                seed=seed,
            )
            for seed in range(_REPLIES)
        ]
        return length * step_alone / float(np.mean([reply.seconds for reply in replies]))

    c, verdict = draft_step / step_alone, float(np.mean(verdicts))
    stages = (
        ("formula", formula(alpha, min(c, 1.0), policy.steps_ahead)),
        ("length of replies", simulated(always(draft_step), always(step_alone), always(0.0))),
        ("fewer cores and batches", simulated(always(draft_step), always(target_step), always(0.0))),
        ("time of verdicts", simulated(always(draft_step), always(target_step), always(verdict))),
        ("spread of steps", simulated(_any_of(draft), _any_of(target), _any_of(verdicts))),
    )
    first = samples[0]
    return Prediction(first.task, first.configuration, policy.steps_ahead, alpha, c, stages, rate_ratio(paired).value)


def _any_of(seconds: Sequence[float]) -> Draw:
    return lambda random: random.choice(seconds)
