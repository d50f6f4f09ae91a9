"""A tool of your own in a template, which asks before it calls the tool."""

from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import build_react


@tool
def order(item: str, number: int) -> str:
    """Order items for the office."""
    return f"ordered {number} x {item}"


with ChatLookahead(policies={"thinker": "balanced", "actor": "strict"}, temperature=0) as llm:
    graph = build_react(llm, [order], InMemorySaver(), ask_before=["order"])
    config = {"configurable": {"thread_id": "1"}}
    state = graph.invoke({"question": "Order 12 pens."}, config)
    for asked in state.get("__interrupt__", ()):
        print(asked.value)
        state = graph.invoke(Command(resume=True), config)
    print(state.get("answer"))
