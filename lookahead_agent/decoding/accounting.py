"""Token counts and timings of one reply."""

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import ClassVar, Literal

_SECONDS_PER_PROMPT_TOKEN = 0.1  # granted to a prompt: more than the slowest measured processor needs to read one


@dataclass
class TokenCounts:
    """Tokens that one engine generated for a reply, by outcome."""

    committed: int = 0  # part of the reply
    rejected: int = 0  # tokens of complete steps that were dropped
    aborted: int = 0  # tokens of steps that were stopped before they were decided, or of no step yet
    speculative: int = 0  # tokens of no step, which were draft tokens for a target with a shared draft

    @property
    def total(self) -> int:
        """The total of the four counts."""
        return self.committed + self.rejected + self.aborted + self.speculative

    def add(self, other: "TokenCounts") -> None:
        """Add the counts of another request."""
        for count in fields(self):
            setattr(self, count.name, getattr(self, count.name) + getattr(other, count.name))


@dataclass
class PromptCounts:
    """The prompt of an engine's first request for a reply, in tokens."""

    total: int = 0  # 0: the engine had no request
    cached: int | None = 0  # tokens from the prefix cache; None: the engine does not report them


class BusyClock:
    """Measures the time in which at least one job was running; the clock `within` runs whenever this one does."""

    def __init__(self, now: Callable[[], float] = time.monotonic, within: "BusyClock | None" = None) -> None:
        self._now = now
        self._within = within
        self._running = 0
        self._since = 0.0
        self._total = 0.0

    # `contextlib.contextmanager` is slower: entering a generator takes several times as long.
    def __enter__(self) -> None:
        if self._running == 0:
            self._since = self._now()
        self._running += 1
        if self._within is not None:
            self._within.__enter__()

    def __exit__(self, *raised: object) -> None:
        if self._within is not None:
            self._within.__exit__(*raised)
        self._running -= 1
        if self._running == 0:
            self._total += self._now() - self._since

    @property
    def seconds(self) -> float:
        """The measured time so far, in seconds."""
        return self._total + (self._now() - self._since if self._running else 0.0)


class ReplyClock:
    """Measures a reply's time, and the parts in which the draft, the target and the verifier were busy."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.began = now()
        self._any = BusyClock(now)
        self.draft, self.target, self.verifier = (BusyClock(now, self._any) for _ in range(3))
        self.prompt: float | None = None  # time of the target's first token, in seconds since the reply began
        self.draft_prompt: float | None = None  # the draft's busy time until its first token, in seconds: its prefill

    def seconds(self) -> dict[str, float]:
        """Return the values of `ReplyReport.seconds`."""
        total = self._now() - self.began
        prompt = total if self.prompt is None else self.prompt
        draft = self.draft.seconds
        draft_prompt = draft if self.draft_prompt is None else self.draft_prompt
        return {
            "total": total,
            "prompt": prompt,
            "writing": total - prompt,
            "waiting": max(0.0, total - self._any.seconds),
            "draft": draft,
            "draft_prompt": draft_prompt,
            "draft_writing": draft - draft_prompt,
            "target": self.target.seconds,
            "verifier": self.verifier.seconds,
        }


@dataclass
class ReplyReport:
    """Token counts, verdicts and timings of one reply.

    `seconds` holds wall-clock times. `total` is `prompt` (until the target's first token) and `writing`. `draft`,
    `target` and `verifier` are the times in which each was busy; these overlap. `draft_prompt` and `draft_writing`
    split the draft's time. `waiting` is the time in which none was busy.
    """

    steps: int = 0  # committed steps
    accepted: int = 0  # committed steps that the draft wrote
    verifier_calls: int = 0  # draft steps that the verifier was called for
    judge_calls: int = 0  # language model requests that the verdicts took
    refuted: int = 0  # draft steps that were ruled out before the target's step was complete
    target_forward_passes: int = 0  # one yields several tokens where draft tokens are accepted
    proposed_tokens: int = 0  # draft tokens for the target's complete requests, where its engine counts them
    accepted_tokens: int = 0  # proposed tokens that the target accepted
    resumptions: int = 0  # how often the target's engine failed and the reply went on
    closing_tokens: int = 0  # tokens of the reply that close its thinking at the budget; no engine generated them
    target_tokens: TokenCounts = field(default_factory=TokenCounts)
    draft_tokens: TokenCounts = field(default_factory=TokenCounts)
    target_prompt: PromptCounts = field(default_factory=PromptCounts)
    draft_prompt: PromptCounts = field(default_factory=PromptCounts)
    seconds: dict[str, float] = field(default_factory=dict)
    speculation_disabled: str | None = None  # the reason, if speculation ended before the reply did
    silent: Literal["draft", "verifier"] | None = None  # the part whose silence is the reason

    def first_prompt(self, drafts: bool, tokens: int) -> PromptCounts | None:
        """Record the prompt of an engine's first request; None if the engine has had one for this reply."""
        counts = self.draft_prompt if drafts else self.target_prompt
        if counts.total:
            return None
        counts.total, counts.cached = tokens, None
        return counts

    def add(self, other: "ReplyReport") -> None:
        """Add the figures of a reply that continued this one."""
        counts = ("steps", "accepted", "verifier_calls", "judge_calls", "refuted", "target_forward_passes")
        for name in (*counts, "proposed_tokens", "accepted_tokens", "resumptions", "closing_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.target_tokens.add(other.target_tokens)
        self.draft_tokens.add(other.draft_tokens)
        if self.target_prompt.total == 0:  # later parts prefill the same prompt again
            self.target_prompt, self.draft_prompt = other.target_prompt, other.draft_prompt
        self.seconds = {name: self.seconds.get(name, 0.0) + value for name, value in other.seconds.items()}
        self.speculation_disabled = self.speculation_disabled or other.speculation_disabled
        self.silent = self.silent or other.silent

    def not_part_of_reply(self) -> None:
        """Count committed tokens as aborted: they only served to decide how the reply begins."""
        for tokens in (self.target_tokens, self.draft_tokens):
            tokens.aborted += tokens.committed
            tokens.committed = 0
        self.steps = self.accepted = 0

    def pace(self, tokens: int) -> float:
        """Seconds per token after the first, which includes the prefill; 0 for a reply of fewer than two `tokens`."""
        return self.seconds["writing"] / (tokens - 1) if tokens > 1 else 0.0

    @property
    def acceptance_rate(self) -> float:
        """See the function `acceptance_rate`."""
        return acceptance_rate(self.accepted, self.steps)


def acceptance_rate(accepted: int, steps: int) -> float:
    """The acceptance rate α: the share of a reply's steps that the draft wrote; 0 for a reply without steps."""
    return accepted / steps if steps else 0.0


@dataclass(eq=False)
class EngineProgress:
    """The latest token of an engine, or verdict of a verifier, for anybody: what waits behind others is not silent."""

    advanced_at: float = float("-inf")  # time on the event loop's clock

    _by_part: ClassVar[dict[int, "EngineProgress"]] = {}  # keys are identities: a class may define a hash

    @classmethod
    def of(cls, part: object) -> "EngineProgress":
        """Return the progress of an engine or verifier; one that cannot be referred to weakly has none to share."""
        if (known := cls._by_part.get(id(part))) is not None:
            return known
        progress = cls()
        with suppress(TypeError):
            weakref.finalize(part, cls._by_part.pop, id(part), None).atexit = False
            cls._by_part[id(part)] = progress
        return progress


def stall_limit(seconds: float, prompt_length: int) -> float:
    """The seconds without progress after which a request with a prompt of this length, in tokens, has stalled."""
    return seconds + _SECONDS_PER_PROMPT_TOKEN * prompt_length
