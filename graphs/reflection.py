"""Reflection: write, criticise, revise, until nothing has to change or the budget is spent.

    writer ──▶ critic ──▶ decider ──▶ reviser ──▶ critic … ──▶ (answer)

A critique is a thought: "the unit is missing" and "there is no unit" say the same, so the critic's policy is lenient.
The decider reads the critique alone, and says whether the text has to change: one word by schema, the target's own.
Writer and reviser write the text that leaves the agent: strict. A reviser that changes nothing ends the run.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_reflection(llm)
    graph.invoke({"task": "..."})["answer"]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from lookahead_agent.agents.metrics import Budget, Usage, add_usage
from lookahead_agent.agents.nodes import model_node, plain_node
from lookahead_agent.agents.templates import default_llm

WRITER = """You carry out a task carefully. Think in short steps with a blank line between them, and end with the \
result."""

CRITIC = """You are a strict but fair reviewer. Check a text against its task, one line for each point: first what is \
asked for, then whether each point is there and right. The last line says what has to change, or "Nothing has to \
change."."""

# A small draft model follows examples better than rules.
CRITIQUES = (
    (
        "A teacher buys 12 pens at $1.50 each and 3 books at $20 each. How much does she pay?",
        "The pens cost 12 * 1.50 = $18, the books 3 * 20 = $60. She pays $78.",
        "Asked for: what she pays.\nPens: 12 * 1.50 = 18, right.\nBooks: 3 * 20 = 60, right.\n"
        "Sum: 18 + 60 = 78, right.\nNothing has to change.",
    ),
    (
        "Write one sentence that invites Ann to a picnic on Sunday at noon.",
        "Dear Ann, come to our picnic at noon!",
        "Asked for: one sentence, Ann, a picnic, Sunday, noon.\nOne sentence: yes.\nAnn and the picnic: yes.\n"
        "Sunday: missing.\nNoon: yes.\nThe day has to be added: Sunday.",
    ),
    (
        "Tom runs 4 miles on each weekday and half as far on Saturday and on Sunday. How many miles does he run in 3 "
        "weeks?",
        "4 * 5 = 20 miles on weekdays and 2 at the weekend make 22 a week. In 3 weeks he runs 66 miles.",
        "Asked for: miles in 3 weeks.\nWeekdays: 4 * 5 = 20, right.\nWeekend: 4 / 2 * 2 = 4, not 2.\n"
        "Three weeks: (20 + 4) * 3 = 72, not 66.\nThe weekend has to become 4 miles, and the result 72.",
    ),
)

DECIDER = """You read what a reviewer says about a text. Decide "good" if the reviewer says that nothing has to \
change, and "revise" if the reviewer names something that is wrong or missing. Small matters of taste are no reason."""

REVISER = """You improve a text by a reviewer's critique. Write the whole text anew, with what the critique asks for \
and without talking about it."""


def to_review(task: str, text: str) -> str:
    """A text with its task, as critic and reviser see it."""
    return f"Task: {task}\n\nText:\n{text}"


_SHOWN = [
    message
    for task, text, critique in CRITIQUES
    for message in (HumanMessage(to_review(task, text)), AIMessage(critique))
]

VERDICT = {
    "title": "verdict",
    "description": "Whether the text has to be revised.",
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "revise"]}},
    "required": ["verdict"],
}

POLICIES = {"critic": r"balanced:delimiter=/:|\n+/", "decider": "off", "writer": "strict", "reviser": "strict"}


class ReflectionState(TypedDict, total=False):
    """The graph's state; only `task` is given at the start.

    `good` is whether the last critique leaves nothing to change, `changed` whether the last revision is another text
    than the one before, and `stopped` says which limit ended it, or that a revision changed nothing.
    """

    task: str
    answer: str
    critique: str
    good: bool
    revisions: int
    changed: bool
    usage: Annotated[Usage, add_usage]
    stopped: str


def build_reflection(
    llm: BaseChatModel,
    tools: Sequence[BaseTool] = (),
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    max_revisions: int = 2,
    budget: Budget | None = None,
) -> CompiledStateGraph[ReflectionState, None, ReflectionState, ReflectionState]:
    """Build the graph.

    Args:
        llm: Chat model.
        tools: None are used; for likeness with the other templates.
        checkpointer: Saves the state after every node.
        max_revisions: How often the text is revised at most.
        budget: What a run may cost.

    Raises:
        ValueError: Tools, or a negative number of revisions.
    """
    if tools:
        raise ValueError("reflection uses no tools: give them to react or plan_execute")
    if max_revisions < 0:
        raise ValueError("max_revisions is at least 0")
    budget = budget or Budget()
    judge = llm.with_structured_output(VERDICT, include_raw=True)

    def writer_prompt(state: ReflectionState) -> list[BaseMessage]:
        return [SystemMessage(WRITER), HumanMessage(state["task"])]

    def writer_update(state: ReflectionState, reply: AIMessage) -> ReflectionState:
        return {"answer": reply.text.strip(), "revisions": 0, "changed": True}

    def critic_prompt(state: ReflectionState) -> list[BaseMessage]:
        return [SystemMessage(CRITIC), *_SHOWN, HumanMessage(to_review(state["task"], state["answer"]))]

    def critic_update(state: ReflectionState, reply: AIMessage) -> ReflectionState:
        return {"critique": reply.text.strip()}

    def decider_prompt(state: ReflectionState) -> list[BaseMessage]:
        return [SystemMessage(DECIDER), HumanMessage(f"The reviewer says:\n{state['critique']}")]

    def decider_update(state: ReflectionState, reply: dict[str, Any]) -> ReflectionState:
        # A verdict that cannot be read is none, and the reviser follows the critique.
        return {"good": isinstance(reply["parsed"], dict) and reply["parsed"].get("verdict") == "good"}

    def reviser_prompt(state: ReflectionState) -> list[BaseMessage]:
        task = f"{to_review(state['task'], state['answer'])}\n\nCritique:\n{state['critique']}"
        return [SystemMessage(REVISER), HumanMessage(task)]

    def reviser_update(state: ReflectionState, reply: AIMessage) -> ReflectionState:
        # A reviser that says nothing has improved nothing.
        text = reply.text.strip() or state["answer"]
        return {"answer": text, "revisions": state["revisions"] + 1, "changed": text != state["answer"]}

    def end(state: ReflectionState) -> ReflectionState:
        return {"stopped": "" if state.get("good") else _stop(state) or ""}

    def _stop(state: ReflectionState) -> str | None:
        if not state.get("changed", True):
            return "a revision changed nothing"
        if state["revisions"] >= max_revisions:
            return f"the limit of {max_revisions} revisions is reached"
        return budget.reached(state.get("usage"))

    def after_writing(state: ReflectionState) -> Literal["critic", "end"]:
        return "end" if _stop(state) else "critic"

    def after_decider(state: ReflectionState) -> Literal["reviser", "end"]:
        return "end" if state["good"] or _stop(state) else "reviser"

    builder = StateGraph(ReflectionState)
    builder.set_node_defaults(timeout=budget.node_timeout)
    builder.add_node("writer", model_node(llm, writer_prompt, writer_update))
    builder.add_node("critic", model_node(llm, critic_prompt, critic_update))
    builder.add_node("decider", model_node(judge, decider_prompt, decider_update))
    builder.add_node("reviser", model_node(llm, reviser_prompt, reviser_update))
    builder.add_node("end", plain_node(end))
    builder.add_edge(START, "writer")
    builder.add_conditional_edges("writer", after_writing)
    builder.add_edge("critic", "decider")
    builder.add_conditional_edges("decider", after_decider)
    builder.add_conditional_edges("reviser", after_writing)
    builder.add_edge("end", END)
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[ReflectionState, None, ReflectionState, ReflectionState]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_reflection(default_llm(POLICIES))
