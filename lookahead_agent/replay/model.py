"""vLLM models that write recorded tokens: a shape's whole forward pass, whose logits point at the recorded next token.

The plugin in `lookahead_agent.cpu` registers them in vLLM's processes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from lookahead_agent.replay.ids import NEXT_TOKENS

_DIGITS, _BASE = 3, 256  # channels that carry an id, and their values: whole numbers below 256 are exact in bf16
_CERTAIN = 1e4  # the logit of the next token; weights that are made up give far smaller ones


class _ReplayModel:
    """Overwrites channels of the hidden state after the last norm by the input id, from which the logits follow.

    There are only operations on tensors, which CUDA graphs can hold, and the output layer does its whole work.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        following = torch.tensor(np.load(Path(vllm_config.model_config.model) / NEXT_TOKENS))  # on the model's device
        self.register_buffer("next_tokens", following, persistent=False)  # type: ignore[attr-defined]
        powers = torch.tensor([_BASE**digit for digit in range(_DIGITS)])
        self.register_buffer("powers", powers, persistent=False)  # type: ignore[attr-defined]

    def forward(self, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        digits = input_ids.unsqueeze(-1) // self.powers % _BASE  # type: ignore[attr-defined]
        hidden[:, :_DIGITS] = digits.to(hidden.dtype)
        return hidden

    def compute_logits(self, hidden_states: Any) -> Any:
        logits = super().compute_logits(hidden_states)  # type: ignore[misc]
        if logits is None:  # of a process that is not the first one of a tensor parallel group
            return None
        ids = (hidden_states[:, :_DIGITS].long() * self.powers).sum(-1)  # type: ignore[attr-defined]
        following = self.next_tokens[ids.clamp(0, len(self.next_tokens) - 1)]  # type: ignore[attr-defined]
        return logits.scatter_(-1, following.unsqueeze(-1), _CERTAIN)


class ReplayLlamaForCausalLM(_ReplayModel, LlamaForCausalLM):  # type: ignore[misc]
    """A replay model of Llama's shapes."""


class ReplayQwen2ForCausalLM(_ReplayModel, Qwen2ForCausalLM):  # type: ignore[misc]
    """A replay model of Qwen2's shapes."""


class ReplayQwen3ForCausalLM(_ReplayModel, Qwen3ForCausalLM):  # type: ignore[misc]
    """A replay model of Qwen3's shapes."""
