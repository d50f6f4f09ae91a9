"""A trace page of a run: accepted and rejected draft steps, and when."""

from lookahead_agent import ChatLookahead
from lookahead_agent.agents.templates import build_plan_execute, template
from lookahead_agent.trace.recorder import TraceRecorder
from lookahead_agent.trace.timeline import timeline, write_page

with ChatLookahead(policies={"executor": "off"}, temperature=0) as llm, TraceRecorder("run.jsonl") as recorder:
    graph = build_plan_execute(llm, [template("tools", "calculator").calculator])
    question = {"messages": [("human", "How much are 12 pens at $1.50?")]}
    graph.invoke(question, {"callbacks": [recorder]})
write_page(timeline(recorder.rows), "run.html", recorder.rows)
print("run.html")
