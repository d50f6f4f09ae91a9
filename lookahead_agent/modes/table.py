"""The table from which every choice starts: modes, configurations and margins, and on a CPU costs by instruction set.

Nothing is measured before the first reply. The figures are measurements of two-core machines (docs/results/cpu.md).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from lookahead_agent.cpu import INSTRUCTIONS
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.inventory import processor

Kernel = Literal["bf16", "fp32", "int8"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
Precision = Literal["auto", "bf16", "fp32", "int8"]
"""Of a model's weights; "int8" has activations in int8 too. "auto" follows the instruction set of a CPU, and the
model's folder on a GPU."""
SpeculationMethod = Literal["none", "draft_model", "shared_draft"]
"""Lossless token speculation: none, a draft model on the target's cores, or a shared draft on cores of its own."""
DraftTokens = Sequence[tuple[int, int, int]]
"""vLLM's `num_speculative_tokens_per_batch_size`: ranges of batch sizes, ends included, with their draft tokens."""

Mode = Literal["off", "sd", "lr", "lr+sd"]
"""Of a reply: the target alone, with draft tokens, with draft steps, or with both."""
EngineMode = Literal["off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft"]
"""A mode and the engines that write in it, for predictions and measurements: "sd" takes draft tokens from a draft model
in the target's engine, "shared_draft" from a shared draft."""
METHODS: Mapping[EngineMode, SpeculationMethod] = {
    "off": "none",
    "sd": "draft_model",
    "lr": "none",
    "lr+sd": "draft_model",
    "shared_draft": "shared_draft",
    "lr+shared_draft": "shared_draft",
}
"""The token speculation of each mode's engines."""
LOOKAHEAD: tuple[EngineMode, ...] = ("lr", "lr+sd", "lr+shared_draft")  # modes with step speculation

PRIOR: Mapping[Mode, float] = {"sd": 1.0, "lr+sd": 1.1, "lr": 1.3, "off": 1.4}
"""Assumed seconds per token of an untried mode, relative to those of "sd"."""
GPU_PRIOR: Mapping[Mode, float] = {"sd": 1.0, "lr+sd": 1.1, "off": 1.2, "lr": 1.3}
"""The same on a GPU: a node begins without draft steps, and a trial decides whether they add."""
HYSTERESIS = 0.1  # share of time by which another mode must be faster before a node switches to it
MAX_PROMPT_TOKENS_PER_REPLY_TOKEN = 40.0
"""Prompt tokens per reply token above which a draft model is left out. Its draft tokens pay for half of them. Measured
on two cores, the draft reads a prompt token in 0.6 ms. It saves 14 ms for each token of a reply."""
ACCEPTANCE_RATE = 0.85  # share of accepted draft tokens, before a pair's is measured (0.88 for the default pair)
MARGIN = 0.05  # share of time by which a configuration must beat a simpler one
SHARED_DRAFT_MARGIN = 0.4
"""The same for a shared draft, which takes cores from its target. It slows replies with few draft tokens (to 0.67 of
the speed of the target alone, as measured), and four concurrent replies (to 0.86)."""
_HANDICAPS = {"none": 1.0, "draft_model": 1 + MARGIN, "shared_draft": (1 + MARGIN) * (1 + SHARED_DRAFT_MARGIN)}
MAX_DRAFT_SIZE = 0.5  # share of the target's size from which a draft model's tokens cost more than they gain
_DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")  # instructions that add four products of int8

# Draft tokens by the minimal acceptance rate. An int8 draft of a bf16 or fp32 target has a table of its own.
_DRAFT_TOKENS: Mapping[float, DraftTokens] = {
    0.92: ((1, 1, 3), (2, 3, 2), (4, 6, 1), (7, 32, 0)),
    0.78: ((1, 1, 2), (2, 5, 1), (6, 32, 0)),
    0.55: ((1, 4, 1), (5, 32, 0)),
}
_INT8_DRAFT_TOKENS: Mapping[float, DraftTokens] = {
    0.92: ((1, 1, 4), (2, 4, 3), (5, 7, 2), (8, 14, 1), (15, 32, 0)),
    0.78: ((1, 1, 3), (2, 5, 2), (6, 11, 1), (12, 32, 0)),
    0.55: ((1, 1, 2), (2, 9, 1), (10, 32, 0)),
}
_MINIMAL: DraftTokens = ((1, 1, 1), (2, 32, 0))  # where the target is as fast alone, but draft_model is forced


@dataclass(frozen=True)
class CPUDefaults:
    """The first choices for CPUs of an instruction set."""

    # Dtype of activations outside int8 products: bf16 is emulated on older processors
    dtype: Literal["bfloat16", "float32"]

    # Precisions, fastest first, without those that are emulated or lose the gain of a batch
    kernels: tuple[Kernel, ...]
    # Target precisions in which a forward pass of a few tokens costs about as much as one of a single token
    speculating: tuple[Kernel, ...]
    # Relative costs of forward passes on a share of the cores, by precision and number of tokens
    pass_costs: Mapping[Kernel, Mapping[int, float]]

    def dtype_of(self, kernel: Kernel) -> str:
        """The dtype in which a model of a precision computes."""
        return {"bf16": "bfloat16", "fp32": "float32", "int8": self.dtype}[kernel]


WITH_DOT_PRODUCTS = CPUDefaults(
    "bfloat16",
    ("int8", "bf16", "fp32"),
    ("int8", "bf16", "fp32"),
    {
        "bf16": {1: 1.0, 4: 0.75, 8: 0.86, 16: 0.93, 128: 5.5},
        "fp32": {1: 1.0, 4: 0.7, 8: 0.98, 16: 1.4, 128: 8.9},
        "int8": {1: 1.0, 4: 1.0, 8: 1.3, 16: 2.1, 128: 14.6},
    },
)
_EMULATED_COSTS: Mapping[Kernel, Mapping[int, float]] = {
    "bf16": {1: 1.0, 4: 3.7, 8: 7.1, 16: 14.0, 128: 114.0},
    "fp32": {1: 1.0, 4: 1.5, 8: 1.8, 16: 2.5, 128: 15.5},
}
WITH_AVX2 = CPUDefaults(
    "float32",
    ("int8", "fp32", "bf16"),
    ("int8", "fp32"),
    {**_EMULATED_COSTS, "int8": {1: 1.0, 4: 1.1, 8: 1.9, 16: 3.7, 128: 18.2}},
)
WITHOUT_INT8 = CPUDefaults("float32", ("fp32", "bf16"), ("fp32",), _EMULATED_COSTS)


def defaults_of(flags: str | None = None) -> CPUDefaults:
    """The defaults for a processor with these CPU flags, by default this one, or its instruction set that is chosen."""
    names = set((flags or os.environ.get(INSTRUCTIONS) or processor()).split())
    if not names.isdisjoint(_DOT_PRODUCTS):
        return WITH_DOT_PRODUCTS
    return WITH_AVX2 if "avx2" in names else WITHOUT_INT8


@dataclass(frozen=True)
class Configuration:
    """A method of token speculation, and the precision of each model."""

    method: SpeculationMethod  # the method of token speculation
    target: Kernel  # the target's precision
    draft: Kernel | None = None  # the draft's; None without a draft
    draft_tokens: DraftTokens = ()  # draft tokens of a draft model, by the number of requests

    @property
    def name(self) -> str:
        """See `configuration_name`."""
        return configuration_name(self.method, self.target, self.draft)


def configuration_name(method: str, target: Kernel | None, draft: Kernel | None) -> str:
    """A short text that does not depend on the number of draft tokens; a precision None is the folder's."""
    return ", ".join(
        [method, *(f"{role} {kernel}" for role, kernel in (("target", target), ("draft", draft)) if kernel)]
    )


def choose_configuration(
    defaults: CPUDefaults,
    *,
    methods: Sequence[SpeculationMethod],
    target: Sequence[Kernel],
    draft: Sequence[Kernel] = (),
    draft_size: float = 0.0,
    paces: Mapping[str, float] | None = None,
    acceptance_rate: float = ACCEPTANCE_RATE,
) -> tuple[Configuration, str]:
    """Choose method and precisions by acceptance rate and `paces`, seconds per token by name; returns the reason too.

    Raises ConfigurationError if no method works with these precisions.
    """
    picks = {method: pick for method in methods if (pick := _first(defaults, method, target, draft, acceptance_rate))}
    if not picks:
        raise ConfigurationError(
            "no configuration of these models is left to choose from: with draft_model, vLLM loads the draft as it "
            "loads the target, so both compute in bf16 or both in float32, but for a draft in int8. Choose another "
            "precision or draft_precision, or token_speculation='shared_draft'"
        )
    chosen = next(iter(picks.values()))
    reason = "the only one that may be chosen"
    if len(picks) > 1:
        pays = (
            "draft_model" in picks
            and picks["draft_model"].target in defaults.speculating
            and draft_size < MAX_DRAFT_SIZE
            and acceptance_rate >= min(_DRAFT_TOKENS)
        )
        chosen = picks["draft_model"] if pays else picks.get("none", chosen)
        reason = "the first choice for this processor and pair"
    measured = {pick.method: (paces or {})[pick.name] for pick in picks.values() if pick.name in (paces or {})}
    if chosen.method in measured and len(measured) > 1:
        chosen = picks[min(measured, key=lambda method: measured[method] * _HANDICAPS[method])]
        reason = "the fastest in measured replies, where a tie goes to the simpler one"
    figures = "; ".join(f"{method} {1000 * pace:.0f} ms per token" for method, pace in measured.items())
    return chosen, f"{chosen.name}: {reason}" + (f" ({figures})" if figures else "")


def _first(
    defaults: CPUDefaults, method: SpeculationMethod, target: Sequence[Kernel], draft: Sequence[Kernel], rate: float
) -> Configuration | None:
    """The first choice for a method; None if it works with none of these precisions."""
    rank = [*defaults.kernels, *KERNELS].index
    ranked = sorted(target, key=rank)
    if method == "none":
        return Configuration(method, ranked[0]) if ranked else None
    for kernel in ranked:
        for draft_kernel in sorted(draft, key=rank):
            if method == "shared_draft":
                return Configuration(method, kernel, draft_kernel)
            # With `draft_model`, vLLM loads the draft as it loads the target, unless the draft's folder is quantized.
            if draft_kernel == "int8" or defaults.dtype_of(draft_kernel) == defaults.dtype_of(kernel):
                rows = _DRAFT_TOKENS if draft_kernel == kernel else _INT8_DRAFT_TOKENS
                row = next((row for least, row in rows.items() if rate >= least), _MINIMAL)
                return Configuration(method, kernel, draft_kernel, row if kernel in defaults.speculating else _MINIMAL)
    return None
