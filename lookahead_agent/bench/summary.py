"""Summaries of results, by task and configuration, and by node of a graph."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lookahead_agent.bench.config import BASELINE, PEER
from lookahead_agent.bench.samples import CallRecord, Sample, acceptance_of
from lookahead_agent.errors import extra_imports
from lookahead_agent.trace.node_times import FIGURES, Span

Pairs = Sequence[tuple[Sample, Sample]]  # samples of the same problem, number and block

_MOST_STEPS = 10_000
_RESAMPLES = 1000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % confidence interval."""

    value: float  # the figure
    low: float | None = None  # lower end; None: too few samples to tell, as for `high`
    high: float | None = None  # upper end

    def shown(self, form: Callable[[float], str], ends: Callable[[float], str] | None = None) -> str:
        """Text such as "0.49 (0.43 to 0.53)"; `ends` formats the interval, if not as `form` does."""
        if self.low is None or self.high is None:
            return form(self.value)
        ends = ends or form
        return f"{form(self.value)} ({ends(self.low)} to {ends(self.high)})"


@dataclass(frozen=True)
class ConfigurationSummary:
    """One configuration of a task."""

    task: str
    configuration: str
    mode: str
    samples: int
    errors: int  # failed samples
    accuracy: Estimate | None  # share of correct answers; None: nothing to check
    accuracy_difference: Estimate | None  # against the baseline, problem by problem; None for it, as the next
    speedup: Estimate | None  # the baseline's seconds over this one's: the median over problems
    rate_ratio: Estimate | None  # tokens per second over the baseline's, likewise
    seconds: float  # per sample, median
    tokens: float  # output tokens per sample, mean
    tokens_per_second: float  # of a sample, median
    first_token: float | None  # seconds to the first committed token of a call, median
    acceptance: float  # share of the committed steps that the draft wrote
    wasted_target: float  # rejected and aborted tokens of the target, per output token
    wasted_draft: float  # the same of the draft
    verifier_share: float  # share of a call's time in which the verifier had work
    same_tokens: int | None  # samples with exactly the baseline's tokens; None: tokens unknown, or several calls


def summarize(samples: Sequence[Sample]) -> list[ConfigurationSummary]:
    """A summary per task and configuration, in the order of measurement, the baseline of each task first."""
    groups = by_configuration(samples)
    baselines: dict[str, list[Sample]] = {}
    for (task, _), of_one in groups.items():
        baselines.setdefault(task, of_one if of_one[0].mode in (BASELINE, PEER) else [])
    return [_summary(of_one, baselines[task]) for (task, _), of_one in groups.items()]


def by_configuration(samples: Iterable[Sample]) -> dict[tuple[str, str], list[Sample]]:
    """Samples by task and configuration, the baseline of each task first: the target alone, else the first peer."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.task, sample.configuration), []).append(sample)
    tasks = list(dict.fromkeys(task for task, _ in groups))
    order = sorted(groups, key=lambda key: (tasks.index(key[0]), key[1] != BASELINE, groups[key][0].mode != PEER))
    return {key: groups[key] for key in order}


def pairs(first: Sequence[Sample], second: Sequence[Sample]) -> Pairs:
    """Samples of the same problem, number and block that both have, without those that failed."""
    others = {(other.block, other.problem, other.sample): other for other in second if other.error is None}
    found = [(mine, others.get((mine.block, mine.problem, mine.sample))) for mine in first if mine.error is None]
    return [(mine, other) for mine, other in found if other is not None]


def spans_of_samples(samples: Sequence[Sample]) -> list[Span]:
    """The replies and tool runs of samples, as if these had run one after another."""
    spans: list[Span] = []
    begin = 0.0
    for number, sample in enumerate(samples):
        for call in sample.calls:
            start, busy = begin + call.started, call.busy
            times = busy.get("prompt", 0.0), busy.get("writing", 0.0), busy.get("waiting", 0.0)
            span = Span(call.path or call.node or "(no node)", start, start + call.seconds, False, call.step, *times)
            spans.append(replace(span, **{name: getattr(call, name) for name in FIGURES}))
        for run in sample.tools:
            start, node = begin + run.started, run.path or "(no node)"
            step = None if run.step is None else number * _MOST_STEPS + run.step
            spans.append(Span(node, start, start + run.seconds, True, step))
        begin += sample.seconds
    return spans


def measured_levers(samples: Sequence[Sample]) -> dict[str, float]:
    """Seconds of writing that a run wins against the target alone, of the levers that these samples of a task tried."""
    groups = {configuration: of_this for (_, configuration), of_this in by_configuration(samples).items()}
    won = {}
    for of_this in groups.values():
        mode, method = of_this[0].mode, of_this[0].settings.get("token_speculation")
        name = {"shared_draft": "shared draft", "sd": "prompt lookup" if method == "ngram" else None}.get(mode)
        if name is not None and (paired := pairs(of_this, groups.get(BASELINE, []))):
            won[name] = float(np.mean([_writing(alone) - _writing(mine) for mine, alone in paired]))
    return won


def _writing(sample: Sample) -> float:
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
        rate_ratio=over_problems(median_ratio, paired, lambda sample: sample.tokens_per_second) if paired else None,
        seconds=float(np.median([sample.seconds for sample in finished])),
        tokens=tokens / len(finished),
        tokens_per_second=float(np.median([sample.tokens_per_second for sample in finished])),
        first_token=float(np.median(first_tokens)) if first_tokens else None,
        acceptance=acceptance_of(calls),
        wasted_target=_wasted(calls, "target") / output,
        wasted_draft=_wasted(calls, "draft") / output,
        verifier_share=sum(call.busy.get("verifier", 0.0) for call in calls)
        / max(sum(call.seconds for call in calls), 1e-9),
        same_tokens=_same_tokens(paired),
    )


def over_problems(statistic: Callable[..., Any], paired: Pairs, of: Callable[[Sample], float]) -> Estimate:
    """A statistic of two columns: a figure `of` the first and of the second sample of each pair.

    Several samples of a problem count as one, their mean: they are not independent.
    """
    first, second = zip(*paired, strict=True)
    return estimate(statistic, _by_problem(first, of), _by_problem(second, of))


def speedup(paired: Pairs) -> Estimate:
    """Seconds of the second of each pair over the first's: the median over problems."""
    return over_problems(
        lambda mine, other, axis=-1: median_ratio(other, mine, axis), paired, lambda sample: sample.seconds
    )


def accuracy_difference(paired: Pairs) -> Estimate | None:
    """Accuracy of the first of each pair minus the second's; None: nothing to check."""
    checked = [both for both in paired if all(sample.correct is not None for sample in both)]
    return over_problems(mean_difference, checked, _correct) if checked else None


def _correct(sample: Sample) -> float:
    return float(bool(sample.correct))


def _by_problem(samples: Iterable[Sample], of: Callable[[Sample], float]) -> list[float]:
    figures: dict[str, list[float]] = {}
    for sample in samples:
        figures.setdefault(sample.problem, []).append(of(sample))
    return [float(np.mean(of_problem)) for of_problem in figures.values()]


def _wasted(calls: Iterable[CallRecord], role: str) -> int:
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
    """A statistic of columns, one entry per problem, with a bootstrap interval: it resamples whole rows."""
    arrays = [np.asarray(column, dtype=float) for column in columns]
    value = float(statistic(*arrays, axis=-1))
    if len(arrays[0]) < 2:
        return Estimate(value)
    with extra_imports("reports need SciPy: pip install 'lookahead-agent[bench]'"):
        from scipy.stats import bootstrap
    # The percentile method, since the others have no answer where all samples are equal.
    found: Any = bootstrap(
        arrays,
        statistic,
        paired=True,
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        rng=0,
    ).confidence_interval
    return Estimate(value, float(found.low), float(found.high))


def median_ratio(first: Any, second: Any, axis: int = -1) -> Any:
    """The median of first over second, pair by pair."""
    return np.median(first / second, axis=axis)


def mean_difference(first: Any, second: Any, axis: int = -1) -> Any:
    """The mean of the differences."""
    return np.mean(first - second, axis=axis)
