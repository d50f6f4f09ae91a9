"""Registers the replay models in vLLM's processes, which import this module by `worker_extension_cls`."""

from vllm import ModelRegistry

from lookahead_agent.replay.replies import ARCHITECTURE, ARCHITECTURES

for _name in ARCHITECTURES:
    ModelRegistry.register_model(ARCHITECTURE + _name, f"lookahead_agent.replay.shapes:Replay{_name}")


class ReplayModels:
    """The extension of vLLM's worker: importing it is all that it is for."""
