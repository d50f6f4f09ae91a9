"""How each reply is written where that is free: whatever was fastest in its node, tried again now and then."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Mode = Literal["off", "sd", "lr", "lr+sd"]  # the target alone; with draft tokens; with draft steps; with both

PRIOR: Mapping[Mode, float] = {"sd": 1.0, "lr+sd": 1.1, "lr": 1.3, "off": 1.4}
"""Seconds per token that are assumed of a mode until it was tried, against those of "sd"."""
HYSTERESIS = 0.1  # share of time by which another mode must be ahead before a node changes to it
TRY_AFTER = 6  # replies of a node after which another mode is tried; twice as many each time that it was no faster
READ_FOR_TOKEN = 40.0
"""Prompt tokens for each token of replies from which a draft model is left out. Its draft tokens pay for half of them:
measured on two cores, it reads a prompt token in 0.6 ms, and saves 14 ms for each token of a reply."""
_LATEST = 12  # replies of a node whose prompts and lengths count
_FEWEST = 4
_WEIGHT = 0.3
_MOST_NODES = 1024  # nodes that are remembered: a server's clients name them as they like
_BUSY = 4  # requests in the target's engine from which steps are left to it: their batches cost those who wait


class ModeChoice(NamedTuple):
    """A mode, and in a few words why."""

    mode: Mode
    reason: str


@dataclass
class _Node:
    seconds: dict[Mode, float] = field(default_factory=dict)
    mode: Mode | None = None
    used: dict[Mode, int] = field(default_factory=dict)
    replies: int = 0
    since_trial: int = 0
    tokens: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    drafts: bool = True
    patience: int = TRY_AFTER


class ModeChooser:
    """Chooses among the modes that the engines offer, for each node of a graph alone."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, _Node] = OrderedDict()

    def choose(self, node: str, modes: Sequence[Mode], waiting: int = 0, busy: Mode = "sd") -> ModeChoice:
        """The mode of a node's next reply, of those that the engines offer.

        `waiting` counts the requests in the target's engine, or the replies that are being written, and `busy` is the
        mode beside several.
        """
        if waiting >= _BUSY and busy in modes:
            beside = "no steps" if busy == "sd" else "the target alone"
            return ModeChoice(busy, f"{waiting} requests are running: {beside} beside them")
        known = self._known(node)
        expected = {mode: self._expected(known, mode) for mode in modes}
        best = min(modes, key=lambda mode: expected[mode])
        if known.mode not in expected or expected[best] < (1 - HYSTERESIS) * expected[known.mode]:
            known.mode, known.patience = best, TRY_AFTER
        if len(modes) > 1 and known.since_trial >= known.patience:
            longest_unused = min(
                (mode for mode in modes if mode != known.mode), key=lambda mode: known.used.get(mode, 0)
            )
            return ModeChoice(longest_unused, "tried again")
        if not known.seconds:
            return ModeChoice(known.mode, "expected to be fastest here")
        figures = ", ".join(f"{mode} {1000 * known.seconds[mode]:.0f}" for mode in modes if mode in known.seconds)
        return ModeChoice(known.mode, f"fastest here so far (ms per token: {figures})")

    def learn(self, node: str, mode: Mode, seconds_per_token: float) -> None:
        """Take in what a reply took, of which nothing else ran beside."""
        known = self._known(node)
        known.replies += 1
        known.used[mode] = known.replies
        before = known.seconds.get(mode)
        known.seconds[mode] = seconds_per_token if before is None else before + _WEIGHT * (seconds_per_token - before)
        if known.mode in (None, mode):
            known.since_trial += 1
            return
        assert known.mode is not None
        known.since_trial = 0
        faster = seconds_per_token < known.seconds.get(known.mode, float("inf"))
        known.patience = TRY_AFTER if faster else min(known.patience * 2, 8 * TRY_AFTER)
        if faster:
            # A trial that was won is worth as much as all that was known of the mode before.
            known.seconds[mode] = seconds_per_token

    def learn_tokens(self, node: str, read: int, written: int) -> None:
        """Take in how many tokens of its prompt a reply had to read, and how many it has itself."""
        self._known(node).tokens.append((read, written))

    def without_draft(self, node: str) -> ModeChoice | None:
        """The target alone, where a draft model would read more of a node's prompts than its draft tokens pay for.

        A conversation that was read without the draft stays without it, so a node changes only where it clearly pays.
        """
        known = self._known(node)
        read, written = (sum(counts) for counts in zip(*known.tokens, strict=True)) if known.tokens else (0, 0)
        limit = READ_FOR_TOKEN * written if known.drafts else READ_FOR_TOKEN * written / 2
        known.drafts = len(known.tokens) < _FEWEST or read <= limit
        if known.drafts:
            return None
        return ModeChoice("off", f"a draft would read {read / written:.0f} tokens of prompts for one of replies")

    def _known(self, node: str) -> _Node:
        known = self._nodes.setdefault(node, _Node())
        self._nodes.move_to_end(node)
        if len(self._nodes) > _MOST_NODES:
            self._nodes.popitem(last=False)
        return known

    def _expected(self, node: _Node, mode: Mode) -> float:
        if mode in node.seconds:
            return node.seconds[mode]
        scale = [seconds / PRIOR[known] for known, seconds in node.seconds.items()]
        return PRIOR[mode] * (min(scale) if scale else 1.0)
