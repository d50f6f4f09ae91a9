"""vLLM models that write recorded tokens: a shape's whole forward pass, whose logits point at the recorded next token.

The plugin in `lookahead_agent.engines.replay_plugin` registers them in vLLM's processes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from lookahead_agent.replay.ids import NEXT_TOKENS

_DIGITS, _BASE = 3, 256  # channels that carry an id, and their values: whole numbers below 256 are exact in bf16
_POSITION = _DIGITS  # channel of a draft token's position
_CERTAIN = 1e4  # the logit of the next token; weights that are made up give far smaller ones


class _ReplayModel:
    """Overwrites channels of the hidden state after the last norm by the input id, from which the logits follow.

    There are only operations on tensors, which CUDA graphs can hold, and the output layer does its whole work.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        table = torch.tensor(np.load(self._folder(vllm_config) / NEXT_TOKENS))  # the tensor is on the model's device
        self.register_buffer("next_tokens", table, persistent=False)  # type: ignore[attr-defined]
        powers = torch.tensor([_BASE**digit for digit in range(_DIGITS)])
        self.register_buffer("powers", powers, persistent=False)  # type: ignore[attr-defined]

    def _folder(self, vllm_config: Any) -> Path:
        return Path(vllm_config.model_config.model)

    @property
    def get_top_tokens(self) -> Any:
        """Missing, since vLLM's `use_local_argmax_reduction` would leave `compute_logits` out; vLLM says so."""
        raise AttributeError

    def forward(self, input_ids: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        written = super().forward(input_ids, positions, *args, **kwargs)  # type: ignore[misc]
        # A target with an EAGLE-3 head also returns the hidden states of some layers.
        self._mark(written[0] if isinstance(written, tuple) else written, input_ids, 0)
        return written

    def _mark(self, hidden: Any, input_ids: Any, position: Any) -> None:
        digits = input_ids.unsqueeze(-1) // self.powers % _BASE  # type: ignore[attr-defined]
        hidden[:, :_DIGITS] = digits.to(hidden.dtype)
        hidden[:, _POSITION] = position

    def compute_logits(self, hidden_states: Any) -> Any:
        logits = super().compute_logits(hidden_states)  # type: ignore[misc]
        if logits is None:  # the process is not the first one of a tensor parallel group
            return None
        positions, ids = self.next_tokens.shape  # type: ignore[attr-defined]
        at = (hidden_states[:, :_DIGITS].long() * self.powers).sum(-1).clamp(0, ids - 1)  # type: ignore[attr-defined]
        position = hidden_states[:, _POSITION].long().clamp(0, positions - 1)
        following = self.next_tokens[position, at]  # type: ignore[attr-defined]
        return logits.scatter_(-1, following.unsqueeze(-1), _CERTAIN)


class ReplayLlamaForCausalLM(_ReplayModel, LlamaForCausalLM):  # type: ignore[misc]
    """A replay model of Llama's shapes."""


class ReplayQwen2ForCausalLM(_ReplayModel, Qwen2ForCausalLM):  # type: ignore[misc]
    """A replay model of Qwen2's shapes."""


class ReplayQwen3ForCausalLM(_ReplayModel, Qwen3ForCausalLM):  # type: ignore[misc]
    """A replay model of Qwen3's shapes."""


class Eagle3ReplayForCausalLM(_ReplayModel, Eagle3LlamaForCausalLM):  # type: ignore[misc]
    """An EAGLE-3 head that replays the target; a channel of what it passes on counts its draft tokens."""

    has_own_lm_head = True  # output layer of a smaller vocabulary than the target's

    def _folder(self, vllm_config: Any) -> Path:
        return Path(vllm_config.speculative_config.draft_model_config.model)

    def combine_hidden_states(self, hidden_states: Any) -> Any:
        """The hidden states that the first draft token follows."""
        combined = super().combine_hidden_states(hidden_states)
        combined[:, 0] = 0
        return combined

    def forward(self, input_ids: Any, positions: Any, hidden_states: Any, inputs_embeds: Any = None) -> Any:
        """The marked hidden states after the last norm, and those that the next draft token follows."""
        position = hidden_states[:, 0].clone()  # the layer overwrites it
        hidden, passed_on = Eagle3LlamaForCausalLM.forward(self, input_ids, positions, hidden_states, inputs_embeds)
        self._mark(hidden, input_ids, position)
        passed_on[:, 0] = position + 1
        return hidden, passed_on
