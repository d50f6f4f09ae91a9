"""A plugin of vLLM (`vllm.general_plugins`) that registers the models of recordings; see `replay.model`.

vLLM calls it in each of its processes, also in those of other programs in the same environment. Only engines whose
model is a replay model set `VARIABLE`; without it, it does nothing.
"""

import os

ENTRY_POINT = "lookahead_replay"  # the plugin's name in the group `vllm.general_plugins`
VARIABLE = "LOOKAHEAD_AGENT_REPLAYS"  # "1" in processes of an engine whose model replays recordings
PREFIX = "Replay"  # prefix of a replay model's architecture, before that of its shape
SHAPES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")  # architectures with a replay model
HEAD = "Eagle3ReplayForCausalLM"  # architecture of an EAGLE-3 head that replays; vLLM wants this beginning


def load() -> None:
    """Register the models in vLLM, by names that it imports only if a configuration has them."""
    if os.environ.get(VARIABLE) != "1":
        return
    from vllm import ModelRegistry

    for architecture in (HEAD, *(PREFIX + shape for shape in SHAPES)):
        ModelRegistry.register_model(architecture, f"lookahead_agent.replay.model:{architecture}")
