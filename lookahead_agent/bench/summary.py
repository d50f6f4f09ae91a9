"""Summaries of results by task and configuration, with confidence intervals."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookahead_agent.bench.config import BASELINE, PEER
from lookahead_agent.bench.samples import CallRecord, Sample, acceptance_of
from lookahead_agent.errors import extra_imports
from lookahead_agent.trace.node_times import FIGURES, Span

Pairs = Sequence[tuple[Sample, Sample]]  # pairs with equal problem, number and block

_MAX_STEPS = 10_000
_RESAMPLES = 1000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A statistic and its 95 % confidence interval."""

    value: float
    low: float | None = None  # lower end; None: too few problems, as for `high`
    high: float | None = None  # upper end

    def format(self, form: Callable[[float], str], ends: Callable[[float], str] | None = None) -> str:
        """Format as "0.49 (0.43 to 0.53)"; `ends` formats the interval, by default like `form`."""
        if self.low is None or self.high is None:
            return form(self.value)
        ends = ends or form
        return f"{form(self.value)} ({ends(self.low)} to {ends(self.high)})"


@dataclass(frozen=True)
class ConfigurationSummary:
    """The summary of one configuration of a task."""

    task: str
    configuration: str
    mode: str
    samples: int
    errors: int  # failed samples
    accuracy: Estimate | None  # share of correct answers; None: nothing to check
    # Difference from the baseline's accuracy, by problem; None for the baseline, as the next two
    accuracy_difference: Estimate | None
    speedup: Estimate | None  # median over problems of the baseline's seconds over the configuration's
    rate_ratio: Estimate | None  # median over problems of its tokens per second over the baseline's
    seconds: float  # seconds per sample, median
    tokens: float  # output tokens per sample, mean
    tokens_per_second: float  # tokens per second of a sample, median
    first_token: float | None  # seconds to the first committed token of a call, median
    acceptance: float  # share of the committed steps that the draft wrote
    wasted_target: float  # rejected and aborted tokens of the target, per output token
    wasted_draft: float  # the same of the draft
    verifier_share: float  # share of a call's time in which the verifier had work
    same_tokens: int | None  # samples with exactly the baseline's tokens; None: tokens unknown, or several calls


def summarize(samples: Sequence[Sample], baseline: str = BASELINE) -> list[ConfigurationSummary]:
    """Summarize each task's configurations in the order of measurement, the baseline first."""
    groups = by_configuration(samples, baseline)
    baselines: dict[str, list[Sample]] = {}
    for (task, name), members in groups.items():
        baselines.setdefault(task, members if name == baseline or members[0].mode in (BASELINE, PEER) else [])
    return [_summary(members, baselines[task]) for (task, _), members in groups.items()]


def by_configuration(samples: Iterable[Sample], baseline: str = BASELINE) -> dict[tuple[str, str], list[Sample]]:
    """Group samples by task and configuration, each task's baseline first, else the first peer."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.task, sample.configuration), []).append(sample)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    order = sorted(groups, key=lambda key: (tasks.index(key[0]), key[1] != baseline, groups[key][0].mode != PEER))
    return {key: groups[key] for key in order}


def pairs(first: Sequence[Sample], second: Sequence[Sample]) -> Pairs:
    """Pair the samples of equal problem, number and block, without failed ones."""
    others = {(other.block, other.problem, other.sample): other for other in second if other.error is None}
    candidates = [(mine, others.get((mine.block, mine.problem, mine.sample))) for mine in first if mine.error is None]
    return [(mine, other) for mine, other in candidates if other is not None]


def spans_of_samples(samples: Sequence[Sample]) -> list[Span]:
    """Convert the calls and tool runs of samples to spans, as if the samples had run one after another."""
    spans: list[Span] = []
    offset = 0.0
    for number, sample in enumerate(samples):
        for call in sample.calls:
            start, busy = offset + call.started, call.busy
            times = busy.get("prompt", 0.0), busy.get("writing", 0.0), busy.get("waiting", 0.0)
            span = Span(call.path or call.node or "(no node)", start, start + call.seconds, False, call.step, *times)
            spans.append(replace(span, **{name: getattr(call, name) for name in FIGURES}))
        for run in sample.tools:
            start, node = offset + run.started, run.path or "(no node)"
            step = None if run.step is None else number * _MAX_STEPS + run.step
            spans.append(Span(node, start, start + run.seconds, True, step))
        offset += sample.seconds
    return spans


def measure_levers(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean seconds of writing that each measured lever saves a run of this task against the target alone."""
    groups = {configuration: members for (_, configuration), members in by_configuration(samples).items()}
    saved = {}
    for members in groups.values():
        mode, method = members[0].mode, members[0].settings.get("token_speculation")
        name = {"shared_draft": "shared draft", "sd": "prompt lookup" if method == "ngram" else None}.get(mode)
        if name is not None and (paired := pairs(members, groups.get(BASELINE, []))):
            saved[name] = float(np.mean([_sum_writing(alone) - _sum_writing(mine) for mine, alone in paired]))
    return saved


def _sum_writing(sample: Sample) -> float:
    return sum(call.busy.get("writing", 0.0) for call in sample.calls)


def _summary(samples: Sequence[Sample], baseline: Sequence[Sample]) -> ConfigurationSummary:
    first = samples[0]
    finished = [sample for sample in samples if sample.error is None] or list(samples)
    calls = [call for sample in finished for call in sample.calls]
    tokens = sum(call.output_tokens for call in calls)
    output = max(tokens, 1)
    first_tokens = [call.first_token for call in calls if call.first_token is not None]
    paired = pairs(samples, baseline) if samples is not baseline else []
    checked = [sample for sample in samples if sample.correct is not None]
    return ConfigurationSummary(
        task=first.task,
        configuration=first.configuration,
        mode=first.mode,
        samples=len(samples),
        errors=sum(sample.error is not None for sample in samples),
        accuracy=estimate(np.mean, _by_problem(checked, _correct)) if checked else None,
        accuracy_difference=accuracy_difference(paired),
        speedup=speedup(paired) if paired else None,
        rate_ratio=estimate_over_problems(median_ratio, paired, lambda sample: sample.tokens_per_second)
        if paired
        else None,
        seconds=float(np.median([sample.seconds for sample in finished])),
        tokens=tokens / len(finished),
        tokens_per_second=float(np.median([sample.tokens_per_second for sample in finished])),
        first_token=float(np.median(first_tokens)) if first_tokens else None,
        acceptance=acceptance_of(calls),
        wasted_target=_count_wasted(calls, "target") / output,
        wasted_draft=_count_wasted(calls, "draft") / output,
        verifier_share=sum(call.busy.get("verifier", 0.0) for call in calls)
        / max(sum(call.seconds for call in calls), 1e-9),
        same_tokens=_same_tokens(paired),
    )


def estimate_over_problems(statistic: Callable[..., Any], paired: Pairs, of: Callable[[Sample], float]) -> Estimate:
    """Estimate a statistic of two columns: `of` the first and `of` the second sample of each pair.

    Samples of one problem are not independent, so that their mean counts as one entry.
    """
    first, second = zip(*paired, strict=True)
    return estimate(statistic, _by_problem(first, of), _by_problem(second, of))


def speedup(paired: Pairs) -> Estimate:
    """Estimate the median over problems of the second sample's seconds over the first's."""
    return estimate_over_problems(
        lambda mine, other, axis=-1: median_ratio(other, mine, axis), paired, lambda sample: sample.seconds
    )


def accuracy_difference(paired: Pairs) -> Estimate | None:
    """Estimate the accuracy of the first samples minus that of the second; None: nothing to check."""
    checked = [both for both in paired if all(sample.correct is not None for sample in both)]
    return estimate_over_problems(mean_difference, checked, _correct) if checked else None


def _correct(sample: Sample) -> float:
    return float(bool(sample.correct))


def _by_problem(samples: Iterable[Sample], of: Callable[[Sample], float]) -> list[float]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        values.setdefault(sample.problem, []).append(of(sample))
    return [float(np.mean(group)) for group in values.values()]


def _count_wasted(calls: Iterable[CallRecord], role: str) -> int:
    counts = [call.tokens.get(role, {}) for call in calls]
    return sum(count.get("rejected", 0) + count.get("aborted", 0) for count in counts)


def _same_tokens(paired: Pairs) -> int | None:
    known = [
        (mine.calls[0].token_ids, other.calls[0].token_ids)
        for mine, other in paired
        if len(mine.calls) == len(other.calls) == 1
    ]
    if not known or any(mine is None for mine, _ in known):
        return None
    return sum(mine == other for mine, other in known)


def estimate(statistic: Callable[..., Any], *columns: Sequence[float]) -> Estimate:
    """Estimate a statistic of columns with one entry per problem; the bootstrap interval resamples whole rows."""
    arrays = [np.asarray(column, dtype=float) for column in columns]
    value = float(statistic(*arrays, axis=-1))
    if len(arrays[0]) < 2:
        return Estimate(value)
    with extra_imports("reports need SciPy: pip install 'lookahead-agent[bench]'"):
        from scipy.stats import bootstrap
    # The percentile method, since BCa, SciPy's default, is undefined if all samples are equal.
    interval: Any = bootstrap(
        arrays,
        statistic,
        paired=True,
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        rng=0,
    ).confidence_interval
    return Estimate(value, float(interval.low), float(interval.high))


def median_ratio(first: Any, second: Any, axis: int = -1) -> Any:
    """Return the median of the ratios first / second."""
    return np.median(first / second, axis=axis)


def mean_difference(first: Any, second: Any, axis: int = -1) -> Any:
    """Return the mean of the differences first - second."""
    return np.mean(first - second, axis=axis)
