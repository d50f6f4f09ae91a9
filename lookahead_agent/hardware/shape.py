"""The sizes of a model that decide what a pass of it costs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        layers: Number of layers.
        weights: Weights of all layers' matrices, in millions.
        head: Weights of the output layer, in millions.
    """

    layers: int
    weights: float
    head: float

    @classmethod
    def of(cls, folder: Path) -> ModelShape | None:
        """The shape of the model in a folder; None if its configuration is of a kind that is not known."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        try:
            return cls._dense(config)
        except KeyError:
            return None

    @classmethod
    def _dense(cls, config: dict[str, Any]) -> ModelShape:
        hidden, layers = config["hidden_size"], config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        of_head = config.get("head_dim") or hidden // heads
        if config.get("num_experts") or config.get("num_local_experts"):
            raise KeyError("experts")
        attention = hidden * of_head * 2 * (heads + config.get("num_key_value_heads", heads))
        matrices = 3 * hidden * config["intermediate_size"]
        return cls(layers, layers * (attention + matrices) / 1e6, hidden * config["vocab_size"] / 1e6)
