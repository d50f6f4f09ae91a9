"""Middleware of agents: the calls' names, thoughts, loops that end, tools that fail, and results that do not fit."""

from __future__ import annotations

from langchain_core.language_models.fake_chat_models import FakeListChatModel

from lookahead_agent.agents.middleware import lookahead_settings
from tests.unit.chat import scripted_chat


def test_only_a_lookahead_model_gets_a_calls_name() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "off"})
    assert lookahead_settings(llm, node="planner") == {"node": "planner"}
    assert lookahead_settings(llm.bind(stop=["\n"]), node="planner") == {"node": "planner"}
    marked = lookahead_settings(llm, node="planner", action_markers=["Plan:"])
    assert marked == {"node": "planner", "action_markers": ("Plan:",)}
    assert lookahead_settings(FakeListChatModel(responses=["4"]), node="planner", action_markers=["Plan:"]) == {}


def test_a_calls_name_chooses_its_policy() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "off"})
    said = llm.bind(**lookahead_settings(llm, node="planner")).invoke("What is 2 + 2?").response_metadata["lookahead"]
    assert (said["node"], said["policy"]) == ("planner", "off")
