"""What theory predicts for the lookahead that was measured, and which measured causes close the gap.

It begins with the paper's formula (section 3.3), which knows the acceptance rate, the draft's speed and the depth, and
lets in what the formula leaves out, one measured cause after another: the machine of the decoder, simulated, with
replies as long as they are; a target that is slower beside a draft and in a batch; the time of verdicts; steps of
different lengths. What is left after that is scheduling: prefills, engines and event loop that wait for each other,
acceptances that come in runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from lookahead_agent.bench.config import BASELINE
from lookahead_agent.bench.samples import Results, Sample, acceptance_rate
from lookahead_agent.bench.statistics import mean
from lookahead_agent.bench.summary import by_configuration, pairs, rate_ratio
from lookahead_agent.policy import as_policy
from lookahead_agent.theory.formulas import asynchronous_speedup, synchronous_speedup
from lookahead_agent.theory.simulation import Draw, Durations, always, simulate

_REPLIES = 200


@dataclass(frozen=True)
class Prediction:
    """Predicted and measured speed of lookahead against the target alone.

    Attributes:
        task: Name of the task.
        configuration: Name of the way it was done.
        depth: γ.
        alpha: Measured acceptance rate.
        c: Measured cost ratio: seconds of a draft step over those of a step of the target alone.
        stages: What was let in, and the speedup that is predicted then.
        measured: Tokens per second against the target alone: the median over problems, as in the tables.
    """

    task: str
    configuration: str
    depth: int
    alpha: float
    c: float
    stages: tuple[tuple[str, float], ...]
    measured: float


def predict(results: Results) -> list[Prediction]:
    """Predictions for each way of doing plain questions with step-level speculation that compares pairs of steps."""
    groups = by_configuration(results.samples)
    found = []
    for (task, configuration), samples in groups.items():
        base = groups.get((task, BASELINE), [])
        if samples[0].mode == "lr" and samples[0].does == "questions" and base:
            prediction = _predict(task, configuration, samples, base)
            if prediction is not None:
                found.append(prediction)
    return found


def _predict(task: str, configuration: str, samples: Sequence[Sample], base: Sequence[Sample]) -> Prediction | None:
    calls = [call for sample in samples for call in sample.calls]
    base = [sample for sample in base if sample.block == samples[0].block]
    alone = [seconds for sample in base for call in sample.calls for seconds in call.times.target]
    draft = [seconds for call in calls for seconds in call.times.draft]
    target = [seconds for call in calls for seconds in call.times.target]
    verdicts = [seconds for call in calls for seconds in call.times.verifier]
    if not (alone and draft and target):
        return None
    policy = as_policy(calls[0].policy)
    alpha = acceptance_rate(calls)
    c = mean(draft) / mean(alone)
    length = max(1, round(statistics.median(call.steps for call in calls)))
    formula = synchronous_speedup if policy.synchronous else asynchronous_speedup
    slow_target, verdict = mean(target), mean(verdicts)

    def simulated(draft: Draw, target: Draw, verifier: Draw) -> float:
        durations = Durations(target, draft, verifier)
        replies = [
            simulate(
                alpha,
                policy.steps_ahead,
                durations,
                steps=length,
                width=policy.width,
                synchronous=policy.synchronous,
                hedge=policy.hedge,
                seed=seed,
            )
            for seed in range(_REPLIES)
        ]
        return length * mean(alone) / mean([reply.seconds for reply in replies])

    stages = (
        ("formula", formula(alpha, min(c, 1.0), policy.steps_ahead)),
        ("replies of their length", simulated(always(mean(draft)), always(mean(alone)), always(0.0))),
        ("fewer cores and batches", simulated(always(mean(draft)), always(slow_target), always(0.0))),
        ("time of verdicts", simulated(always(mean(draft)), always(slow_target), always(verdict))),
        ("spread of steps", simulated(_any_of(draft), _any_of(target), _any_of(verdicts or [0.0]))),
    )
    paired = pairs(samples, base)
    if not paired:
        return None
    return Prediction(task, configuration, policy.steps_ahead, alpha, c, stages, rate_ratio(paired).value)


def _any_of(seconds: Sequence[float]) -> Draw:
    return lambda randomly: randomly.choice(seconds)
