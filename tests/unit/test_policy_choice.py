from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages

from lookahead_agent import ChatLookahead, LookaheadPolicyMiddleware
from lookahead_agent.chat.requests import matching_key
from lookahead_agent.errors import PolicyError
from lookahead_agent.policy import as_policy, node_path
from tests.unit.chat import scripted_chat

REPLY = "First this.\n\nThen that.\n\nIt is 4."


def test_order_of_choice() -> None:
    llm = scripted_chat(REPLY, policies={"a": "strict"}, policy="fast")

    def chosen(**changes: Any) -> tuple[str, str]:
        policy = llm.policy_for(**{"policy": "off", "configurable": "exact", "node": "a", **changes})
        assert policy.rule is not None
        return policy.name, policy.rule

    assert chosen() == ("off", "the call's own argument")
    assert chosen(policy=None) == ("exact", 'config["configurable"]["lookahead_policy"]')
    assert chosen(policy=None, configurable=None) == ("strict", "policies['a'], in the node 'a'")
    other = {"policy": None, "configurable": None, "node": "b"}
    assert chosen(**other) == ("fast", "the model's own policy: nothing else chooses one in the node 'b'")
    assert chosen(**{**other, "node": ""})[1].endswith("outside a graph")


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("planner", "planner"),
        ("research:planner", "research:planner"),
        ("team:research:planner", "research:planner"),
        ("research:writer", "research:*"),
        ("other:planner", "planner"),
        ("replanner", "*planner"),
        ("executor", None),
    ],
)
def test_the_longest_name_goes_first_and_then_the_first_pattern(path: str, key: str | None) -> None:
    keys = ["research:*", "*planner", "planner", "research:planner"]
    assert matching_key(keys, path) == key


@pytest.mark.parametrize(
    ("namespace", "path"),
    [
        ("planner:1-2", "planner"),
        ("research:1-2|planner:3-4", "research:planner"),
        ("research:1-2|1|planner:3-4", "research:planner"),
        ("", "planner"),
        (None, "planner"),
    ],
)
def test_the_path_of_a_node(namespace: str | None, path: str) -> None:
    metadata = {"langgraph_node": "planner", "langgraph_checkpoint_ns": namespace}
    assert node_path(metadata) == path
    assert node_path({}) == ""


def test_explanations() -> None:
    llm = scripted_chat(REPLY, policies={"plan*": "balanced", "executor": "off"})
    assert llm.policy_for("planner").explain() == (
        "balanced: steps ahead where that is fastest; a draft step is accepted if it has a similarity of 0.56 to the "
        "target's, and has the same numbers, units and equations; where its models have a certificate of a risk of "
        "0.05, that decides "
        "(chosen by policies['plan*'], in the node 'planner')"
    )
    assert llm.policy_for("a:executor").explain().startswith("off: the target alone (chosen by policies['executor']")
    assert llm.policy_for(policy="exact").rule == "the call's own argument"
    assert as_policy("strict").explain().endswith("; the final answer is the target's")
    assert "with 2 candidates each" in as_policy("random:width=2").explain()


class State(TypedDict, total=False):
    messages: Annotated[list[AnyMessage], add_messages]


def graph_of(llm: ChatLookahead, **nodes: Any) -> Any:
    """A line of nodes; a node is True to call the model, or a compiled graph."""
    graph = StateGraph(State)
    for name, inner in nodes.items():
        graph.add_node(name, (lambda state: {"messages": [llm.invoke("What is it?")]}) if inner is True else inner)
    for first, second in zip([START, *nodes], [*nodes, END], strict=True):
        graph.add_edge(first, second)
    return graph.compile()


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def reply_to(prompt: str) -> str:
    """A tool call, once, for whoever has tools."""
    return CALL if "tools:" in prompt and "tool: 3" not in prompt else REPLY


POLICIES = {
    "planner": "exact",
    "executor": "off",
    "research:planner": "fast",
    "helper:model": "random:probability=1",
    "team:*": "strict",
}


def used(messages: list[AnyMessage]) -> list[tuple[str, str]]:
    figures = [message.response_metadata["lookahead"] for message in messages if isinstance(message, AIMessage)]
    return [(entry["path"], entry["policy"]) for entry in figures]


EXPECTED = [
    ("planner", "exact"),
    ("executor", "off"),
    ("research:planner", "fast"),
    ("team:inner:writer", "strict"),
    ("helper:model", "random:probability=1"),
    ("helper:model", "random:probability=1"),
    ("writer", "balanced"),
]


def everything(llm: ChatLookahead) -> Any:
    return graph_of(
        llm,
        planner=True,
        executor=True,
        research=graph_of(llm, planner=True),
        team=graph_of(llm, inner=graph_of(llm, writer=True)),
        helper=create_agent(llm, [add]),
        writer=True,
    )


def test_every_node_has_its_policy_in_subgraphs_and_agents_on_ten_threads() -> None:
    llm = scripted_chat(reply_to, policies=POLICIES)
    graph = everything(llm)
    llm.check_policies(graph)
    together = threading.Barrier(10)

    def run(number: int) -> list[tuple[str, str]]:
        together.wait()
        return used(graph.invoke({"messages": [HumanMessage(f"Question {number}?")]})["messages"])

    with ThreadPoolExecutor(10) as threads:
        for result in threads.map(run, range(10)):
            assert result == EXPECTED


async def test_every_node_has_its_policy_when_the_graph_is_streamed() -> None:
    graph = everything(scripted_chat(reply_to, policies=POLICIES))
    final: dict[str, Any] = {}
    async for mode, data in graph.astream({"messages": [HumanMessage("?")]}, stream_mode=["messages", "values"]):
        final = data if mode == "values" else final
    assert used(final["messages"]) == EXPECTED


def test_entries_without_a_node_are_found_when_the_graph_is_checked() -> None:
    graph = everything(scripted_chat(REPLY))
    for key in ("planer", "research:executor", "x*"):
        llm = scripted_chat(REPLY, policies={"planner": "exact", key: "off"})
        with pytest.raises(PolicyError, match="research:planner"):
            llm.check_policies(graph)


def test_the_middleware_tells_planning_from_acting() -> None:
    llm = scripted_chat(reply_to)
    for middleware, names in (
        (LookaheadPolicyMiddleware("fast", "off"), ["fast", "off"]),
        (LookaheadPolicyMiddleware(acting={"verifier": "exact"}), ["balanced", "custom"]),
    ):
        agent = create_agent(llm, [add], middleware=[middleware])
        result = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
        assert [policy for _, policy in used(result["messages"])] == names


async def test_the_middleware_in_an_event_loop() -> None:
    agent = create_agent(scripted_chat(reply_to), [add], middleware=[LookaheadPolicyMiddleware("fast", "off")])
    result = await agent.ainvoke({"messages": [HumanMessage("1 + 2?")]})
    assert [policy for _, policy in used(result["messages"])] == ["fast", "off"]


def test_the_middleware_refuses_what_cannot_work() -> None:
    with pytest.raises(PolicyError):
        LookaheadPolicyMiddleware("lenient")
