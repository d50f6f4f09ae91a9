"""A model's weights as an engine on some platform loads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import WITH_INT8, WITHOUT_INT8, CPUDefaults, Kernel, multiplies_int8
from lookahead_agent.models.conversion import Form, converted, converted_folder, is_quantized
from lookahead_agent.progress import Progress

_DTYPE: Mapping[Kernel, str] = {"bf16": "bfloat16", "fp32": "float32", "int8": "bfloat16", "int8-weights": "float32"}


@dataclass(frozen=True)
class Platform:
    """What the engines run on: whether vLLM is for CPUs, and whether the CPU multiplies int8."""

    on_cpu: bool
    int8: bool

    @classmethod
    def detect(cls) -> Platform:
        """This machine's."""
        return cls(runs_on_cpu(), multiplies_int8())

    @property
    def defaults(self) -> CPUDefaults:
        """The CPU's first choices."""
        return WITH_INT8 if self.int8 else WITHOUT_INT8


@dataclass(frozen=True)
class Weights:
    """A model's weights as its engine loads them: its folder, the conversion they need first, and engine arguments."""

    source: Path
    form: Form | None
    arguments: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The folder that the engine loads, once it is written."""
        return converted_folder(self.source, self.form) if self.form is not None else self.source

    def write(self, progress: Progress) -> Path:
        """Return the folder, and convert the weights if they are not in the cache.

        Raises:
            ModelError: They could not be converted.
        """
        return converted(self.source, self.form, progress) if self.form is not None else self.source


def weights_in(folder: Path, kernel: Kernel | None, platform: Platform) -> Weights:
    """A model's weights in a precision; without one as its folder says.

    Raises:
        ConfigurationError: The precision is for CPUs only.
    """
    if kernel is None:
        return Weights(folder, "bf16", {})
    if kernel == "int8-weights" and not platform.on_cpu:
        raise ConfigurationError("the precision int8-weights is for CPUs: choose int8, or a quantized model")
    weights = Weights(folder, "int8" if kernel == "int8" else "bf16", {})
    arguments: dict[str, Any] = {}
    if platform.on_cpu:
        from lookahead_agent.cpu import INT8, INT8_WEIGHTS

        if kernel == "int8-weights":
            arguments["quantization"] = INT8_WEIGHTS
        elif kernel == "int8" and weights.folder != folder:
            arguments["quantization"] = INT8
    if platform.on_cpu or kernel != "int8":
        arguments["dtype"] = _DTYPE[kernel]
    return Weights(folder, weights.form, arguments)


def judge_weights(folder: Path, given: Mapping[str, Any], platform: Platform | None = None) -> Weights:
    """A judge's weights: in its makers' precision, but where that is slow on this CPU."""
    platform = platform or Platform.detect()
    if not platform.on_cpu or "dtype" in given or is_quantized(folder):
        return Weights(folder, "bf16", {})
    return Weights(folder, "bf16", {"dtype": "bfloat16" if platform.int8 else "float32"})
