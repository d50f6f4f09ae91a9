"""From what is asked of a chat model to its reply, for the model itself and for servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import ensure_config

from lookahead_agent.chat.messages import conversation, question
from lookahead_agent.chat.reply_message import as_message
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.tokenizer import continues
from lookahead_agent.errors import ConfigurationError, check_encodable
from lookahead_agent.generation.call import ReplyGenerator
from lookahead_agent.generation.call_options import DEFAULT_MAX_TOKENS, CallOptions, SamplingArguments
from lookahead_agent.generation.policy_choice import POLICY_KEY, NodePath, choose_policy
from lookahead_agent.generation.request import ChatRequest, Emit
from lookahead_agent.generation.tool_parsers import ToolParser
from lookahead_agent.policy import PolicyLike, VerifierPolicy
from lookahead_agent.running.client import reply_of_running
from lookahead_agent.running.wire import ReplyOrder

if TYPE_CHECKING:
    from lookahead_agent.chat.model import ChatLookahead


class Calls:
    """The calls of a chat model: what is decided before a reply, and what writes it.

    Args:
        llm: Whose fields decide what a call does not say, and whose engines write.
    """

    def __init__(self, llm: ChatLookahead) -> None:
        self._llm = llm

    def request(
        self,
        prompt: list[BaseMessage] | str | list[int],
        options: CallOptions,
        *,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
        longest_prompt: int | None = None,
    ) -> ChatRequest:
        """A call with everything decided: its policy, its node, how tokens are chosen.

        Args:
            prompt: Messages; or a prompt without a chat template, as text or as token ids. The reply continues
                a last message of the model's own, unless that was a finished reply.
            options: What the call sets.
            run_manager: Knows which node makes the call.
            longest_prompt: In tokens; None: the context.

        Raises:
            ConfigurationError: There is no message, or one that is not text, or a value is out of its range.
            PolicyError: The chosen policy does not exist.
        """
        policy, path = self.policy_of(options, run_manager)
        messages = [message for message in prompt if isinstance(message, BaseMessage)]
        is_chat = not isinstance(prompt, str) and len(messages) == len(prompt)
        if isinstance(prompt, str):
            check_encodable(prompt, "the prompt")
        given = conversation(messages) if is_chat else cast("str | list[int]", prompt)
        if is_chat and continues(cast("list[dict[str, Any]]", given)) and (options.structured or options.tool_choice):
            raise ConfigurationError(
                "the last message is the model's own, which a reply would continue, but a required tool call or a "
                "response_format begins anew: leave one of the two out"
            )
        return ChatRequest(
            given,
            question(messages) if is_chat else prompt if isinstance(prompt, str) else "",
            self._sampling(options),
            policy,
            path,
            options,
            self._llm.timeout,
            longest_prompt,
            self._llm.audit_rate,
        )

    def policy_of(
        self,
        options: CallOptions,
        run_manager: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None = None,
    ) -> tuple[VerifierPolicy, NodePath]:
        """The policy of a call, and the node that makes it."""
        config = ensure_config()
        # In LangChain's streaming path the run manager is not handed on, but the configuration has the same metadata.
        metadata = {**(config.get("metadata") or {}), **((run_manager.metadata or {}) if run_manager else {})}
        path = NodePath.read(options.node) if options.node else NodePath.of(metadata)
        return self.policy_on(path, options.policy, (config.get("configurable") or {}).get(POLICY_KEY)), path

    def policy_on(self, path: NodePath, call: PolicyLike | None, configurable: PolicyLike | None) -> VerifierPolicy:
        """The policy of a call from a node, by what call and configuration say; see `ChatLookahead.policy_for`."""
        llm = self._llm
        return choose_policy(
            call=call, configurable=configurable, path=path, policies=llm.policies, default=llm.policy
        ).with_depth(llm.depth)

    def _sampling(self, options: CallOptions) -> Sampling:
        sources = (options, self._llm, self._llm.access.recommended_sampling)
        given: dict[str, Any] = {}
        for name in SamplingArguments.model_fields:
            values = (getattr(source, name, None) for source in sources)
            given[name] = next((value for value in values if value is not None), None)
        # The model's fields may have been assigned, which pydantic does not check.
        chosen = SamplingArguments.read(given)
        return Sampling(
            max_tokens=chosen.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=chosen.temperature or 0.0,
            top_p=1.0 if chosen.top_p is None else chosen.top_p,
            top_k=chosen.top_k or 0,
            seed=chosen.seed,
            stop=tuple(chosen.stop or ()),
        )

    def work(self, request: ChatRequest) -> Callable[[Emit], Coroutine[Any, Any, AIMessage]]:
        """What writes the reply to a request, for `background.stream` and `background.astream`."""
        return partial(self._reply, request)

    async def _reply(self, request: ChatRequest, emit: Emit) -> AIMessage:
        """Write a reply, or have it written; runs in the background loop."""
        llm, access = self._llm, self._llm.access
        # Which engines are meant only another process asks; to say it is work that others need not do for each reply.
        elsewhere = access.may_be_kept
        digest = access.digest if elsewhere else ""
        order = ReplyOrder(digest, request, llm.model, llm.tool_parser, llm.return_token_ids)
        if elsewhere and (kept := await reply_of_running(order, emit)) is not None:
            return kept
        return await self.carry_out(order, emit)

    async def carry_out(self, order: ReplyOrder, emit: Emit) -> AIMessage:
        """Write a reply that this process or another one has ordered, in the background loop; see `running.keeper`."""
        access, request = self._llm.access, order.request
        async with access.engines(request.policy) as engines:

            def prepared() -> ToolParser:
                """The parts that may read files or import modules, which would delay every other reply."""
                engines.certified(request.policy)
                return access.tool_parser(order.tool_parser, engines)

            parser = await asyncio.to_thread(prepared)
            reply = await ReplyGenerator(request, engines, access.thinking(engines), parser, emit).reply()
        return as_message(reply, request, order.model, with_token_ids=order.with_token_ids)
