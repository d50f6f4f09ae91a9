"""Decides whether drafting pays: which engines a pair starts with, and the mode of each reply.

Both start from one table, and both follow one record of measured replies.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from statistics import median
from typing import NamedTuple

from lookahead_agent.modes.record import WINDOW, Load, Measurements, PaceRecord, Quantity, Series
from lookahead_agent.modes.table import (
    ACCEPTANCE_RATE,
    HYSTERESIS,
    MAX_PROMPT_TOKENS_PER_REPLY_TOKEN,
    PRIOR,
    Configuration,
    CPUDefaults,
    Kernel,
    Mode,
    SpeculationMethod,
    choose_configuration,
)

TRY_AFTER = 6  # replies of a node before another mode is tried; doubles after each trial that was no faster
BUSY = 4  # requests beside a reply from which draft steps stop: their batches delay waiting requests
_TOKEN_WINDOW = 12  # latest replies of a node whose prompts and lengths count
_MIN_REPLIES = 4  # replies of a node before their lengths count: the first also prefill what its conversations share
_MIN_PACES = 3  # replies of all nodes before their pace counts
_WEIGHT = 0.3  # weight of a node's latest reply in the mean
_MAX_NODES = 1024  # remembered nodes: a server's clients choose the names
_MAX_SERIES, _MAX_SERIES_IN_MEMORY = 768, 8 * _MAX_NODES  # remembered series of measured values; the first is on disk
_MAX_ROWS, _MAX_WIDTH = 24, 60  # rows of the explained table, and characters of a node in it


class ModeChoice(NamedTuple):
    """A mode, and the reason in a few words."""

    mode: Mode
    reason: str


class Measured(NamedTuple):
    """A value of a series; with `replaces`, earlier values no longer count."""

    series: Series
    value: float
    replaces: bool = False


@dataclass
class _NodeState:
    """What a node's next choice depends on beside the measured replies."""

    mode: Mode | None = None
    used: dict[Mode, int] = field(default_factory=dict)
    replies: int = 0
    since_trial: int = 0
    tokens: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_TOKEN_WINDOW))
    drafts: bool = True
    trial_interval: int = TRY_AFTER


class ModeChooser:
    """Chooses engines, and among the modes that they offer, separately for each node of a graph.

    It starts with the measurements of `records`, the last of which gets those of `keep`. `configuration` names the
    engines that write the replies; `prior` has the assumed seconds of untried modes.
    """

    def __init__(self, *records: PaceRecord, configuration: str = "", prior: Mapping[Mode, float] = PRIOR) -> None:
        self.record = records[-1] if records else None
        self.configuration = configuration
        self._prior = prior
        self._measured: Measurements = {}
        for record in records:
            self._measured |= record.read()
        self._nodes: OrderedDict[tuple[str, Load], _NodeState] = OrderedDict()

    @property
    def acceptance_rate(self) -> float:
        """The median share of accepted draft tokens of the pair; the table's before one is measured."""
        rates = [rate for series, found in self._measured.items() if series.quantity == "acceptance" for rate in found]
        return median(rates) if rates else ACCEPTANCE_RATE

    def paces(self) -> dict[str, float]:
        """Seconds per token of replies without draft steps, by `Configuration.name`."""
        names = {series.configuration for series in self._measured}
        found = {name: self._pace(Series(name, "off" if name.startswith("none") else "sd")) for name in names}
        return {name: pace for name, pace in found.items() if pace is not None}

    def choose_engines(
        self,
        defaults: CPUDefaults,
        *,
        methods: Sequence[SpeculationMethod],
        target: Sequence[Kernel],
        draft: Sequence[Kernel] = (),
        draft_size: float = 0.0,
    ) -> tuple[Configuration, str]:
        """Choose the engines of a pair on a CPU; see `choose_configuration`."""
        return choose_configuration(
            defaults,
            methods=methods,
            target=target,
            draft=draft,
            draft_size=draft_size,
            paces=self.paces(),
            acceptance_rate=self.acceptance_rate,
        )

    def choose_mode(
        self, node: str, modes: Sequence[Mode], beside: int = 0, *, busy: Mode = "sd", tries: bool = True
    ) -> ModeChoice:
        """Choose the mode of a node's next reply among `modes`, which the engines offer.

        Args:
            node: The name of the node.
            modes: The modes to choose from.
            beside: The requests in the target's engine, or the replies that are being written.
            busy: The mode once those reach `BUSY`.
            tries: Whether modes are tried from time to time. Otherwise "off" is for a draft in the target's engine that
                would prefill more prompt tokens than its draft tokens pay for.
        """
        if beside >= BUSY and busy in modes:
            effect = "no steps" if busy == "sd" else "the target alone"
            return ModeChoice(busy, f"{beside} requests are running: {effect} beside them")
        if not tries and "off" in modes and (alone := self._without_draft(node)):
            return alone
        load = _load_of(beside)
        state, expected = self._state(node, load), self._predict(node, load, modes)
        best = min(modes, key=lambda mode: expected[mode])
        if state.mode not in expected or expected[best] < (1 - HYSTERESIS) * expected[state.mode]:
            state.mode, state.trial_interval = best, TRY_AFTER
        if tries and len(modes) > 1 and state.since_trial >= state.trial_interval:
            longest_unused = min(
                (mode for mode in modes if mode != state.mode), key=lambda mode: state.used.get(mode, 0)
            )
            return ModeChoice(longest_unused, "tried again")
        known = [mode for mode in modes if self._series(mode, load, node) in self._measured]
        if not known:
            return ModeChoice(state.mode, "expected to be fastest here")
        measured = ", ".join(f"{mode} {1000 * expected[mode]:.0f}" for mode in known)
        return ModeChoice(state.mode, f"fastest here so far (ms per token: {measured})")

    def learn(self, node: str, mode: Mode, found: Mapping[Quantity, float], beside: int = 0) -> list[Measured]:
        """Learn from a reply that ran with the same load from beginning to end; returns what `keep` may keep.

        A time of 0 is not a measurement: the reply came at once.
        """
        found = {quantity: value for quantity, value in found.items() if value > 0 or quantity == "acceptance"}
        load = _load_of(beside)
        state, own = self._state(node, load), self._series(mode, load, node)
        earlier, is_trial = self._measured.get(own, []), state.mode not in (None, mode)
        state.replies += 1
        state.used[mode] = state.replies
        measured = [
            Measured(series, found[series.quantity], replaces=is_trial and series == own)
            for series in (
                *(own, own._replace(quantity="prefill")),
                *((self._series(mode), self._series(mode, quantity="acceptance")) if load == "alone" else ()),
            )
            if series.quantity in found
        ]
        _add(self._measured, measured, _MAX_SERIES_IN_MEMORY)
        if not is_trial:
            state.since_trial += 1
            return measured
        assert state.mode is not None
        state.since_trial = 0
        expected = self._predict(node, load, (mode, state.mode))
        if expected[mode] < expected[state.mode]:  # a trial that won replaces the earlier replies of its mode
            state.trial_interval = TRY_AFTER
            return measured
        state.trial_interval = min(state.trial_interval * 2, 8 * TRY_AFTER)
        if "writing" in found:
            self._measured[own] = [*earlier, found["writing"]][-WINDOW:]
        return [each._replace(replaces=False) for each in measured]

    def keep(self, measured: Iterable[Measured]) -> None:
        """Keep what `learn` returned for later runs; this waits for the file."""
        if self.record is not None:
            self.record.update(lambda measurements: _add(measurements, measured, _MAX_SERIES))

    def learn_tokens(self, node: str, read: int, written: int) -> None:
        """Record how many prompt tokens a reply had to read, and how many tokens it has."""
        self._state(node).tokens.append((read, written))

    def table(self) -> list[str]:
        """The latest measured replies as lines of a table; empty before the first one."""
        rows = [("engines", "node", "load", "mode", "assumed", "ms per token", "replies", "")]
        paces = [(series, found) for series, found in self._measured.items() if series.quantity == "writing"]
        for series, found in paces[-_MAX_ROWS:]:
            state = self._nodes.get((series.node, series.load)) if series.configuration == self.configuration else None
            chosen = "chosen" if state is not None and state.mode == series.mode else ""
            pace = self._pace(series)
            figures = f"{self._prior[series.mode]:.1f}", "" if pace is None else f"{1000 * pace:.1f}", str(len(found))
            node = series.node if series.node.isprintable() else ascii(series.node)
            rows.append(
                (series.configuration, node[:_MAX_WIDTH] or "(all)", series.load, series.mode, *figures, chosen)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return [line.rstrip() for line in lines] if paces else []

    def _series(self, mode: Mode, load: Load = "alone", node: str = "", quantity: Quantity = "writing") -> Series:
        return Series(self.configuration, mode, load, node, quantity)

    def _pace(self, series: Series) -> float | None:
        """Seconds per token of a node, whose text changes: a mean that forgets. Of all nodes: the lower quartile.

        Other programs may slow replies, and engines are chosen by the fastest quarter of these.
        """
        found = self._measured.get(series, [])
        if series.node and found:
            return reduce(lambda mean, pace: mean + _WEIGHT * (pace - mean), found)
        return sorted(found)[len(found) // 4] if len(found) >= _MIN_PACES else None

    def _without_draft(self, node: str) -> ModeChoice | None:
        """Choose the target alone if a draft would read more prompt tokens than its draft tokens pay for; else None.

        A conversation that was read without the draft continues without it, so a node switches only at a clear gain.
        """
        state, (read, written) = self._state(node), self._tokens(node)
        limit = MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * written * (1.0 if state.drafts else 0.5)
        state.drafts = read <= limit
        if state.drafts:
            return None
        return ModeChoice("off", f"a draft would read {read / written:.0f} tokens of prompts for one of replies")

    def _state(self, node: str, load: Load = "alone") -> _NodeState:
        state = self._nodes.setdefault((node, load), _NodeState())
        self._nodes.move_to_end((node, load))
        if len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)
        return state

    def _predict(self, node: str, load: Load, modes: Sequence[Mode]) -> dict[Mode, float]:
        """Predict the seconds for each token of a node's next reply, its prefill included, by mode.

        A mode without replies of the node under this load has, in proportion, what the next level says: the node's
        replies that ran alone, those of all nodes, and the table.
        """
        expected = {mode: self._prior[mode] for mode in modes}
        has_replies = False
        for level in (self._series("off"), self._series("off", node=node), self._series("off", load, node)):
            paces = {mode: pace for mode in modes if (pace := self._pace(level._replace(mode=mode))) is not None}
            if paces:
                has_replies = True
                scale = min(pace / expected[mode] for mode, pace in paces.items())
                expected = {mode: paces.get(mode, scale * expected[mode]) for mode in modes}
        prefill = {
            mode: median(found)
            for mode in modes
            if (found := self._measured.get(self._series(mode, load, node, "prefill")))
        }
        read, written = self._tokens(node)
        if has_replies and prefill and read:
            lowest = min(prefill.values())
            expected = {mode: pace + prefill.get(mode, lowest) * read / written for mode, pace in expected.items()}
        return expected

    def _tokens(self, node: str) -> tuple[int, int]:
        """Prompt tokens that the node's latest replies had to read, and their own tokens; 0 and 0 if they are few."""
        tokens = self._state(node).tokens
        if len(tokens) < _MIN_REPLIES:
            return 0, 0
        return sum(read for read, _ in tokens), sum(written for _, written in tokens)


def _load_of(beside: int) -> Load:
    return "beside others" if beside else "alone"


def _add(measurements: Measurements, measured: Iterable[Measured], most: int) -> None:
    """Add values to at most so many series. The nodes that replied least recently go first."""
    for series, value, replaces in measured:
        values = measurements.pop(series, [])
        measurements[series] = [*([] if replaces else values), value][-WINDOW:]
        if len(measurements) > most:
            del measurements[next((each for each in measurements if each.node), next(iter(measurements)))]
