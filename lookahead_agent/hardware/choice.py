"""Precision, token speculation and number of draft tokens for a pair of models: a table first, then measured replies.

`KernelCosts` gives the expected seconds per token of each configuration. Where replies were measured (`ReplySpeeds`),
their pace replaces the expectation, and scales those of configurations that use the same cores.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.kernels import KERNELS, Kernel, KernelCosts, ModelSize

Precision = Literal["auto", "bf16", "fp32", "int8", "int8-weights"]
"""Of a model's weights: "int8" has activations in int8 too, "int8-weights" not. "auto" is the fastest without
loss on a CPU, and as the model's folder has it on a GPU."""
SpeculationMethod = Literal["none", "draft_model", "shared_draft"]
"""Lossless token speculation: none, by the draft model on the target's cores, or by the draft on cores of its own."""

PROMPT_TOKENS, REPLY_TOKENS = 250, 200
"""Of the typical reply."""
ACCEPTANCE_RATE = 0.85
"""Of draft tokens, until something is known of a pair (0.88 was measured of the default pair)."""
MARGIN = 0.05
"""Share of time by which a configuration must be ahead of a simpler one."""
SHARED_DRAFT_MARGIN = 0.4
"""The same for a shared draft, which takes cores from its target: replies with few draft tokens are slower with one
(measured: 0.67 of the target's speed alone), and so are four at once (0.86)."""
_HIGHEST_RATE = 0.99
_MOST_DRAFT_TOKENS = 6
_SHARED_DRAFT_TOKENS = 8
_MOST_REQUESTS = 32
# vLLM prepares each pass of a draft model.
_SECONDS_PER_DRAFT_PASS = 2e-3
_FLOAT32 = ("fp32", "int8-weights")


@dataclass(frozen=True)
class Configuration:
    """Token method and precisions.

    Attributes:
        method: Of token speculation.
        target: The target's precision.
        draft: The draft's; None without a draft.
        draft_tokens: For a pass, at most.
    """

    method: SpeculationMethod
    target: Kernel
    draft: Kernel | None = None
    draft_tokens: int = 0

    @property
    def name(self) -> str:
        """Short text, the same whatever the number of draft tokens."""
        drafts = f", draft {self.draft}" if self.draft else ""
        return f"{self.method}, target {self.target}{drafts}"


@dataclass(frozen=True)
class Candidate:
    """A configuration and its speed.

    Attributes:
        configuration: The configuration.
        prompt: Expected seconds until the first token of the typical reply.
        pace: Seconds for each token after it, measured or expected.
        measured: Whether replies were measured with it.
    """

    configuration: Configuration
    prompt: float
    pace: float
    measured: bool = False

    @property
    def seconds(self) -> float:
        """Of the typical reply."""
        return self.prompt + REPLY_TOKENS * self.pace


@dataclass(frozen=True)
class Choice:
    """A configuration, and why.

    Attributes:
        configuration: The one that is taken.
        reason: Why, in a sentence.
        candidates: The fastest of each method, fastest first.
    """

    configuration: Configuration
    reason: str
    candidates: tuple[Candidate, ...]


def choose_configuration(
    costs: KernelCosts,
    target: ModelSize,
    draft: ModelSize | None,
    *,
    methods: Sequence[SpeculationMethod] = ("none", "draft_model", "shared_draft"),
    target_kernels: Sequence[Kernel] = KERNELS,
    draft_kernels: Sequence[Kernel] = KERNELS,
    paces: Mapping[str, float] | None = None,
    acceptance_rate: float = ACCEPTANCE_RATE,
) -> Choice:
    """Choose the configuration with the fewest seconds per token; a tie within 5 % goes to the simpler one.

    A shared draft is taken only where it is the only method, or where replies were measured with it.

    Args:
        costs: Of passes on this processor.
        target: The target's size.
        draft: The draft's; None: there is none, or it has another tokenizer.
        methods: That may be chosen.
        target_kernels: Precisions that may be chosen.
        draft_kernels: The same for the draft.
        paces: Seconds per token after the first, by `Configuration.name`, where replies were measured.
        acceptance_rate: Of draft tokens.

    Raises:
        ConfigurationError: Nothing is left to choose from.
    """
    known, rate = paces or {}, min(acceptance_rate, _HIGHEST_RATE)
    expected = [
        candidate
        for method in methods
        for kernel in target_kernels
        for candidate in _expected(costs, method, (target, kernel), [(draft, one) for one in draft_kernels], rate)
    ]
    if not expected:
        raise ConfigurationError(
            "no configuration of these models is left to choose from: with draft_model, vLLM loads the draft as it "
            "loads the target, so both compute in bf16 or both in float32 (fp32, int8-weights), but for a draft in "
            "int8. Choose another precision or draft_precision, or token_speculation='shared_draft'"
        )
    ratios = [
        known[one.configuration.name] / one.pace
        for one in expected
        if one.configuration.name in known and _on_all_cores(one)
    ]
    scale = statistics.median(ratios) if ratios else 1.0
    best: dict[SpeculationMethod, Candidate] = {}
    for one in expected:
        method, name = one.configuration.method, one.configuration.name
        candidate = replace(one, pace=known.get(name, one.pace * scale), measured=name in known)
        if not _on_all_cores(one) and not candidate.measured and len(methods) > 1:
            continue
        if method not in best or candidate.seconds < best[method].seconds:
            best[method] = candidate
    ranked = sorted(best.values(), key=lambda one: one.seconds)
    chosen = _simplest(ranked)
    return Choice(chosen.configuration, _reason(chosen, ranked), tuple(ranked))


def _expected(
    costs: KernelCosts,
    method: SpeculationMethod,
    target: tuple[ModelSize, Kernel],
    drafts: Sequence[tuple[ModelSize | None, Kernel]],
    rate: float,
) -> Iterator[Candidate]:
    """The configurations of a method with the target in one precision, as the table has them."""
    prompt = PROMPT_TOKENS * costs.seconds_per_prompt_token(*target)
    if method == "none":
        yield Candidate(Configuration(method, target[1]), prompt, costs.seconds(*target, 1))
        return
    for draft, kernel in drafts:
        if draft is None:
            continue
        # vLLM loads the draft of `draft_model` as it loads the target, unless its folder says how.
        alike = kernel == "int8" or (kernel in _FLOAT32) == (target[1] in _FLOAT32)
        if method == "shared_draft":
            one_pass = costs.seconds(*target, _SHARED_DRAFT_TOKENS + 1, share=True)
            one_pass += costs.seconds(draft, kernel, 1, share=True)
            configuration = Configuration(method, target[1], kernel, _SHARED_DRAFT_TOKENS)
            yield Candidate(configuration, prompt, one_pass / tokens_per_pass(_SHARED_DRAFT_TOKENS, rate))
        elif alike:
            count, pace = _best_draft_tokens(costs, target, (draft, kernel), rate, range(1, _MOST_DRAFT_TOKENS + 1))
            drafting = PROMPT_TOKENS * costs.seconds_per_prompt_token(draft, kernel)
            yield Candidate(Configuration(method, target[1], kernel, count), prompt + drafting, pace)


def _on_all_cores(candidate: Candidate) -> bool:
    return candidate.configuration.method != "shared_draft"


def _simplest(ranked: Sequence[Candidate]) -> Candidate:
    """The fastest candidate, or a simpler one that is about as fast."""
    others = [one for one in ranked if _on_all_cores(one)]
    fastest = ranked[0]
    if others and others[0].seconds <= fastest.seconds * (1 + SHARED_DRAFT_MARGIN):
        fastest = others[0]
    alone = next((one for one in others if one.configuration.method == "none"), fastest)
    return alone if alone.seconds <= fastest.seconds * (1 + MARGIN) else fastest


def _reason(chosen: Candidate, ranked: Sequence[Candidate]) -> str:
    how = "measured" if chosen.measured else "expected"
    others = "".join(f"; {one.configuration.name}: {one.seconds:.0f} s" for one in ranked if one is not chosen)
    return (
        f"{chosen.configuration.name}: a reply of {REPLY_TOKENS} tokens to a prompt of {PROMPT_TOKENS} takes "
        f"{chosen.seconds:.0f} s ({how}){others}"
    )


def tokens_per_pass(draft_tokens: int, rate: float) -> float:
    """Expected tokens of a pass; each draft token is accepted with a probability below 1, if those before it are."""
    return (1 - rate ** (draft_tokens + 1)) / (1 - rate)


def acceptance_rate_of(tokens: float, draft_tokens: int) -> float:
    """The acceptance rate by which a pass wins so many tokens: `tokens_per_pass` reversed."""
    low, high = 0.0, _HIGHEST_RATE
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_pass(draft_tokens, middle) < tokens else (low, middle)
    return low


def _best_draft_tokens(
    costs: KernelCosts,
    target: tuple[ModelSize, Kernel],
    draft: tuple[ModelSize, Kernel],
    rate: float,
    counts: Iterable[int],
    requests: int = 1,
) -> tuple[int, float]:
    """The fewest draft tokens that are about as fast as any of these counts, and a request's seconds per token."""
    drafting = costs.seconds(*draft, requests) + _SECONDS_PER_DRAFT_PASS
    paces = {
        count: (count * drafting + costs.seconds(*target, requests * (count + 1))) / tokens_per_pass(count, rate)
        for count in counts
    }
    fastest = min(paces.values())
    return next((count, pace) for count, pace in paces.items() if pace <= fastest * (1 + MARGIN))


def draft_tokens_by_batch_size(
    costs: KernelCosts, target: ModelSize, draft: ModelSize, configuration: Configuration, acceptance_rate: float
) -> list[tuple[int, int, int]]:
    """vLLM's `num_speculative_tokens_per_batch_size`: ranges of requests, both ends included, with their draft tokens.

    Args:
        costs: Of passes on this processor.
        target: The target's size.
        draft: The draft's.
        configuration: With a draft model.
        acceptance_rate: Of draft tokens.
    """
    assert configuration.draft is not None
    models = (target, configuration.target), (draft, configuration.draft)
    rate = min(acceptance_rate, _HIGHEST_RATE)
    ranges: list[tuple[int, int, int]] = []
    for requests in range(1, _MOST_REQUESTS + 1):
        # The configuration was chosen for a single request.
        counts = range(int(requests == 1), configuration.draft_tokens + 1)
        count, _ = _best_draft_tokens(costs, *models, rate, counts, requests)
        if ranges and ranges[-1][2] == count:
            ranges[-1] = (ranges[-1][0], requests, count)
        else:
            ranges.append((requests, requests, count))
    return ranges
