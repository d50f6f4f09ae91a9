"""Reflection: write, criticise, revise, until nothing has to change or the limit is reached.

    writer ──▶ critic ──▶ decider ──▶ reviser ──▶ critic … ──▶ (answer)

A critique is a thought: "the day is missing" and "there is no day" mean the same, so the critic's policy is lenient.
The decider reads only the critique, and decides whether the text has to change. Its verdict is one word by schema.
Writer and reviser write the final text, so their policies are strict. A reviser that changes nothing ends the run.

    llm = ChatLookahead(policies=POLICIES)
    graph = build_reflection(llm)
    graph.invoke({"messages": [("human", "...")]})["messages"][-1].text
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from lookahead_agent.agents.prompts import reply_limit, since_last_question
from lookahead_agent.agents.templates import default_llm

WRITER = "You carry out a task carefully. Write what is asked for, and nothing about how you did it."

CRITIC = """You are a strict but fair reviewer. Check a text against its task, one line for each point: first what is \
asked for, then whether each point is there and right. The last line says what has to change, or "Nothing has to \
change."."""

REVIEW = "Task: {task}\n\nText:\n{text}"

# A small draft model follows examples better than rules: tasks with texts, and their critiques.
EXAMPLES = {
    REVIEW.format(
        task="Write one sentence that invites Ann to a picnic on Sunday at noon.",
        text="Dear Ann, come to our picnic at noon!",
    ): "Asked for: one sentence, Ann, a picnic, Sunday, noon.\nSunday: missing.\nThe day has to be added: Sunday.",
    REVIEW.format(
        task="Write a Python function that says whether a text is a palindrome.",
        text="def is_palindrome(text):\n    return text == text[::-1]",
    ): "Asked for: a function, palindromes.\nThe text is compared with its reverse: right.\nNothing has to change.",
}

DECIDER = """You read what a reviewer says about a text. Decide "good" if the reviewer says that nothing has to \
change, and "revise" if the reviewer names something that is wrong or missing. Small matters of taste are no reason."""

REVISER = """You improve a text by a reviewer's critique. Write the whole text anew, with what the critique asks for \
and without talking about it."""

VERDICT = {
    "title": "verdict",
    "description": "Whether the text has to be revised.",
    "type": "object",
    "properties": {"verdict": {"enum": ["good", "revise"]}},
    "required": ["verdict"],
}

POLICIES = {"critic": r"balanced:delimiter=/:|\n+/", "decider": "off", "writer": "strict", "reviser": "strict"}


class ReflectionState(MessagesState, total=False):
    """`messages`, and the text with its critique, which the writer resets for each task."""

    text: AIMessage
    critique: str
    good: bool
    revisions: int
    changed: bool


def build_reflection(
    llm: BaseChatModel,
    tools: Sequence[BaseTool] = (),
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    max_revisions: int = 2,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the graph, which revises a text at most `max_revisions` times and uses no tools.

    Raises:
        ValueError: `tools` is not empty, or `max_revisions` is negative.
    """
    if tools:
        raise ValueError("reflection uses no tools: give them to react or plan_execute")
    if max_revisions < 0:
        raise ValueError("max_revisions is at least 0")

    def review_request(state: ReflectionState) -> str:
        return REVIEW.format(task=since_last_question(state["messages"])[0].text, text=state["text"].text)

    def writer(state: ReflectionState) -> list[AnyMessage]:
        since_last_question(state["messages"])  # an empty task is an error
        return [SystemMessage(WRITER), *state["messages"]]

    def critic(state: ReflectionState) -> list[AnyMessage]:
        examples = [part for text, critique in EXAMPLES.items() for part in (HumanMessage(text), AIMessage(critique))]
        return [SystemMessage(CRITIC), *examples, HumanMessage(review_request(state))]

    def decider(state: ReflectionState) -> list[AnyMessage]:
        return [SystemMessage(DECIDER), HumanMessage(f"The reviewer says:\n{state['critique']}")]

    def reviser(state: ReflectionState) -> list[AnyMessage]:
        return [SystemMessage(REVISER), HumanMessage(f"{review_request(state)}\n\nCritique:\n{state['critique']}")]

    def begin(state: dict[str, Any]) -> dict[str, Any]:
        return {"text": state["reply"], "critique": "", "good": False, "revisions": 0, "changed": True}

    def decide(state: dict[str, Any]) -> dict[str, Any]:
        # An unreadable verdict counts as "revise".
        parsed = state["reply"]["parsed"]
        return {"good": isinstance(parsed, dict) and parsed.get("verdict") == "good"}

    def revise(state: dict[str, Any]) -> dict[str, Any]:
        # An empty reply is not a revision.
        changed = state["reply"].text.strip() not in ("", state["text"].text.strip())
        text = state["reply"] if changed else state["text"]
        return {"text": text, "revisions": state["revisions"] + 1, "changed": changed}

    def after_writing(state: ReflectionState) -> Literal["critic", "answer"]:
        return "critic" if state["changed"] and state["revisions"] < max_revisions else "answer"

    limit = reply_limit(llm)
    judge, author = llm.with_structured_output(VERDICT, include_raw=True, **limit), llm.bind(**limit)
    builder = StateGraph(ReflectionState)
    builder.add_node("writer", _node(writer, author, begin))
    builder.add_node("critic", _node(critic, author, lambda state: {"critique": state["reply"].text.strip()}))
    builder.add_node("decider", _node(decider, judge, decide))
    builder.add_node("reviser", _node(reviser, author, revise))
    builder.add_node("answer", lambda state: {"messages": [state["text"]]})
    builder.add_edge(START, "writer")
    builder.add_conditional_edges("writer", after_writing)
    builder.add_edge("critic", "decider")
    builder.add_conditional_edges("decider", lambda s: "answer" if s["good"] else "reviser", ["answer", "reviser"])
    builder.add_conditional_edges("reviser", after_writing)
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_reflection(default_llm(POLICIES))


def _node(
    prompt: Callable[[Any], list[AnyMessage]], model: Runnable[Any, Any], update: Callable[[Any], dict[str, Any]]
) -> Runnable[Any, dict[str, Any]]:
    """Build a node that calls a model, in `invoke` and `ainvoke`; `update` gets the state with the `reply`."""
    return RunnablePassthrough.assign(reply=RunnableLambda(prompt) | model) | RunnableLambda(update)
