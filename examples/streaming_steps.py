"""Streams a plan, with accepted draft steps in green."""

from rich.console import Console

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import build_plan_execute, template

console = Console(highlight=False)
with ChatLookahead(policies={"executor": "off"}, stream_steps=True) as llm:
    graph = build_plan_execute(llm, [template("tools", "calculator").calculator])
    question = {"messages": [("human", "A box holds 12 eggs. How many are in 7 boxes?")]}
    for mode, data in graph.stream(question, stream_mode=["custom", "updates"]):
        if mode == "custom" and (step := data["lookahead_step"])["kind"] in ("accepted", "committed"):
            console.print(step["text"], style="green" if step["kind"] == "accepted" else None, end="", markup=False)
        elif mode == "updates":
            console.rule(", ".join(data))
