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


def test_policy_of_the_call_precedes_those_of_config_node_and_model() -> None:
    llm = scripted_chat(REPLY, policies={"a": "strict"}, policy="fast")

    def chosen_policy(**changes: Any) -> tuple[str, str]:
        policy = llm.policy_for(**{"policy": "off", "configurable": "exact", "node": "a", **changes})
        assert policy.rule is not None
        return policy.name, policy.rule

    assert chosen_policy() == ("off", "the call's own argument")
    assert chosen_policy(policy=None) == ("exact", 'config["configurable"]["lookahead_policy"]')
    assert chosen_policy(policy=None, configurable=None) == ("strict", "policies['a'], in the node 'a'")
    other_node = {"policy": None, "configurable": None, "node": "b"}
    assert chosen_policy(**other_node) == ("fast", "the model's own policy: nothing else chooses one in the node 'b'")
    assert chosen_policy(**{**other_node, "node": ""})[1].endswith("outside a graph")


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
def test_longest_name_precedes_the_first_matching_pattern(path: str, key: str | None) -> None:
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
def test_node_path_joins_the_names_of_nested_nodes(namespace: str | None, path: str) -> None:
    metadata = {"langgraph_node": "planner", "langgraph_checkpoint_ns": namespace}
    assert node_path(metadata) == path
    assert node_path({}) == ""


def test_explanation_states_the_policy_and_the_rule_that_chose_it() -> None:
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
    """A graph of nodes in sequence; a node is True to call the model, or a compiled graph."""
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
    """A tool call if the prompt has tools and no result yet, else the reply."""
    return CALL if "tools:" in prompt and "tool: 3" not in prompt else REPLY


POLICIES = {
    "planner": "exact",
    "executor": "off",
    "research:planner": "fast",
    "helper:model": "random:probability=1",
    "team:*": "strict",
}


def paths_and_policies(messages: list[AnyMessage]) -> list[tuple[str, str]]:
    metadata = [message.response_metadata["lookahead"] for message in messages if isinstance(message, AIMessage)]
    return [(entry["path"], entry["policy"]) for entry in metadata]


EXPECTED = [
    ("planner", "exact"),
    ("executor", "off"),
    ("research:planner", "fast"),
    ("team:inner:writer", "strict"),
    ("helper:model", "random:probability=1"),
    ("helper:model", "random:probability=1"),
    ("writer", "balanced"),
]


def nested_graph(llm: ChatLookahead) -> Any:
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
    graph = nested_graph(llm)
    llm.check_policies(graph)
    barrier = threading.Barrier(10)

    def run(number: int) -> list[tuple[str, str]]:
        barrier.wait()
        return paths_and_policies(graph.invoke({"messages": [HumanMessage(f"Question {number}?")]})["messages"])

    with ThreadPoolExecutor(10) as threads:
        for result in threads.map(run, range(10)):
            assert result == EXPECTED


async def test_every_node_has_its_policy_when_the_graph_is_streamed() -> None:
    graph = nested_graph(scripted_chat(reply_to, policies=POLICIES))
    final: dict[str, Any] = {}
    async for mode, data in graph.astream({"messages": [HumanMessage("?")]}, stream_mode=["messages", "values"]):
        final = data if mode == "values" else final
    assert paths_and_policies(final["messages"]) == EXPECTED


def test_check_policies_rejects_entries_without_a_node() -> None:
    graph = nested_graph(scripted_chat(REPLY))
    for key in ("planer", "research:executor", "x*"):
        llm = scripted_chat(REPLY, policies={"planner": "exact", key: "off"})
        with pytest.raises(PolicyError, match="research:planner"):
            llm.check_policies(graph)


def test_middleware_distinguishes_planning_from_acting() -> None:
    llm = scripted_chat(reply_to)
    for middleware, names in (
        (LookaheadPolicyMiddleware("fast", "off"), ["fast", "off"]),
        (LookaheadPolicyMiddleware(acting={"verifier": "exact"}), ["balanced", "custom"]),
    ):
        agent = create_agent(llm, [add], middleware=[middleware])
        result = agent.invoke({"messages": [HumanMessage("1 + 2?")]})
        assert [policy for _, policy in paths_and_policies(result["messages"])] == names


async def test_middleware_works_in_ainvoke() -> None:
    agent = create_agent(scripted_chat(reply_to), [add], middleware=[LookaheadPolicyMiddleware("fast", "off")])
    result = await agent.ainvoke({"messages": [HumanMessage("1 + 2?")]})
    assert [policy for _, policy in paths_and_policies(result["messages"])] == ["fast", "off"]


def test_middleware_rejects_an_unknown_policy() -> None:
    with pytest.raises(PolicyError):
        LookaheadPolicyMiddleware("lenient")
