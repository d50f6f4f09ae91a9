"""The fastest way to run a pair of models on this machine: precision, cores, and who guesses tokens.

Predicted from what the machine's kernels take (`kernels`) and from the models' shapes, for the typical reply of a node
that plans; the pace of real replies (`observed`) goes before a prediction.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lookahead_agent.engines.pass_costs import cost_at
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.kernels import KERNELS, Kernel
from lookahead_agent.hardware.shape import ModelShape

Precision = Literal["auto", "bf16", "fp32", "int8", "int8-weights"]
"""Of a model's weights: "int8" has activations in int8 too, "int8-weights" not. "auto" is the fastest without
loss on a CPU, and as the model's folder has it on a GPU."""
SpeculationMethod = Literal["none", "draft_model", "shared_draft"]
"""Who guesses the target's tokens: nobody, the draft model on the target's cores, or the draft beside it."""

PROMPT_TOKENS, REPLY_TOKENS = 250, 200
"""Of the typical reply."""
ACCEPTANCE_RATE = 0.85
"""Probability that a draft token is right, until something is known of a pair (0.88 was seen of the default pair)."""
_MOST_RIGHT = 0.99
MARGIN = 0.05
"""Share of time by which a way must be ahead of a simpler one: predictions are no better than that."""
SHARED_DRAFT_MARGIN = 0.4
"""The same for a target with a shared draft, which has fewer cores beside its draft: a reply that guesses little is
slower than one of the target alone (measured: 0.67 of its speed), and so are four at once (0.86). Predictions flatter
it: where it was to be 29 % ahead of `draft_model`, it was behind."""

# What a layer takes beside its matrices: attention, norms, and that vLLM launches operations one by one on a CPU
# (measured: 0.2 to 0.4 ms a layer, 1,536 and 896 wide).
_SECONDS_A_LAYER = 0.3e-3
# What each token adds, most of it activations and attention (measured: a pass of the 1.5B target took 100 ms for
# 16 tokens of as many replies, 65 for one; the matrices account for 17 of the difference).
_SECONDS_A_TOKEN_A_LAYER = 0.05e-3
# vLLM prepares each of the passes in which a draft model guesses.
_SECONDS_A_DRAFT_TOKEN = 2e-3
# After a wrong guess the draft reads up to a block of the target's words again before it writes on.
_PASSES_TO_BEGIN_ANEW = 2.0
_IN_FLOAT32 = ("fp32", "int8-weights")
_DRAFT_TOKENS: Mapping[SpeculationMethod, tuple[int, ...]] = {
    "none": (0,),
    "draft_model": (1, 2, 3, 4, 5, 6),
    "shared_draft": (8,),
}

Times = Mapping[Kernel, Mapping[int, float]]
"""Seconds of a million weights, by kernel and tokens in the pass."""


@dataclass(frozen=True)
class Arrangement:
    """Which engines there are, and how each has its weights.

    Attributes:
        speculation_method: Who guesses the target's tokens.
        target: The target's precision.
        draft: The draft's; None without a draft.
        draft_tokens: Tokens guessed for a pass, at most.
    """

    speculation_method: SpeculationMethod
    target: Kernel
    draft: Kernel | None = None
    draft_tokens: int = 0

    @property
    def name(self) -> str:
        """Short text, the same whatever the number of guesses."""
        drafts = f", draft {self.draft}" if self.draft else ""
        return f"{self.speculation_method}, target {self.target}{drafts}"


@dataclass(frozen=True)
class Candidate:
    """An arrangement, and how long a typical reply takes in it.

    Attributes:
        arrangement: The arrangement.
        prompt: Seconds until the reply's first token, predicted.
        pace: Seconds for each token after it, predicted or as observed.
        observed: Whether replies were measured in it.
    """

    arrangement: Arrangement
    prompt: float
    pace: float
    observed: bool = False

    @property
    def seconds(self) -> float:
        """Of the typical reply."""
        return self.prompt + REPLY_TOKENS * self.pace


@dataclass(frozen=True)
class Choice:
    """The arrangement that is taken, and the best of each kind that it was compared with.

    Attributes:
        arrangement: What is taken.
        reason: Why, in a sentence.
        candidates: The best of each way of guessing, fastest first.
        acceptance_rate: Probability that a draft token is right, by which it was chosen.
    """

    arrangement: Arrangement
    reason: str
    candidates: tuple[Candidate, ...]
    acceptance_rate: float


def choose_arrangement(
    target: ModelShape,
    draft: ModelShape | None,
    *,
    every_core: Times,
    targets_share: Times,
    drafts_share: Times,
    speculation_method: Sequence[SpeculationMethod] = ("none", "draft_model", "shared_draft"),
    target_precisions: Sequence[Kernel] = KERNELS,
    draft_precisions: Sequence[Kernel] = KERNELS,
    observed: Mapping[str, float] | None = None,
    acceptance_rate: float = ACCEPTANCE_RATE,
) -> Choice:
    """Choose the arrangement in which a typical reply takes least time; the simpler of two that take the same.

    Args:
        target: The target's shape.
        draft: The draft's; None: there is none, or it has other tokens.
        every_core: What kernels take on all cores.
        targets_share: What they take on the target's share of them.
        drafts_share: On the draft's.
        speculation_method: Ways that may be chosen.
        target_precisions: Precisions that may be.
        draft_precisions: The same for the draft.
        observed: Seconds per token after the first, by `Arrangement.name`, where replies were measured.
        acceptance_rate: Probability that a draft token is right.

    Raises:
        ConfigurationError: Nothing is left to choose from.
    """
    known = observed or {}
    right = min(acceptance_rate, _MOST_RIGHT)
    predicted = _best_draft_tokens(
        _candidates(
            target,
            draft,
            every_core,
            targets_share,
            drafts_share,
            speculation_method,
            target_precisions,
            draft_precisions,
            right,
        )
    )
    if not predicted:
        raise ConfigurationError(
            "no way of running these models is left to choose from: with draft_model, vLLM loads the draft as it loads "
            "the target, so both compute in bf16 or both in float32 (fp32, int8-weights), but for a draft in int8. "
            "Choose another precision or draft_precision, or token_speculation='shared_draft'"
        )
    missed = _missed(predicted, known)
    best: dict[SpeculationMethod, Candidate] = {}
    for candidate in predicted:
        name = candidate.arrangement.name
        way = candidate.arrangement.speculation_method
        pace = known.get(name, candidate.pace * missed[way])
        seen = Candidate(candidate.arrangement, candidate.prompt, pace, name in known)
        if way not in best or seen.seconds < best[way].seconds:
            best[way] = seen
    ranked = sorted(best.values(), key=lambda candidate: candidate.seconds)
    chosen = ranked[0]
    on_every_core = [each for each in ranked if each.arrangement.speculation_method != "shared_draft"]
    if on_every_core and on_every_core[0].seconds <= chosen.seconds * (1 + SHARED_DRAFT_MARGIN):
        chosen = on_every_core[0]
    alone = best.get("none")
    if alone is not None and alone.seconds <= chosen.seconds * (1 + MARGIN):
        chosen = alone
    return Choice(chosen.arrangement, _reason(chosen, ranked), tuple(ranked), right)


def _missed(predicted: Sequence[Candidate], known: Mapping[str, float]) -> Mapping[SpeculationMethod, float]:
    """What replies took against what was predicted of them, by way of guessing.

    Predictions miss what they leave out, of which the ways that use every core share most: what was seen of one tells
    of the other. A target with a shared draft's shortfall is its own: it guesses too little, or waits for its draft.
    """
    seen: dict[SpeculationMethod, list[float]] = {}
    for candidate in predicted:
        if candidate.arrangement.name in known:
            ratio = known[candidate.arrangement.name] / candidate.pace
            seen.setdefault(candidate.arrangement.speculation_method, []).append(ratio)
    on_every_core = [ratio for way, ratios in seen.items() if way != "shared_draft" for ratio in ratios]
    return {
        way: statistics.median(ratios) if (ratios := seen.get(way) or on_every_core) else 1.0
        for way in get_args(SpeculationMethod)
    }


def _best_draft_tokens(candidates: Iterator[Candidate]) -> list[Candidate]:
    """Of the candidates that differ only in how many tokens are guessed, the one with fewest that is about as fast."""
    alike: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(candidate.arrangement.name, []).append(candidate)
    return [
        next(one for one in ways if one.pace <= min(other.pace for other in ways) * (1 + MARGIN))
        for ways in alike.values()
    ]


def _reason(chosen: Candidate, ranked: Sequence[Candidate]) -> str:
    others = [candidate for candidate in ranked if candidate is not chosen]
    against = "; ".join(f"{candidate.arrangement.name}: {candidate.seconds:.0f} s" for candidate in others)
    how = "measured" if chosen.observed else "predicted"
    typical = f"a reply of {REPLY_TOKENS} tokens to a prompt of {PROMPT_TOKENS} takes {chosen.seconds:.0f} s ({how})"
    return f"{chosen.arrangement.name}: {typical}" + (f"; {against}" if against else "")


def _candidates(
    target: ModelShape,
    draft: ModelShape | None,
    every_core: Times,
    targets_share: Times,
    drafts_share: Times,
    speculation_method: Sequence[SpeculationMethod],
    target_precisions: Sequence[Kernel],
    draft_precisions: Sequence[Kernel],
    right: float,
) -> Iterator[Candidate]:
    for way in speculation_method:
        for of_target in target_precisions:
            if way == "none":
                alone = _Pass(target, of_target, every_core)
                yield Candidate(Arrangement(way, of_target), PROMPT_TOKENS * alone.prompt, alone.tokens(1))
                continue
            for of_draft in draft_precisions if draft is not None else ():
                # vLLM loads the draft of `draft_model` as it loads the target, unless its folder says how.
                like = (of_draft in _IN_FLOAT32) == (of_target in _IN_FLOAT32)
                if way == "draft_model" and of_draft != "int8" and not like:
                    continue
                for draft_tokens in _DRAFT_TOKENS[way]:
                    assert draft is not None
                    arrangement = Arrangement(way, of_target, of_draft, draft_tokens)
                    if way == "draft_model":
                        drafting, writing = _Pass(draft, of_draft, every_core), _Pass(target, of_target, every_core)
                        prompt = writing.prompt + drafting.prompt
                        round_ = _round(drafting, writing, draft_tokens, 1)
                        yield Candidate(
                            arrangement, PROMPT_TOKENS * prompt, round_ / tokens_of_a_pass(draft_tokens, right)
                        )
                    else:
                        drafting = _Pass(draft, of_draft, drafts_share)
                        writing = _Pass(target, of_target, targets_share)
                        prompt = max(writing.prompt, drafting.prompt)
                        yield Candidate(arrangement, PROMPT_TOKENS * prompt, _shared_draft(drafting, writing, right))


def tokens_of_a_pass(draft_tokens: int, right: float) -> float:
    """Tokens that a pass wins with so many guesses, each right with a probability below 1 if those before it are."""
    return (1 - right ** (draft_tokens + 1)) / (1 - right)


def acceptance_rate_of(tokens: float, draft_tokens: int) -> float:
    """The probability with which guesses are right by which a pass wins so many tokens: `tokens_of_a_pass` reversed."""
    low, high = 0.0, _MOST_RIGHT
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_of_a_pass(draft_tokens, middle) < tokens else (low, middle)
    return low


def _round(drafting: _Pass, writing: _Pass, draft_tokens: int, replies: int) -> float:
    """Seconds in which a draft model on the target's cores guesses, and the target reads the guesses."""
    return draft_tokens * (drafting.tokens(replies) + _SECONDS_A_DRAFT_TOKEN) + writing.tokens(
        replies * (draft_tokens + 1)
    )


def _shared_draft(drafting: _Pass, writing: _Pass, right: float) -> float:
    """Seconds per token with a shared draft: draft and target work at the same time, the slower sets the pace."""
    beginning = (1 - right) * _PASSES_TO_BEGIN_ANEW * drafting.tokens(1)
    draft = drafting.tokens(1) + beginning
    # In the time of a pass the draft writes so many guesses for the next.
    draft_tokens = max(1, min(12, round(writing.tokens(6) / draft)))
    # After a wrong one the draft has nothing to show yet, and the target goes a pass alone.
    wrong = 1 - right**draft_tokens
    won = tokens_of_a_pass(draft_tokens, right) + wrong
    return max(draft, (writing.tokens(draft_tokens + 1) + wrong * writing.tokens(1)) / won)


class _Pass:
    """What passes of a model cost on some cores."""

    def __init__(self, shape: ModelShape, kernel: Kernel, times: Times) -> None:
        self._shape = shape
        self._weights = times[kernel]

    def tokens(self, count: int) -> float:
        """Seconds of a pass of so many tokens."""
        shape = self._shape
        matrices = (shape.weights + shape.head) * cost_at(self._weights, count)
        return matrices + shape.layers * (_SECONDS_A_LAYER + count * _SECONDS_A_TOKEN_A_LAYER)

    @property
    def prompt(self) -> float:
        """Seconds of each token of a long prompt."""
        most = max(self._weights)
        return self._shape.weights * self._weights[most] / most


def draft_tokens_by_load(
    target: ModelShape,
    draft: ModelShape,
    arrangement: Arrangement,
    times: Times,
    most_replies: int = 32,
    acceptance_rate: float = ACCEPTANCE_RATE,
) -> list[tuple[int, int, int]]:
    """How many tokens to guess for each of so many replies at once: fewer, the more there are.

    Args:
        target: The target's shape.
        draft: The draft's.
        arrangement: With the draft on the target's cores.
        times: What kernels take on them.
        most_replies: At once.
        acceptance_rate: Probability that a draft token is right.

    Returns:
        Ranges of replies, both ends included, with the guesses for each: vLLM's
        `num_speculative_tokens_per_batch_size`. None where the target is faster alone: then the draft pauses
        (`pausing_draft`).
    """
    assert arrangement.draft is not None
    writing, drafting = _Pass(target, arrangement.target, times), _Pass(draft, arrangement.draft, times)

    def best(replies: int) -> int:
        def rate(draft_tokens: int) -> float:
            won = tokens_of_a_pass(draft_tokens, min(acceptance_rate, _MOST_RIGHT))
            return won / _round(drafting, writing, draft_tokens, replies)

        # A single reply is what the arrangement was chosen for.
        fewest = 0 if replies > 1 else 1
        rates = [rate(draft_tokens) for draft_tokens in range(fewest, arrangement.draft_tokens + 1)]
        return next(
            draft_tokens for draft_tokens, each in enumerate(rates, fewest) if each * (1 + MARGIN) >= max(rates)
        )

    ranges: list[tuple[int, int, int]] = []
    for replies in range(1, most_replies + 1):
        draft_tokens = best(replies)
        if ranges and ranges[-1][2] == draft_tokens:
            ranges[-1] = (ranges[-1][0], replies, draft_tokens)
        else:
            ranges.append((replies, replies, draft_tokens))
    return ranges


def pass_costs(shape: ModelShape, kernel: Kernel, times: Times) -> dict[int, float]:
    """Seconds of a pass of a model by its number of tokens.

    Args:
        shape: The model's.
        kernel: Precision of its weights.
        times: What kernels take on its cores.
    """
    one = _Pass(shape, kernel, times)
    return {tokens: one.tokens(tokens) for tokens in times[kernel]}
