"""What results come to: per task and way of doing it, and per node."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from lookahead_agent.bench.config import BASELINE
from lookahead_agent.bench.samples import CallRecord, Results, Sample, TurnRecord, acceptance_rate
from lookahead_agent.bench.statistics import Estimate, difference, estimate, mean, median_ratio, quantile


@dataclass(frozen=True)
class ConfigurationSummary:
    """One way of doing a task.

    Attributes:
        task: Name of the task.
        configuration: Name of the way.
        mode: Its mode.
        samples: How many there are.
        errors: Of them, those that failed.
        right: Share of right answers; None: nothing to check.
        right_difference: Against the baseline, problem by problem; None for the baseline itself, as of the next two.
        speedup: The baseline's seconds over this one's: the median over problems.
        rate_ratio: Tokens per second against the baseline's: the median over problems.
        seconds: Per sample, median.
        tokens: Output tokens per sample, mean.
        tokens_per_second: Of a sample, median.
        first_token: Seconds to the first committed token of a call, median.
        step_gap: Seconds from one committed step of a call to the next, median.
        step_gap_p90: The same, 90th percentile.
        acceptance: Share of steps that the draft wrote.
        wasted_target: Tokens that the target wrote for nothing, per output token.
        wasted_draft: The same of the draft.
        judge_share: Share of verdicts for which a language model was asked.
        verifier_share: Share of a call's time in which the verifier had work.
        cpu_seconds: Processor time per sample; None: unknown, as of the next three.
        gpu_seconds: GPU time per sample.
        peak_memory: Most memory at once, in bytes.
        joules: Energy per sample.
        same_tokens: Samples of one call with the baseline's very tokens; None: tokens unknown, or several calls.
    """

    task: str
    configuration: str
    mode: str
    samples: int
    errors: int
    right: Estimate | None
    right_difference: Estimate | None
    speedup: Estimate | None
    rate_ratio: Estimate | None
    seconds: float
    tokens: float
    tokens_per_second: float
    first_token: float | None
    step_gap: float | None
    step_gap_p90: float | None
    acceptance: float
    wasted_target: float
    wasted_draft: float
    judge_share: float
    verifier_share: float
    cpu_seconds: float | None
    gpu_seconds: float | None
    peak_memory: int | None
    joules: float | None
    same_tokens: int | None


@dataclass(frozen=True)
class NodeSummary:
    """One node in one way of doing a task.

    Attributes:
        task: Name of the task.
        configuration: Name of the way.
        node: The node; None outside a graph.
        policy: Name of its policy.
        calls: Calls per sample.
        seconds: In its calls, per sample.
        tokens: Output tokens per sample.
        steps: Steps in all samples.
        acceptance: Share of them that the draft wrote.
        speculates: Whether a draft wrote anything there.
    """

    task: str
    configuration: str
    node: str | None
    policy: str
    calls: float
    seconds: float
    tokens: float
    steps: int
    acceptance: float
    speculates: bool


def summarize(results: Results) -> list[ConfigurationSummary]:
    """A summary per task and arm, in the order in which they were measured, the baseline of each task first."""
    groups = by_configuration(results.samples)
    return [_summary(samples, groups.get((task, BASELINE), []), results.turns) for (task, _), samples in groups.items()]


def by_configuration(samples: Iterable[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """Samples by task and arm, the baseline of each task first."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.task, sample.configuration), []).append(sample)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    order = sorted(groups, key=lambda key: (tasks.index(key[0]), key[1] != BASELINE))
    return {key: groups[key] for key in order}


def pairs(first: Sequence[Sample], second: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """Samples of the same problem, number and block, of those that did not fail."""

    def of(sample: Sample) -> tuple[int, str, int]:
        return sample.block, sample.problem, sample.sample

    others = {of(sample): sample for sample in second if sample.error is None}
    found = [(sample, others.get(of(sample))) for sample in first if sample.error is None]
    return [(mine, other) for mine, other in found if other is not None]


def nodes(results: Results) -> list[NodeSummary]:
    """A summary per task, arm and node, of tasks that are graphs."""
    found = []
    for (task, configuration), samples in by_configuration(results.samples).items():
        calls: dict[str | None, list[CallRecord]] = {}
        for sample in samples:
            for call in sample.calls:
                calls.setdefault(call.node, []).append(call)
        if set(calls) <= {None}:
            continue
        for node, made in calls.items():
            found.append(
                NodeSummary(
                    task,
                    configuration,
                    node,
                    "/".join(sorted({call.policy for call in made})),
                    len(made) / len(samples),
                    sum(call.seconds for call in made) / len(samples),
                    sum(call.output_tokens for call in made) / len(samples),
                    sum(call.steps for call in made),
                    acceptance_rate(made),
                    any(sum(call.tokens.get("draft", {}).values()) for call in made),
                )
            )
    return found


def _summary(
    samples: Sequence[Sample], base: Sequence[Sample], turns: Mapping[str, TurnRecord]
) -> ConfigurationSummary:
    first = samples[0]
    finished = [sample for sample in samples if sample.error is None] or list(samples)
    calls = [call for sample in finished for call in sample.calls]
    output = max(sum(call.output_tokens for call in calls), 1)
    verdicts = sum(call.verifier_calls for call in calls)
    gaps = [
        later - earlier
        for call in calls
        for earlier, later in zip(call.times.committed, call.times.committed[1:], strict=False)
    ]
    firsts = [call.first_token for call in calls if call.first_token is not None]
    paired = pairs(samples, base) if first.configuration != BASELINE else []
    measured = [turns[name] for name in {sample.turn for sample in samples if sample.turn} if name in turns]
    return ConfigurationSummary(
        task=first.task,
        configuration=first.configuration,
        mode=first.mode,
        samples=len(samples),
        errors=sum(sample.error is not None for sample in samples),
        right=_right(samples),
        right_difference=right_difference(paired),
        speedup=speedup(paired) if paired else None,
        rate_ratio=rate_ratio(paired) if paired else None,
        seconds=statistics.median(sample.seconds for sample in finished),
        tokens=mean([sample.output_tokens for sample in finished]),
        tokens_per_second=statistics.median(sample.tokens_per_second for sample in finished),
        first_token=statistics.median(firsts) if firsts else None,
        step_gap=quantile(gaps, 0.5),
        step_gap_p90=quantile(gaps, 0.9),
        acceptance=acceptance_rate(calls),
        wasted_target=_wasted(calls, "target") / output,
        wasted_draft=_wasted(calls, "draft") / output,
        judge_share=sum(call.judge_calls for call in calls) / max(verdicts, 1),
        verifier_share=sum(call.busy.get("verifier", 0.0) for call in calls)
        / max(sum(call.seconds for call in calls), 1e-9),
        cpu_seconds=_per_sample([turn.cpu_seconds for turn in measured], len(samples)),
        gpu_seconds=_per_sample([turn.gpu_seconds for turn in measured], len(samples)),
        peak_memory=max((turn.peak_memory for turn in measured if turn.peak_memory is not None), default=None),
        joules=_per_sample([turn.joules for turn in measured], len(samples)),
        same_tokens=_same_tokens(paired),
    )


def over_problems(
    statistic: Callable[..., float], paired: Sequence[tuple[Sample, Sample]], of: Callable[[Sample], float]
) -> Estimate:
    """A statistic of pairs of samples. Several samples of a problem count as one, their mean: they are not independent.

    Args:
        statistic: Of the figures of the pairs' first samples and those of their second ones, problem by problem.
        paired: Samples of the same problems.
        of: The figure.
    """
    first, second = zip(*paired, strict=True)
    return estimate(statistic, _by_problem(first, of), _by_problem(second, of))


def speedup(paired: Sequence[tuple[Sample, Sample]]) -> Estimate:
    """Seconds of the second of each pair over the first's: the median over problems."""
    return over_problems(lambda mine, base: median_ratio(base, mine), paired, lambda sample: sample.seconds)


def rate_ratio(paired: Sequence[tuple[Sample, Sample]]) -> Estimate:
    """Tokens per second of the first of each pair over the second's: the median over problems."""
    return over_problems(median_ratio, paired, lambda sample: sample.tokens_per_second)


def right_difference(paired: Sequence[tuple[Sample, Sample]]) -> Estimate | None:
    """Right answers of the first of each pair minus the second's, as a share; None: nothing to check."""
    checked = [both for both in paired if all(sample.right is not None for sample in both)]
    return over_problems(difference, checked, lambda sample: float(bool(sample.right))) if checked else None


def _right(samples: Sequence[Sample]) -> Estimate | None:
    checked = [sample for sample in samples if sample.right is not None]
    return estimate(mean, _by_problem(checked, lambda sample: float(bool(sample.right)))) if checked else None


def _by_problem(samples: Iterable[Sample], of: Callable[[Sample], float]) -> list[float]:
    figures: dict[str, list[float]] = {}
    for sample in samples:
        figures.setdefault(sample.problem, []).append(of(sample))
    return [mean(of_problem) for of_problem in figures.values()]


def _wasted(calls: Iterable[CallRecord], role: str) -> int:
    token_counts = [call.tokens.get(role, {}) for call in calls]
    return sum(fate.get("rejected", 0) + fate.get("aborted", 0) for fate in token_counts)


def _per_sample(values: Sequence[float | None], samples: int) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / samples if known and len(known) == len(values) else None


def _same_tokens(paired: Sequence[tuple[Sample, Sample]]) -> int | None:
    known = [
        (mine.calls[0].token_ids, base.calls[0].token_ids)
        for mine, base in paired
        if len(mine.calls) == len(base.calls) == 1
    ]
    if not known or any(mine is None for mine, _ in known):
        return None
    return sum(mine == base for mine, base in known)
