"""How the time of a run divides by node, and what each lever would win of it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Table = tuple[list[str], list[list[str]]]  # Headings and rows

BETWEEN = "(between)"  # The node of the time in which a run had neither a reply nor a tool's run

_LOOKUP_COST = 1.1  # Of a forward pass that verifies what was looked up, where a pass of one token costs 1
_DRAFTED_PASSES, _SHARED_DRAFT_COST = 0.39, 1.4
"""Passes per token with two draft tokens, of which 0.85 are accepted; their cost, where the draft takes cores."""


@dataclass(frozen=True)
class Span:
    """A reply, or a tool's run; times are in seconds since the run began."""

    node: str
    start: float
    end: float
    is_tool: bool = False
    step: int | None = None  # of the graph, as LangGraph counts them
    prompt: float = 0.0  # seconds until the first token
    writing: float = 0.0  # seconds after it
    idle: float = 0.0  # seconds of both in which no engine had work
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: unknown
    output_tokens: int = 0
    passes: int = 0  # forward passes of the target
    new_share: float = 1.0  # of the prompt: its last message
    lookup_passes: float = 1.0  # per token, if drafts were looked up in the prompt
    policy: str = ""
    steps: int = 0
    accepted: int = 0  # draft steps among these


FIGURES = (
    *("prompt_tokens", "cached_tokens", "output_tokens", "passes", "new_share", "lookup_passes"),
    *("policy", "steps", "accepted"),
)
"""The fields of a span that are counts and shares of a reply."""


@dataclass(frozen=True)
class NodeTimes:
    """Seconds of a node's replies and tool runs, summed; where several ran at once, more than passed."""

    node: str
    replies: int
    prompt: float
    writing: float
    tools: float
    waiting: float
    prompt_tokens: int
    cached_tokens: int | None  # of these from the prefix cache; None: unknown
    output_tokens: int = 0
    policy: str = ""
    steps: int = 0
    accepted: int = 0  # draft steps among these


def node_times(spans: Sequence[Span], seconds: float | None = None) -> list[NodeTimes]:
    """The division of a run's time, in the order in which the nodes began; `seconds` is the run's length."""
    nodes: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        nodes.setdefault(span.node, []).append(span)
    found = [_sum(node, of_node) for node, of_node in nodes.items()]
    if spans:
        length = max(span.end for span in spans) - min(span.start for span in spans)
        between = max(0.0, (length if seconds is None else seconds) - _covered(spans))
        found.append(NodeTimes(BETWEEN, 0, 0.0, 0.0, 0.0, between, 0, 0))
    return found


def _sum(node: str, spans: Sequence[Span]) -> NodeTimes:
    replies = [span for span in spans if not span.is_tool]
    cached = [span.cached_tokens for span in replies]
    summed = ("prompt", "prompt_tokens", "output_tokens", "steps", "accepted")
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
    """The replies and tool runs in the rows of a trace; older traces know less of them."""
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
    """The division of the time by node, and the levers, both per run; `seconds` is the length of all runs."""
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
    shown = 2 if measured is None else 3  # one run measures none
    return [(headings, rows), (["lever", "would win at most, s", "measured, s"][:shown], [row[:shown] for row in won])]


def levers(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds that a shared draft, prompt lookup, a warm prefix, and tools at once would win at most, each alone."""
    replies = [span for span in spans if not span.is_tool]
    return {
        "shared draft": sum(_won(span, _DRAFTED_PASSES * _SHARED_DRAFT_COST) for span in replies),
        "prompt lookup": sum(_won(span, span.lookup_passes * _LOOKUP_COST) for span in replies),
        "warm prefix": sum(map(_of_prefix, replies)),
        "tools at once": _of_tools([span for span in spans if span.is_tool]),
    }


def _won(span: Span, passes: float) -> float:
    """Seconds of writing that so many passes per token would save against those that it took."""
    took = span.passes / span.output_tokens if span.passes and span.output_tokens else 1.0
    return span.writing * max(0.0, 1 - passes / min(1.0, took))


def _of_prefix(span: Span) -> float:
    """Seconds that reading all but the last message before it is asked would save."""
    cached = span.cached_tokens or 0
    warm = span.prompt_tokens * (1 - span.new_share) - cached
    return span.prompt * warm / (span.prompt_tokens - cached) if warm > 0 else 0.0


def _of_tools(spans: Sequence[Span]) -> float:
    """Seconds that tools of one step of the graph took after one another, but for the longest."""
    steps: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.step is not None:
            steps.setdefault((span.node, span.step), []).append(span)
    return sum(_covered(group) - max(span.end - span.start for span in group) for group in steps.values())


def _covered(spans: Iterable[Span]) -> float:
    """Seconds in which at least one of them was under way."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return total
