"""vLLM's models with a recorded next token: the forward pass and the logits are computed, and then overruled."""

from typing import Any

import numpy as np
import torch
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from lookahead_agent.replay.replies import TABLE

_BASE = 256  # the largest number up to which bfloat16 has every whole number
_CHANNELS = 3  # digits of an id
_LOGIT = 10_000.0  # of the recorded token: far above those of any weights, and a number of float16


class _Replay:
    """Carries the id of each token past the layers, in a few channels after the last norm, to `compute_logits`."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)  # type: ignore[call-arg]
        following = torch.from_numpy(np.load(getattr(vllm_config.model_config.hf_config, TABLE)))
        ids = torch.arange(len(following))
        digits = torch.stack([ids // _BASE**place % _BASE for place in range(_CHANNELS)], dim=1)
        device = torch.get_default_device()
        # Made-up weights are written over persistent buffers.
        self.register_buffer("replay_next", following.to(device), persistent=False)  # type: ignore[attr-defined]
        self.register_buffer(  # type: ignore[attr-defined]
            "replay_digits", digits.to(device, torch.get_default_dtype()), persistent=False
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run the model, and write the ids' digits over the first channels of its hidden states."""
        out = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **others)  # type: ignore[misc]
        hidden = out[0] if isinstance(out, tuple) else out
        if isinstance(hidden, torch.Tensor):  # else another stage of a pipeline
            hidden[:, :_CHANNELS] = self.replay_digits[input_ids]  # type: ignore[attr-defined]
        return out

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Compute the logits, and raise that of the recorded token above all others."""
        logits: torch.Tensor | None = super().compute_logits(hidden_states)  # type: ignore[misc]
        if logits is not None:
            digits = hidden_states[:, :_CHANNELS].long()
            last = (digits * _BASE ** torch.arange(_CHANNELS, device=digits.device)).sum(1)
            # Before an engine serves, vLLM tries the sampler on hidden states of chance.
            following = self.replay_next[last.clamp(0, len(self.replay_next) - 1)]  # type: ignore[attr-defined]
            logits.scatter_(1, following[:, None], _LOGIT)
        return logits


class ReplayQwen2ForCausalLM(_Replay, Qwen2ForCausalLM):  # type: ignore[misc]
    """Qwen2 and Qwen2.5."""


class ReplayQwen3ForCausalLM(_Replay, Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen3."""


class ReplayLlamaForCausalLM(_Replay, LlamaForCausalLM):  # type: ignore[misc]
    """Llama, and models of its architecture."""
