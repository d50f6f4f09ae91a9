"""The report of `bench --parity --against`: the replies of each server, and their differences from the first one's."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lookahead_agent.bench.pictures import Bar, Panel
from lookahead_agent.bench.report import BaseReport
from lookahead_agent.bench.server_parity import ServerReply
from lookahead_agent.bench.summary import Estimate, estimate, mean_difference
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.trace.node_times import Table

Figure = Callable[[ServerReply], float | None]

_ALL = "all"
_BEFORE, _AFTER = 40, 160
"""Characters of a reply that are shown before and after its first difference."""


def _share_of_names(reply: ServerReply) -> float | None:
    return reply.named / reply.names if reply.named is not None and reply.names else None


_FIGURES: dict[str, tuple[Figure, bool]] = {
    "recorded calls": (lambda reply: _number(reply.recorded), True),
    "accuracy": (lambda reply: _number(reply.correct), True),
    "tools named": (_share_of_names, True),
    "missing": (lambda reply: reply.missing, False),
    "extra": (lambda reply: reply.extra, False),
    "malformed": (lambda reply: reply.malformed, False),
    "failed": (lambda reply: float(reply.error is not None), False),
}
"""Figures of a reply by heading, and whether more is better."""


def _number(value: bool | None) -> float | None:
    return None if value is None else float(value)


@dataclass(frozen=True)
class ServerComparison:
    """The differences of one server from the first one."""

    server: str
    pairs: list[tuple[ServerReply, ServerReply]]  # the first server's reply and this one's, to the same turns
    calls_differ: Estimate  # share of the turns
    bytes_differ: Estimate
    differences: dict[str, Estimate]  # this server's mean minus the first's, by figure

    @property
    def worse(self) -> list[str]:
        """The figures that are worse than the first server's, with an interval that excludes equality."""
        found = []
        for name, value in self.differences.items():
            if value.low is not None and value.high is not None:
                is_worse = value.high < 0 if _FIGURES[name][1] else value.low > 0
                found += [name] if is_worse else []
        return found


class ParityReport(BaseReport):
    """The report of the replies of servers; raises ConfigurationError if there are none."""

    def __init__(self, replies: Sequence[ServerReply]) -> None:
        if not replies:
            raise ConfigurationError("there are no results in the file yet")
        self.replies = sorted(replies, key=lambda reply: (reply.position, reply.sample))
        self.servers = list(dict.fromkeys(reply.server for reply in self.replies))
        self.comparisons = [_compare(self.replies, self.servers[0], name) for name in self.servers[1:]]

    def conditions(self) -> str:
        """Describe servers and requests."""
        models = dict.fromkeys(f"{reply.server}: {reply.model} at {reply.url}" for reply in self.replies)
        settings = ", ".join(f"{name} {value}" for name, value in self.replies[0].settings.items())
        return f"{len(self.replies)} replies; {'; '.join(models)}; {settings}. Intervals of 95 %, by conversation."

    def sections(self) -> list[tuple[str, list[Table]]]:
        """Return the servers' own figures, their differences, and their calls by tool."""
        sections = [("each server", [_as_table(self.records())])]
        if self.comparisons:
            rows = [_as_row(each) for each in self.comparisons]
            sections.append((f"against {self.servers[0]}", [_as_table(rows)]))
            sections += [
                (f"first difference of {each.server}", [table])
                for each in self.comparisons
                if (table := _first_difference(each)) is not None
            ]
        tools = Counter((name, reply.server) for reply in self.replies for name, _ in reply.calls)
        rows_by_tool: list[dict[str, Any]] = [
            {"calls of": tool, **{server: tools[tool, server] for server in self.servers}}
            for tool in sorted({tool for tool, _ in tools})
        ]
        total = {server: sum(count for (_, name), count in tools.items() if name == server) for server in self.servers}
        sections.append(("calls", [_as_table([*rows_by_tool, {"calls of": "all tools", **total}])]))
        return sections

    def records(self) -> list[dict[str, Any]]:
        """Return the figures of each task and server."""
        tasks = list(dict.fromkeys(reply.task for reply in self.replies))
        groups = [(task, [reply for reply in self.replies if reply.task == task]) for task in tasks]
        if len(tasks) > 1:
            groups.append((_ALL, list(self.replies)))
        return [
            _record(task, server, [reply for reply in replies if reply.server == server])
            for task, replies in groups
            for server in self.servers
        ]

    def panels(self) -> list[Panel]:
        """Return a panel for each share, with a bar for each server."""
        panels = []
        for name in ("recorded calls", "accuracy", "tools named"):
            bars = []
            for server in self.servers:
                value = _mean([reply for reply in self.replies if reply.server == server], _FIGURES[name][0])
                bars += [Bar(server, value.value, value.low, value.high)] if value is not None else []
            panels += [Panel(name, bars)] if bars else []
        return panels


def _compare(replies: Sequence[ServerReply], first: str, other: str) -> ServerComparison:
    def key(reply: ServerReply) -> tuple[str, int, int]:
        return reply.conversation, reply.sample, reply.turn

    mine = {key(reply): reply for reply in replies if reply.server == other}
    pairs = [(reply, mine[key(reply)]) for reply in replies if reply.server == first and key(reply) in mine]
    if not pairs:
        raise ConfigurationError(f"{first} and {other} have no turn in common yet: run the same command again")
    pairs.sort(key=lambda both: (both[0].sample, both[0].conversation, both[0].turn))
    differences = {}
    for name, (figure, _) in _FIGURES.items():
        known = [both for both in pairs if figure(both[0]) is not None and figure(both[1]) is not None]
        if known:
            columns = [
                _by_conversation((reply.conversation, figure(reply) or 0.0) for reply in side)
                for side in ([mine for _, mine in known], [reply for reply, _ in known])
            ]
            differences[name] = estimate(mean_difference, *columns)
    return ServerComparison(
        other,
        pairs,
        _share(pairs, lambda mine, other: mine.parsed_calls != other.parsed_calls),
        _share(pairs, lambda mine, other: mine.text != other.text),
        differences,
    )


def _record(task: str, server: str, replies: Sequence[ServerReply]) -> dict[str, Any]:
    cached = [(reply.cached_tokens, reply.prompt_tokens) for reply in replies if reply.cached_tokens is not None]
    prompts = sum(prompt or 0 for _, prompt in cached)
    again = _repetitions(replies)
    record: dict[str, Any] = {"task": task, "server": server, "replies": len(replies)}
    record["calls"] = sum(len(reply.calls) for reply in replies)
    for name, (figure, is_share) in _FIGURES.items():
        if is_share:
            record[name] = _percent(_mean(replies, figure))
        else:
            record[name] = sum(int(figure(reply) or 0) for reply in replies)
    own = _share(again, lambda first, other: first.text != other.text) if again else None
    record["differs from itself"] = _percent(own)
    record["cached"] = f"{sum(tokens for tokens, _ in cached) / prompts:.0%}" if prompts else ""
    return record


def _as_row(comparison: ServerComparison) -> dict[str, Any]:
    row: dict[str, Any] = {"server": comparison.server, "turns": len(comparison.pairs)}
    row["other calls"] = _percent(comparison.calls_differ)
    row["other bytes"] = _percent(comparison.bytes_differ)
    for name, value in comparison.differences.items():
        is_share = _FIGURES[name][1]
        row[name] = value.format(lambda share: f"{100 * share:+.1f}" if is_share else f"{share:+.3f}")  # noqa: B023
    row["worse"] = ", ".join(comparison.worse) or "no"
    return row


def _repetitions(replies: Sequence[ServerReply]) -> list[tuple[ServerReply, ServerReply]]:
    """Pair each reply with the server's first reply to the same request."""
    first: dict[str, ServerReply] = {}
    pairs = []
    for reply in sorted(replies, key=lambda reply: (reply.sample, reply.conversation, reply.turn)):
        earlier = first.setdefault(f"{reply.server} {reply.request}", reply)
        pairs += [(earlier, reply)] if earlier is not reply else []
    return pairs


def _share(
    pairs: Sequence[tuple[ServerReply, ServerReply]], differs: Callable[[ServerReply, ServerReply], bool]
) -> Estimate:
    """Estimate the share of pairs that differ, of at least one pair."""
    verdicts = [(other.conversation, float(differs(first, other))) for first, other in pairs]
    return estimate(np.mean, _by_conversation(verdicts))


def _mean(replies: Sequence[ServerReply], figure: Figure) -> Estimate | None:
    known = [(reply.conversation, value) for reply in replies if (value := figure(reply)) is not None]
    return estimate(np.mean, _by_conversation(known)) if known else None


def _by_conversation(values: Iterable[tuple[str, float]]) -> list[float]:
    """Average the values of each conversation, which are not independent."""
    groups: dict[str, list[float]] = {}
    for conversation, value in values:
        groups.setdefault(conversation, []).append(value)
    return [float(np.mean(group)) for group in groups.values()]


def _percent(value: Estimate | None) -> str:
    return "" if value is None else value.format("{:.0%}".format, lambda end: f"{100 * end:.0f}")


def _as_table(records: Sequence[dict[str, Any]]) -> Table:
    """Build a table of records, without columns that are empty in all of them."""
    shown = [name for name in records[0] if any(record[name] != "" for record in records)]
    return shown, [[str(record[name]) for name in shown] for record in records]


def _first_difference(comparison: ServerComparison) -> Table | None:
    """Show the first turn whose calls differ, else the first whose bytes do; None: there is no such turn."""
    different = [both for both in comparison.pairs if both[0].text != both[1].text]
    different.sort(key=lambda both: both[0].parsed_calls == both[1].parsed_calls)
    if not different:
        return None
    first, other = different[0]
    place = f"{first.conversation} ({first.task}), turn {first.turn + 1}, sample {first.sample + 1}"
    texts = (first.text.strip(), other.text.strip())
    at = next((at for at, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    start = max(0, at - _BEFORE)
    rows = [[reply.server, repr(text[start : at + _AFTER])] for reply, text in zip((first, other), texts, strict=True)]
    return ["server", place], rows
