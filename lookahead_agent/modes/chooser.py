"""Chooses each reply's mode unless it is forced: the node's fastest so far, with occasional trials of other modes."""

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Mode = Literal["off", "sd", "lr", "lr+sd"]  # target alone; with draft tokens; with draft steps; with both

PRIOR: Mapping[Mode, float] = {"sd": 1.0, "lr+sd": 1.1, "lr": 1.3, "off": 1.4}
"""Assumed seconds per token of an untried mode, relative to those of "sd"."""
HYSTERESIS = 0.1  # share of time by which another mode must be faster before a node switches to it
TRY_AFTER = 6  # replies of a node before another mode is tried; doubles after each trial that was no faster
MAX_PROMPT_TOKENS_PER_REPLY_TOKEN = 40.0
"""Prompt tokens per reply token above which a draft model is left out. Its draft tokens pay for half of them. Measured
on two cores, the draft reads a prompt token in 0.6 ms. It saves 14 ms for each token of a reply."""
_WINDOW = 12  # latest replies of a node whose prompts and lengths count
_MIN_REPLIES = 4
_WEIGHT = 0.3
_MAX_NODES = 1024  # remembered nodes: a server's clients choose the names
_BUSY = 4  # requests in the target's engine from which draft steps stop: their batches delay waiting requests


class ModeChoice(NamedTuple):
    """A mode, and the reason in a few words."""

    mode: Mode
    reason: str


@dataclass
class _NodeState:
    seconds: dict[Mode, float] = field(default_factory=dict)
    mode: Mode | None = None
    used: dict[Mode, int] = field(default_factory=dict)
    replies: int = 0
    since_trial: int = 0
    tokens: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    drafts: bool = True
    trial_interval: int = TRY_AFTER


class ModeChooser:
    """Chooses among the modes that the engines offer, separately for each node of a graph."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, _NodeState] = OrderedDict()

    def choose(self, node: str, modes: Sequence[Mode], waiting: int = 0, busy: Mode = "sd") -> ModeChoice:
        """Choose the mode of a node's next reply among `modes`, which the engines offer.

        `waiting` counts the requests in the target's engine, or the replies that are being written. `busy` is the mode
        once they reach `_BUSY`.
        """
        if waiting >= _BUSY and busy in modes:
            effect = "no steps" if busy == "sd" else "the target alone"
            return ModeChoice(busy, f"{waiting} requests are running: {effect} beside them")
        state = self._node_state(node)
        expected = {mode: self._expected_seconds(state, mode) for mode in modes}
        best = min(modes, key=lambda mode: expected[mode])
        if state.mode not in expected or expected[best] < (1 - HYSTERESIS) * expected[state.mode]:
            state.mode, state.trial_interval = best, TRY_AFTER
        if len(modes) > 1 and state.since_trial >= state.trial_interval:
            longest_unused = min(
                (mode for mode in modes if mode != state.mode), key=lambda mode: state.used.get(mode, 0)
            )
            return ModeChoice(longest_unused, "tried again")
        if not state.seconds:
            return ModeChoice(state.mode, "expected to be fastest here")
        measured = ", ".join(f"{mode} {1000 * state.seconds[mode]:.0f}" for mode in modes if mode in state.seconds)
        return ModeChoice(state.mode, f"fastest here so far (ms per token: {measured})")

    def learn(self, node: str, mode: Mode, seconds_per_token: float) -> None:
        """Record the speed of a reply that ran alone."""
        state = self._node_state(node)
        state.replies += 1
        state.used[mode] = state.replies
        mean = state.seconds.get(mode)
        state.seconds[mode] = seconds_per_token if mean is None else mean + _WEIGHT * (seconds_per_token - mean)
        if state.mode in (None, mode):
            state.since_trial += 1
            return
        assert state.mode is not None
        state.since_trial = 0
        faster = seconds_per_token < state.seconds.get(state.mode, float("inf"))
        state.trial_interval = TRY_AFTER if faster else min(state.trial_interval * 2, 8 * TRY_AFTER)
        if faster:
            # A trial that won replaces the earlier average of its mode.
            state.seconds[mode] = seconds_per_token

    def learn_tokens(self, node: str, read: int, written: int) -> None:
        """Record how many prompt tokens a reply had to read, and how many tokens it has."""
        self._node_state(node).tokens.append((read, written))

    def without_draft(self, node: str) -> ModeChoice | None:
        """Choose the target alone if a draft would read more prompt tokens than its draft tokens pay for; else None.

        A conversation that was read without the draft continues without it, so a node switches only at a clear gain.
        """
        state = self._node_state(node)
        read, written = (sum(counts) for counts in zip(*state.tokens, strict=True)) if state.tokens else (0, 0)
        limit = MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * written * (1.0 if state.drafts else 0.5)
        state.drafts = len(state.tokens) < _MIN_REPLIES or read <= limit
        if state.drafts:
            return None
        return ModeChoice("off", f"a draft would read {read / written:.0f} tokens of prompts for one of replies")

    def _node_state(self, node: str) -> _NodeState:
        state = self._nodes.setdefault(node, _NodeState())
        self._nodes.move_to_end(node)
        if len(self._nodes) > _MAX_NODES:
            self._nodes.popitem(last=False)
        return state

    def _expected_seconds(self, state: _NodeState, mode: Mode) -> float:
        if mode in state.seconds:
            return state.seconds[mode]
        scales = [seconds / PRIOR[tried] for tried, seconds in state.seconds.items()]
        return PRIOR[mode] * (min(scales) if scales else 1.0)
