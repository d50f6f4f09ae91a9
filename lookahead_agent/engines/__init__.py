"""Engines generate tokens: vLLM in a child process, an OpenAI-compatible server, or a script."""

from lookahead_agent.engines.protocol import Delta as Delta
from lookahead_agent.engines.protocol import Engine as Engine
from lookahead_agent.engines.protocol import Sampling as Sampling
from lookahead_agent.engines.scripted import ScriptedEngine as ScriptedEngine
from lookahead_agent.engines.scripted import ScriptedStep as ScriptedStep
from lookahead_agent.engines.scripted import ScriptedTokenizer as ScriptedTokenizer
from lookahead_agent.engines.tokenizer import HFTokenizer as HFTokenizer
from lookahead_agent.engines.tokenizer import Tokenizer as Tokenizer
from lookahead_agent.engines.vllm_config import VLLMConfig as VLLMConfig
from lookahead_agent.engines.vllm_engine import VLLMEngine as VLLMEngine
from lookahead_agent.system import background as background
