"""How a model family writes its tool calls: read here for Hermes (Qwen and others), by vLLM's parsers for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.replies.tool_calls import MARKERS, ParsedReply, parse_reply

Tools = Sequence[Mapping[str, Any]]


class ToolParser(Protocol):
    """Finds the tool calls in a reply."""

    @property
    def markers(self) -> tuple[str, ...] | None:
        """Texts that begin a tool call; None if they are not known."""
        ...

    def parse(self, text: str, tools: Tools) -> ParsedReply:
        """Take a reply apart.

        Args:
            text: The reply without its thinking.
            tools: What it may call, in OpenAI's format.
        """
        ...


class HermesToolParser:
    """`<tool_call>{"name": …, "arguments": …}</tool_call>`, and what small models make of it."""

    markers = MARKERS

    def parse(self, text: str, tools: Tools) -> ParsedReply:
        """Take a reply apart."""
        return parse_reply(text, {tool["function"]["name"] for tool in tools})


# What begins a call in the formats of vLLM's parsers. Replies in other formats are the target's as a whole.
_VLLM_MARKERS: dict[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>",),
    "qwen3_json": ("<tool_call>",),
    "qwen3_coder": ("<tool_call>", "<function="),
    "qwen3_xml": ("<tool_call>", "<function="),
    "mistral": ("[TOOL_CALLS]",),
    "llama3_json": ("<|python_tag|>", "{"),
    "llama4_json": ("<|python_tag|>", "{"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>",),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>",),
    "pythonic": ("[",),
}

# What in a chat template gives its family away; the first that is found.
_IN_TEMPLATE = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|python_tag|>", "llama3_json"),
)


class VLLMToolParser:
    """One of vLLM's own parsers.

    Args:
        name: Its name there, as for `vllm serve --tool-call-parser`.
        tokenizer: The target's.

    Raises:
        ConfigurationError: vLLM has no parser of this name, or it does not go with the tokenizer.
        MissingExtraError: vLLM is not installed.
    """

    def __init__(self, name: str, tokenizer: HFTokenizer) -> None:
        check_tool_parser(name)
        from vllm.tool_parsers import ToolParserManager

        self._class: Any = ToolParserManager.get_tool_parser(name)
        self._name = name
        self._tokenizer = tokenizer.backend
        try:
            self._class(self._tokenizer)
        except Exception as error:  # each parser raises what it likes
            raise ConfigurationError(f"the tool parser {name!r} does not go with this model: {error}") from error

    @property
    def markers(self) -> tuple[str, ...] | None:
        """Texts that begin a tool call; None if they are not known."""
        return _VLLM_MARKERS.get(self._name)

    def parse(self, text: str, tools: Tools) -> ParsedReply:
        """Take a reply apart."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="", tools=list(tools))
        found = self._class(self._tokenizer, request.tools).extract_tool_calls(text, request)
        if not found.tools_called:
            begun = [at for marker in self.markers or () if len(marker) > 1 and (at := text.find(marker)) >= 0]
            if not begun:
                return ParsedReply(text)
            parsed = ParsedReply(text[: min(begun)].strip())
            parsed.add_invalid(None, text[min(begun) :], f"the {self._name} parser reads no call in this")
            return parsed
        parsed = ParsedReply((found.content or "").strip())
        for call in found.tool_calls:
            parsed.add(call.function.name, call.function.arguments, call.function.arguments)
        return parsed


def check_tool_parser(name: str | None) -> None:
    """Check that there is a tool parser of this name, before any model loads; None: chosen by the model.

    Raises:
        ConfigurationError: There is not; the message lists those that are.
        MissingExtraError: vLLM, whose parsers these are, is not installed.
    """
    if name is None:
        return
    if find_spec("vllm") is None:
        raise MissingExtraError(f"tool_parser={name!r} is one of vLLM's, which is not installed")
    from vllm.tool_parsers import ToolParserManager

    known = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
    if name not in known:
        raise ConfigurationError(f"vLLM has no tool parser {name!r}; it has {', '.join(sorted(known))}")


def choose_tool_parser(name: str | None, tokenizer: Tokenizer) -> ToolParser:
    """The parser of a model's tool calls.

    Args:
        name: One of vLLM's; None: by the model's chat template.
        tokenizer: The target's.

    Raises:
        ConfigurationError: No parser of this name goes with the tokenizer.
    """
    if not isinstance(tokenizer, HFTokenizer):
        return HermesToolParser()
    if name is None:
        template = tokenizer.chat_template
        name = next((family for mark, family in _IN_TEMPLATE if mark in template), "hermes")
        if name == "hermes" or find_spec("vllm") is None:
            return HermesToolParser()
    return VLLMToolParser(name, tokenizer)
