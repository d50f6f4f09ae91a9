"""From what a chat model's user wants to the engines that are started: precision, who guesses tokens, which folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lookahead_agent.cpu.cores import available_cores, share_cores
from lookahead_agent.cpu.names import INT8, INT8_WEIGHTS
from lookahead_agent.engines.shared_draft_proposer import COSTS
from lookahead_agent.engines.token_speculation import speculates_by_draft_model, speculative_config, vllm_takes_classes
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_engine import runs_on_cpu
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import (
    ACCEPTANCE_RATE,
    Arrangement,
    Choice,
    Precision,
    SpeculationMethod,
    choose_arrangement,
    draft_tokens_by_load,
    pass_costs,
)
from lookahead_agent.hardware.kernels import KERNELS, Kernel, kernel_times, processor
from lookahead_agent.hardware.observed import Observed
from lookahead_agent.hardware.shape import ModelShape
from lookahead_agent.models.quantize import is_quantized, quantized
from lookahead_agent.progress import LogProgress, Progress

_INT8_INSTRUCTIONS = ("avx512_vnni", "avx_vnni", "amx_int8", "i8mm")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
"""What a vocabulary is read from, first that without which there is none."""
_DTYPES: Mapping[str, Kernel] = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}
_ARGUMENT: Mapping[Kernel, str] = {
    "bf16": "bfloat16",
    "fp32": "float32",
    "int8": "bfloat16",
    "int8-weights": "float32",
}


@dataclass(frozen=True)
class EngineRequest:
    """What is wanted of the engines.

    Attributes:
        token_speculation: Method of token-level speculation, or "auto".
        precision: Of the target's weights.
        draft_precision: Of the draft's.
        target_arguments: Arguments of the target's engine, which go before a precision.
        draft_arguments: Arguments of the draft's.
        draft_engine: Whether the draft must have an engine of its own, because steps are to be speculated on.
    """

    token_speculation: str | Mapping[str, Any] = "auto"
    precision: Precision = "auto"
    draft_precision: Precision = "auto"
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_engine: bool = False


@dataclass(frozen=True)
class EngineSetup:
    """Engines to start.

    Attributes:
        target: The target's folder; None: it is behind a server.
        draft: The draft's, if it has an engine of its own; None: it has none here.
        target_arguments: More arguments of the target's engine.
        draft_arguments: More arguments of the draft's.
        speculation_method: Method of token-level speculation.
        precision: Of each model's weights, by role.
        reason: Why so, in a sentence.
        arrangement: What was chosen; None where there was nothing to choose.
        observed: Where the pace of replies in it is kept; None where it does not matter.
        draft_tokens: Tokens that the draft model guesses for each pass of a single reply; 0: it does not, or not
            always so many.
    """

    target: Path | None
    draft: Path | None
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)
    speculation_method: str = "none"
    precision: Mapping[str, Kernel] = field(default_factory=dict)
    reason: str = ""
    arrangement: Arrangement | None = None
    observed: Observed | None = None
    draft_tokens: int = 0


def select_engines(request: EngineRequest, target: Path | None, draft: Path | None, progress: Progress) -> EngineSetup:
    """Decide which engines to start; blocks while the machine is measured or weights are written as int8.

    Args:
        request: What is wanted.
        target: The target's folder; None: it is behind a server.
        draft: The draft's; None: there is none here.
        progress: Told what is done.

    Raises:
        ConfigurationError: What is wanted cannot be had.
        ModelError: Weights could not be written.
        EngineStartError: The machine could not be measured.
    """
    alike = target is not None and draft is not None and one_vocabulary(target, draft)
    ways = _ways(request, here=target is not None, draft=draft, alike=alike)
    choice: Choice | None = None
    observed: Observed | None = None
    if target is not None and runs_on_cpu():
        choice, observed = _measured_choice(request, target, draft if alike else None, ways, progress)
    arrangement = choice.arrangement if choice is not None else None
    speculation_method: str = arrangement.speculation_method if arrangement is not None else ways[-1]
    method = speculation_method if request.token_speculation == "auto" else request.token_speculation
    precision = _precision_of_each(request, arrangement, draft, progress)
    targets = as_precision(target, precision["target"], progress)
    drafts = as_precision(draft, precision["draft"], progress)
    more: dict[str, Any] = {}
    if target is not None:
        config = speculative_config(_with_draft_tokens(method, arrangement), drafts[0], on_cpu=runs_on_cpu())
        if config is not None:
            if config.get("model") == str(drafts[0]) and "quantization" in drafts[1]:
                config["quantization"] = drafts[1]["quantization"]
            chosen = arrangement if isinstance(method, str) else None
            right = choice.acceptance_rate if choice is not None else ACCEPTANCE_RATE
            more = _measured_draft_tokens(speculation_method, chosen, config, target, draft, right, progress)
    return EngineSetup(
        targets[0],
        drafts[0] if request.draft_engine or speculation_method == "shared_draft" else None,
        targets[1] | more,
        drafts[1],
        method if isinstance(method, str) else str(method.get("method", "custom")),
        {
            role: kernel
            for role, kernel, folder in (("target", precision["target"], target), ("draft", precision["draft"], draft))
            if kernel is not None and folder is not None
        },
        choice.reason if choice is not None else "",
        arrangement,
        observed,
        _guesses_alone(more),
    )


def _guesses_alone(arguments: Mapping[str, Any]) -> int:
    config = arguments.get("speculative_config") or {}
    if config.get("method") != "draft_model":
        return 0
    by_load = config.get("num_speculative_tokens_per_batch_size")
    return int(by_load[0][2] if by_load else config.get("num_speculative_tokens", 0))


def _precision_of_each(
    request: EngineRequest, arrangement: Arrangement | None, draft: Path | None, progress: Progress
) -> dict[str, Kernel | None]:
    """Each model's precision, by role; None where its folder says."""
    if arrangement is not None:
        precision = {"target": arrangement.target, "draft": arrangement.draft}
    else:
        precision = {
            "target": _given(request.precision, request.target_arguments),
            "draft": _given(request.draft_precision, request.draft_arguments),
        }
    if draft is not None and precision["draft"] is None and runs_on_cpu():
        precision["draft"] = _best_alone(request, draft, progress)
    return precision


def as_precision(folder: Path | None, kernel: Kernel | None, progress: Progress) -> tuple[Path | None, dict[str, Any]]:
    """The folder and the engine arguments of a model in a precision.

    Args:
        folder: The model's; None: it is not here.
        kernel: The precision; None: as the folder says.
        progress: Told of weights that are written.

    Raises:
        ConfigurationError: The precision is for CPUs only.
        ModelError: The weights could not be written.
    """
    if folder is None or kernel is None:
        return folder, {}
    arguments: dict[str, Any] = {}
    if kernel == "int8":
        written = quantized(folder, progress)
        if written != folder and runs_on_cpu():
            arguments["quantization"] = INT8
        folder = written
    if kernel == "int8-weights":
        if not runs_on_cpu():
            raise ConfigurationError("the precision int8-weights is for CPUs: choose int8, or a quantized model")
        arguments["quantization"] = INT8_WEIGHTS
    if runs_on_cpu() or kernel != "int8":
        arguments["dtype"] = _ARGUMENT[kernel]
    return folder, arguments


def _measured_draft_tokens(
    speculation_method: str,
    arrangement: Arrangement | None,
    config: dict[str, Any],
    target: Path,
    draft: Path | None,
    right: float,
    progress: Progress,
) -> dict[str, Any]:
    """Engine arguments of a target that guesses tokens, with what was measured where the way was chosen by that."""
    if arrangement is None:
        return {"speculative_config": config}
    if speculation_method == "draft_model" and draft is not None:
        return {"speculative_config": config | _by_load(arrangement, target, draft, right, progress)}
    costs = _pass_costs(arrangement, target, progress) if speculation_method == "shared_draft" else None
    return {"speculative_config": config} | ({"additional_config": {COSTS: costs}} if costs is not None else {})


def _ways(request: EngineRequest, *, here: bool, draft: Path | None, alike: bool) -> tuple[SpeculationMethod, ...]:
    """Ways of guessing tokens that may be chosen, the last the one without a measurement.

    Raises:
        ConfigurationError: The one that is wanted needs what is not there.
    """
    method = request.token_speculation
    name = method if isinstance(method, str) else method.get("method")
    if speculates_by_draft_model(method):
        if draft is None:
            raise ConfigurationError(f"token_speculation={name!r} needs a draft model: name one with draft_model=…")
        if not alike:
            raise ConfigurationError(
                f"{draft.name} has another tokenizer than the target, and {name} speculation guesses tokens: choose "
                "another method (as a draft of steps, which are exchanged as text, it will do)"
            )
        return ("shared_draft",) if name == "shared_draft" else ("draft_model",)
    if name != "auto" or not here or not alike:
        return ("none",)
    classes = vllm_takes_classes()
    if request.draft_engine:
        return ("shared_draft",) if classes else ("none",)
    return ("none", "draft_model", *(("shared_draft",) if classes else ()))


def one_vocabulary(target: Path, draft: Path) -> bool:
    """Whether the models in two folders have the same tokens."""
    # Reading two tokenizers takes seconds, comparing their files milliseconds.
    return _same_files(target, draft) or HFTokenizer(target).fingerprint == HFTokenizer(draft).fingerprint


def _same_files(target: Path, draft: Path) -> bool:
    pairs = [(target / name, draft / name) for name in _TOKENIZER_FILES]
    return pairs[0][0].is_file() and all(_bytes(of_target) == _bytes(of_draft) for of_target, of_draft in pairs)


def _bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _given(precision: Precision, arguments: Mapping[str, Any]) -> Kernel | None:
    """The precision that a user has fixed; None if none is."""
    if "dtype" in arguments:
        return None if precision == "auto" else _contradiction(precision, arguments)
    return None if precision == "auto" else precision


def _contradiction(precision: Precision, arguments: Mapping[str, Any]) -> Kernel:
    kernel = _DTYPES.get(str(arguments["dtype"]))
    if kernel == precision:
        return kernel
    raise ConfigurationError(f"precision={precision!r} and the engine argument dtype={arguments['dtype']!r} disagree")


def _precisions(precision: Precision, arguments: Mapping[str, Any], folder: Path) -> tuple[Kernel, ...]:
    """Precisions that may be chosen for a model; none if it is not to be touched."""
    if "quantization" in arguments or is_quantized(folder) or arguments.get("load_format") == "dummy":
        return ()
    if "dtype" in arguments:
        known = _DTYPES.get(str(arguments["dtype"]).removeprefix("torch."))
        _given(precision, arguments)
        return (known,) if known is not None else ()
    if precision == "int8" and not multiplies_int8():
        raise ConfigurationError(
            "this processor has no instructions for int8 arithmetic (VNNI, AMX): choose the precision int8-weights"
        )
    if precision != "auto":
        return (precision,)
    # Emulated, int8 is slower than anything else, and the engine may not come up in time; where it is not, float
    # activations lose what a batch wins.
    without = "int8-weights" if multiplies_int8() else "int8"
    return tuple(kernel for kernel in KERNELS if kernel != without)


def multiplies_int8() -> bool:
    """Whether the processor has instructions for int8 arithmetic."""
    return not set(processor().split()).isdisjoint(_INT8_INSTRUCTIONS)


def _measured_choice(
    request: EngineRequest, target: Path, draft: Path | None, ways: Sequence[SpeculationMethod], progress: Progress
) -> tuple[Choice | None, Observed | None]:
    """The choice by what this machine's kernels take; None where the models are of a kind that is not known."""
    of_target = _precisions(request.precision, request.target_arguments, target)
    of_draft = _precisions(request.draft_precision, request.draft_arguments, draft) if draft is not None else ()
    shapes = ModelShape.of(target), ModelShape.of(draft) if draft is not None else None
    if not of_target or shapes[0] is None or (draft is not None and (not of_draft or shapes[1] is None)):
        return None, None
    measured = kernel_times(progress)
    targets_share, drafts_share = share_cores(available_cores(), with_draft=True)
    observed = Observed([str(folder) for folder in (target, draft) if folder is not None])
    choice = choose_arrangement(
        shapes[0],
        shapes[1],
        every_core=measured.on(available_cores()),
        targets_share=measured.on(targets_share),
        drafts_share=measured.on(drafts_share),
        speculation_method=ways,
        target_precisions=of_target,
        draft_precisions=of_draft,
        # Of the target alone it says as much whether a draft was named then or not.
        observed=Observed([str(target)]).paces() | observed.paces(),
        acceptance_rate=observed.acceptance_rate() or ACCEPTANCE_RATE,
    )
    return choice, observed


def _best_alone(request: EngineRequest, draft: Path, progress: Progress) -> Kernel | None:
    """The fastest precision of a draft whose target is elsewhere, or has other tokens."""
    kernels = _precisions(request.draft_precision, request.draft_arguments, draft)
    shape = ModelShape.of(draft)
    if not kernels or shape is None:
        return None
    times = kernel_times(progress).on(available_cores())
    choice = choose_arrangement(
        shape,
        None,
        every_core=times,
        targets_share=times,
        drafts_share=times,
        speculation_method=("none",),
        target_precisions=kernels,
    )
    return choice.arrangement.target


def _with_draft_tokens(method: str | Mapping[str, Any], arrangement: Arrangement | None) -> str | Mapping[str, Any]:
    if method == "draft_model" and arrangement is not None and arrangement.draft_tokens:
        return {"method": "draft_model", "num_speculative_tokens": arrangement.draft_tokens}
    return method


def _by_load(arrangement: Arrangement, target: Path, draft: Path, right: float, progress: Progress) -> dict[str, Any]:
    shapes = ModelShape.of(target), ModelShape.of(draft)
    if shapes[0] is None or shapes[1] is None:
        return {}
    times = kernel_times(progress).on(available_cores())
    schedule = draft_tokens_by_load(shapes[0], shapes[1], arrangement, times, acceptance_rate=right)
    return {"num_speculative_tokens_per_batch_size": schedule} if len(schedule) > 1 else {}


def _pass_costs(arrangement: Arrangement, target: Path, progress: Progress) -> dict[int, float] | None:
    shape = ModelShape.of(target)
    share, _ = share_cores(available_cores(), with_draft=True)
    times = kernel_times(progress).on(share)
    return pass_costs(shape, arrangement.target, times) if shape is not None else None


def judge_arguments(given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Arguments of the engine of a judge of its own: its precision is as its makers have it, where that is not slow."""
    if not runs_on_cpu() or "dtype" in given or is_quantized(folder):
        return {}
    times = kernel_times(LogProgress()).on(available_cores())
    # A judge reads much and writes one token.
    longest = max(times["bf16"])
    return {"dtype": _ARGUMENT["bf16" if times["bf16"][longest] <= times["fp32"][longest] else "fp32"]}
