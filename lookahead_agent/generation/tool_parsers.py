"""Chooses the tool parser of a model family: our own for JSON formats, vLLM's for the others, call by call."""

import logging
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from lookahead_agent.engines.tokenizer import HFTokenizer, Tokenizer
from lookahead_agent.errors import ConfigurationError, MissingExtraError
from lookahead_agent.generation.json_tool_parsers import (
    JsonToolParser,
    ParsedSpan,
    ToolParser,
    invalid,
    is_rest_of,
    prefix_pattern,
)
from lookahead_agent.generation.scanned_text import ScannedText
from lookahead_agent.generation.tool_calls import MAX_CALLS, TOO_MANY_CALLS, ParsedReply, Tools, skip_whitespace

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Tags:
    """The tags of a single call in a format of vLLM, the tags around one or all, and a template of a reply with one."""

    begins: str
    ends: str
    around: tuple[str, str]
    alone: str = "{around[0]}{call}{around[1]}"


_XML = _Tags("<function=", "</function>", ("<tool_call>", "</tool_call>"), "{around[0]}\n{call}\n{around[1]}")
_DEEPSEEK = _Tags("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"))
_TAGS = {"qwen3_coder": _XML, "qwen3_xml": _XML, "deepseek_v3": _DEEPSEEK, "deepseek_v31": _DEEPSEEK}
_PYTHONIC = frozenset({"pythonic", "llama4_pythonic", "olmo3"})
_PYTHON_LIST = re.compile(r"\A\s*+(?:<\|python_start\|>|<function_calls>)?\s*+\[\s*+[A-Za-z_][\w.]*+\s*+\(")
_PARTIAL_PYTHON_LIST = re.compile(r"\A\s*+(?:<[\w|]*+>?+)?+\s*+(?:\[\s*+(?:[A-Za-z_][\w.]*+\s*+)?)?\Z")
_PYTHON_TOKEN = re.compile(r"""'(?:[^'\\\n]|\\.)*+'|"(?:[^"\\\n]|\\.)*+"|[(\[{]|[)\]}]""")

# Texts of chat templates that identify the family; the first one found decides.
_TEMPLATE_MARKS = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("<|python_tag|>", "llama3_json"),
)


class VLLMToolParser(ToolParser):
    """One of vLLM's parsers, which gets each call alone if the format has tags around calls."""

    def __init__(self, name: str, tokenizer: HFTokenizer) -> None:
        check_tool_parser(name)
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self._class: Any = ToolParserManager.get_tool_parser(name)
        self.name = name
        # Each call gets a parser of its own, and most of them copy the vocabulary.
        self._tokenizer = get_cached_tokenizer(tokenizer.backend)
        self._tags = _TAGS.get(name)
        self.markers = None
        # An unknown format may begin anywhere: the reply is parsed as a whole when it is complete.
        self.begins, self.may_begin = re.compile(r"\A"), re.compile(r"(?!)")
        if self._tags is not None:
            self.markers = (self._tags.around[0], self._tags.begins)
            self.begins = re.compile("|".join(map(re.escape, self.markers)))
            self.may_begin = re.compile(prefix_pattern(*self.markers))
        elif name in _PYTHONIC:
            self.markers, self.begins, self.may_begin = ("[",), _PYTHON_LIST, _PARTIAL_PYTHON_LIST
        try:
            self._class(self._tokenizer)
        except Exception as error:  # vLLM's parsers raise errors of any type
            raise ConfigurationError(f"the tool parser {name!r} does not go with this model: {error}") from error

    def read(self, reply: ScannedText, at: int, tools: Tools, *, truncated: bool) -> ParsedSpan:
        """Parse the call at a marker, or the whole reply."""
        if self._tags is not None:
            return self._parse_call(self._tags, reply, at, tools, truncated=truncated)
        text = reply.text
        calls = ParsedReply("")
        # Such a format has no end of calls: the last call of a truncated reply may be incomplete.
        found = self._extract(first_calls(text.strip()) if self.name in _PYTHONIC else text.strip(), tools)
        if found is None:
            return self._invalid(text, len(text), truncated=truncated) if self.name in _PYTHONIC else ParsedSpan(at)
        for number, call in enumerate(found.tool_calls[: MAX_CALLS + 1], 1):
            if number > MAX_CALLS:
                calls.add_invalid(call.function.name, call.function.arguments, TOO_MANY_CALLS)
            elif truncated and number == len(found.tool_calls) and self.name not in _PYTHONIC:
                calls.add_invalid(call.function.name, call.function.arguments, "it was cut off")
            else:
                calls.add(call.function.name, call.function.arguments or None, call.function.arguments, tools)
        calls.content = found.content or ""
        return ParsedSpan(len(text), calls)

    def _parse_call(self, tags: _Tags, reply: ScannedText, at: int, tools: Tools, *, truncated: bool) -> ParsedSpan:
        text, begin = reply.text, at
        if text.startswith(tags.around[0], at):
            begin = skip_whitespace(text, at + len(tags.around[0]))
        if not text.startswith(tags.begins, begin):
            partial = is_rest_of(tags.begins, text, begin)
            if not (partial and truncated) and text[begin : begin + 1] not in ("{", "["):
                return ParsedSpan(begin)
            close = reply.find(tags.around[1], begin)
            end = min(close + len(tags.around[1]), len(text))
            return self._invalid(text[at:end], end, truncated=truncated and close == len(text))
        closing = reply.find(tags.ends, begin)
        end = reply.find(tags.begins, begin + len(tags.begins))
        if closing == len(text) or end < closing:
            name_match = re.match(r"<function=([^>\s]*)>", text[begin:end])
            if name_match is not None and all(tool["function"]["name"] != name_match[1] for tool in tools):
                return ParsedSpan(begin + len(tags.begins))
            return self._invalid(text[at:end], end, truncated=truncated and end == len(text))
        end = closing + len(tags.ends)
        source, after = text[begin:end], skip_whitespace(text, end)
        if text.startswith(tags.around[1], after):
            end = after + len(tags.around[1])
        elif after < len(text) and is_rest_of(tags.around[1], text, after):
            end = len(text)
        found = self._extract(tags.alone.format(around=tags.around, call=source), tools)
        if found is None or len(found.tool_calls) != 1:
            return self._invalid(text[at:end], end, truncated=False)
        call, calls = found.tool_calls[0], ParsedReply("")
        calls.add(call.function.name, call.function.arguments or None, text[at:end].strip(), tools)
        return ParsedSpan(end, calls)

    def _invalid(self, source: str, end: int, *, truncated: bool) -> ParsedSpan:
        return invalid(None, source, end, f"the {self.name} parser reads no call in it", truncated=truncated)

    def _extract(self, text: str, tools: Tools) -> Any | None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(messages=[{"role": "user", "content": ""}], model="", tools=list(tools))
        try:
            found = self._class(self._tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # vLLM's parsers raise errors of any type
            logger.debug("vLLM's %s parser failed", self.name, exc_info=True)
            return None
        return found if found.tools_called and found.tool_calls else None


def first_calls(text: str) -> str:
    """Return a list of calls in Python's notation without those that follow too many calls; vLLM reads them slowly."""
    depth = calls = 0
    for token in _PYTHON_TOKEN.finditer(text):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        calls += token[0] == ")" and depth == 1
        if calls > MAX_CALLS:
            return f"{text[: token.end()]}]"
    return text


_HERMES, _LLAMA = JsonToolParser(), JsonToolParser("<|python_tag|>", None, ",;")
_JSON_PARSERS: dict[str, ToolParser] = {
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
    """Return the parser for vLLM's format `name`; None: the format of the model's chat template."""
    if not isinstance(tokenizer, HFTokenizer):
        return JsonToolParser()
    template = tokenizer.chat_template
    chosen = name or next((family for mark, family in _TEMPLATE_MARKS if mark in template), "hermes")
    if chosen in _JSON_PARSERS:
        return _JSON_PARSERS[chosen]
    if name is None and find_spec("vllm") is None:
        return JsonToolParser()
    return VLLMToolParser(chosen, tokenizer)
