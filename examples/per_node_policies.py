"""Lenient where a graph plans, strict where it acts."""

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.agents.templates import build_plan_execute, template

with ChatLookahead(
    policies={
        "planner": "balanced",
        "executor": "off",
        "finisher": VerifierPolicy(name="mine", verifier="judge", p_aligned=0.9, depth=2),
    }
) as llm:
    graph = build_plan_execute(llm, [template("tools", "calculator").calculator])
    print(llm.policy_for("finisher").explain())
    question = {"messages": [("human", "Pens cost $1.50. How much are 12 of them?")]}
    print(graph.invoke(question)["messages"][-1].text)
