"""Every template on the real pair; templates with tools get a database and a calculator."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from importlib import resources
from typing import Any

import pytest
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.metrics import NodeMetrics
from lookahead_agent.agents.templates import build_reflection, build_self_consistency, template
from lookahead_agent.agents.tool_sources import load_tools

QUESTION = "How many sales are there in the city of Porto?"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> list[BaseTool]:
    """The SQL tool for a small shop's database, and a calculator."""
    database = tmp_path_factory.mktemp("shop") / "shop.db"
    connection = sqlite3.connect(database)
    connection.executescript(resources.files("lookahead_agent.agents").joinpath("shop.sql").read_text("utf-8"))
    connection.close()
    return load_tools([f"sql:{database}", "calculator"])


@pytest.fixture
def llm(request: pytest.FixtureRequest, default_llm: ChatLookahead) -> ChatLookahead:
    """A model with the template's own policies on running engines."""
    return ChatLookahead(policies=template("graphs", request.param).POLICIES, temperature=0, max_tokens=150)


def run(graph: Any, question: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Run a graph; return the final state and the policy of each node."""
    metrics = NodeMetrics()
    state = graph.invoke({"messages": [HumanMessage(question)]}, {"callbacks": [metrics]})
    assert isinstance(state["messages"][-1], AIMessage)
    assert state["messages"][-1].text
    return state, {node["node"]: node["policy"] for node in metrics.nodes()}


def results(messages: list[AnyMessage]) -> list[ToolMessage]:
    return [message for message in messages if isinstance(message, ToolMessage)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("llm", "name"),
    [(name, name) for name in ("react", "plan_execute", "rewoo", "llm_compiler", "supervisor")],
    indirect=["llm"],
)
def test_template_answers_from_the_results_of_its_tools(llm: ChatLookahead, name: str, tools: list[BaseTool]) -> None:
    tool_argument: Any = {"seller": [tools[0]], "calculator": [tools[1]]} if name == "supervisor" else tools
    limits = {"model_calls": 3} if name == "supervisor" else {}  # each of its specialists' answers takes several calls
    graph = getattr(template("graphs", name), f"build_{name}")(llm, tool_argument, **limits)
    state, policies = run(graph, QUESTION)
    assert results(state["messages"]), "a tool was called"
    if name != "supervisor":
        assert any("13" in result.text for result in results(state["messages"]))
        assert "13" in state["messages"][-1].text
    expected = template("graphs", name).POLICIES
    assert policies.keys() <= expected.keys()
    assert all(policies[node] == expected[node] for node in policies)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("llm", ["reflection"], indirect=True)
def test_reflection_answers_within_its_revisions(llm: ChatLookahead) -> None:
    graph = build_reflection(llm, max_revisions=1)
    state, policies = run(graph, "Write one sentence that says what 12 pens at $1.50 cost.")
    assert "18" in state["messages"][-1].text
    assert policies["critic"] == r"balanced:delimiter=/:|\n+/"
    assert policies["decider"] == "off"
    assert state["good"] or state["revisions"] == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("llm", ["self_consistency"], indirect=True)
def test_self_consistency_answers_with_the_majority(llm: ChatLookahead) -> None:
    # The small target and its draft do not always answer 18, so the test checks the vote.
    sampling = llm.model_copy(update={"temperature": 0.7, "seed": 1})
    graph = build_self_consistency(sampling, samples=3, read=last_number)
    state, policies = run(graph, "Pens cost $1.50 each. How much do 12 pens cost?")
    assert 2 <= sum(state["votes"].values()) <= 3
    winner = Counter(state["votes"]).most_common(1)[0][0]
    assert last_number(state["messages"][-1].text) == winner
    assert policies == {"sampler": "balanced"}


def last_number(text: str) -> str | None:
    found = re.findall(r"\d+(?:\.\d+)?", text)
    return f"{float(found[-1]):g}" if found else None
