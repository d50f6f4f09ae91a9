"""Tokenizers: their interface, and those of Hugging Face models."""

import copy
import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, Self

from lookahead_agent.engines import chat_template
from lookahead_agent.engines.chat_template import TemplateMessage, ThinkingTags, choose_ending, tool_calls
from lookahead_agent.engines.model_files import read_object
from lookahead_agent.engines.written_replies import ReplyTokenCache
from lookahead_agent.errors import (
    ConfigurationError,
    ContextLengthError,
    EngineError,
    IntegrityError,
    ModelNotFoundError,
)


class TextStream(Protocol):
    """Decodes tokens one by one."""

    def push(self, token_id: int) -> str:
        """Return the text that one more token completes, empty in the middle of a character."""

    def flush(self) -> str:
        """Return the text of tokens that have completed no character: replacement characters."""


class ChatPrompt(list[int]):
    """The token ids of a chat, and its text unless the reply continues a message."""

    text: str | None = None


class Tokenizer(Protocol):
    """A model's tokenizer and chat template."""

    eos_ids: frozenset[int]  # tokens that end a reply
    size: int  # vocabulary size; all ids are below it
    thinking: ThinkingTags | None  # the tags around the model's thinking; None: it has none
    fingerprint: str  # equal for tokenizers with the same vocabulary, which may exchange token ids

    @property
    def template_variables(self) -> frozenset[str]:
        """Variables of the chat template that a call may set, such as `enable_thinking`."""

    def encode(self, text: str, longest: int | None = None) -> list[int]:
        """Token ids of `text` without special tokens; raises ContextLengthError for far more than `longest` tokens."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Start decoding tokens that follow `before`."""

    def chat_prompt(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        longest: int | None = None,
        *,
        whole: bool = False,
    ) -> ChatPrompt:
        """Token ids of a chat up to the reply, which continues a last assistant message that is not `FINISHED`.

        `template_arguments` are JSON values of `template_variables`. With `whole`, the template must show every message
        with its text and tool calls.

        Raises:
            ConfigurationError: The template refuses the messages, leaves one out, or has no such variable.
            ContextLengthError: The chat has far more tokens than `longest`.
        """

    def remember_reply(self, prompt: ChatPrompt, reply_ids: Sequence[int]) -> None:
        """Make later prompts repeat a reply in its own tokens, so that they hit the engine's prefix cache.

        The reply's token ids have the shape (m,) and include the token that ends it.
        """

    def follow_up(self, question: str) -> list[int]:
        """Token ids that end a reply and ask another question; raises ConfigurationError if the template cannot."""


logger = logging.getLogger(__name__)
# Tokens before a stream that a decoder may need (leading spaces, characters of several tokens).
_CONTEXT_TOKENS = 8
# Special tokens that mark parts of a reply: decoding keeps them as text, so that parsers find them.
_MARKUP_TOKENS = re.compile(r"tool|function|python_tag|think", re.IGNORECASE)
_MAX_TOKENS_OF_CHARACTER = 4  # maximum number of bytes of a character in UTF-8
_MAX_RENDER_SECONDS = 10.0
_MAX_GROWTH = 4096  # factor by which the tokenizer's replacements may lengthen a text
_MAX_FORMS = 1_000  # forms of conversations that are remembered as complete
_PIECE_LENGTH = 1 << 14  # characters encoded at once if a text may be too long
_MAX_TOKENS_PER_CUT = 16  # tokens that a cut can add to a text: characters on both sides may share one token


def prompt_too_long(longest: int) -> ContextLengthError:
    """The error for a prompt of more than `longest` tokens."""
    return ContextLengthError(f"the prompt is too long: it has more than {longest} tokens; shorten it")


def _call(operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the tokenizer's Rust code; raises EngineError for a panic, which is not an `Exception`."""
    try:
        return operation(*args, **kwargs)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise EngineError(f"the model's tokenizer.json fails on a text: {str(error)[:200]}") from error


class _HFStream:
    def __init__(self, tokenizer: Any, before: Sequence[int], visible_tokens: Mapping[int, str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._visible_tokens = visible_tokens
        self._pending: list[int] = []
        before = list(before[-_CONTEXT_TOKENS:])
        self._stream = DecodeStream(ids=before, skip_special_tokens=True)
        # A stream that begins within a character would repeat the text before it. It begins before the character, and
        # has the whole of it, since the character's first tokens completed none.
        for end in reversed(range(len(before) + 1)):
            if (context := self._context(before[:end])) is not None:
                self._stream = DecodeStream(ids=context, skip_special_tokens=True)
                for token_id in before[end:]:
                    self.push(token_id)
                break
        self._begun = False  # whether a token of this stream was pushed

    def _context(self, token_ids: list[int]) -> list[int] | None:
        """The tokens, without the rest of a character at their beginning, if they end with a whole one; else None."""
        for begin in range(min(_MAX_TOKENS_OF_CHARACTER, max(len(token_ids), 1))):
            text: str = _call(self._tokenizer.decode, token_ids[begin:], skip_special_tokens=True)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                return token_ids[begin:]
            if self._encode(text) == token_ids[begin:]:
                # The text itself has this character, after which `DecodeStream` would wait for the rest of one.
                return self._encode(".")
        return None

    def _encode(self, text: str) -> list[int]:
        return list(_call(self._tokenizer.encode, text, add_special_tokens=False).ids)

    def push(self, token_id: int) -> str:
        self._begun = True
        if token_id in self._visible_tokens:
            return self.flush() + self._visible_tokens[token_id]
        piece: str | None = _call(self._stream.step, self._tokenizer, token_id)
        if piece is None:
            self._pending.append(token_id)
            return ""
        self._pending.clear()
        return piece

    def flush(self) -> str:
        pending = self._pending if self._begun else []
        text: str = _call(self._tokenizer.decode, pending, skip_special_tokens=True) if pending else ""
        self._pending.clear()
        return text


class HFTokenizer:
    """The tokenizer of a Hugging Face model folder; raises ModelNotFoundError if the folder has no fast tokenizer.

    `backend` replaces the tokenizer of transformers for counting.
    """

    def __init__(self, folder: Path, backend: Any = None) -> None:
        self._for_counting = backend is not None
        if not self._for_counting:
            chat_template.bound_operations()
        self.backend: Any = backend if backend is not None else _load(folder)
        if not self.backend.is_fast:
            raise ModelNotFoundError(f"{folder} has no tokenizer.json")
        self._fast = self.backend.backend_tokenizer
        self._visible_tokens: dict[int, str] = {
            token_id: token.content
            for token_id, token in self.backend.added_tokens_decoder.items()
            if token.special and _MARKUP_TOKENS.search(token.content)
        }
        self._written_replies = ReplyTokenCache()
        self._name = Path(self.backend.name_or_path).name
        self._warned_about_names = False
        self._complete_forms: set[int] = set()  # forms of conversations of which the template leaves nothing out
        template = self.backend.chat_template
        self.chat_template = template if isinstance(template, str) else json.dumps(template or "")
        for text in template.values() if isinstance(template, dict) else [template or ""]:
            chat_template.check_template(text)
        self._check_patterns(folder)
        self.eos_ids = _eos_ids(folder, self.backend.eos_token_id)
        self.size = len(self.backend)
        tags = ThinkingTags()
        self.thinking: ThinkingTags | None = None
        if tags.open in self.chat_template or tags.close in self.chat_template:
            # Templates show an earlier reply as its models write it: the tag, line breaks, and the answer.
            breaks: list[str] = re.findall(rf"{re.escape(tags.close)}((?:\\n|\n)*)", self.chat_template)
            self.thinking = ThinkingTags(separator=max(breaks, key=len, default="").replace("\\n", "\n"))
        elif tags.close in self.backend.get_added_vocab():  # also in models that never think
            self.thinking = ThinkingTags(always=False)
        if self._for_counting:  # the hash takes a second, and no engine exchanges these ids
            self.fingerprint = f"counting-{uuid.uuid4().hex}"
        else:
            vocabulary = json.dumps(sorted(self.backend.get_vocab().items()))
            self.fingerprint = hashlib.sha256(vocabulary.encode()).hexdigest()

    def _check_patterns(self, folder: Path) -> None:
        """Try the patterns of the tokenizer with a time-out: Rust's search for a pattern cannot be interrupted.

        Then encode the same texts, since Rust's search gives up on patterns that are fast in another engine.
        Raises ModelNotFoundError for a pattern that takes exponential time, or for replacements that multiply a text.
        """
        import regex

        probes: set[str] = set()
        parts = [getattr(self._fast, name) for name in ("normalizer", "pre_tokenizer", "decoder")]
        pending: list[Any] = [json.loads(part.__getstate__()) for part in parts if part is not None]
        growth = 1
        for value in pending:
            if isinstance(value, list):
                pending += value
            elif isinstance(value, dict):
                pending += value.values()
                growth *= max(1, len(value["content"])) if isinstance(value.get("content"), str) else 1
                if isinstance(pattern := value.get("Regex"), str):
                    probes.update(pattern_probes := _probes(pattern))
                    if _takes_exponential_time(pattern, pattern_probes, regex):
                        raise ModelNotFoundError(
                            f"{folder} has no usable tokenizer: {pattern[:80]!r} takes exponential time"
                        )
        if growth > _MAX_GROWTH:
            raise ModelNotFoundError(
                f"{folder} has no usable tokenizer: its replacements make a text {growth} times longer"
            )
        try:
            for probe in probes:
                self.decode(self.encode(probe))
        except EngineError as error:
            raise ModelNotFoundError(f"{folder} has no usable tokenizer: {error.__cause__}") from error

    def copy_for_text_exchange(self) -> Self:
        """The same tokenizer for a server that returns text only; its fingerprint prevents an exchange of token ids."""
        copied = copy.copy(self)
        copied.fingerprint = f"text-{uuid.uuid4().hex}"
        return copied

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads, except those that transformers supplies or takes itself."""
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
        try:
            return frozenset().union(*map(_get_template_variables, texts)) - supplied
        except Exception as error:  # error of a template that cannot be read, or that is nested too deeply
            raise ConfigurationError(f"the chat template of {self._name} cannot be read: {error}") from error

    def encode(self, text: str, longest: int | None = None) -> list[int]:
        """Token ids of `text`; see `Tokenizer.encode`."""
        if longest is not None and len(text) > 4 * longest:
            count = 0
            for start in range(0, len(text), _PIECE_LENGTH):
                piece = _call(self.backend.encode, text[start : start + _PIECE_LENGTH], add_special_tokens=False)
                count += max(0, len(piece) - _MAX_TOKENS_PER_CUT)
                if count > longest:
                    raise prompt_too_long(longest)
        ids: list[int] = _call(self.backend.encode, text, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without special tokens, except marks of a reply's parts (`<think>`, `[TOOL_CALLS]`)."""
        if not self._visible_tokens or self._visible_tokens.keys().isdisjoint(token_ids):
            text: str = _call(self._fast.decode, list(token_ids), skip_special_tokens=True)
            return text
        stream = self.stream()
        return "".join(map(stream.push, token_ids)) + stream.flush()

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """The text of tokens with special tokens, except the beginning-of-sequence token, which encoding adds again."""
        text: str = _call(self._fast.decode, list(token_ids), skip_special_tokens=False)
        return text.removeprefix(self.backend.bos_token or "")

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Start decoding tokens that follow `before`."""
        return _HFStream(self._fast, before, self._visible_tokens)

    def chat_prompt(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        longest: int | None = None,
        *,
        whole: bool = False,
    ) -> ChatPrompt:
        """See `Tokenizer.chat_prompt`; remembered replies keep their own tokens."""
        arguments = template_arguments or {}
        if whole:
            self._check_complete(messages, tools, arguments)
        text = self._render(messages, tools, arguments, choose_ending(messages))
        token_ids = self._written_replies.ids_of(text, lambda part: self.encode(part, longest))
        prompt = ChatPrompt(token_ids if token_ids is not None else self.encode(text, longest))
        prompt.text = None if chat_template.continues(messages) else text
        return prompt

    def remember_reply(self, prompt: ChatPrompt, reply_ids: Sequence[int]) -> None:
        """See `Tokenizer.remember_reply`; a reply that was truncated, or continues a message, is not remembered."""
        if reply_ids and reply_ids[-1] in self.eos_ids and prompt.text is not None:
            end = str(_call(self._fast.decode, [reply_ids[-1]], skip_special_tokens=False))
            self._written_replies.add(prompt.text, prompt, self.decode_all(reply_ids[:-1]), reply_ids[:-1], end)

    def _check_complete(
        self,
        messages: Sequence[TemplateMessage],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
    ) -> None:
        marked = [chat_template.with_placeholders(message, index) for index, message in enumerate(messages)]
        # Conversations of one form differ in their texts only, so one of them is rendered for all.
        form = hash(json.dumps([marked, tools, arguments], sort_keys=True, default=str))
        if form in self._complete_forms:
            return
        text = self._render(marked, tools, arguments, choose_ending(marked))
        # One pass: a search per marker takes minutes in a conversation of many thousand messages.
        seen = {"", *chat_template.MARK.findall(text)}
        for index, message in enumerate(marked):
            omitted = "" if (message.get("content") or "") in seen else f"message {index + 1}, which has the role"
            if not omitted and any(call["function"]["arguments"]["mark"] not in seen for call in tool_calls(message)):
                omitted = f"the tool calls of message {index + 1}, which has the role"
            if omitted:
                raise ConfigurationError(
                    f"the chat template of {self._name} leaves out {omitted} {message['role']!r}"
                    + (": give one system message, as the first" if message["role"] == "system" and index else "")
                )
            if message["role"] == "user" and (message.get("name") or "") not in seen and not self._warned_about_names:
                self._warned_about_names = True
                logger.warning(
                    "the chat template of %s leaves out the names of users: put them into the text", self._name
                )
        if len(self._complete_forms) >= _MAX_FORMS:
            self._complete_forms.clear()
        self._complete_forms.add(form)

    def follow_up(self, question: str) -> list[int]:
        """See `Tokenizer.follow_up`."""
        roles = ("user", "A question?"), ("assistant", "A reply."), ("user", question)
        messages = [{"role": role, "content": content} for role, content in roles]
        _, separator, suffix = self._render(messages, None, {}, choose_ending(messages)).partition("A reply.")
        if not separator:
            raise ConfigurationError("the model's chat template does not show an earlier reply as it was")
        return self.encode(suffix)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        arguments: Mapping[str, Any],
        ending: Mapping[str, bool],
    ) -> str:
        if self.backend.chat_template is None:
            raise ConfigurationError(f"{self._name} has no chat template: use an instruct model")
        if not self._for_counting:  # finding the variables of a template takes transformers
            chat_template.check_arguments(arguments, self.template_variables)
        first_error: Exception | None = None
        current = list(messages)
        options = {"tools": list(tools) if tools else None, "tokenize": False, **ending, **arguments}
        # Some templates take a tool's result only after its call, but a call that could not be parsed is text; others
        # concatenate arguments and text.
        for adapt in (list, chat_template.without_lone_results, chat_template.with_argument_texts):
            adapted = adapt(current)
            if first_error is None or adapted != current:
                current = adapted
                try:
                    return chat_template.within(
                        _MAX_RENDER_SECONDS, partial(self.backend.apply_chat_template, current, **options)
                    )
                except chat_template.TemplateLimitError:
                    raise
                # A template is third-party code: unexpected input can raise any exception.
                except Exception as error:
                    first_error = first_error or error
        raise ConfigurationError(
            f"the chat template of {self._name} refuses these messages: {first_error or type(first_error).__name__}"
        ) from first_error


def _load(folder: Path) -> Any:
    """Load a folder's tokenizer with transformers."""
    # transformers is slow to import, so it is imported when a model is first used.
    from transformers import AutoTokenizer

    try:
        # Otherwise transformers asks on the terminal whether to run the folder's code.
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a damaged file can raise anything, as the panics of Rust
        reason = str(error) or type(error).__name__
        raise ModelNotFoundError(f"{folder} has no usable tokenizer: {reason[:500]}") from error


def _probes(pattern: str) -> list[str]:
    """Make short texts for trying a pattern, of its own letters and of some of each kind."""
    words = re.findall(r"\w+", pattern)
    letters = sorted({*"".join(words), *" \n\t~a1!.-_,;=中é"})[:80]
    repeated = [letter * 40 for letter in letters]
    repeated += ["".join(words)[:8] * 10, *(word[:4] * 10 for word in words[:20])]
    return [probe + end for probe in repeated for end in ("", "\0")]


def _takes_exponential_time(pattern: str, probes: Sequence[str], regex: Any) -> bool:
    """Whether a search for a pattern takes more than a second in one of the texts."""
    try:
        compiled = regex.compile(pattern)
        for probe in probes:
            for _ in compiled.finditer(probe, timeout=1.0):
                pass
    except TimeoutError:
        return True
    except regex.error:  # a notation of Rust's engine only
        return False
    return False


def _eos_ids(folder: Path, default: int | None) -> frozenset[int]:
    """The tokens that end a reply, of the tokenizer and of generation_config.json; raises IntegrityError."""
    file = folder / "generation_config.json"
    configured: Any = None
    if file.exists():
        try:
            configured = read_object(file).get("eos_token_id")
        except (OSError, ValueError) as error:
            raise IntegrityError(f"{file} cannot be read: {error}") from error
    listed = configured if isinstance(configured, list) else [] if configured is None else [configured]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31 for token in listed):
        raise IntegrityError(f"eos_token_id in {file} is a token id, or a list of them")
    return frozenset({*listed, *([default] if default is not None else [])})
