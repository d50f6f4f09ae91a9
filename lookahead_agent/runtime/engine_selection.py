"""From a user's settings to the engines that are started: precision, token speculation, and the models' folders."""

import filecmp
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from lookahead_agent import __version__
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.shared_draft_proposer import COSTS
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import speculates_by_draft_model, speculative_config, trained_context
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import (
    ACCEPTANCE_RATE,
    Configuration,
    Kernel,
    Precision,
    SpeculationMethod,
    choose_configuration,
)
from lookahead_agent.hardware.reply_speeds import ReplySpeeds
from lookahead_agent.models.catalogue import ModelSet
from lookahead_agent.models.conversion import is_quantized
from lookahead_agent.runtime.weights import Platform, Weights, context_that_fits, weight_bytes, weights_in

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
"""Files of a vocabulary; without the first there is none."""
_LEAST_CONTEXT = 16384  # tokens that a GPU must have room for if a draft is to have a share of its memory
_GPUS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_KERNEL_OF_DTYPE: Mapping[str, Kernel] = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class RuntimeSpec:
    """What determines the engines of a chat model."""

    models: ModelSet  # target, draft, judge and embedding model
    target_arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of the target's vLLM engine
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of the draft's vLLM engine
    judge_arguments: Mapping[str, Any] = field(default_factory=dict)  # arguments of the judge's vLLM engine
    # The models that are behind servers, by role: "target", "draft", "judge", "embedding"
    remote: Mapping[str, RemoteModel] = field(default_factory=dict)
    # Method of token-level speculation inside the target's engine, or "auto"
    token_speculation: str | Mapping[str, Any] = "auto"
    precision: Precision = "auto"  # of the target's weights
    draft_precision: Precision = "auto"  # of the draft's
    # CPU cores as (target, draft) in vLLM's notation; None: chosen. A judge shares the draft's
    cores: tuple[str, str] | None = None
    draft_engine: bool = False  # whether the draft needs an engine of its own, since step speculation is forced

    @property
    def digest(self) -> str:
        """Equal for equal specifications in this version: by it processes agree on which engines they mean."""
        return sha256(f"{__version__} {asdict(self)}".encode()).hexdigest()

    def runs_here(self, *roles: str) -> bool:
        """Whether these roles' models all run in engines of this process."""
        return self.remote.keys().isdisjoint(roles)

    @property
    def names(self) -> dict[str, str]:
        """The models' names by role; a judge is only named if it has an engine of its own."""
        models = self.models
        facts = {"target": models.target, "draft": models.draft, "judge": models.judge, "embedding": models.embedding}
        found = {role: each.name for role, each in facts.items() if each}
        return found | {role: each.model for role, each in self.remote.items() if each.model is not None}

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model, here or behind a server."""
        return self.models.draft is not None or not self.runs_here("draft")


@dataclass(frozen=True)
class EngineSetup:
    """Engines to start."""

    target: Weights | None = None  # the target's weights; None: it is behind a server
    draft: Weights | None = None  # the draft's, if its weights are used here
    draft_engine: bool = False  # whether the draft has an engine of its own here
    # Arguments of the target's engine beside those of its weights
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    speculation_method: str = "none"  # of token speculation
    precision: Mapping[str, Kernel] = field(default_factory=dict)  # of each model's weights, by role
    reason: str = ""  # why so, in a sentence
    configuration: Configuration | None = None  # the chosen one; None where there was no choice
    may_leave_out_draft: bool = False  # whether a reply may do without `draft_model`, which a user can force
    speeds: ReplySpeeds | None = None  # where the speed of its replies is kept; None where it does not matter
    alone_when_busy: bool = False  # whether the target writes alone while several requests run

    @property
    def draft_tokens(self) -> int:
        """Tokens of the draft model for each pass of a single request; 0: another method."""
        config = self.target_arguments.get("speculative_config") or {}
        if config.get("method") != "draft_model":
            return 0
        ranges = config.get("num_speculative_tokens_per_batch_size")
        return int(ranges[0][2] if ranges else config.get("num_speculative_tokens", 0))

    def without_shared_draft(self, problem: str) -> "EngineSetup":
        """The same engines, but for a target that did not start with a shared draft."""
        reason = f"the target runs without a shared draft, because it did not start with one: {problem}"
        return EngineSetup(self.target, self.draft, self.draft_engine, precision=self.precision, reason=reason)


def select_engines(
    spec: RuntimeSpec,
    target: Path | None,
    draft: Path | None,
    platform: Platform | None = None,
    fits: Callable[..., int] = context_that_fits,
) -> EngineSetup:
    """Decide which engines to start, by settings and the folders of target and draft; no folder: it is not here.

    Raises ConfigurationError if the settings contradict each other, or cannot be had here.
    """
    platform = platform or Platform.detect()
    alike = target is not None and draft is not None and same_vocabulary(target, draft)
    methods = _methods(spec, draft, here=target is not None, alike=alike)
    configuration, reason, speeds = None, "", None
    if target is not None and draft is not None and not platform.on_cpu and len(methods) > 1:
        room = fits([(target, spec.target_arguments), (draft, spec.draft_arguments)])
        if room < min(_LEAST_CONTEXT, trained_context(target)):
            methods, reason = ("none",), f"beside a draft the GPU has room for {room} tokens"
    if target is not None and platform.on_cpu:
        speeds = ReplySpeeds([str(folder) for folder in (target, draft if alike else None) if folder is not None])
        found = _choose_on_cpu(spec, platform, target, draft if alike else None, methods, speeds)
        configuration, reason = found or (None, "")
    method: str = configuration.method if configuration is not None else methods[-1]
    given = method if spec.token_speculation == "auto" else spec.token_speculation
    if configuration is not None:
        kernels = {"target": configuration.target, "draft": configuration.draft}
    else:
        kernels = {
            "target": _fixed(spec.precision, spec.target_arguments),
            "draft": _fixed(spec.draft_precision, spec.draft_arguments),
        }
    if draft is not None and kernels["draft"] is None:
        kernels["draft"] = _fastest_alone(spec.draft_precision, spec.draft_arguments, draft, platform)
    folders = {"target": target, "draft": draft}
    weights = {
        role: weights_in(folder, kernels[role], platform) for role, folder in folders.items() if folder is not None
    }
    speculation = _speculation(given, weights.get("draft"), platform, configuration) if target is not None else {}
    draft_engine = draft is not None and (spec.draft_engine or method == "shared_draft")
    drafting = (speculation.get("speculative_config") or {}).get("model")
    drafts = "draft" in weights and drafting == str(weights["draft"].folder)
    return EngineSetup(
        weights.get("target"),
        weights["draft"] if draft_engine or drafts else None,
        draft_engine,
        speculation,
        given if isinstance(given, str) else str(given.get("method", "custom")),
        {role: kernel for role in weights if (kernel := kernels[role]) is not None},
        reason,
        configuration,
        spec.token_speculation == "auto" and configuration is not None and bool(configuration.draft_tokens),
        speeds if configuration is not None else None,
        # On a GPU nothing has measured draft tokens for several requests, and their batches cost the target little.
        alone_when_busy=spec.token_speculation == "auto" and not platform.on_cpu,
    )


def _methods(spec: RuntimeSpec, draft: Path | None, *, here: bool, alike: bool) -> tuple[SpeculationMethod, ...]:
    """Token methods that may be chosen; on a GPU the last is taken. ConfigurationError if one lacks something."""
    method = spec.token_speculation
    name = method if isinstance(method, str) else method.get("method")
    if speculates_by_draft_model(method):
        if draft is None:
            raise ConfigurationError(f"token_speculation={name!r} needs a draft model: name one with draft_model=…")
        if not alike:
            raise ConfigurationError(
                f"{draft.name} has another tokenizer than the target, and {name} shares tokens: choose another method "
                "(as a draft of steps, which are exchanged as text, it will do)"
            )
        return ("shared_draft",) if name == "shared_draft" else ("draft_model",)
    if name != "auto" or not here or not alike:
        return ("none",)
    if any(spec.target_arguments.get(size, 1) != 1 for size in _GPUS):
        return ("none",)  # a shared draft was tried beside one GPU alone
    return ("shared_draft",) if spec.draft_engine else ("none", "draft_model", "shared_draft")


def same_vocabulary(target: Path, draft: Path, load: Callable[[Path], HFTokenizer] = HFTokenizer) -> bool:
    """Whether the models in two folders have the same tokens."""
    # Reading two tokenizers takes seconds, comparing their files milliseconds.
    same, _, _ = filecmp.cmpfiles(target, draft, _TOKENIZER_FILES, shallow=False)
    neither = [name for name in _TOKENIZER_FILES if not any((folder / name).exists() for folder in (target, draft))]
    if _TOKENIZER_FILES[0] in same and len(same) + len(neither) == len(_TOKENIZER_FILES):
        return True
    return load(target).fingerprint == load(draft).fingerprint


def _fixed(precision: Precision, arguments: Mapping[str, Any]) -> Kernel | None:
    if precision == "auto":
        return None
    if "dtype" not in arguments or _KERNEL_OF_DTYPE.get(str(arguments["dtype"])) == precision:
        return precision
    raise ConfigurationError(f"precision={precision!r} and the engine argument dtype={arguments['dtype']!r} disagree")


def _kernels(
    precision: Precision, arguments: Mapping[str, Any], folder: Path, platform: Platform
) -> tuple[Kernel, ...]:
    """Precisions that may be chosen for a model on a CPU; none if its folder decides."""
    if "quantization" in arguments or is_quantized(folder) or arguments.get("load_format") == "dummy":
        return ()
    fixed = _fixed(precision, arguments)
    if "dtype" in arguments:
        known = _KERNEL_OF_DTYPE.get(str(arguments["dtype"]).removeprefix("torch."))
        return (known,) if known is not None else ()
    if fixed == "int8" and not platform.int8:
        raise ConfigurationError(
            "this processor has no instructions for int8 arithmetic (VNNI, AMX): choose the precision int8-weights"
        )
    kernels = platform.defaults.kernels if fixed is None else (fixed,)
    if arguments.get("enforce_eager") is False:  # our kernels cannot be compiled
        kernels = tuple(kernel for kernel in kernels if kernel not in ("int8", "int8-weights"))
        if not kernels:
            raise ConfigurationError(
                f"vLLM cannot compile the kernels of {fixed}: leave enforce_eager out, or choose the precision bf16"
            )
    return kernels


def _choose_on_cpu(
    spec: RuntimeSpec,
    platform: Platform,
    target: Path,
    draft: Path | None,
    methods: tuple[SpeculationMethod, ...],
    speeds: ReplySpeeds,
) -> tuple[Configuration, str] | None:
    """The choice by the table and by measured replies; None where a model's folder decides."""
    kernels = _kernels(spec.precision, spec.target_arguments, target, platform)
    draft_kernels: tuple[Kernel, ...] = ()
    if draft is not None:
        draft_kernels = _kernels(spec.draft_precision, spec.draft_arguments, draft, platform)
    if not kernels or (draft is not None and not draft_kernels):
        return None
    return choose_configuration(
        platform.defaults,
        methods=methods,
        target=kernels,
        draft=draft_kernels,
        draft_size=_size(draft) / _size(target) if draft is not None else 0.0,
        # The target's speed alone does not depend on a draft.
        paces=ReplySpeeds([str(target)]).paces() | speeds.paces(),
        acceptance_rate=speeds.acceptance_rate() or ACCEPTANCE_RATE,
    )


def _size(folder: Path) -> int:
    """Bytes of a model in bf16, whatever its files are; of the files where the architecture has another shape."""
    try:
        return weight_bytes(folder, {"load_format": "dummy"})
    except KeyError:
        return weight_bytes(folder, {})


def default_weights(folder: Path, platform: Platform | None = None) -> Weights:
    """A model's weights in the precision that is the fastest here for the model alone."""
    platform = platform or Platform.detect()
    return weights_in(folder, _fastest_alone("auto", {}, folder, platform), platform)


def _fastest_alone(
    precision: Precision, arguments: Mapping[str, Any], folder: Path, platform: Platform
) -> Kernel | None:
    """The fastest precision on a CPU of a model whose partner is elsewhere, or has another tokenizer."""
    kernels = _kernels(precision, arguments, folder, platform) if platform.on_cpu else ()
    return kernels[0] if kernels else None


def _speculation(
    given: str | Mapping[str, Any], draft: Weights | None, platform: Platform, configuration: Configuration | None
) -> dict[str, Any]:
    method: str | Mapping[str, Any] = given
    by_requests = configuration.draft_tokens if configuration is not None and given == "draft_model" else ()
    if by_requests:
        method = {"method": given, "num_speculative_tokens": by_requests[0][2]}
    folder, quantization = (draft.folder, draft.arguments.get("quantization")) if draft is not None else (None, None)
    config = speculative_config(method, folder, on_cpu=platform.on_cpu, draft_quantization=quantization)
    if config is None:
        return {}
    if by_requests:
        config["num_speculative_tokens_per_batch_size"] = list(by_requests)
    arguments: dict[str, Any] = {"speculative_config": config}
    if configuration is not None and given == "shared_draft":
        arguments["additional_config"] = {COSTS: dict(platform.defaults.pass_costs[configuration.target])}
    return arguments
