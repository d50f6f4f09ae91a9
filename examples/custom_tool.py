"""A tool of your own in a template, which asks before it calls the tool."""

from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import build_react, template


@tool
def order(item: str, number: int) -> str:
    """Order items for the office."""
    return f"ordered {number} x {item}"


with ChatLookahead(policies=template("graphs", "react").POLICIES, temperature=0) as llm:
    graph = build_react(llm, [order], InMemorySaver(), ask_before=["order"])
    config = {"configurable": {"thread_id": "1"}}
    state = graph.invoke({"messages": [("user", "Order 12 pens.")]}, config)
    for asked in state.get("__interrupt__", ()):
        for action in asked.value["action_requests"]:
            print(f"May this call be made? {action['name']}({action['args']})")
        # Or {"type": "reject", "message": "..."}, or "edit" with other arguments.
        state = graph.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    print(state["messages"][-1].text)
