"""A model's weights in the form that an engine loads, and the division of a GPU's memory among engines."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from lookahead_agent.cpu import INT8
from lookahead_agent.engines.model_files import read_config, read_count
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import WITH_AVX2, WITH_DOT_PRODUCTS, WITHOUT_INT8, CPUDefaults, Kernel, defaults_of
from lookahead_agent.models.conversion import WeightForm, ensure_form, folder_of_form, is_quantized
from lookahead_agent.system.progress import Progress

Role = TypeVar("Role", bound=str)

USABLE = 0.92  # share of the memory for all engines together: vLLM's default for one
_OVERHEAD = 5 << 29  # bytes per engine besides weights and cache: activations, CUDA graphs, CUDA's context
_SHARE = "gpu_memory_utilization"
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt")
_BYTES_PER_VALUE = {"float32": 4, "fp8": 1}  # by dtype; 2 for others


@dataclass(frozen=True)
class Platform:
    """The engines' hardware: whether vLLM is a CPU build, and what the CPU multiplies fast."""

    on_cpu: bool
    int8: bool = True  # whether an int8 kernel runs at the speed of memory
    dot_products: bool = True  # whether instructions add four products of int8, and bf16 is not emulated

    @classmethod
    def detect(cls) -> Self:
        """The platform of this machine."""
        defaults = defaults_of()
        return cls(runs_on_cpu(), defaults is not WITHOUT_INT8, defaults is WITH_DOT_PRODUCTS)

    @property
    def defaults(self) -> CPUDefaults:
        """The default choices on this CPU."""
        if not self.int8:
            return WITHOUT_INT8
        return WITH_DOT_PRODUCTS if self.dot_products else WITH_AVX2


@dataclass(frozen=True)
class Weights:
    """A model's weights as its engine loads them: source folder, conversion, and engine arguments."""

    source: Path
    form: WeightForm | None
    arguments: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder that the engine loads, which `write` creates if needed."""
        return folder_of_form(self.source, self.form) if self.form is not None else self.source

    def write(self, progress: Progress) -> Path:
        """Convert the weights if they are not in the cache, and return the folder; raises ModelError on failure."""
        return ensure_form(self.source, self.form, progress) if self.form is not None else self.source


def weights_in(folder: Path, kernel: Kernel | None, platform: Platform) -> Weights:
    """A model's weights in a precision; None: its folder's."""
    if kernel is None:
        return Weights(folder, "bf16", {})
    int8: WeightForm = "int8" if platform.on_cpu else "w8a8"
    weights = Weights(folder, int8 if kernel == "int8" else "bf16", {})
    arguments: dict[str, Any] = {}
    if platform.on_cpu and kernel == "int8" and weights.folder != folder:
        arguments["quantization"] = INT8
    if platform.on_cpu or kernel != "int8":
        arguments["dtype"] = platform.defaults.dtype_of(kernel)
    return Weights(folder, weights.form, arguments)


def judge_weights(folder: Path, arguments: Mapping[str, Any], platform: Platform) -> Weights:
    """A judge's weights: in the published precision, unless it is slow on this CPU."""
    if not platform.on_cpu or "dtype" in arguments or is_quantized(folder):
        return Weights(folder, "bf16", {})
    return Weights(folder, "bf16", {"dtype": platform.defaults.dtype})


def memory_shares(
    engines: Mapping[Role, tuple[Path, Mapping[str, Any]]], total: int | None = None, usable: float = USABLE
) -> dict[Role, float]:
    """The `gpu_memory_utilization` by role of engines, each a folder and arguments, that share a GPU of `total` bytes.

    A share in an engine's arguments is kept. Raises ConfigurationError if the weights alone do not fit.
    """
    total = _gpu_bytes() if total is None else total
    shares = {role: arguments[_SHARE] for role, (_, arguments) in engines.items() if _SHARE in arguments}
    free = {role: engine for role, engine in engines.items() if role not in shares}
    fixed = {role: weight_bytes(*engine) + _OVERHEAD for role, engine in free.items()}
    cache = {role: kv_cache_bytes_per_token(*engine) for role, engine in free.items()}
    rest = total * (usable - sum(shares.values())) - sum(fixed.values())
    if free and rest <= 0:
        sizes = ", ".join(f"{role} {size / 2**30:.1f} GiB" for role, size in fixed.items())
        raise ConfigurationError(
            f"the models do not fit into the GPU's {total / 2**30:.0f} GiB together ({sizes} before any cache): "
            "choose a smaller or quantized model, more GPUs (engine_args={'tensor_parallel_size': …}), or a server"
        )
    return {role: round((fixed[role] + rest * cache[role] / sum(cache.values())) / total, 4) for role in free} | shares


def context_that_fits(engines: Iterable[tuple[Path, Mapping[str, Any]]], total: int | None = None) -> int:
    """Tokens for which engines (folder, arguments) have room on a GPU of `total` bytes; 0 if they do not fit."""
    engines = list(engines)
    usable = (_gpu_bytes() if total is None else total) * USABLE
    rest = usable - sum(weight_bytes(*engine) + _OVERHEAD for engine in engines)
    return max(int(rest) // sum(kv_cache_bytes_per_token(*engine) for engine in engines), 0)


def _gpu_bytes() -> int:
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def weight_bytes(folder: Path, arguments: Mapping[str, Any]) -> int:
    """Bytes of an engine's weights on each of its GPUs: of the files, or of the shape for dummy weights."""
    sizes = (sum(file.stat().st_size for file in folder.glob(kind)) for kind in _WEIGHT_FILES)
    size = next(filter(None, sizes), 0)
    if not size or arguments.get("load_format") == "dummy":
        size = 2 * _parameter_count(_text_config(folder))
    draft_bytes = sum(weight_bytes(draft, {}) for draft in _draft_folders(arguments))
    return size // int(arguments.get("tensor_parallel_size", 1)) + draft_bytes


def kv_cache_bytes_per_token(folder: Path, arguments: Mapping[str, Any]) -> int:
    """Bytes per token of an engine's keys and values on each of its GPUs."""
    config = _text_config(folder)
    heads = read_count(config, "num_key_value_heads", "num_attention_heads")
    size = 2 * read_count(config, "num_hidden_layers") * heads * _head_size(config)
    trained_dtype = config.get("torch_dtype") or config.get("dtype")
    dtype = str(arguments.get("kv_cache_dtype", arguments.get("dtype", trained_dtype)))
    value_bytes = next((number for name, number in _BYTES_PER_VALUE.items() if name in dtype), 2)
    draft_bytes = sum(kv_cache_bytes_per_token(draft, {}) for draft in _draft_folders(arguments))
    return int(size * value_bytes) // int(arguments.get("tensor_parallel_size", 1)) + draft_bytes


def _draft_folders(arguments: Mapping[str, Any]) -> list[Path]:
    """The folder of the draft model inside the engine, if it has one."""
    config = arguments.get("speculative_config") or {}
    return [Path(config["model"])] if config.get("method") == "draft_model" else []


def _text_config(folder: Path) -> dict[str, Any]:
    config = read_config(folder)
    inner = config.get("text_config")
    return inner if inner and isinstance(inner, dict) else config


def _head_size(config: Mapping[str, Any]) -> int:
    if config.get("head_dim") is not None:
        return read_count(config, "head_dim")
    return read_count(config, "hidden_size") // read_count(config, "num_attention_heads")


def _parameter_count(config: Mapping[str, Any]) -> int:
    """The number of weights of a dense decoder."""
    hidden, heads = read_count(config, "hidden_size"), read_count(config, "num_attention_heads")
    kv_heads = read_count(config, "num_key_value_heads", "num_attention_heads")
    attention = 2 * hidden * _head_size(config) * (heads + kv_heads)
    layers = read_count(config, "num_hidden_layers") * (
        attention + 3 * hidden * read_count(config, "intermediate_size")
    )
    return layers + hidden * read_count(config, "vocab_size") * (1 if config.get("tie_word_embeddings") else 2)
