"""`ChatLookahead`: LangChain in, engine out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, Literal

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from lookahead_agent import background
from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.token_speculation import check_token_speculation, guesses_by_draft_model
from lookahead_agent.errors import ConfigurationError, ContextLengthError
from lookahead_agent.messages import question, template_messages
from lookahead_agent.models import DEFAULT_SET, choose_models
from lookahead_agent.models.catalogue import RecommendedSampling
from lookahead_agent.policy import VerifierPolicy, as_policy, choose_policy
from lookahead_agent.progress import Progress
from lookahead_agent.regions import Regions, ThinkingTags
from lookahead_agent.runtime import EngineSet, RemoteJudgeSpec, Runtime, RuntimeSpec
from lookahead_agent.tool_calls import ContentStream, ParsedReply, action_markers, call_constraint, parse_reply

POLICY_KEY = "lookahead_policy"


class ChatLookahead(BaseChatModel):
    """A chat model that thinks with Lookahead Reasoning (arXiv 2506.19830) on vLLM engines in this process.

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

    A policy is chosen by, in this order: the call's `policy` argument (`.invoke(..., policy="off")`,
    `.bind(policy=...)`), `config["configurable"]["lookahead_policy"]`, the entry in `policies` for the LangGraph node
    that is running, and `policy`.

    Engines start at the first call (or with `start`), are shared with other models of the same configuration, and are
    shut down by `close`, when the model is collected, or at exit.

    `response_metadata["lookahead"]` says what happened: `policy`, `node`, `steps`, `accepted`, `acceptance_rate`,
    `verifier_calls`, `judge_calls`, `refuted` (draft steps dropped before the verifier had to be asked), `tokens` (of
    each engine: `committed`, `rejected`, `aborted`), `seconds` (`total`, the time that `draft`, `target` and `verifier`
    had work, and `waiting`, in which none had), and `speculation_off` (why speculation ended early, or None).

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
    policy: str | VerifierPolicy = "balanced"
    """Policy of calls for which nothing else chooses one."""
    policies: dict[str, str | VerifierPolicy] = Field(default_factory=dict)
    """Policies by LangGraph node name."""
    temperature: float | None = Field(None, ge=0)
    """0 takes the likeliest token; None: what the model's makers recommend."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Probability mass that is sampled from; None: what the model's makers recommend."""
    top_k: int | None = Field(None, ge=0)
    """Number of likeliest tokens that are sampled from, 0 for all; None: what the model's makers recommend."""
    seed: int | None = None
    """Makes sampling repeatable for policies that do not depend on timing (off, exact)."""
    max_tokens: int = Field(1024, ge=1)
    """Most tokens of a reply."""
    stop: list[str] | None = None
    """Texts that end a reply; they are not part of it."""
    judge_model: str | None = None
    """Judge of step pairs: a catalogue name, a folder or a Hugging Face id, or with `judge_url` its name there; None:
    the target judges."""
    judge_url: str | None = None
    """Address of an OpenAI-compatible server for the judge, up to and with `/v1`."""
    judge_api_key: SecretStr | None = None
    """Key for that server."""
    embedding_model: str | None = None
    """A sentence-transformers model: a folder or a Hugging Face id; None: the catalogue's."""
    token_speculation: str | dict[str, Any] = "none"
    """Token-level speculation inside the target's steps: "none", "ngram", "suffix", "draft_model", or vLLM's
    `speculative_config`, as {"method": "eagle3", "model": …, "num_speculative_tokens": 3}."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the target's vLLM engine (`vllm.AsyncEngineArgs`): tensor_parallel_size, quantization, …"""
    draft_engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the draft's vLLM engine."""
    judge_engine_args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the judge's vLLM engine, if it has one of its own."""
    cores: tuple[str, str] | None = None
    """CPU cores of target and draft ("0-5", "6,7"); None: chosen so that they do not share any."""
    return_token_ids: bool = False
    """Whether `response_metadata["token_ids"]` lists the reply's tokens."""
    engines: EngineSet | None = Field(None, exclude=True, repr=False)
    """Engines to use in place of vLLM engines of our own, for tests; they are not shut down."""

    _runtime: Runtime | None = PrivateAttr(None)
    _sampling_default: RecommendedSampling = PrivateAttr(default_factory=RecommendedSampling)

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _check(self) -> ChatLookahead:
        policies = [as_policy(policy) for policy in (self.policy, *self.policies.values())]
        if self.engines is not None:
            return self
        expects_draft = any(policy.speculates for policy in policies)
        check_token_speculation(self.token_speculation, self.engine_args)
        wants_draft = expects_draft or self.draft_model is not None or guesses_by_draft_model(self.token_speculation)
        models = choose_models(
            self.model,
            self.draft_model,
            draft_wanted=wants_draft,
            judge=self.judge_model if self.judge_url is None else None,
            embedding=self.embedding_model,
        )
        if models.catalogued is not None:
            self._sampling_default = models.catalogued.sampling
        spec = RuntimeSpec(
            models,
            self.engine_args,
            self.draft_engine_args,
            self.judge_engine_args,
            self._remote_judge(),
            self.token_speculation,
            self.cores,
        )
        self._runtime = Runtime(spec, expects_draft=expects_draft)
        return self

    def _remote_judge(self) -> RemoteJudgeSpec | None:
        if self.judge_url is None:
            if self.judge_api_key is not None:
                raise ConfigurationError("judge_api_key is for a judge behind a server: give its judge_url too")
            return None
        if self.judge_model is None:
            raise ConfigurationError("judge_url needs judge_model: the model's name on that server")
        if not self.judge_url.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"judge_url is an http:// or https:// address up to and with /v1, not {self.judge_url!r}"
            )
        key = self.judge_api_key.get_secret_value() if self.judge_api_key is not None else None
        return RemoteJudgeSpec(self.judge_url, self.judge_model, key)

    # The engines' life

    def start(self, progress: Progress | None = None) -> None:
        """Fetch the models and start the engines now instead of at the first call.

        Args:
            progress: Shown what is done; None: the `lookahead_agent` logger is told.

        Raises:
            ModelError: A model could not be fetched.
            EngineStartError: The target could not be started.
        """
        if self._runtime is None:
            return
        if progress is not None:
            self._runtime.progress = progress
        policies = [as_policy(policy) for policy in (self.policy, *self.policies.values())]
        for policy in policies:
            background.run(self._start(policy))

    async def _start(self, policy: VerifierPolicy) -> None:
        async with self._engines(policy):
            return

    def close(self) -> None:
        """Shut down the engines, unless another model uses them; a later call starts them again."""
        if self._runtime is not None:
            self._runtime.close()

    def __enter__(self) -> ChatLookahead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @asynccontextmanager
    async def _engines(self, policy: VerifierPolicy) -> AsyncIterator[EngineSet]:
        if self.engines is not None:
            yield self.engines
            return
        assert self._runtime is not None
        async with self._runtime.engines(policy) as engines:
            yield engines

    def _thinking(self, engines: EngineSet) -> ThinkingTags | None:
        """The tags around the target's thinking: from the catalogue, else from its chat template."""
        catalogued = self._runtime.models.catalogued if self._runtime is not None else None
        return catalogued.thinking if catalogued is not None else engines.target.tokenizer.thinking

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
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        params["ls_provider"] = "lookahead"
        params["ls_model_name"] = self.model
        return params

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Let the model call tools.

        Args:
            tools: Tools, functions, Pydantic classes or OpenAI tool dictionaries.
            tool_choice: "auto" or None: the model may call a tool; "none": it must not; "any", "required" or True:
                it must call one; a tool's name: it must call that one.
            kwargs: Bound as well.

        Raises:
            ConfigurationError: `tool_choice` names no tool.
        """
        converted = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=_chosen_tools(converted, tool_choice), tool_choice=_forced(tool_choice), **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        return _result(background.run(call.reply(lambda _: None)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        call = self._call(messages, stop, run_manager, kwargs)
        return _result(await background.arun(call.reply(lambda _: None)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        for item in background.stream(call.reply):
            chunk = _chunk(item)
            if run_manager is not None and chunk.text:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        call = self._call(messages, stop, run_manager, kwargs)
        async for item in background.astream(call.reply):
            chunk = _chunk(item)
            if run_manager is not None and chunk.text:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _call(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
        options: dict[str, Any],
    ) -> _Call:
        chosen = _CallOptions.read(options)
        config = ensure_config()
        # In LangChain's streaming path the run manager is not handed on, but the configuration has the same metadata.
        metadata = {**(config.get("metadata") or {}), **((run_manager.metadata or {}) if run_manager else {})}
        node = metadata.get("langgraph_node")
        policy = choose_policy(
            call=chosen.policy,
            configurable=(config.get("configurable") or {}).get(POLICY_KEY),
            node=node,
            policies=self.policies,
            default=self.policy,
        )
        return _Call(self, messages, self._sampling(stop, chosen), policy, node, chosen)

    def _sampling(self, stop: list[str] | None, options: _CallOptions) -> Sampling:
        def value(name: str) -> Any:
            for source in (options, self, self._sampling_default):
                if (given := getattr(source, name, None)) is not None:
                    return given
            return None

        return Sampling(
            max_tokens=value("max_tokens"),
            temperature=value("temperature"),
            top_p=value("top_p"),
            top_k=value("top_k"),
            seed=value("seed"),
            stop=tuple(stop if stop is not None else self.stop or ()),
        )


class _CallOptions(BaseModel):
    """What a call may set, by the same rules as the constructor."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    policy: Any = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["required"] | None = None

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> _CallOptions:
        """Check the keyword arguments of a call.

        Raises:
            ConfigurationError: One is unknown or out of its range.
        """
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            problem = error.errors()[0]
            name = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(sorted([*cls.model_fields, "stop"]))
                raise ConfigurationError(f"a call takes no argument {name!r}; it takes {known}") from error
            raise ConfigurationError(f"{name}={problem['input']!r}: {problem['msg']}") from error


class _Call:
    """One reply, from messages to message.

    Arguments are those of `ChatLookahead._call`, decided.
    """

    def __init__(
        self,
        model: ChatLookahead,
        messages: list[BaseMessage],
        sampling: Sampling,
        policy: VerifierPolicy,
        node: str | None,
        options: _CallOptions,
    ) -> None:
        self._model = model
        self._messages = messages
        self._template_messages = template_messages(messages)
        self._sampling = sampling
        self._policy = policy
        self._node = node
        self._tools: list[dict[str, Any]] = options.tools
        self._forced = options.tool_choice is not None

    async def reply(self, on_content: Callable[[str], None]) -> AIMessage:
        """Write the reply; `on_content` is given its text as it becomes certain."""
        async with self._model._engines(self._policy) as engines:
            prompt = await asyncio.to_thread(engines.target.tokenizer.chat_prompt, self._template_messages, self._tools)
            room = engines.target.context_length - len(prompt)
            if room < 1:
                raise ContextLengthError(
                    f"the messages are {len(prompt)} tokens long and the context {engines.target.context_length}: "
                    "shorten them, or raise max_model_len in engine_args"
                )
            names = {tool["function"]["name"] for tool in self._tools}
            markers = action_markers(self._tools)
            regions = Regions(markers, self._model._thinking(engines), self._policy.answer_from_target)
            content = ContentStream(markers, on_content)
            sampling = self._sampling
            verifier = engines.verifier(self._policy)
            if self._forced:
                # The whole reply is an action: the target's alone, and in the form of a call.
                verifier = None
                sampling = replace(sampling, structured=call_constraint(self._tools), stop=())
            draft_prompt = await self._draft_prompt(engines) if verifier is not None else None
            reply = await lookahead(
                ReplyRequest(tuple(prompt), sampling, question(self._messages), regions, draft_prompt),
                engines.target,
                engines.draft,
                verifier,
                _settings(self._policy),
                content.push if not self._forced else None,
            )
            parsed = await asyncio.to_thread(parse_reply, reply.text, names)
            content.finish(parsed.content)
            wanted = self._policy.speculates and not self._forced
            problem = engines.problem if wanted and verifier is None else reply.report.speculation_off
            return self._message(reply, parsed, len(prompt), problem)

    async def _draft_prompt(self, engines: EngineSet) -> tuple[int, ...] | None:
        """The prompt in the draft's own words, if it has another tokenizer."""
        if engines.draft is None or engines.draft.tokenizer.fingerprint == engines.target.tokenizer.fingerprint:
            return None
        ids = await asyncio.to_thread(engines.draft.tokenizer.chat_prompt, self._template_messages, self._tools)
        return tuple(ids)

    def _message(self, reply: Reply, parsed: ParsedReply, prompt_tokens: int, problem: str | None) -> AIMessage:
        report = reply.report
        metadata: dict[str, Any] = {
            "model_name": self._model.model,
            "model_provider": "lookahead",
            "finish_reason": "tool_calls" if parsed.tool_calls else reply.finish_reason,
            "lookahead": {
                "policy": self._policy.name,
                "node": self._node,
                "steps": report.steps,
                "accepted": report.accepted,
                "acceptance_rate": report.acceptance_rate,
                "verifier_calls": report.verifier_calls,
                "judge_calls": report.judge_calls,
                "refuted": report.refuted,
                "tokens": {"target": asdict(report.target_tokens), "draft": asdict(report.draft_tokens)},
                "seconds": report.seconds,
                "speculation_off": problem,
            },
        }
        if self._model.return_token_ids:
            metadata["token_ids"] = list(reply.token_ids)
        return AIMessage(
            content=parsed.content,
            tool_calls=parsed.tool_calls,
            invalid_tool_calls=parsed.invalid_tool_calls,
            response_metadata=metadata,
            usage_metadata=UsageMetadata(
                input_tokens=prompt_tokens,
                output_tokens=len(reply.token_ids),
                total_tokens=prompt_tokens + len(reply.token_ids),
            ),
        )


def _settings(policy: VerifierPolicy) -> DecodingSettings:
    fields = DecodingSettings.__dataclass_fields__.keys() & VerifierPolicy.model_fields.keys()
    return DecodingSettings(**{field: getattr(policy, field) for field in fields})


def _result(message: AIMessage) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=message)])


def _chunk(item: str | AIMessage) -> ChatGenerationChunk:
    """A piece of text, or what the final message adds to the text already streamed."""
    if isinstance(item, str):
        return ChatGenerationChunk(message=AIMessageChunk(content=item))
    calls = [
        tool_call_chunk(name=call["name"], args=json.dumps(call["args"]), id=call["id"], index=index)
        for index, call in enumerate(item.tool_calls)
    ]
    calls += [
        tool_call_chunk(name=call["name"], args=call["args"], id=call["id"], index=len(calls) + index)
        for index, call in enumerate(item.invalid_tool_calls)
    ]
    return ChatGenerationChunk(
        message=AIMessageChunk(
            content="",
            tool_call_chunks=calls,
            response_metadata=item.response_metadata,
            usage_metadata=item.usage_metadata,
            chunk_position="last",
        )
    )


def _chosen_tools(tools: list[dict[str, Any]], choice: Any) -> list[dict[str, Any]]:
    """The tools that a reply may call."""
    if choice in (None, "auto", "any", "required", True, False):
        return tools
    if choice == "none":
        return []
    name = choice["function"]["name"] if isinstance(choice, dict) else choice
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        known = ", ".join(tool["function"]["name"] for tool in tools)
        raise ConfigurationError(f"tool_choice {name!r} is not one of the tools ({known})")
    return named


def _forced(choice: Any) -> Literal["required"] | None:
    """Whether a reply must be a tool call."""
    return None if choice in (None, "auto", "none", False) else "required"
