"""`ChatLookahead`: LangChain in, engine out."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.load.load import ALL_SERIALIZABLE_MAPPINGS
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from lookahead_agent.certificates.drift_monitor import SHARE
from lookahead_agent.chat.calls import Calls
from lookahead_agent.chat.engine_access import EngineAccess, EngineUser
from lookahead_agent.chat.fields import EngineFields, SamplingFields, ServerFields
from lookahead_agent.chat.messages import begun, from_openai, template_messages
from lookahead_agent.chat.profile import profile_of
from lookahead_agent.chat.reply_message import as_chunk
from lookahead_agent.chat.serialization import Saving
from lookahead_agent.chat.step_callbacks import StepEvents
from lookahead_agent.decoding import StepEvent
from lookahead_agent.engines import background
from lookahead_agent.engines.token_speculation import speculates_by_draft_model
from lookahead_agent.errors import ConfigurationError, check_encodable
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.offered_tools import chosen_tools, forced, openai_tools
from lookahead_agent.generation.policy_choice import NodePath, check_policies, with_configured
from lookahead_agent.generation.request import ChatRequest, Emit, TextDelta
from lookahead_agent.generation.structured_output import Form, FormParser, Method, parsed, traced_schema
from lookahead_agent.generation.tool_parsers import check_tool_parser
from lookahead_agent.models import DEFAULT_SET, choose_models, has_draft
from lookahead_agent.policy import PolicyLike, VerifierPolicy, as_policy
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.runtime import Runtime, RuntimeSpec

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph


class ChatLookahead(SamplingFields, ServerFields, EngineFields, Saving):
    """A chat model that thinks with Lookahead Reasoning (arXiv 2506.19830) on vLLM, in this process or behind servers.

    A draft model writes whole reasoning steps ahead, the target model writes the matching steps in parallel, and a
    verifier keeps the draft steps that mean the same. Tool calls are always the target's own.

    Instantiate:
        ```python
        from lookahead_agent import ChatLookahead

        llm = ChatLookahead(model="qwen2.5-coder-1.5b", policies={"planner": "balanced", "executor": "strict"})
        ```

    Invoke and stream:
        ```python
        llm.invoke("What is 17 * 23?").text
        for chunk in llm.stream("Explain why the sky is blue."):
            print(chunk.text, end="")
        ```

    Tools:
        ```python
        llm.bind_tools([calculator]).invoke("What is 17 * 23?").tool_calls
        ```

    Structured output:
        ```python
        class Answer(BaseModel):
            number: int

        llm.with_structured_output(Answer).invoke("What is 17 * 23?")
        ```

    Behind servers:
        ```python
        llm = ChatLookahead(
            model="Qwen/Qwen3-32B", base_url="http://big:8000/v1",
            draft_model="Qwen/Qwen3-1.7B", draft_url=["http://small-1:8000/v1", "http://small-2:8000/v1"],
        )
        ```

    A policy is chosen by, in this order: the call's `policy` argument (`.invoke(..., policy="off")`,
    `.bind(policy=...)`), `config["configurable"]["lookahead_policy"]`, the entry in `policies` for the LangGraph node
    that is running, and `policy`. An entry is a node's name ("planner"), its path through subgraphs
    ("research:planner"), or a pattern ("research:*"). `check_policies(graph)` finds entries without a node;
    `policy_for` tells which policy a call gets, and its `explain()` why.

    Engines start at the first call (or with `start`), are shared with other models of the same configuration, and are
    shut down by `close`, when the model is collected, or at exit. A copy (`copy.copy`, `copy.deepcopy`, `model_copy`)
    is another model of that configuration: closing either leaves the other its engines. `pickle` writes fields down,
    keys included, and makes the model again from them, whose engines start at its first call.

    Thinking, of models that think apart, is no part of a message's text: `content_blocks` shows it as a block of type
    "reasoning". Custom events `lookahead_step` (`astream_events`, or `stream_mode="custom"` with `stream_steps=True`)
    tell what happens to each step: the fields of `decoding.StepEvent`.

    `response_metadata["lookahead"]` says what happened: `call` (its id), `policy`, `selection_rule`, `certificate` (of
    a policy with a risk), `audit` (of steps that were looked at again since the engines were started), `node`, `path`,
    `steps`, `accepted`, `acceptance_rate`, `verifier_calls`, `judge_calls`, `refuted` (draft steps dropped before the
    verifier had to be asked), `target_forward_passes` (fewer than the target's tokens where draft tokens were
    accepted), `tokens` (of each engine: `committed`, `rejected`, `aborted`, `speculative`), `seconds`
    (`total`, the time that `draft`, `target` and `verifier` had work, and `waiting`, in which none had), and
    `speculation_disabled` (why speculation ended early, or None).

    Raises:
        pydantic.ValidationError: A field is out of its range.
        ConfigurationError: Values that do not go together, or a policy that does not exist.
        ModelNotFoundError: A model that is neither in the catalogue, nor a folder, nor a Hugging Face id.
        MissingExtraError: vLLM is not installed.

    All of them are raised before any model is loaded.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    model: str = DEFAULT_SET
    """Target model: a name of the catalogue, a folder, or a Hugging Face id."""
    draft_model: str | None = None
    """Draft model: a folder or a Hugging Face id; None: the catalogue's draft for the target."""
    judge_model: str | None = None
    """Judge of step pairs: a catalogue name, a folder or a Hugging Face id, or with `judge_url` its name there; None:
    the target judges."""
    embedding_model: str | None = None
    """A sentence-transformers model: a folder or a Hugging Face id, or with `embedding_url` its name there; None: the
    catalogue's."""
    policy: str | VerifierPolicy = "balanced"
    """Policy of calls for which nothing else chooses one."""
    policies: dict[str, str | VerifierPolicy] = Field(default_factory=dict)
    """Policies by LangGraph node: name, path through subgraphs ("outer:inner"), or pattern ("plan*")."""
    tool_parser: str | None = None
    """Name of the vLLM parser that reads the target's tool calls; None: by its chat template."""
    audit_rate: float = Field(SHARE, ge=0, le=1)
    """Share of the steps accepted by a certificate (policies such as "risk=0.02") that the target judges again when it
    has nothing else to do; where they are disputed more often than in the calibration, the policy is tightened."""
    streaming: bool = False
    """Whether `invoke` streams too, so that callbacks get its pieces."""
    stream_steps: bool = False
    """Whether step events also go to LangGraph's `stream_mode="custom"`, as {"lookahead_step": …}."""
    depth: Literal["auto"] | Annotated[int, Field(ge=1, le=16)] = "auto"
    """Steps ahead of policies that do not say. "auto": each node's replies are written in whatever way is fastest here,
    with draft steps that its policy allows or without; a number commands draft steps."""
    return_token_ids: bool = False
    """Whether `response_metadata["token_ids"]` lists the reply's tokens."""
    engines: EngineSet | None = Field(None, exclude=True, repr=False)
    """Engines to use in place of those that the other fields describe, for tests; they are not shut down."""

    _runtime: Runtime | None = PrivateAttr(None)
    _user: EngineUser = PrivateAttr(default_factory=EngineUser)

    @model_validator(mode="after")
    def _check(self) -> ChatLookahead:
        policies = self._every_policy()
        if self.engines is None:
            self._arrange(policies)
        if self.profile is None:
            self.profile = profile_of(self.access, self.max_tokens)
        return self

    def _arrange(self, policies: Sequence[VerifierPolicy]) -> None:
        """Find the runtime of the engines that the fields describe."""
        check_tool_parser(self.tool_parser)
        remote = self.remote_models(
            {
                "target": self.model,
                "draft": self.draft_model,
                "judge": self.judge_model,
                "embedding": self.embedding_model,
            }
        )
        self._check_engine_settings(remote)
        wants_draft = (
            any(policy.speculates for policy in policies)
            or self.draft_model is not None
            or speculates_by_draft_model(self.token_speculation)
            or (self.token_speculation == "auto" and has_draft(self.model))
        )
        models = choose_models(
            self.model if self.tokenizer is None else self.tokenizer,
            self.draft_model if self.draft_tokenizer is None else self.draft_tokenizer,
            draft_wanted=wants_draft,
            judge=self.judge_model if "judge" not in remote else None,
            embedding=self.embedding_model if "embedding" not in remote else None,
        )
        spec = RuntimeSpec(
            models,
            self.engine_args,
            self.draft_engine_args,
            self.judge_engine_args,
            remote,
            self.token_speculation if "target" not in remote else "none",
            self.precision,
            self.draft_precision,
            self.cores,
        )
        # Behind a server, what the target costs is not known here: steps are the only way to win something.
        steps = [policy.forces_speculation or ("target" in remote and policy.speculates) for policy in policies]
        self._runtime = Runtime.shared(spec, expects_draft=any(steps))
        self._runtime.use(self._user)

    def _every_policy(self) -> list[VerifierPolicy]:
        """The model's policies, its own and those of nodes; raises PolicyError if one does not exist."""
        return [as_policy(policy).with_depth(self.depth) for policy in (self.policy, *self.policies.values())]

    # The engines' life

    def start(self, progress: Progress | None = None) -> None:
        """Fetch the models and start the engines now instead of at the first call.

        Args:
            progress: Shown what is done; None: the `lookahead_agent` logger is told.

        Raises:
            ModelError: A model could not be fetched.
            EngineStartError: The target could not be started.
        """
        self.access.start(self._every_policy(), progress)

    def close(self) -> None:
        """Shut down the engines, unless another model uses them; a later call starts them again."""
        self.access.leave()

    def __eq__(self, other: object) -> bool:
        # Not by who uses the engines, in which copies differ.
        if not isinstance(other, type(self)):
            return NotImplemented
        return self._runtime is other._runtime and all(
            getattr(self, name) == getattr(other, name) for name in type(self).model_fields
        )

    def __copy__(self) -> Self:
        return self._with_own_user(super().__copy__())

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        memo = {} if memo is None else memo
        # Engines are resources, and LangChain's caches, limiters and callbacks are shared by what uses them.
        for shared in (self.engines, self._runtime, self._user, self.cache, self.rate_limiter, self.callbacks):
            memo[id(shared)] = shared
        return self._with_own_user(super().__deepcopy__(memo))

    def _with_own_user(self, copied: Self) -> Self:
        """A copy that uses the engines on its own behalf, so that closing one leaves the other its engines."""
        copied.__dict__.pop("_serialized", None)
        copied._user = EngineUser()
        if copied._runtime is not None:
            copied._runtime.use(copied._user)
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        # The fields say which engines are meant; another process finds or starts them.
        fields = {name: getattr(self, name) for name in self.model_fields_set - {"profile"}}
        for name, value in fields.items():
            try:
                if value is not None and name == "engines":
                    raise TypeError("engines belong to their process")
                pickle.dumps(value)
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                raise ConfigurationError(
                    f"{name} cannot be pickled ({error}): pickle a model without it, and give it where it is read again"
                ) from error
        return _made_of, (type(self), fields)

    def __enter__(self) -> ChatLookahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def access(self) -> EngineAccess:
        """The engines, for those who ask them for more than replies."""
        return EngineAccess(self.engines, self._runtime, self._user, self.use_running)

    @property
    def calls(self) -> Calls:
        """What stands behind `invoke` and `stream`, for those who need more of it, such as a server."""
        return Calls(self)

    # What LangChain asks for

    @property
    def _llm_type(self) -> str:
        return "lookahead"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {
            "model": self.model,
            "draft_model": self.draft_model,
            "policy": str(self.policy),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "stop": self.stop,
        }

    def invoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """Reply to a text or messages."""
        return super().invoke(input, config, stop=stop, **with_configured(kwargs, config))

    async def ainvoke(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AIMessage:
        """`invoke` for callers in an event loop."""
        return await super().ainvoke(input, config, stop=stop, **with_configured(kwargs, config))

    def stream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[AIMessageChunk]:
        """Reply to a text or messages in chunks."""
        return super().stream(input, config, stop=stop, **with_configured(kwargs, config))

    def astream(
        self,
        input: LanguageModelInput,
        config: RunnableConfig | None = None,
        *,
        stop: list[str] | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[AIMessageChunk]:
        """`stream` for callers in an event loop."""
        return super().astream(input, config, stop=stop, **with_configured(kwargs, config))

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        if isinstance(model_input, Sequence) and not isinstance(model_input, str):
            # LangChain's own reading of OpenAI's messages raises on calls whose arguments are not JSON.
            model_input = [
                from_openai(message) if isinstance(message, Mapping) and message.get("role") == "assistant" else message
                for message in model_input
            ]
        try:
            return super()._convert_input(model_input)
        except (ValueError, NotImplementedError) as error:
            raise ConfigurationError(f"this is no input of a chat model: {error}") from error

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=[stop] if isinstance(stop, str) else stop, **kwargs)
        params["ls_provider"] = "lookahead"
        params["ls_model_name"] = kwargs.get("model", self.model)
        return params

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        # LangChain keeps what it has written down of a model, also for copies of it with other fields.
        self.__dict__.pop("_serialized", None)
        # Nodes of different policies must not have each other's replies from a cache.
        policy = self.calls.policy_of(self._options(stop, kwargs))[0]
        return super()._get_llm_string(stop, **kwargs) + f"---{policy!r}"

    # Counting tokens

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text by the target's tokenizer, without special tokens around it; starts no engine.

        Raises:
            ModelError: The tokenizer could not be fetched.
            ConfigurationError: The text has a lone surrogate.
        """
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        check_encodable(text, "the text")
        return self.access.tokenizer().encode(text)

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """How many tokens the prompt of these messages has, by the target's chat template; starts no engine.

        Equal to the `input_tokens` of a reply to them. Of messages that are no prompt by themselves, such as a part of
        a conversation that begins with a tool's result, the texts are counted.

        Args:
            messages: The messages; none at all have no tokens.
            tools: As of `bind_tools`.

        Raises:
            ModelError: The tokenizer could not be fetched.
            ConfigurationError: A message has content that is not text, or a tool is no function.
        """
        if self.custom_get_token_ids is not None:
            return super().get_num_tokens_from_messages(messages, tools)
        converted = template_messages(self._convert_input(messages).to_messages()) if messages else []
        tokenizer, offered = self.access.tokenizer(), openai_tools(tools or ())
        if not converted and not offered:
            return 0
        try:
            return len(tokenizer.chat_prompt(begun(converted), offered))
        except ConfigurationError:
            return sum(len(tokenizer.encode(json.dumps(part, ensure_ascii=False))) for part in (*converted, *offered))

    def policy_for(
        self, node: str | None = None, *, policy: PolicyLike | None = None, configurable: PolicyLike | None = None
    ) -> VerifierPolicy:
        """The policy that a call gets; its `explain()` says which rule chose it.

        Args:
            node: The node that calls, by name or by path ("research:planner"); None: outside a graph.
            policy: The call's argument.
            configurable: `config["configurable"]["lookahead_policy"]`.

        Raises:
            PolicyError: The chosen policy does not exist.
        """
        return self.calls.policy_on(NodePath.read(node) if node else NodePath(), policy, configurable)

    def explain(self) -> str:
        """Say how the engines are arranged and from which figures that was chosen, and which certificates policies with
        a risk go by; they must be running."""
        return self.access.explain(self._every_policy())

    def check_policies(self, graph: CompiledStateGraph[Any, Any, Any, Any]) -> None:
        """Check that every entry of `policies` matches a node of a compiled graph or of its subgraphs.

        Raises:
            PolicyError: One does not; the message lists the nodes.
        """
        check_policies(self.policies, graph)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: Tools, functions, Pydantic classes, or tool dictionaries in the format of OpenAI or Anthropic. Tools
                that run on a provider's servers, such as `{"type": "web_search_preview"}`, are refused.
            tool_choice: "auto" or None: the model may call a tool; "none": it must not; "any", "required" or True:
                it must call one; a tool's name: it must call that one. The dictionaries of OpenAI and Anthropic work
                too: `{"type": "any"}`, `{"type": "tool", "name": …}`, `{"type": "function", "function": {"name": …}}`,
                `{"type": "allowed_tools", …}`.
            parallel_tool_calls: True: a reply that must call tools may call several; False: a reply calls one at most;
                None: as the model likes, but one where it must.
            kwargs: Bound as well.

        Raises:
            ConfigurationError: A tool is no function, or `tool_choice` names no tool or has no known form.
        """
        converted = openai_tools(tools)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        kwargs.pop("strict", None)  # arguments are always held to the schema where a call is required
        return self.bind(tools=chosen_tools(converted, tool_choice), tool_choice=forced(tool_choice), **kwargs)

    def with_structured_output(
        self,
        schema: Any = None,
        *,
        method: Method = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Have replies in the form of a schema.

        Args:
            schema: A Pydantic class, a dataclass or another type, such as an enum or `list[int]` (replies are its
                instances); a TypedDict, a JSON schema or an OpenAI function (replies are what JSON makes of them). May
                be None with "json_mode".
            method: "json_schema": tokens that do not fit the schema are never chosen (guided decoding);
                "function_calling": by a required tool call; "json_mode": any JSON object, which the prompt must
                describe.
            include_raw: Whether to return {"raw": message, "parsed": …, "parsing_error": …} and not to raise.
            strict: For likeness with other models; replies are always held to the schema.
            kwargs: Bound as well.

        Raises:
            ConfigurationError: No schema, or none that can be read.
        """
        if method not in get_args(Method):
            raise ConfigurationError(f"method is {', '.join(get_args(Method))}, not {method!r}")
        if schema is None and method != "json_mode":
            raise ConfigurationError(f"the method {method!r} needs a schema")
        form = Form.of(schema) if schema is not None else None
        described = traced_schema(schema, form) if form is not None else None
        kwargs["ls_structured_output_format"] = {"kwargs": {"method": method}, "schema": described}
        if form is not None and method == "function_calling":
            bound = self.bind_tools([form.tool], tool_choice=form.name, **kwargs)
        elif form is not None and method == "json_schema":
            bound = self.bind(response_format=form.response_format, **kwargs)
        else:
            bound = self.bind(response_format={"type": "json_object"}, **kwargs)
        return parsed(bound, FormParser(form=form, called=method == "function_calling"), include_raw=include_raw)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        *_, message = self._written(messages, stop, run_manager, kwargs)
        return _result(message)

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        async with aclosing(self._awritten(messages, stop, run_manager, kwargs)) as items:
            *_, message = [item async for item in items]
        return _result(message)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for item in self._written(messages, stop, run_manager, kwargs):
            chunk = ChatGenerationChunk(message=as_chunk(item))
            if run_manager is not None and isinstance(item, TextDelta):
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async with aclosing(self._awritten(messages, stop, run_manager, kwargs)) as items:
            async for item in items:
                chunk = ChatGenerationChunk(message=as_chunk(item))
                if run_manager is not None and isinstance(item, TextDelta):
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def _written(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | None,
        options: dict[str, Any],
    ) -> Iterator[TextDelta | AIMessage]:
        """A reply's pieces and at last its message; what happens to steps goes to the callbacks."""
        request = self._request(messages, stop, run_manager, options)
        steps = StepEvents(request, self.stream_steps, run_manager)
        for item in background.stream(self.calls.work(request)):
            if isinstance(item, StepEvent):
                steps.send(item)
            else:
                yield item

    async def _awritten(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: AsyncCallbackManagerForLLMRun | None,
        options: dict[str, Any],
    ) -> AsyncGenerator[TextDelta | AIMessage, None]:
        request = self._request(messages, stop, run_manager, options)
        steps = StepEvents(request, self.stream_steps, run_manager)
        async with aclosing(background.astream(self.calls.work(request))) as items:
            async for item in items:
                if isinstance(item, StepEvent):
                    await steps.asend(item)
                else:
                    yield item

    # More than LangChain's calls

    def stream_with_steps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **options: Any
    ) -> Iterator[StepEvent | AIMessageChunk]:
        """Stream a reply's text and what happens to its steps, also outside graphs and chains.

        Where nothing else runs, LangChain hands a stream no callbacks, through which `stream` could tell of steps. No
        callback is called here; inside a graph, `stream_steps=True` is the way.

        Args:
            input: A text, or messages.
            stop: Texts that end the reply; None: the model's.
            options: As of `invoke`: policy, tools, max_tokens, …

        Returns:
            Steps and chunks of text in the order in which they happen; the last chunk has the metadata.

        Raises:
            LookaheadError: As `invoke`.
        """
        for item in background.stream(self._work_on(input, stop, options)):
            yield item if isinstance(item, StepEvent) else as_chunk(item)

    async def astream_with_steps(
        self, input: LanguageModelInput, *, stop: list[str] | None = None, **options: Any
    ) -> AsyncGenerator[StepEvent | AIMessageChunk, None]:
        """`stream_with_steps` for callers in an event loop."""
        async with aclosing(background.astream(self._work_on(input, stop, options))) as items:
            async for item in items:
                yield item if isinstance(item, StepEvent) else as_chunk(item)

    def _work_on(
        self, input: LanguageModelInput, stop: list[str] | None, options: dict[str, Any]
    ) -> Callable[[Emit], Coroutine[Any, Any, AIMessage]]:
        return self.calls.work(self._request(self._convert_input(input).to_messages(), stop, None, options))

    def _request(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        options: dict[str, Any],
    ) -> ChatRequest:
        return self.calls.request(messages, self._options(stop, options), run_manager=run_manager)

    @staticmethod
    def _options(stop: list[str] | None, options: Mapping[str, Any]) -> CallOptions:
        # LangChain itself reads `stream`, which says whether `invoke` streams, and passes it on.
        return CallOptions.read({**{name: options[name] for name in options.keys() - {"stream"}}, "stop": stop})


def _made_of(kind: type[ChatLookahead], fields: dict[str, Any]) -> ChatLookahead:
    """A model from its fields; what `pickle` calls."""
    return kind(**fields)


def _result(item: TextDelta | AIMessage) -> ChatResult:
    assert isinstance(item, AIMessage)
    return ChatResult(generations=[ChatGeneration(message=item)])


# LangChain lists in langchain-core which classes `load(…, allowed_objects="all")` may make again, and has no other way
# to add one.
ALL_SERIALIZABLE_MAPPINGS[tuple(ChatLookahead.lc_id())] = (*__name__.split("."), ChatLookahead.__name__)
