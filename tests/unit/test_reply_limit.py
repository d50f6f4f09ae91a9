"""The default limit of a reply, the limits of the templates, and the switch for thinking."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import HumanMessage
from pydantic import ValidationError

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.prompts import reply_limit
from lookahead_agent.agents.templates import build_plan_execute, build_react, build_reflection, build_self_consistency
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedTokenizer, reply_script
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import scripted_chat
from tests.unit.test_counting import add


def limits(llm: ChatLookahead) -> set[int]:
    assert llm.engines is not None
    return {sampling.max_tokens for _, sampling in llm.engines.target.requests}  # type: ignore[attr-defined]


def chat(reply: str, context_length: int = 4000, tags: ThinkingTags | None = None, **fields: Any) -> ChatLookahead:
    engine = ScriptedEngine(ScriptedTokenizer(tags), reply_script(reply), context_length=context_length)
    return ChatLookahead(engines=EngineSet(engine), policy="off", **fields)


def test_reply_may_fill_the_context_unless_a_limit_is_given() -> None:
    llm = chat("word " * 3000)
    reply = llm.invoke("?")
    assert reply.response_metadata["finish_reason"] == "stop"
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["output_tokens"] > 2999
    assert limits(llm) == {4000 - reply.usage_metadata["input_tokens"]}
    full = chat("word " * 3000, context_length=100).invoke("?")
    assert full.response_metadata["finish_reason"] == "length"
    assert chat("word " * 3000).invoke("?", max_tokens=7).usage_metadata["output_tokens"] == 7  # type: ignore[index]
    assert chat("word " * 3000, max_tokens=8).invoke("?").usage_metadata["output_tokens"] == 8  # type: ignore[index]
    assert "max_output_tokens" not in (llm.profile or {}), "the context alone limits it"


@pytest.mark.parametrize("name", ["react", "plan_execute", "self_consistency", "reflection"])
@pytest.mark.parametrize(("own", "expected"), [(None, {1024}), (50, {50})])
def test_templates_limit_the_replies_of_a_model_without_a_limit(name: str, own: int | None, expected: set[int]) -> None:
    llm = scripted_chat("Plan:\n1. add(a=1, b=2)", policy="off", max_tokens=own)
    tools = [add] if name in ("react", "plan_execute") else []
    builds = {
        "react": build_react, "plan_execute": build_plan_execute, "self_consistency": build_self_consistency,
        "reflection": build_reflection,
    }  # fmt: skip
    builds[name](llm, tools).invoke({"messages": [HumanMessage("What is 1 + 2?")]})
    assert limits(llm) == expected


def test_limit_of_a_template_leaves_room_for_thinking_and_respects_other_limits() -> None:
    assert reply_limit(chat("a", tags=ThinkingTags())) == {"max_tokens": 8192}
    assert reply_limit(chat("a")) == {"max_tokens": 1024}
    assert reply_limit(chat("a").bind(max_tokens=3)) == {}
    assert reply_limit(chat("a").bind(temperature=0)) == {"max_tokens": 1024}
    assert reply_limit(object()) == {}


def test_thinking_is_a_variable_of_the_chat_template() -> None:
    def arguments(options: dict[str, Any], **fields: Any) -> dict[str, Any]:
        request = chat("a", **fields).request([HumanMessage("?")], CallOptions.read(options))
        return dict(request.template_arguments)

    assert arguments({}) == {}
    assert arguments({"thinking": False}) == {"enable_thinking": False}
    assert arguments({}, thinking=True) == {"enable_thinking": True}
    assert arguments({"thinking": False}, thinking=True) == {"enable_thinking": False}
    assert arguments({"template_arguments": {"enable_thinking": True}}, thinking=False) == {"enable_thinking": True}
    assert chat("a", thinking=False).invoke("?").text == "a"


@pytest.mark.parametrize("value", [2048, 0, "low", {"type": "enabled", "budget_tokens": 1024}])
def test_budget_of_thinking_tokens_has_a_name_of_its_own(value: Any) -> None:
    with pytest.raises(ConfigurationError, match="thinking_tokens is the budget of tokens"):
        chat("a").invoke("?", thinking=value)
    with pytest.raises(ValidationError, match="thinking_tokens is the budget of tokens"):
        chat("a", thinking=value)


def test_chat_template_without_the_switch_is_an_error() -> None:
    llm = chat("a", thinking=False)
    assert llm.engines is not None
    llm.engines.target.tokenizer.template_variables = frozenset()  # type: ignore[misc]
    with pytest.raises(ConfigurationError, match="reads no enable_thinking"):
        llm.invoke("?")
