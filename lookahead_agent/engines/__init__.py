"""Where tokens come from: vLLM in a child process, or a script."""

from lookahead_agent.engines.protocol import Delta, Engine, Sampling
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.engines.vllm_config import VLLMConfig
from lookahead_agent.engines.vllm_engine import VLLMEngine

__all__ = [
    "Delta",
    "Engine",
    "HFTokenizer",
    "Sampling",
    "ScriptedEngine",
    "ScriptedStep",
    "ScriptedTokenizer",
    "Tokenizer",
    "VLLMConfig",
    "VLLMEngine",
]
