"""`ChatLookahead`, the LangChain chat model: it builds a request for each call and converts the reply's events."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models.base import LangSmithParams, LanguageModelInput
from langchain_core.load.load import ALL_SERIALIZABLE_MAPPINGS
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from lookahead_agent.chat.binding import BindingModel, DerivedProfile, profile_of
from lookahead_agent.chat.events import StepCallbacks, as_chunk, as_message
from lookahead_agent.chat.messages import from_openai
from lookahead_agent.chat.requests import CONFIGURED, POLICY_KEY, CallDefaults
from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import ConfigurationError, ContextLengthError, validation_message
from lookahead_agent.generation.backend import LIVE_EVENTS, ChatReply, GenerateEvent, GenerateRequest, TextDelta
from lookahead_agent.generation.call_options import CallOptions, SamplingArguments, openai_tools
from lookahead_agent.generation.local_backend import LocalBackend
from lookahead_agent.generation.server_backend import ServerBackend, find_server
from lookahead_agent.generation.tool_parsers import check_tool_parser
from lookahead_agent.models.catalogue import GREEDY
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system import background
from lookahead_agent.system.progress import Progress

Config = RunnableConfig | None
Messages = list[BaseMessage]
Stop = list[str] | None
Run = CallbackManagerForLLMRun | None
AsyncRun = AsyncCallbackManagerForLLMRun | None

ReplyEvent = TextDelta | StepEvent | AIMessage
"""The text and the steps of a reply while they are generated, then its message."""


class ChatContextLengthError(ContextLengthError, ContextOverflowError):
    """The prompt leaves no room for a reply: LangChain's agents catch this error, summarize, and try again."""


class ChatLookahead(CallDefaults, BindingModel):
    """A LangChain chat model that runs Lookahead Reasoning (arXiv 2506.19830) on vLLM, in this process or on servers.

    A draft model writes whole reasoning steps ahead while the target model writes the matching steps in parallel. A
    verifier accepts the draft steps that mean the same as the target's. Only the target writes tool calls.

        ```python
        llm = ChatLookahead(model="qwen2.5-coder-1.5b", policies={"planner": "balanced", "executor": "strict"})
        llm.invoke("What is 17 * 23?").text
        llm.bind_tools([calculator]).invoke("What is 17 * 23?").tool_calls
        llm.with_structured_output(Answer).invoke("What is 17 * 23?")
        ```

    With models on OpenAI-compatible servers:
        ```python
        llm = ChatLookahead(
            model="Qwen/Qwen3-32B", base_url="http://big:8000/v1",
            draft_model="Qwen/Qwen3-1.7B", draft_url="http://small:8000/v1",
        )
        ```

    The policy of a call comes from the first of these that is set:

    1. the call's `policy` argument: `.invoke(..., policy="off")` or `.bind(policy=...)`
    2. `config["configurable"]["lookahead_policy"]`
    3. the entry in `policies` for the running LangGraph node
    4. the field `policy`

    A key of `policies` is a node's name ("planner"), its path through subgraphs ("research:planner"), or a pattern
    ("research:*"). `policy_for(node).explain()` says which policy a call gets, and why.

    The engines start at the first call or with `start`, and models of the same configuration share them. `close` shuts
    them down unless another model or a copy uses them; otherwise they run until all these models are garbage-collected,
    or until exit. `pickle` stores the fields that were set, API keys included.

    `content_blocks` shows thinking as a block of type "reasoning". Step events (`lookahead_step`) arrive through
    `astream_events`, or `stream_mode="custom"` with `stream_steps=True`. The reference's page "Metadata" explains
    `response_metadata["lookahead"]`. The constructor checks its arguments without loading a model.

    Raises:
        pydantic.ValidationError: A field is out of its range.
        ConfigurationError: Arguments contradict each other, or a policy does not exist.
        ModelNotFoundError: A model is neither in the catalogue, nor a folder, nor a Hugging Face id.
        MissingExtraError: vLLM is not installed.
    """

    # Errors of pydantic would show the input, which may be an API key in a wrong field.
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid", hide_input_in_errors=True)

    streaming: bool = False
    """Whether `invoke` streams internally, so that callbacks receive the reply in chunks."""
    stream_steps: bool = False
    """Whether step events also go to LangGraph's `stream_mode="custom"`, as `{"lookahead_step": …}`."""
    return_token_ids: bool = False
    """Whether `response_metadata["token_ids"]` has the reply's token ids."""
    engines: EngineSet | None = Field(None, exclude=True, repr=False)
    """Engines for tests, in place of those that the other fields describe; `close` does not shut them down."""

    _backend: LocalBackend = PrivateAttr()
    _is_constructed: bool = PrivateAttr(False)

    @model_validator(mode="before")
    @classmethod
    def _without_derived_profile(cls, fields: Any) -> Any:
        # `configurable_fields` constructs a model from all values of another one, whose profile may not apply.
        if isinstance(fields, Mapping) and isinstance(fields.get("profile"), DerivedProfile):
            return {name: value for name, value in fields.items() if name != "profile"}
        return fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        policies = self._all_policies()
        if self.engines is None:
            check_tool_parser(self.tool_parser)
            self._backend = LocalBackend(runtime=self._find_runtime(policies))
        else:
            self._backend = LocalBackend(self.engines)
        if self.profile is None:
            self.profile = profile_of(self._backend, self.max_tokens)
        self._is_constructed = True
        return self

    # Changes of fields, which are validated as the constructor's arguments are

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field and select the engines anew; raises ConfigurationError for a value that no new model takes."""
        if name in type(self).model_fields and getattr(self, "_is_constructed", False):
            self._change({name: value})
        else:
            super().__setattr__(name, value)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the model with other fields; raises ConfigurationError for a value that no new model takes."""
        copied = super().model_copy(deep=deep)
        if update:
            copied._change(update)
        return copied

    def copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:  # type: ignore[override]
        """Copy the model as `model_copy` does; pydantic keeps this name for older programs."""
        return self.model_copy(update=update, deep=deep)

    def _change(self, update: Mapping[str, Any]) -> None:
        try:
            changed = type(self)(**{name: getattr(self, name) for name in self.model_fields_set} | dict(update))
        except ValidationError as error:
            raise ConfigurationError(validation_message(error)) from error
        self.__dict__.pop("_serialized", None)
        self.__dict__.update({name: getattr(changed, name) for name in (*update, "profile")})
        self.__pydantic_fields_set__.update(update)
        own, other = self._backend.runtime, changed._backend.runtime
        # Running engines stay if only the fields of calls change.
        if self.engines is not None or own is None or other is None or own.spec != other.spec:
            self._backend = changed._backend

    # Generation

    def invoke(self, input: LanguageModelInput, config: Config = None, **kwargs: Any) -> AIMessage:
        """Reply to a text or messages."""
        return super().invoke(input, config, **_with_configured_policy(kwargs, config))

    async def ainvoke(self, input: LanguageModelInput, config: Config = None, **kwargs: Any) -> AIMessage:
        """`invoke` for callers in an event loop."""
        return await super().ainvoke(input, config, **_with_configured_policy(kwargs, config))

    def stream(self, input: LanguageModelInput, config: Config = None, **kwargs: Any) -> Iterator[AIMessageChunk]:
        """Stream the reply to a text or messages in chunks."""
        return super().stream(input, config, **_with_configured_policy(kwargs, config))

    def astream(self, input: LanguageModelInput, config: Config = None, **kwargs: Any) -> AsyncIterator[AIMessageChunk]:
        """`stream` for callers in an event loop."""
        return super().astream(input, config, **_with_configured_policy(kwargs, config))

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        if isinstance(model_input, Sequence) and not isinstance(model_input, str):
            # LangChain's own conversion of OpenAI messages raises for calls whose arguments are not JSON.
            model_input = [
                from_openai(message) if isinstance(message, Mapping) and message.get("role") == "assistant" else message
                for message in model_input
            ]
        try:
            return super()._convert_input(model_input)
        except (ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ConfigurationError(
                f"this is not an input of a chat model: {reason[0].rstrip('.')}; give a text, or a list of messages"
            ) from error

    def _generate(self, messages: Messages, stop: Stop = None, run_manager: Run = None, **kwargs: Any) -> ChatResult:
        *_, message = self._events(messages, stop, run_manager, kwargs, with_text=False)
        return _result(message)

    async def _agenerate(
        self, messages: Messages, stop: Stop = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> ChatResult:
        async with aclosing(self._aevents(messages, stop, run_manager, kwargs, with_text=False)) as events:
            *_, message = [event async for event in events]
        return _result(message)

    def _stream(
        self, messages: Messages, stop: Stop = None, run_manager: Run = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        for event in self._events(messages, stop, run_manager, kwargs):
            chunk = ChatGenerationChunk(message=as_chunk(event))
            if run_manager is not None and isinstance(event, TextDelta):
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self, messages: Messages, stop: Stop = None, run_manager: AsyncRun = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._aevents(messages, stop, run_manager, kwargs)) as events:
            async for event in events:
                chunk = ChatGenerationChunk(message=as_chunk(event))
                if run_manager is not None and isinstance(event, TextDelta):
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _events(
        self, messages: Messages, stop: Stop, run_manager: Run, options: dict[str, Any], *, with_text: bool = True
    ) -> Iterator[TextDelta | AIMessage]:
        """Yield the text of a reply, then its message; step events go to the callbacks."""
        request = self.request(messages, _options(stop, options), run_manager=run_manager)
        steps = StepCallbacks(request, self.stream_steps, run_manager)
        reply = partial(self._reply, request, kinds=_live_events(with_text, steps.has_listeners))
        with _langchain_errors():
            for event in background.stream(reply):
                if isinstance(event, StepEvent):
                    steps.send(event)
                else:
                    yield event

    async def _aevents(
        self, messages: Messages, stop: Stop, run_manager: AsyncRun, options: dict[str, Any], *, with_text: bool = True
    ) -> AsyncGenerator[TextDelta | AIMessage, None]:
        request = self.request(messages, _options(stop, options), run_manager=run_manager)
        steps = StepCallbacks(request, self.stream_steps, run_manager)
        reply = partial(self._reply, request, kinds=_live_events(with_text, steps.has_listeners))
        with _langchain_errors():
            async with aclosing(background.astream(reply)) as events:
                async for event in events:
                    if isinstance(event, StepEvent):
                        await steps.asend(event)
                    else:
                        yield event

    def generate_events(self, request: GenerateRequest) -> AsyncGenerator[ReplyEvent, None]:
        """Yield the text and the steps of a reply, then its message; must run in the background loop."""
        return background.event_stream(partial(self._reply, request))

    async def _reply(
        self,
        request: GenerateRequest,
        emit: Callable[[ReplyEvent], None],
        kinds: Collection[type[GenerateEvent]] = LIVE_EVENTS,
    ) -> None:
        """Generate a reply in the background loop, and pass its events of these kinds to `emit`, then its message."""

        def emit_converted(event: GenerateEvent) -> None:
            if isinstance(event, ChatReply):
                emit(as_message(event, self.model, with_token_ids=self.return_token_ids))
            else:
                emit(event)

        # The daemon has no verifier of the user's own.
        backend = self._backend if request.policy.own_verifier is not None else await self._choose_backend()
        await backend.emit_reply(request, emit_converted, kinds)

    async def _choose_backend(self) -> LocalBackend | ServerBackend:
        """Return the daemon of `lookahead-agent up` if it runs the same engines, else the backend of this process."""
        runtime = self._backend.runtime
        # Engines that already run in this process come first, and models behind servers need no daemon.
        if self.use_daemon and runtime is not None and runtime.running is None and not runtime.spec.remote:
            return await find_server(runtime.spec.digest) or self._backend
        return self._backend

    # Lifecycle

    @property
    def backend(self) -> LocalBackend:
        """The backend that generates in this process."""
        return self._backend

    def start(self, progress: Progress | None = None) -> None:
        """Fetch the models and start the engines now instead of at the first call.

        Args:
            progress: Shows downloads and starts; None: the `lookahead_agent` logger records them.

        Raises:
            ModelError: A model cannot be fetched.
            EngineStartError: The target does not start.
        """
        if background.run(self._choose_backend()) is self._backend:
            self._backend.start(self._all_policies(), progress)

    def warm(
        self,
        input: LanguageModelInput,
        *,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool] = (),
        **kwargs: Any,
    ) -> None:
        """Prefill the beginning of later prompts while the engines are idle, so that their replies start sooner.

        The call returns at once and starts no engine: the latest prompts wait until the engines run. A reply interrupts
        the prefill. Models behind servers skip it, since it may cost money; the daemon of `lookahead-agent up` does it.

        Args:
            input: Text or messages that begin later prompts. The last message may be empty.
            tools: Tools that later calls bind.
            kwargs: Options of later calls, such as `node`.

        Raises:
            ConfigurationError: A call with these arguments would raise it.
        """
        options = _options(None, {"tools": openai_tools(tools), **kwargs})
        messages = self._convert_input(input).to_messages()
        request = self.request(messages, options, may_be_empty=True)
        background.submit_unattended(self._warm(request), "a prompt is not read ahead")

    async def _warm(self, request: GenerateRequest) -> None:
        await (await self._choose_backend()).warm(request)

    def explain(self) -> str:
        """Explain how the running engines were selected, and whether policies with a risk have a certificate.

        After an empty line, a table lists the measured replies: milliseconds per token by engines, node, load and mode,
        the pace that the library assumed relative to that of `sd`, and the mode that each node uses.
        """
        backend = background.run(self._choose_backend())
        return backend.explain(self._all_policies()) if isinstance(backend, LocalBackend) else backend.status.reason

    def close(self) -> None:
        """Shut down the engines unless another model uses them; a later call starts them again."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __eq__(self, other: object) -> bool:
        # `_backend` differs between copies: each has its own lease of the same runtime.
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._backend.runtime is other._backend.runtime and all(
            getattr(self, name) == getattr(other, name) for name in type(self).model_fields
        )

    def __copy__(self) -> Self:
        return self._with_own_lease(super().__copy__())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        # Copies share engines, and LangChain's cache, rate limiter and callbacks.
        for shared in (self.engines, self._backend, self.cache, self.rate_limiter, self.callbacks):
            memo[id(shared)] = shared
        return self._with_own_lease(super().__deepcopy__(memo))

    def _with_own_lease(self, copied: Self) -> Self:
        """Give a copy its own lease of the engines, so that closing one model leaves them to the other."""
        copied.__dict__.pop("_serialized", None)
        copied._backend = LocalBackend(copied.engines, self._backend.runtime)
        return copied

    # LangChain's hooks

    @property
    def _llm_type(self) -> str:
        return "lookahead"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        names = ("model", "draft_model", *SamplingArguments.model_fields)
        return {name: getattr(self, name) for name in names} | {"policy": str(self.policy)}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=[stop] if isinstance(stop, str) else stop, **kwargs)
        params["ls_provider"] = "lookahead"
        params["ls_model_name"] = kwargs.get("model", self.model)
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # LangChain caches a model's serialized form, and copies with other fields inherit it.
        self.__dict__.pop("_serialized", None)
        # LangChain's cache must not mix the replies of nodes with different policies or budgets.
        options = _options(stop, kwargs)
        policy, node = self._choose_policy(options, None)
        thinking_tokens = self._choose_thinking_tokens(options, node)
        return super()._get_llm_string(stop, **kwargs) + f"---{policy!r}---{thinking_tokens}"

    def _tokenizer(self) -> Tokenizer:
        return self._backend.tokenizer()

    def _recommend_sampling(self) -> Mapping[str, Any]:
        entry = self._backend.catalogue_entry
        return entry.sampling if entry is not None else GREEDY


@contextmanager
def _langchain_errors() -> Iterator[None]:
    """Raise an error that LangChain has a class for as that class too."""
    try:
        yield
    except ContextLengthError as error:
        raise ChatContextLengthError(str(error)) from error


def _with_configured_policy(kwargs: dict[str, Any], config: Config) -> dict[str, Any]:
    """Add the configured policy to a call's arguments; outside chains and graphs, LangChain does not pass it on."""
    policy = ((config or {}).get("configurable") or {}).get(POLICY_KEY)
    if policy is not None and kwargs.get("policy") is None:
        kwargs["policy"] = as_policy(policy).with_selection_rule(CONFIGURED)
    return kwargs


def _options(stop: list[str] | None, options: Mapping[str, Any]) -> CallOptions:
    # `stream` is LangChain's own option (whether `invoke` streams), which it passes on all the same.
    return CallOptions.read({**{name: options[name] for name in options.keys() - {"stream"}}, "stop": stop})


def _live_events(text: bool, steps: bool) -> tuple[type[GenerateEvent], ...]:
    """Return the events that leave the background loop: each wakes a thread of the caller."""
    return (*((TextDelta,) if text else ()), *((StepEvent,) if steps else ()))


def _result(item: TextDelta | AIMessage) -> ChatResult:
    assert isinstance(item, AIMessage)
    return ChatResult(generations=[ChatGeneration(message=item)])


# langchain-core lists the classes that `load(…, allowed_objects="all")` may restore, and has no other way to add one.
ALL_SERIALIZABLE_MAPPINGS[tuple(ChatLookahead.lc_id())] = (*__name__.split("."), ChatLookahead.__name__)
