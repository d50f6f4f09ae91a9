"""Text to token ids and back, for models and for scripts."""

import copy
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, Self

from lookahead_agent.engines import chat_template
from lookahead_agent.engines.chat_template import Message, ThinkingTags, ending, tool_calls
from lookahead_agent.engines.written_replies import WrittenReplies
from lookahead_agent.errors import ConfigurationError, ContextLengthError, ModelNotFoundError


class TextStream(Protocol):
    """Decodes tokens one by one."""

    def push(self, token_id: int) -> str:
        """The text that one more token completes, empty inside a character."""

    def flush(self) -> str:
        """The text of tokens that have completed no character: replacement characters."""


class ChatPrompt(list[int]):
    """Token ids of a chat, and its text if an earlier reply may be found in it."""

    text: str | None = None


class Tokenizer(Protocol):
    """A model's tokenizer and chat template."""

    eos_ids: frozenset[int]  # tokens that end a reply
    size: int  # number of tokens; ids are below it
    thinking: ThinkingTags | None  # the tags around the model's thinking; None if it does not think apart
    fingerprint: str  # equal for tokenizers with the same vocabulary, which may exchange token ids

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that a call may set, such as `enable_thinking`."""

    def encode(self, text: str, longest: int | None = None) -> list[int]:
        """Token ids of `text` without special tokens; ContextLengthError if it has far more than `longest`."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Start decoding tokens that follow `before`."""

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        longest: int | None = None,
        *,
        whole: bool = False,
    ) -> ChatPrompt:
        """Token ids of a chat, ready for the reply, which may continue a last message that is not `FINISHED`.

        `template_arguments` are values of `template_variables`, of JSON's types. `whole`: the template must show every
        message, its text and the calls in it.

        Raises:
            ConfigurationError: The template refuses the messages, leaves one out, or has no such variable.
            ContextLengthError: The chat has far more tokens than `longest`.
        """

    def remember_reply(self, prompt: ChatPrompt, reply_ids: Sequence[int]) -> None:
        """Have later prompts repeat a reply in its own tokens, so that an engine finds them in its prefix cache.

        The reply's token ids have the shape (m,), the one that ends it included.
        """

    def follow_up(self, question: str) -> list[int]:
        """Token ids that end a reply and ask a further question; ConfigurationError if the template cannot."""


logger = logging.getLogger(__name__)
# Tokens before a stream that a decoder may need to know (leading spaces, characters of several tokens).
_CONTEXT_TOKENS = 8
# Special tokens that part a reply: they are shown as text, so that whoever looks for them finds them.
_PARTS_A_REPLY = re.compile(r"tool|function|python_tag|think", re.IGNORECASE)
_PIECE_LENGTH = 1 << 14  # characters that are encoded at once of a text that may be too long
_LOST_AT_CUT = 16  # tokens by which a cut can lengthen a text: characters on both sides would be one token


def prompt_too_long(longest: int) -> ContextLengthError:
    """The error of a prompt that has more than `longest` tokens."""
    return ContextLengthError(f"the prompt is too long: it has more than {longest} tokens; shorten it")


class _HFStream:
    def __init__(self, tokenizer: Any, before: Sequence[int], shown: Mapping[int, str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._shown = shown
        self._stream = DecodeStream(ids=list(before[-_CONTEXT_TOKENS:]), skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._shown:
            return self.flush() + self._shown[token_id]
        piece: str | None = self._stream.step(self._tokenizer, token_id)
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return piece

    def flush(self) -> str:
        text: str = self._tokenizer.decode(self._pending, skip_special_tokens=True) if self._pending else ""
        self._pending.clear()
        return text


class HFTokenizer:
    """The tokenizer of a Hugging Face model folder; raises ModelNotFoundError if it has no fast one."""

    def __init__(self, folder: Path) -> None:
        # transformers is slow to import, so it is imported when a model is first used.
        from transformers import AutoTokenizer

        try:
            self.backend: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ModelNotFoundError(f"{folder} has no usable tokenizer: {error}") from error
        if not self.backend.is_fast:
            raise ModelNotFoundError(f"{folder} has no tokenizer.json")
        self._fast = self.backend.backend_tokenizer
        self._shown: dict[int, str] = {
            token_id: token.content
            for token_id, token in self.backend.added_tokens_decoder.items()
            if token.special and _PARTS_A_REPLY.search(token.content)
        }
        self._replies = WrittenReplies()
        self._name = Path(self.backend.name_or_path).name
        self._warned_of_names = False
        template = self.backend.chat_template
        self.chat_template = template if isinstance(template, str) else json.dumps(template or "")
        self.eos_ids = _eos_ids(folder, self.backend.eos_token_id)
        self.size = len(self.backend)
        vocabulary = json.dumps(sorted(self.backend.get_vocab().items()))
        self.fingerprint = hashlib.sha256(vocabulary.encode()).hexdigest()
        tags = ThinkingTags()
        self.thinking: ThinkingTags | None = None
        if tags.open in self.chat_template or tags.close in self.chat_template:
            self.thinking = tags
        elif tags.close in self.backend.get_added_vocab():  # which may have them of models that never think
            self.thinking = ThinkingTags(always=False)

    def exchanging_text(self) -> Self:
        """The same tokenizer of a server that tells texts and not tokens: nobody may exchange token ids with it."""
        other = copy.copy(self)
        other.fingerprint = f"text-{uuid.uuid4().hex}"
        return other

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads, but for those that transformers itself supplies or takes."""
        import inspect

        from transformers.utils.chat_template_utils import _get_template_variables

        supplied = {
            "messages",
            *inspect.signature(self.backend.apply_chat_template).parameters,
            *self.backend.SPECIAL_TOKENS_ATTRIBUTES,
            *self.backend.special_tokens_map,
        }
        templates = self.backend.chat_template or ""
        texts = [templates] if isinstance(templates, str) else templates.values()
        return frozenset().union(*map(_get_template_variables, texts)) - supplied

    def encode(self, text: str, longest: int | None = None) -> list[int]:
        """Token ids of `text`; see `Tokenizer.encode`."""
        if longest is not None and len(text) > 4 * longest:
            count = 0
            for start in range(0, len(text), _PIECE_LENGTH):
                piece = self.backend.encode(text[start : start + _PIECE_LENGTH], add_special_tokens=False)
                count += max(0, len(piece) - _LOST_AT_CUT)
                if count > longest:
                    raise prompt_too_long(longest)
        ids: list[int] = self.backend.encode(text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out but for those that part a reply (`<think>`, `[TOOL_CALLS]`)."""
        if not self._shown or self._shown.keys().isdisjoint(token_ids):
            text: str = self._fast.decode(list(token_ids), skip_special_tokens=True)
            return text
        stream = self.stream()
        return "".join(map(stream.push, token_ids)) + stream.flush()

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Text of tokens with all special tokens but the beginning-of-text, which whoever encodes it adds again."""
        text: str = self._fast.decode(list(token_ids), skip_special_tokens=False)
        return text.removeprefix(self.backend.bos_token or "")

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Start decoding tokens that follow `before`."""
        return _HFStream(self._fast, before, self._shown)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        longest: int | None = None,
        *,
        whole: bool = False,
    ) -> ChatPrompt:
        """See `Tokenizer.chat_prompt`; replies that are remembered have their own tokens."""
        arguments = template_arguments or {}
        if whole:
            self._check_shown(messages, tools, arguments)
        text = self._render(messages, tools, arguments, ending(messages))
        known = self._replies.ids_of(text, lambda part: self.encode(part, longest))
        prompt = ChatPrompt(known if known is not None else self.encode(text, longest))
        prompt.text = None if chat_template.continues(messages) else text
        return prompt

    def remember_reply(self, prompt: ChatPrompt, reply_ids: Sequence[int]) -> None:
        """See `Tokenizer.remember_reply`; a reply that was cut off, or goes on with a message, is not remembered."""
        if reply_ids and reply_ids[-1] in self.eos_ids and prompt.text is not None:
            end = str(self._fast.decode([reply_ids[-1]], skip_special_tokens=False))
            self._replies.add(prompt.text, prompt, self.decode_all(reply_ids[:-1]), reply_ids[:-1], end)

    def _check_shown(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, arguments: Mapping[str, Any]
    ) -> None:
        texts = [chat_template.marked(message, place) for place, message in enumerate(messages)]
        text = self._render(texts, tools, arguments, ending(texts))
        # One pass: looking for one mark at a time takes minutes of a conversation of many thousand messages.
        seen = {"", *chat_template.MARK.findall(text)}
        for place, message in enumerate(texts):
            what = "" if (message.get("content") or "") in seen else f"message {place + 1}, which has the role"
            if not what and any(call["function"]["arguments"]["mark"] not in seen for call in tool_calls(message)):
                what = f"the tool calls of message {place + 1}, which has the role"
            if what:
                raise ConfigurationError(
                    f"the chat template of {self._name} leaves out {what} {message['role']!r}"
                    + (": give one system message, as the first" if message["role"] == "system" and place else "")
                )
            if message["role"] == "user" and (message.get("name") or "") not in seen and not self._warned_of_names:
                self._warned_of_names = True
                logger.warning(
                    "the chat template of %s leaves out the names of users: put them into the text", self._name
                )

    def follow_up(self, question: str) -> list[int]:
        """See `Tokenizer.follow_up`."""
        roles = ("user", "A question?"), ("assistant", "A reply."), ("user", question)
        messages = [{"role": role, "content": content} for role, content in roles]
        _, found, rest = self._render(messages, None, {}, ending(messages)).partition("A reply.")
        if not found:
            raise ConfigurationError("the model's chat template does not show an earlier reply as it was")
        return self.encode(rest)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        ending: Mapping[str, bool],
    ) -> str:
        if self.backend.chat_template is None:
            raise ConfigurationError(f"{self._name} has no chat template: use an instruct model")
        chat_template.check_arguments(arguments, self.template_variables)
        refused: Exception | None = None
        shown = list(messages)
        options = {"tools": list(tools) if tools else None, "tokenize": False, **ending, **arguments}
        # Some templates take a tool's result only after its call, and one that could not be read is text; others join
        # arguments to text.
        for change in (list, chat_template.without_lone_results, chat_template.with_argument_texts):
            changed = change(shown)
            if refused is None or changed != shown:
                shown = changed
                try:
                    return str(self.backend.apply_chat_template(shown, **options))
                # A template is a program of the model's makers: what it does not expect makes it fail.
                except Exception as error:
                    refused = refused or error
        raise ConfigurationError(
            f"the chat template of {self._name} refuses these messages: {refused or type(refused).__name__}"
        ) from refused


def _eos_ids(folder: Path, default: int | None) -> frozenset[int]:
    ids = {default} if default is not None else set()
    config = folder / "generation_config.json"
    if config.is_file():
        stated = json.loads(config.read_text()).get("eos_token_id") or []
        ids.update([stated] if isinstance(stated, int) else stated)
    return frozenset(ids)
