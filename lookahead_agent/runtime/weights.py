"""A model's weights in the form that an engine loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from lookahead_agent.cpu import INT8
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.models.conversion import WeightForm, ensure_form, folder_of_form, is_quantized
from lookahead_agent.modes.table import WITH_AVX2, WITH_DOT_PRODUCTS, WITHOUT_INT8, CPUDefaults, Kernel, defaults_of
from lookahead_agent.system.progress import Progress


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
