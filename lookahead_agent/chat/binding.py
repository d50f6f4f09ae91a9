"""The chat model's LangChain interface: tools, structured output, token counts, serialization and profile."""

import json
import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast, get_args

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.model_profile import ModelProfile
from langchain_core.load.serializable import SerializedConstructor, SerializedNotImplemented
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from lookahead_agent.chat.messages import template_messages, without_empty_replies
from lookahead_agent.chat.structured_output import Form, FormParser, Method, callback_schema, with_parser
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import choose_tools, openai_tools, split_choice
from lookahead_agent.generation.local_backend import LocalBackend
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.system.texts import check_encodable

_UNSUPPORTED = (
    *(f"{kind}_{direction}puts" for kind in ("image", "audio", "video") for direction in ("in", "out")),
    *("image_url_inputs", "pdf_inputs", "image_tool_message", "pdf_tool_message", "attachment"),
)
"""Content that this model neither reads nor writes, by the keys of LangChain's model profiles."""
# Every model calls tools: a grammar constrains required calls even where the chat template has no tools.
_SUPPORTED = (
    *("text_inputs", "text_outputs", "tool_calling", "tool_choice", "tool_call_streaming", "structured_output"),
    "temperature",
)


class BindingModel(BaseChatModel):
    """A chat model that binds tools and schemas, counts tokens, and can be serialized."""

    @abstractmethod
    def _tokenizer(self) -> Tokenizer:
        """The target's tokenizer; starts no engine."""

    @abstractmethod
    def _thinking_argument(self) -> dict[str, bool]:
        """The variable of the chat template that switches thinking."""

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return a model that may call these tools.

        Args:
            tools: Tools, functions, Pydantic classes, or tool dictionaries in the format of OpenAI or Anthropic. Tools
                that run on a provider's servers, such as `{"type": "web_search_preview"}`, raise an error.
            tool_choice: "auto" or None: the model may call a tool; "none": it must not; "any", "required" or True:
                it must call one; a tool's name: it must call that tool. Dictionaries of OpenAI and Anthropic work too.
            parallel_tool_calls: True: a reply with a required call may have several calls; False: one at most; None:
                the model decides, but a required call is a single one where the engine holds to forms.
            strict: For LangChain's agents, which set it. A required call follows its schema in any case, and the tools
                check the arguments of other calls.
            kwargs: Further options of calls.

        Raises:
            ConfigurationError: A tool is not a function, or `tool_choice` is malformed or names an unknown tool.
        """
        choice, parallel_tool_calls = split_choice(tool_choice, parallel_tool_calls)
        allowed, choice = choose_tools(openai_tools(tools), choice)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(tools=allowed, tool_choice=choice, **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return a model whose replies follow a schema.

        Args:
            schema: A Pydantic class, a dataclass or another type, such as an enum or `list[int]` (replies are its
                instances); a TypedDict, a JSON schema or an OpenAI function (replies are the parsed JSON). None is for
                "json_mode" only.
            method: "json_schema": guided decoding excludes every token that breaks the schema, which the prompt does
                not show; "function_calling": a required tool call, whose schema the prompt shows with its descriptions;
                "json_mode": any JSON object. Describe the fields in your messages where the prompt does not show them.
            include_raw: Whether to return {"raw": message, "parsed": …, "parsing_error": …} instead of raising.
            strict: Whether the schema must be enforced: "json_schema" and "function_calling" do so in any case, and
                "json_mode" cannot.
            kwargs: Further options of calls.

        Raises:
            ConfigurationError: The method is unknown or cannot be strict, or the schema is missing or invalid.
        """
        if method not in get_args(Method):
            raise ConfigurationError(f"method is {', '.join(get_args(Method))}, not {method!r}")
        if schema is None and method != "json_mode":
            raise ConfigurationError(f"the method {method!r} needs a schema")
        if strict and method == "json_mode":
            raise ConfigurationError('the method "json_mode" enforces no schema: leave strict=True out')
        form = Form.of(schema) if schema is not None else None
        described = callback_schema(schema, form) if form is not None else None
        kwargs["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": described}
        if form is not None and method == "function_calling":
            bound = self.bind_tools([form.tool], tool_choice=form.name, **kwargs)
        elif form is not None and method == "json_schema":
            bound = self.bind(response_format=form.response_format, **kwargs)
        else:
            bound = self.bind(response_format={"type": "json_object"}, **kwargs)
        return with_parser(bound, FormParser(form=form, called=method == "function_calling"), include_raw=include_raw)

    def get_token_ids(self, text: str) -> list[int]:
        """Tokenize a text with the target's tokenizer, without special tokens around it; starts no engine."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        check_encodable(text, "the text")
        return self._tokenizer().encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Count the tokens of these messages' prompt, by the target's chat template; starts no engine.

        The count equals the `input_tokens` of a reply to them. Messages that are not a prompt alone, such as a part of
        a conversation that begins with a tool's result, count as JSON. `tools` takes what `bind_tools` takes.

        Raises:
            ModelError: The tokenizer cannot be fetched.
            ConfigurationError: A message has content other than text, or a tool is not a function.
        """
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        converted = template_messages(self._convert_input(messages).to_messages()) if messages else []
        tokenizer, schemas = self._tokenizer(), openai_tools(tools or ())
        if not converted and not schemas:
            return 0
        try:
            return len(tokenizer.chat_prompt(without_empty_replies(converted), schemas, self._thinking_argument()))
        except ConfigurationError:
            return sum(len(tokenizer.encode(json.dumps(part, ensure_ascii=False))) for part in (*converted, *schemas))

    # Serialization

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return True: `langchain_core.load` can serialize and restore the model."""
        return True

    @classmethod
    def get_lc_namespace(cls) -> list[str]:
        """Return the namespace in serialized models, which stays the same if the class moves."""
        return ["lookahead_agent", "chat_model"]

    def to_json(self) -> SerializedConstructor | SerializedNotImplemented:
        """Serialize the model for `langchain_core.load`, with each policy as its fields."""
        serialized = super().to_json()
        if serialized["type"] == "constructor":
            for name in {"policy", "policies"} & serialized["kwargs"].keys():
                serialized["kwargs"][name] = _policy_fields(serialized["kwargs"][name])
        return serialized

    @property
    def lc_secrets(self) -> dict[str, str]:
        """The fields that are not serialized, and the environment variables that `load` reads in their place."""
        names = ("api_key", "draft_api_key", "judge_api_key", "embedding_api_key")
        return {name: f"LOOKAHEAD_{name.upper()}" for name in names}

    def __reduce__(self) -> tuple[Any, ...]:
        # The fields identify the engines; the process that loads the model finds or starts them.
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        fields = {name: value for name, value in fields.items() if not isinstance(value, DerivedProfile)}
        for name, value in fields.items():
            try:
                if value is not None and name == "engines":
                    raise TypeError("engines belong to their process")
                pickle.dumps(value)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise ConfigurationError(
                    f"{name} cannot be pickled ({error}): pickle a model without it, and give it where it is read again"
                ) from error
        return partial(type(self), **fields), ()


def _policy_fields(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _policy_fields(entry) for key, entry in value.items()}
    return value.model_dump(exclude_unset=True) if isinstance(value, VerifierPolicy) else value


class DerivedProfile(dict[str, Any]):
    """A profile that follows from the model's fields, and changes with them."""


def profile_of(backend: LocalBackend, max_tokens: int | None) -> ModelProfile:
    """Return LangChain's profile of a model whose replies have at most `max_tokens` tokens; loads nothing."""
    capabilities: dict[str, Any] = dict.fromkeys(_SUPPORTED, True) | dict.fromkeys(_UNSUPPORTED, False)
    profile = cast(ModelProfile, DerivedProfile(capabilities))
    if max_tokens is not None:
        profile["max_output_tokens"] = max_tokens
    if (engines := backend.running) is not None:
        profile["reasoning_output"] = backend.thinking(engines) is not None
    elif (entry := backend.catalogue_entry) is not None:
        profile["reasoning_output"] = entry.thinking is not None
    if backend.runtime is not None:
        profile["name"] = backend.runtime.models.target.name
    if (context := backend.find_context_length()) is not None:
        profile["max_input_tokens"] = context
    return profile
