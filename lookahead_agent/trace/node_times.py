"""Divides the time of a run by node, and estimates the seconds that each lever would save."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

Table = tuple[list[str], list[list[str]]]  # Headings and rows

BEFORE, BETWEEN = "(before)", "(between)"
"""Pseudo-nodes for the time without a reply or a tool run: before the first of them, and later."""

_LOOKUP_COST = 1.1  # cost of a forward pass that verifies looked-up draft tokens; one of a single token costs 1
_DRAFTED_PASSES, _SHARED_DRAFT_COST = 0.39, 1.4
"""Forward passes per token with two draft tokens at acceptance rate 0.85; the cost of one beside a draft on a CPU."""


@dataclass(frozen=True)
class Span:
    """A reply or a tool run; `start` and `end` are in seconds since the run began."""

    node: str
    start: float
    end: float
    is_tool: bool = False
    step: int | None = None  # LangGraph's number of the graph's step
    prompt: float = 0.0  # seconds until the first token
    writing: float = 0.0  # seconds after it
    idle: float = 0.0  # seconds of `prompt` and `writing` in which no engine had work
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: unknown
    output_tokens: int = 0
    passes: int = 0  # forward passes of the target
    new_share: float = 1.0  # share of the prompt that is its last message
    lookup_passes: float = 1.0  # forward passes per token with prompt lookup
    policy: str = ""
    steps: int = 0
    accepted: int = 0  # draft steps among these


FIGURES = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "passes", "new_share", "lookup_passes"),
    *("policy", "steps", "accepted"),
)
"""Fields of a span with counts and shares of a reply."""


@dataclass(frozen=True)
class NodeTimes:
    """Summed seconds of a node's replies and tool runs; those that run at the same time share it equally."""

    node: str
    replies: int
    prompt: float
    writing: float
    tools: float
    waiting: float
    prompt_tokens: int
    cached_tokens: int | None  # Prompt tokens from the prefix cache; None: unknown
    output_tokens: int = 0
    passes: int = 0  # forward passes of the target
    policy: str = ""
    steps: int = 0
    accepted: int = 0  # draft steps among these

    @property
    def seconds(self) -> float:
        """The node's part of the elapsed time."""
        return self.prompt + self.writing + self.tools + self.waiting


def node_times(spans: Sequence[Span], seconds: float | None = None, before: float = 0.0) -> list[NodeTimes]:
    """Divide a run's time by node, in the order in which the nodes began: the parts add up to the run's length.

    Args:
        spans: The replies and tool runs.
        seconds: The run's length; None: from the beginning of the first span to the end of the last one.
        before: Seconds of the run before the first span.
    """
    nodes: dict[str, list[Span]] = {}
    for span in map(_with_shared_time, spans, _shares(spans)):
        nodes.setdefault(span.node, []).append(span)
    times = [
        _sum(node, node_spans)
        for node, node_spans in sorted(nodes.items(), key=lambda entry: min(span.start for span in entry[1]))
    ]
    if spans:
        length = before + max(span.end for span in spans) - min(span.start for span in spans)
        between = max(0.0, (length if seconds is None else seconds) - before - _sum_covered(spans))
        gaps = {**({BEFORE: before} if before else {}), BETWEEN: between}
        times += [NodeTimes(name, 0, 0.0, 0.0, 0.0, gap, 0, 0) for name, gap in gaps.items()]
    return times


def _shares(spans: Sequence[Span]) -> list[float]:
    """Return the part of the elapsed time that each span has, where spans at the same time share it equally."""
    edges = sorted(
        (at, is_start, number)
        for number, span in enumerate(spans)
        for at, is_start in ((span.start, True), (span.end, False))
    )
    shares, running, before = [0.0] * len(spans), set[int](), 0.0
    for at, is_start, number in edges:
        for other in running:
            shares[other] += (at - before) / len(running)
        before = at
        (running.add if is_start else running.discard)(number)
    return shares


def _with_shared_time(span: Span, share: float) -> Span:
    """Shorten a span to its share of the elapsed time."""
    length = span.end - span.start
    factor = share / length if length > 0 else 0.0
    parts = {name: factor * getattr(span, name) for name in ("prompt", "writing", "idle")}
    return replace(span, end=span.start + share, **parts)


def _sum(node: str, spans: Sequence[Span]) -> NodeTimes:
    replies = [span for span in spans if not span.is_tool]
    cached = [span.cached_tokens for span in replies]
    summed = ("prompt", "prompt_tokens", "output_tokens", "passes", "steps", "accepted")
    return NodeTimes(
        node,
        len(replies),
        writing=sum(span.writing - span.idle for span in replies),
        tools=sum(span.end - span.start for span in spans if span.is_tool),
        waiting=sum(max(0.0, span.end - span.start - span.prompt - span.writing) + span.idle for span in replies),
        cached_tokens=None if None in cached else sum(count or 0 for count in cached),
        policy="/".join(sorted({span.policy for span in replies})),
        **{name: sum(getattr(span, name) for span in replies) for name in summed},
    )


def spans_of(rows: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Convert the rows of a trace to spans; rows of older traces may lack fields."""
    spans = []
    for row in rows:
        node = row.get("path") or "(no node)"
        if row["type"] == "tool":
            spans.append(Span(node, row["started"], row["started"] + row["seconds"], True, row["step"]))
        elif row["type"] == "reply" and "prompt" in row["seconds"]:
            seconds, prompt, usage = row["seconds"], row["prompt_tokens"]["target"], row["usage"] or {}
            times = seconds["prompt"], seconds["writing"], seconds["waiting"]
            known = {name: row[name] for name in FIGURES if name in row}
            known |= {"prompt_tokens": prompt["total"], "cached_tokens": prompt["cached"]}
            known |= {"output_tokens": usage.get("output_tokens", 0), "passes": row["target_forward_passes"]}
            spans.append(Span(node, row["at"] - seconds["total"], row["at"], False, row["step"], *times, **known))
    return spans


def tables(
    spans: Sequence[Span], measured: Mapping[str, float] | None = None, runs: int = 1, seconds: float | None = None
) -> list[Table]:
    """Build the tables of time by node and of levers, both per run; `seconds` is the total length of the runs."""
    if not spans:
        return []
    headings = ["node", "policy", "replies", "tokens", "accepted steps", "prompt, s", "writing, s", "tools, s"]
    headings += ["waiting, s", "prompt tokens", "cached"]
    rows = [
        [
            each.node,
            each.policy,
            f"{each.replies / runs:.4g}",
            f"{each.output_tokens / runs:.0f}",
            f"{each.accepted} of {each.steps}" if each.accepted else "",
            *(f"{part / runs:.1f}" for part in (each.prompt, each.writing, each.tools, each.waiting)),
            f"{each.prompt_tokens / runs:.0f}",
            "?" if each.cached_tokens is None else f"{each.cached_tokens / runs:.0f}",
        ]
        for each in node_times(spans, seconds)
    ]
    known = measured or {}
    won = [
        [name, f"{predicted / runs:.1f}", f"{known[name]:.1f}" if name in known else ""]
        for name, predicted in levers(spans).items()
    ]
    width = 2 if measured is None else 3  # a single run has no measured levers
    return [(headings, rows), (["lever", "would win at most, s", "measured, s"][:width], [row[:width] for row in won])]


def levers(spans: Sequence[Span]) -> dict[str, float]:
    """Estimate the seconds that a shared draft, prompt lookup, a warm prefix, or parallel tools would save at most."""
    replies = [span for span in spans if not span.is_tool]
    return {
        "shared draft": sum(_seconds_saved_by_passes(span, _DRAFTED_PASSES * _SHARED_DRAFT_COST) for span in replies),
        "prompt lookup": sum(_seconds_saved_by_passes(span, span.lookup_passes * _LOOKUP_COST) for span in replies),
        "warm prefix": sum(map(_seconds_saved_by_prefix, replies)),
        "tools at once": _seconds_saved_by_tools([span for span in spans if span.is_tool]),
    }


def _seconds_saved_by_passes(span: Span, passes: float) -> float:
    """Return the seconds of writing that `passes` per token would save against the measured passes."""
    measured = span.passes / span.output_tokens if span.passes and span.output_tokens else 1.0
    return span.writing * max(0.0, 1 - passes / min(1.0, measured))


def _seconds_saved_by_prefix(span: Span) -> float:
    """Return the prefill seconds saved if all but the last message were already in the prefix cache."""
    cached = span.cached_tokens or 0
    uncached = span.prompt_tokens * (1 - span.new_share) - cached
    return span.prompt * uncached / (span.prompt_tokens - cached) if uncached > 0 else 0.0


def _seconds_saved_by_tools(spans: Sequence[Span]) -> float:
    """Return the seconds saved if the tools of each graph step ran in parallel: all but the longest of each step."""
    steps: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.step is not None:
            steps.setdefault((span.node, span.step), []).append(span)
    return sum(_sum_covered(group) - max(span.end - span.start for span in group) for group in steps.values())


def _sum_covered(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one span was running."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
