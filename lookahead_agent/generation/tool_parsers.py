"""How a model family writes its tool calls: JSON formats are read here, the others by vLLM's parsers, call by call."""

import logging
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.generation.json_tool_parsers import Found, JsonToolParser, ToolParser, beginnings, invalid
from lookahead_agent.generation.tool_calls import ParsedReply, Tools, skip_space

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Units:
    """The tags of a single call in a format of vLLM's, those around one or all, and a whole reply with one call."""

    begins: str
    ends: str
    around: tuple[str, str]
    alone: str = "{around[0]}{call}{around[1]}"


_XML = _Units("<function=", "</function>", ("<tool_call>", "</tool_call>"), "{around[0]}\n{call}\n{around[1]}")
_DEEPSEEK = _Units("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"))
_UNITS = {"qwen3_coder": _XML, "qwen3_xml": _XML, "deepseek_v3": _DEEPSEEK, "deepseek_v31": _DEEPSEEK}
_PYTHONIC = frozenset({"pythonic", "llama4_pythonic", "olmo3"})
_PYTHON_LIST = re.compile(r"\A\s*(?:<\|python_start\|>|<function_calls>)?\s*\[\s*[A-Za-z_][\w.]*\s*\(")
_HALF_PYTHON_LIST = re.compile(r"\A\s*(?:<[\w|]*>?)?\s*(?:\[\s*(?:[A-Za-z_][\w.]*\s*)?)?\Z")

# What in a chat template gives its family away; the first that is found.
_IN_TEMPLATE = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|python_tag|>", "llama3_json"),
)


class VLLMToolParser(ToolParser):
    """One of vLLM's own parsers, asked for each call alone where calls can be told apart."""

    def __init__(self, name: str, tokenizer: HFTokenizer) -> None:
        check_tool_parser(name)
        from vllm.tool_parsers import ToolParserManager

        self._class: Any = ToolParserManager.get_tool_parser(name)
        self.name = name
        self._tokenizer = tokenizer.backend
        self._units = _UNITS.get(name)
        self.markers = None
        # A format that is not known may begin anywhere: all of the reply is read when it is complete.
        self.begins, self.may_begin = re.compile(r"\A"), re.compile(r"(?!)")
        if self._units is not None:
            self.markers = (self._units.around[0], self._units.begins)
            self.begins = re.compile("|".join(map(re.escape, self.markers)))
            self.may_begin = re.compile(beginnings(*self.markers))
        elif name in _PYTHONIC:
            self.markers, self.begins, self.may_begin = ("[",), _PYTHON_LIST, _HALF_PYTHON_LIST
        try:
            self._class(self._tokenizer)
        except Exception as error:  # each parser raises what it likes
            raise ConfigurationError(f"the tool parser {name!r} does not go with this model: {error}") from error

    def read(self, text: str, at: int, tools: Tools, *, cut: bool) -> Found:
        """Read the calls from a marker on, or all of the reply."""
        if self._units is not None:
            return self._unit(self._units, text, at, tools, cut=cut)
        calls = ParsedReply("")
        # Such a format says nothing of its calls' ends: the last one of a reply that was cut off may have been longer.
        found = self._extract(text.strip(), tools)
        if found is None:
            return self._unread(text, len(text), cut=cut) if self.name in _PYTHONIC else Found(at)
        for number, call in enumerate(found.tool_calls, 1):
            if cut and number == len(found.tool_calls) and self.name not in _PYTHONIC:
                calls.add_invalid(call.function.name, call.function.arguments, "it was cut off")
            else:
                calls.add(call.function.name, call.function.arguments or None, call.function.arguments, tools)
        calls.content = found.content or ""
        return Found(len(text), calls)

    def _unit(self, units: _Units, text: str, at: int, tools: Tools, *, cut: bool) -> Found:
        begin = at
        if text.startswith(units.around[0], at):
            begin = skip_space(text, at + len(units.around[0]))
        if not text.startswith(units.begins, begin):
            half = units.begins.startswith(text[begin:])
            if not (half and cut) and text[begin : begin + 1] not in ("{", "["):
                return Found(begin)
            close = text.find(units.around[1], begin)
            end = close + len(units.around[1]) if close >= 0 else len(text)
            return self._unread(text[at:end], end, cut=cut and close < 0)
        closing = text.find(units.ends, begin)
        following = text.find(units.begins, begin + len(units.begins))
        if closing < 0 or 0 <= following < closing:
            end = following if following >= 0 else len(text)
            named = re.match(r"<function=([^>\s]*)>", text[begin:end])
            if named is not None and all(tool["function"]["name"] != named[1] for tool in tools):
                return Found(begin + len(units.begins))
            return self._unread(text[at:end], end, cut=cut and end == len(text))
        end = closing + len(units.ends)
        source, after = text[begin:end], skip_space(text, end)
        if text.startswith(units.around[1], after):
            end = after + len(units.around[1])
        elif text[after:] and units.around[1].startswith(text[after:]):
            end = len(text)
        found = self._extract(units.alone.format(around=units.around, call=source), tools)
        if found is None or len(found.tool_calls) != 1:
            return self._unread(text[at:end], end, cut=False)
        call, calls = found.tool_calls[0], ParsedReply("")
        calls.add(call.function.name, call.function.arguments or None, text[at:end].strip(), tools)
        return Found(end, calls)

    def _unread(self, source: str, end: int, *, cut: bool) -> Found:
        return invalid(None, source, end, f"the {self.name} parser reads no call in it", cut=cut)

    def _extract(self, text: str, tools: Tools) -> Any | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="", tools=list(tools))
        try:
            found = self._class(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # each parser raises what it likes
            logger.debug("vLLM's %s parser failed", self.name, exc_info=True)
            return None
        return found if found.tools_called and found.tool_calls else None


_HERMES, _LLAMA = JsonToolParser(), JsonToolParser("<|python_tag|>", None, ",;")
_READ_HERE: dict[str, ToolParser] = {
    "hermes": _HERMES,
    "qwen3_json": _HERMES,
    "llama3_json": _LLAMA,
    "llama4_json": _LLAMA,
    "mistral": JsonToolParser("[TOOL_CALLS]", None, "", named=True),
}


def check_tool_parser(name: str | None) -> None:
    """Check that vLLM has a tool parser of this name, before any model loads."""
    if name is None:
        return
    if find_spec("vllm") is None:
        raise MissingExtraError(f"tool_parser={name!r} is one of vLLM's, which is not installed")
    from vllm.tool_parsers import ToolParserManager

    known = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
    if name not in known:
        raise ConfigurationError(f"vLLM has no tool parser {name!r}; it has {', '.join(sorted(known))}")


def choose_tool_parser(name: str | None, tokenizer: Tokenizer) -> ToolParser:
    """The parser of a model's tool calls: vLLM's of this name, or None: by the model's chat template."""
    if not isinstance(tokenizer, HFTokenizer):
        return JsonToolParser()
    template = tokenizer.chat_template
    chosen = name or next((family for mark, family in _IN_TEMPLATE if mark in template), "hermes")
    if chosen in _READ_HERE:
        return _READ_HERE[chosen]
    if name is None and find_spec("vllm") is None:
        return JsonToolParser()
    return VLLMToolParser(chosen, tokenizer)
