"""The tokens and the time of a reply, by use."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields


@dataclass
class TokenCounts:
    """Tokens that one engine generated for a reply, by what became of them."""

    committed: int = 0  # part of the reply
    rejected: int = 0  # in steps that were complete and not used
    aborted: int = 0  # in steps that were stopped before they were complete
    speculative: int = 0  # written only as draft tokens for the target, in no step

    @property
    def generated(self) -> int:
        """All of them."""
        return self.committed + self.rejected + self.aborted + self.speculative

    def add(self, other: "TokenCounts") -> None:
        """Add the tokens of another request."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass
class PromptCounts:
    """The prompt of an engine's first request for a reply, in tokens."""

    total: int = 0  # 0: the engine was asked nothing
    cached: int | None = 0  # of these from its prefix cache; None: it does not tell


class BusyClock:
    """Measures how long at least one piece of work was under way; the clock `within` runs while this one does."""

    def __init__(self, now: Callable[[], float] = time.monotonic, within: "BusyClock | None" = None) -> None:
        self._now = now
        self._within = within
        self._running = 0
        self._since = 0.0
        self._total = 0.0

    # Not by `contextlib`: it is entered for every token, and a generator takes several times as long.
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
        """Time counted so far, in seconds."""
        return self._total + (self._now() - self._since if self._running else 0.0)


class ReplyClock:
    """Measures a reply, and the parts of it in which draft, target and verifier had work."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._clock = now
        self._started = now()
        self._any = BusyClock(now)
        self.draft, self.target, self.verifier = (BusyClock(now, self._any) for _ in range(3))
        self.prompt: float | None = None  # when the target had read the prompt, in seconds since the reply began
        self._draft_prompt: float | None = None

    def now(self) -> float:
        """Seconds since the reply began."""
        return self._clock() - self._started

    def draft_writes(self) -> None:
        """The draft has written a token; until its first one, all of its work was its prompt's."""
        if self._draft_prompt is None:
            self._draft_prompt = self.draft.seconds

    def seconds(self) -> dict[str, float]:
        """The figures of `ReplyReport.seconds`."""
        total = self.now()
        prompt = total if self.prompt is None else self.prompt
        draft = self.draft.seconds
        draft_prompt = draft if self._draft_prompt is None else self._draft_prompt
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
    """Figures of one reply.

    `seconds` is wall-clock time: `total`, which is `prompt` (until the target's first token) and `writing`; the part in
    which the `draft`, the `target` and the `verifier` had work (they overlap, so the parts do not add up to the total);
    the draft's part once more as `draft_prompt` and `draft_writing`; and the part `waiting` in which none had work.
    """

    steps: int = 0  # of the reply
    accepted: int = 0  # steps that the draft wrote
    verifier_calls: int = 0  # draft steps that the verifier was asked about
    judge_calls: int = 0  # questions to a language model that it took to answer
    refuted: int = 0  # draft steps that were dropped before the target's step was complete
    target_forward_passes: int = 0  # one gives several tokens where draft tokens are accepted
    target_tokens: TokenCounts = field(default_factory=TokenCounts)
    draft_tokens: TokenCounts = field(default_factory=TokenCounts)
    target_prompt: PromptCounts = field(default_factory=PromptCounts)
    draft_prompt: PromptCounts = field(default_factory=PromptCounts)
    seconds: dict[str, float] = field(default_factory=dict)
    speculation_disabled: str | None = None  # the reason, if speculation ended before the reply did

    def first_prompt(self, drafts: bool, tokens: int) -> PromptCounts | None:
        """Count a prompt that an engine is given; None if the engine has had one for this reply."""
        counts = self.draft_prompt if drafts else self.target_prompt
        if counts.total:
            return None
        counts.total, counts.cached = tokens, None
        return counts

    def add(self, other: "ReplyReport") -> None:
        """Add the figures of a reply that went on where this one ended."""
        for name in ("steps", "accepted", "verifier_calls", "judge_calls", "refuted", "target_forward_passes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.target_tokens.add(other.target_tokens)
        self.draft_tokens.add(other.draft_tokens)
        if self.target_prompt.total == 0:  # the parts that follow read the same prompt again
            self.target_prompt, self.draft_prompt = other.target_prompt, other.draft_prompt
        self.seconds = {name: self.seconds.get(name, 0.0) + value for name, value in other.seconds.items()}
        self.speculation_disabled = self.speculation_disabled or other.speculation_disabled

    def not_part_of_reply(self) -> None:
        """Count what was committed as aborted: it was written to see how a reply would begin."""
        for tokens in (self.target_tokens, self.draft_tokens):
            tokens.aborted += tokens.committed
            tokens.committed = 0
        self.steps = self.accepted = 0

    def pace(self, tokens: int) -> float:
        """Seconds per token after the first, which waits for the prompt; 0 for a reply of one of `tokens`."""
        return self.seconds["writing"] / (tokens - 1) if tokens > 1 else 0.0

    @property
    def acceptance_rate(self) -> float:
        """See `acceptance_rate`."""
        return acceptance_rate(self.accepted, self.steps)


def acceptance_rate(accepted: int, steps: int) -> float:
    """Share of a reply's steps that the draft wrote (α); 0 for a reply without steps."""
    return accepted / steps if steps else 0.0
