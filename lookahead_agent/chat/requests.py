"""Builds the `GenerateRequest` of a call of the chat model: its LangGraph node, its policy, and its sampling."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import ensure_config
from pydantic import Field, model_validator

from lookahead_agent.certificates.drift_monitor import AUDIT_RATE
from lookahead_agent.chat.fields import EngineFields
from lookahead_agent.chat.messages import conversation
from lookahead_agent.engines.chat_template import continues
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.errors import ConfigurationError, PolicyError
from lookahead_agent.generation.backend import GenerateRequest
from lookahead_agent.generation.call_options import (
    NO_LIMIT,
    CallOptions,
    SamplingArguments,
    Thinking,
    ThinkingTokens,
    check_budget,
)
from lookahead_agent.models.catalogue import GREEDY
from lookahead_agent.policy import PolicyLike, VerifierPolicy, as_policy, node_path
from lookahead_agent.system.texts import check_encodable

if TYPE_CHECKING:
    from langgraph.graph.state import CompiledStateGraph

POLICY_KEY = "lookahead_policy"  # Key of `config["configurable"]` that sets the policy
CONFIGURED = f'config["configurable"]["{POLICY_KEY}"]'

RunManager = CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun


class CallDefaults(SamplingArguments, EngineFields):
    """Policies, sampling and limits of calls that set none themselves."""

    thinking: Thinking = None
    """Whether the model thinks before its answer, if its chat template reads `enable_thinking`; None: the template
    decides."""
    thinking_tokens: ThinkingTokens | dict[str, ThinkingTokens] | None = None
    """Most tokens of the thinking: the decoder then writes the model's closing tag, and the answer follows. 0: no
    thinking. A dictionary gives budgets by LangGraph node, with keys as in `policies`. None: no budget."""
    policy: str | VerifierPolicy = "balanced"
    """Policy of calls for which nothing else sets one."""
    policies: dict[str, str | VerifierPolicy] = Field(default_factory=dict)
    """Policies by LangGraph node: name, path through subgraphs ("outer:inner"), or pattern ("plan*")."""
    depth: Literal["auto"] | Annotated[int, Field(ge=1, le=16)] = "auto"
    """Steps ahead for policies that set none. "auto" gives each node the fastest configuration, with or without the
    draft steps that its policy allows; a number forces step speculation."""
    tool_parser: str | None = None
    """Name of the vLLM parser for the target's tool calls; None: the chat template decides."""
    audit_rate: float = Field(AUDIT_RATE, ge=0, le=1)
    """Share of the steps accepted by a certificate (policies such as "risk=0.02") that the target judges again while
    idle. If it disputes more of them than in the calibration, the policy is tightened."""

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        # Where the model thinks, some nodes may have a budget of 0.
        budget = self.thinking_tokens
        check_budget(self.thinking, max(budget.values(), default=None) if isinstance(budget, dict) else budget)
        return self

    def request(
        self,
        prompt: Sequence[BaseMessage] | str | list[int],
        options: CallOptions,
        *,
        run_manager: RunManager | None = None,
        may_be_empty: bool = False,
    ) -> GenerateRequest:
        """Build the request of a call with these options; `run_manager` knows the calling node.

        Without a question it raises ConfigurationError, unless the prompt `may_be_empty`. A `prompt` of text or token
        ids bypasses the chat template. With messages, the reply continues a last assistant message, unless that is a
        finished reply.
        """
        policy, node = self._choose_policy(options, run_manager)
        messages: list[dict[str, Any]] | None = None
        text_or_ids: str | list[int] = ""
        question = ""
        if isinstance(prompt, str):
            check_encodable(prompt, "the prompt")
            if not prompt:
                raise ConfigurationError("the prompt is empty")
            text_or_ids = question = prompt
        elif prompt and isinstance(prompt[0], int):
            text_or_ids = [part for part in prompt if isinstance(part, int)]
        else:
            history = [part for part in prompt if isinstance(part, BaseMessage)]
            messages = conversation(history, may_be_empty=may_be_empty)
            question = next((message.text for message in reversed(history) if not isinstance(message, AIMessage)), "")
            if options.constraint is not None and continues(messages):
                raise ConfigurationError(
                    "the last message is the model's own, which a reply would continue, but a required tool call or a "
                    "response_format begins anew: leave one of the two out"
                )
        return GenerateRequest(
            id=uuid.uuid4().hex,
            sampling=self._sampling(options),
            policy=policy,
            selection_rule=policy.rule,
            node=node,
            thread=_thread(run_manager),
            messages=messages,
            prompt=text_or_ids,
            question=question,
            tools=options.tools,
            must_call=options.tool_choice is not None,
            parallel_tool_calls=options.parallel_tool_calls,
            form=options.form,
            template_arguments={**self._thinking_argument(options.thinking), **options.template_arguments},
            # Text and token ids have no tags that the library knows.
            thinking_tokens=self._choose_thinking_tokens(options, node) if messages is not None else None,
            action_markers=options.action_markers,
            tool_parser=self.tool_parser,
            target_timeout=self.timeout,
            # A server has other clients, whose tokens are not seen here.
            stall_timeout=self.stall_timeout
            if self.base_url is None or "stall_timeout" in self.model_fields_set
            else None,
            audit_rate=self.audit_rate,
        )

    def _thinking_argument(self, thinking: bool | None = None) -> dict[str, bool]:
        """Return the variable of the chat template that switches thinking: the call's, else the model's."""
        chosen = self.thinking if thinking is None else thinking
        return {} if chosen is None else {"enable_thinking": chosen}

    def _choose_thinking_tokens(self, options: CallOptions, node: str) -> int | None:
        """Return the budget of the thinking: the call's, else the model's for this node."""
        if options.thinking_tokens is not None:
            return options.thinking_tokens
        if not isinstance(self.thinking_tokens, dict):
            return self.thinking_tokens
        key = matching_key(list(self.thinking_tokens), node)
        return self.thinking_tokens[key] if key is not None else None

    def _sampling(self, options: CallOptions) -> Sampling:
        """Merge the sampling arguments: the call's, else the model's fields, else the recommendation of its makers."""
        values_by_name = dict(self._recommend_sampling())
        for source in (self, options):
            values = {name: getattr(source, name, None) for name in SamplingArguments.model_fields}
            values_by_name |= {name: value for name, value in values.items() if value is not None}
        # Pydantic does not check fields that were assigned after construction.
        chosen = SamplingArguments.read(values_by_name).model_dump(exclude_none=True)
        return Sampling(
            **{"max_tokens": NO_LIMIT, **chosen, "stop": tuple(chosen.get("stop", ()))},
            structured=options.constraint,
        )

    def _recommend_sampling(self) -> Mapping[str, Any]:
        return GREEDY

    def _choose_policy(self, options: CallOptions, run_manager: RunManager | None) -> tuple[VerifierPolicy, str]:
        """Return the policy of a call, and the path of the calling node."""
        node = options.node or node_path(_metadata(run_manager))
        configurable = (ensure_config().get("configurable") or {}).get(POLICY_KEY)
        return self.policy_for(node, policy=options.policy, configurable=configurable), node

    def policy_for(
        self, node: str | None = None, *, policy: PolicyLike | None = None, configurable: PolicyLike | None = None
    ) -> VerifierPolicy:
        """Return the policy that a call gets; its `explain()` names the rule that selected it.

        Args:
            node: Name or path ("research:planner") of the calling node; None: outside a graph.
            policy: The call's `policy` argument.
            configurable: `config["configurable"]["lookahead_policy"]`.
        """
        if policy is not None:
            chosen = as_policy(policy)
            rule = CONFIGURED if chosen.rule == CONFIGURED else "the call's own argument"
        elif configurable is not None:
            chosen, rule = as_policy(configurable), CONFIGURED
        else:
            where = f"in the node {node!r}" if node else "outside a graph"
            key = matching_key(list(self.policies), node or "")
            chosen = as_policy(self.policies[key] if key is not None else self.policy)
            default_rule = f"the model's own policy: nothing else chooses one {where}"
            rule = f"policies[{key!r}], {where}" if key is not None else default_rule
        return chosen.with_selection_rule(rule).with_depth(self.depth)

    def _all_policies(self) -> list[VerifierPolicy]:
        """Return the model's default policy and those of its nodes; raises PolicyError if one does not exist."""
        return [as_policy(policy).with_depth(self.depth) for policy in (self.policy, *self.policies.values())]

    def check_policies(self, graph: CompiledStateGraph[Any, Any, Any, Any], *, calls: Collection[str] = ()) -> None:
        """Check that every key of `policies` and `thinking_tokens` matches a node of a compiled graph or its subgraphs.

        Args:
            graph: The compiled graph.
            calls: Further names that middleware gives to its calls, such as "thinker" of `ThinkingMiddleware`.

        Raises:
            PolicyError: A key matches no node; the message lists the nodes.
        """
        subgraphs: Any = graph.get_subgraphs(recurse=True)
        graphs = [("", graph.nodes), *((f"{path.replace('|', ':')}:", inner.nodes) for path, inner in subgraphs)]
        named = {f"{path}{name}" for path, names in graphs for name in names if not name.startswith("__")}
        nodes = sorted({*named, *calls})
        budgets = self.thinking_tokens if isinstance(self.thinking_tokens, dict) else {}
        for field, keys in (("policies", self.policies), ("thinking_tokens", budgets)):
            for key in keys:
                if all(matching_key([key], node) is None for node in nodes):
                    raise PolicyError(f"{field}[{key!r}] matches no node of this graph, which has {', '.join(nodes)}")


def _thread(run_manager: RunManager | None) -> str | None:
    """LangGraph's `thread_id` of the calling graph."""
    found = {**(ensure_config().get("configurable") or {}), **_metadata(run_manager)}.get("thread_id")
    return None if found is None else str(found)


def _metadata(run_manager: RunManager | None) -> dict[str, Any]:
    """LangChain's metadata of a call; its streaming path passes no run manager, but the config has the same."""
    known = (run_manager.metadata if run_manager is not None else None) or {}
    return {**(ensure_config().get("metadata") or {}), **known}


def matching_key(keys: Sequence[str], node: str) -> str | None:
    """Return the key of `policies` that matches a node's path, or None."""
    # A name ("planner") matches that node in every graph, a path ("research:planner") that node in that subgraph, and a
    # pattern ("plan*", "research:*") all that fit it. The longest name or path comes first, then the first pattern.
    names = node.split(":") if node else []
    tails = [":".join(names[start:]) for start in range(len(names))]
    for tail in tails:
        if tail in keys:
            return tail
    patterns = (key for key in keys if any(character in key for character in "*?["))
    return next((key for key in patterns if any(fnmatchcase(tail, key) for tail in tails)), None)
