"""Turns a user's settings into the engines to start: precision, token speculation, and the models' folders."""

import filecmp
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.shared_draft_proposer import ACCEPTANCE, COSTS
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.vllm_config import speculates_by_draft_model, speculative_config
from lookahead_agent.errors import ConfigurationError, IntegrityError
from lookahead_agent.hardware.gpus import PARALLEL_SIZES, weight_bytes
from lookahead_agent.models.catalogue import ModelSet
from lookahead_agent.models.conversion import is_quantized
from lookahead_agent.modes.chooser import ModeChooser
from lookahead_agent.modes.record import PaceRecord
from lookahead_agent.modes.table import (
    GPU_PRIOR,
    Configuration,
    Kernel,
    Precision,
    SpeculationMethod,
    configuration_name,
)
from lookahead_agent.runtime.weights import Platform, Weights, weights_in
from lookahead_agent.system.inventory import gpus

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
"""Files of a tokenizer; without the first, a folder has no vocabulary."""
_VERSION = importlib.metadata.version("lookahead-agent")
_ALONE_ON_GPU = (
    "the target runs alone: it brings no head, and on a GPU the speed of a draft is known as an upper bound only. A "
    "depth, or token_speculation='shared_draft', adds the draft"
)
_DRAFT_ON_FREE_GPU = "the target writes alone, and each node learns whether the steps of the draft make it faster"
_KERNEL_OF_DTYPE: Mapping[str, Kernel] = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True)
class RuntimeSpec:
    """The settings that determine the engines of a chat model."""

    models: ModelSet  # target, draft, judge and embedding model
    # Arguments of the vLLM engines of target, draft and judge; they may hold secrets
    target_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    judge_arguments: Mapping[str, Any] = field(default_factory=dict, repr=False)
    # The models behind servers, by role: "target", "draft", "judge", "embedding"
    remote: Mapping[str, RemoteModel] = field(default_factory=dict)
    # Method of token speculation inside the target's engine, or "auto"
    token_speculation: str | Mapping[str, Any] = "auto"
    precision: Precision = "auto"  # precision of the target's weights
    draft_precision: Precision = "auto"  # precision of the draft's weights
    # CPU cores as (target, draft) in vLLM's notation; None: automatic. A judge shares the draft's
    cores: tuple[str, str] | None = None
    # GPUs of target, draft and judge by role, such as "0,1"; the library chooses those of a role that is left out
    gpus: Mapping[str, str] = field(default_factory=dict)
    mps: bool = True  # whether engines on one GPU have a server of NVIDIA's Multi-Process Service
    draft_engine: bool = False  # whether the draft needs an engine of its own, because step speculation is forced

    @property
    def digest(self) -> str:
        """A hash that is equal for equal specifications of this version; processes compare it to share engines."""
        return sha256(f"{_VERSION} {asdict(self)}".encode()).hexdigest()

    def is_local(self, *roles: str) -> bool:
        """Whether the models of these roles all run in engines of this process."""
        return self.remote.keys().isdisjoint(roles)

    @property
    def names(self) -> dict[str, str]:
        """The models' names by role; a role without a model is left out."""
        models = self.models
        by_role = {"target": models.target, "draft": models.draft, "judge": models.judge, "embedding": models.embedding}
        local_names = {role: model.name for role, model in by_role.items() if model}
        return local_names | {role: remote.model for role, remote in self.remote.items() if remote.model is not None}

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model, local or behind a server."""
        return self.models.draft is not None or not self.is_local("draft")


@dataclass(frozen=True)
class EngineSetup:
    """The engines to start."""

    target: Weights | None = None  # the target's weights; None: the target is behind a server
    draft: Weights | None = None  # the draft's weights, if an engine here loads them
    draft_engine: bool = False  # whether the draft has an engine of its own here
    # Arguments of the target's engine, in addition to those of its weights
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    speculation_method: str = "none"  # method of token speculation
    precision: Mapping[str, Kernel] = field(default_factory=dict)  # precision of each model's weights, by role
    reason: str = ""  # reason for the choice, as a sentence
    configuration: Configuration | None = None  # the selected configuration; None: the caller named it
    draft_is_optional: bool = False  # whether a reply may skip `draft_model`, which a user can force
    on_cpu: bool = False  # whether the target runs on this machine's CPU, whose cores other programs use too
    modes: ModeChooser = field(default_factory=ModeChooser, compare=False, repr=False)  # selected these engines
    alone_when_busy: bool = False  # whether the target writes alone while several requests run
    mps: bool = True  # whether engines on one GPU may have an MPS server
    brings_speculation: bool = False  # whether the draft tokens are those of the target's own head or layers

    @property
    def draft_tokens(self) -> int:
        """Tokens of the draft model in each pass of a single request; 0 for another method."""
        config = self.target_arguments.get("speculative_config") or {}
        if config.get("method") != "draft_model":
            return 0
        ranges = config.get("num_speculative_tokens_per_batch_size")
        return int(ranges[0][2] if ranges else config.get("num_speculative_tokens", 0))

    def simplify(self, problem: str, *, uses_mps: bool) -> "EngineSetup | None":
        """The same engines without optional draft tokens and an MPS server, with which they did not start.

        None if they have neither.
        """
        optional = "a shared draft" if self.speculation_method == "shared_draft" else ""
        optional = self.speculation_method if self.brings_speculation else optional
        left_out = [*filter(None, (optional, "an MPS server" if uses_mps else ""))]
        if not left_out:
            return None
        reason = f"the engines run without {' and '.join(left_out)}, because they did not start so: {problem}"
        if not optional:
            return replace(self, reason=reason, mps=False)
        return EngineSetup(
            self.target, self.draft, self.draft_engine, precision=self.precision, reason=reason, mps=not uses_mps
        )

    def explain_on_gpu(self, brought: Mapping[str, Any] | None) -> "EngineSetup":
        """Add why a GPU's automatic configuration has the draft tokens that the target brings, or none."""
        if brought is None:
            return replace(self, reason=_DRAFT_ON_FREE_GPU, alone_when_busy=True) if self.draft_engine else self
        source = Path(str(brought["model"])).name if "model" in brought else "its own layers"
        reason = f"the target's tokens are drafted by {source} ({brought['method']}), which is lossless"
        return replace(self, reason=reason, brings_speculation=True)


def select_engines(
    spec: RuntimeSpec,
    target: Path | None,
    draft: Path | None,
    platform: Platform | None = None,
) -> EngineSetup:
    """Select which engines to start, given the settings and the folders of target and draft (None: not local).

    Raises ConfigurationError if the settings contradict each other, or are not possible on this machine.
    """
    platform = platform or Platform.detect()
    alike = target is not None and draft is not None and same_vocabulary(target, draft)
    methods = _methods(spec, draft, platform, here=target is not None, alike=alike)
    configuration, reason, modes = None, "", _chooser(spec, target, draft if alike else None, platform)
    if methods == ("none",) and spec.token_speculation == "auto" and alike and not platform.on_cpu:
        reason = _ALONE_ON_GPU
    if target is not None and platform.on_cpu:
        choice = _choose_on_cpu(spec, platform, target, draft if alike else None, methods, modes)
        configuration, reason = choice or (None, "")
    method: str = configuration.method if configuration is not None else methods[-1]
    chosen = method if spec.token_speculation == "auto" else spec.token_speculation
    if configuration is not None:
        kernels = {"target": configuration.target, "draft": configuration.draft}
    else:
        kernels = {
            "target": _forced_precision(spec.precision, spec.target_arguments),
            "draft": _forced_precision(spec.draft_precision, spec.draft_arguments),
        }
    if draft is not None and kernels["draft"] is None:
        kernels["draft"] = _fastest_alone(spec.draft_precision, spec.draft_arguments, draft, platform)
    folders = {"target": target, "draft": draft}
    weights = {
        role: weights_in(folder, kernels[role], platform) for role, folder in folders.items() if folder is not None
    }
    speculation: dict[str, Any] = {}
    if target is not None:
        speculation = _speculation(chosen, weights.get("draft"), platform, configuration, modes.acceptance_rate)
    draft_engine = draft is not None and (spec.draft_engine or method == "shared_draft")
    proposer = (speculation.get("speculative_config") or {}).get("model")
    drafts_inside = "draft" in weights and proposer == str(weights["draft"].folder)
    speculation_method = chosen if isinstance(chosen, str) else str(chosen.get("method", "custom"))
    draft_kernel = kernels["draft"] if draft_engine or drafts_inside else None
    modes.configuration = configuration_name(speculation_method, kernels["target"], draft_kernel)
    if draft_engine and speculation_method != "shared_draft":
        modes.configuration += ", beside a draft"  # the draft runs on a share of the cores
    return EngineSetup(
        weights.get("target"),
        weights["draft"] if draft_engine or drafts_inside else None,
        draft_engine,
        speculation,
        speculation_method,
        {role: kernel for role in weights if (kernel := kernels[role]) is not None},
        reason,
        configuration,
        spec.token_speculation == "auto" and configuration is not None and bool(configuration.draft_tokens),
        platform.on_cpu,
        modes,
        # On a GPU, draft tokens for several requests were never measured, and batches cost the target little.
        alone_when_busy=spec.token_speculation == "auto" and not platform.on_cpu,
    )


def _chooser(spec: RuntimeSpec, target: Path | None, draft: Path | None, platform: Platform) -> ModeChooser:
    """A chooser with the record of a pair on this machine; without one if the target is behind a server."""
    if target is None:
        return ModeChooser()
    folders = [str(folder) for folder in (target, draft) if folder is not None]
    if platform.on_cpu:  # speeds of the target alone hold for any draft
        return ModeChooser(*(PaceRecord(models) for models in ([folders[0]], folders)))
    settings = (str(sorted(each.items())) for each in (spec.target_arguments, spec.draft_arguments, spec.gpus))
    return ModeChooser(PaceRecord([*folders, *gpus(), *settings, str(spec.mps)]), prior=GPU_PRIOR)


def _methods(
    spec: RuntimeSpec, draft: Path | None, platform: Platform, *, here: bool, alike: bool
) -> tuple[SpeculationMethod, ...]:
    """Token methods to choose from, one on a GPU. Raises ConfigurationError without a suitable draft model."""
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
    if any(spec.target_arguments.get(size, 1) != 1 for size in PARALLEL_SIZES):
        return ("none",)  # a shared draft was only tried on a single GPU
    if spec.draft_engine:
        return ("shared_draft",)
    # On a GPU, only runs whose text cannot diverge were measured: they bound the speed of a draft from above.
    return ("none", "draft_model", "shared_draft") if platform.on_cpu else ("none",)


def same_vocabulary(target: Path, draft: Path, load: Callable[[Path], HFTokenizer] = HFTokenizer) -> bool:
    """Whether the models in two folders have the same tokens."""
    # Loading two tokenizers takes seconds, comparing their files milliseconds.
    same, _, _ = filecmp.cmpfiles(target, draft, _TOKENIZER_FILES, shallow=False)
    absent = [name for name in _TOKENIZER_FILES if not any((folder / name).exists() for folder in (target, draft))]
    if _TOKENIZER_FILES[0] in same and len(same) + len(absent) == len(_TOKENIZER_FILES):
        return True
    return load(target).fingerprint == load(draft).fingerprint


def _forced_precision(precision: Precision, arguments: Mapping[str, Any]) -> Kernel | None:
    if precision == "auto":
        return None
    if "dtype" not in arguments or _KERNEL_OF_DTYPE.get(str(arguments["dtype"])) == precision:
        return precision
    raise ConfigurationError(f"precision={precision!r} and the engine argument dtype={arguments['dtype']!r} disagree")


def _kernels(
    precision: Precision, arguments: Mapping[str, Any], folder: Path, platform: Platform
) -> tuple[Kernel, ...]:
    """The precisions to choose from for a model on a CPU; none if its folder decides."""
    if "quantization" in arguments or is_quantized(folder) or arguments.get("load_format") == "dummy":
        return ()
    forced = _forced_precision(precision, arguments)
    if "dtype" in arguments:
        kernel = _KERNEL_OF_DTYPE.get(str(arguments["dtype"]).removeprefix("torch."))
        return (kernel,) if kernel is not None else ()
    kernels = platform.defaults.kernels if forced is None else (forced,)
    if "int8" in kernels and "int8" not in platform.defaults.kernels:
        raise ConfigurationError("int8 needs AVX2, or ARM's i8mm, which this processor lacks: choose fp32 or bf16")
    if arguments.get("enforce_eager") is False:  # vLLM cannot compile this library's kernels
        kernels = tuple(kernel for kernel in kernels if kernel != "int8")
        if not kernels:
            raise ConfigurationError(
                f"vLLM cannot compile the kernels of {forced}: leave enforce_eager out, or choose the precision bf16"
            )
    return kernels


def _choose_on_cpu(
    spec: RuntimeSpec,
    platform: Platform,
    target: Path,
    draft: Path | None,
    methods: tuple[SpeculationMethod, ...],
    modes: ModeChooser,
) -> tuple[Configuration, str] | None:
    """The choice by the table and by measured replies; None if a model's folder decides."""
    kernels = _kernels(spec.precision, spec.target_arguments, target, platform)
    draft_kernels: tuple[Kernel, ...] = ()
    if draft is not None:
        draft_kernels = _kernels(spec.draft_precision, spec.draft_arguments, draft, platform)
    if not kernels or (draft is not None and not draft_kernels):
        return None
    return modes.choose_engines(
        platform.defaults,
        methods=methods,
        target=kernels,
        draft=draft_kernels,
        draft_size=_bf16_bytes(draft) / _bf16_bytes(target) if draft is not None else 0.0,
    )


def _bf16_bytes(folder: Path) -> int:
    """Bytes of a model in bf16, whatever its files contain; for an unknown architecture, bytes of its files."""
    try:
        return weight_bytes(folder, {"load_format": "dummy"})
    except IntegrityError:
        return weight_bytes(folder, {})


def default_weights(folder: Path, platform: Platform | None = None) -> Weights:
    """A model's weights in the precision that is fastest on this machine for the model alone."""
    platform = platform or Platform.detect()
    return weights_in(folder, _fastest_alone("auto", {}, folder, platform), platform)


def _fastest_alone(
    precision: Precision, arguments: Mapping[str, Any], folder: Path, platform: Platform
) -> Kernel | None:
    """The fastest precision on a CPU for a model whose partner is remote, or has another tokenizer."""
    kernels = _kernels(precision, arguments, folder, platform) if platform.on_cpu else ()
    return kernels[0] if kernels else None


def _speculation(
    chosen: str | Mapping[str, Any],
    draft: Weights | None,
    platform: Platform,
    configuration: Configuration | None,
    acceptance_rate: float,
) -> dict[str, Any]:
    method: str | Mapping[str, Any] = chosen
    by_batch_size = configuration.draft_tokens if configuration is not None and chosen == "draft_model" else ()
    if by_batch_size:
        method = {"method": chosen, "num_speculative_tokens": by_batch_size[0][2]}
    folder, quantization = (draft.folder, draft.arguments.get("quantization")) if draft is not None else (None, None)
    config = speculative_config(method, folder, on_cpu=platform.on_cpu, draft_quantization=quantization)
    if config is None:
        return {}
    if by_batch_size:
        config["num_speculative_tokens_per_batch_size"] = list(by_batch_size)
    arguments: dict[str, Any] = {"speculative_config": config}
    if chosen == "shared_draft":
        # Rounded, because chat models share only equal engines.
        arguments["additional_config"] = {ACCEPTANCE: round(acceptance_rate, 1)}
        if configuration is not None:
            arguments["additional_config"][COSTS] = dict(platform.defaults.pass_costs[configuration.target])
    return arguments
