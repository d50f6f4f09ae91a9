"""Self-consistency: several reasoned answers in one batch, and a vote (Wang et al., 2022).

    sampler (k answers at once, stopped when the vote is decided) ──▶ (answer)

The answers share one batch of the engine. The sampler stops those that can no longer change the vote. Each is a long
thought with a short answer, so the sampler's policy is lenient. The vote corrects a wrong answer unless most are wrong:
"fast" costs a third of the correct answers.

    llm = ChatLookahead(policies=POLICIES, temperature=0.7)
    graph = build_self_consistency(llm)
    graph.invoke({"messages": [("human", "...")]})["messages"][-1].text
"""

from __future__ import annotations

import asyncio
import contextvars
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, SystemMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from lookahead_agent.agents.templates import default_llm

SAMPLER = """You answer a question. Think in short steps with a blank line between them. End with one line that has \
only the answer, as short as it can be, like this:

Answer: Lisbon"""

_ANSWER = re.compile(r"answer\W*[:=]\s*(.+)", re.IGNORECASE)

POLICIES = {"sampler": "balanced"}


class SelfConsistencyState(MessagesState, total=False):
    """`messages`, whose last is a reply with the answer that won, and the votes, which begin anew with each question.

    `replies` are those that were written to the end.
    """

    votes: dict[str, int]
    replies: list[str]


def answer_of(text: str) -> str | None:
    """The answer of a reply, in one form: without units around a number, thousands separators and closing zeros."""
    found = _ANSWER.findall(text)
    if not found:
        return None
    answer: str = found[-1].strip().strip("*").rstrip(".").strip()
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", answer)
    if len(numbers) == 1:
        number: str = numbers[0].replace(",", "")
        return number.rstrip("0").rstrip(".") if "." in number else number
    return answer.lower() or None


def build_self_consistency(
    llm: BaseChatModel,
    tools: Sequence[BaseTool] = (),
    checkpointer: BaseCheckpointSaver[str] | None = None,
    *,
    samples: int = 5,
    read: Callable[[str], str | None] = answer_of,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Build the graph.

    Args:
        llm: Chat model, at a temperature above 0.
        tools: None are used; for likeness with the other templates.
        checkpointer: Saves the state after every node.
        samples: Answers that are begun (k), all at once or as many as a run's `max_concurrency` allows.
        read: Finds the answer in a reply; replies with equal ones vote for the same.

    Raises:
        ValueError: Tools, or no samples.
    """
    if tools:
        raise ValueError("self_consistency uses no tools: give them to react or plan_execute")
    if samples < 1:
        raise ValueError("samples is at least 1")

    async def asampler(state: SelfConsistencyState, config: RunnableConfig) -> dict[str, Any]:
        messages = [SystemMessage(SAMPLER), *state["messages"]]
        # Each has its own seed, or all would say the same of a model that has one.
        seed = getattr(llm, "seed", None)
        turns = asyncio.Semaphore(config.get("max_concurrency") or samples)

        async def sample(number: int) -> AIMessage:
            async with turns:
                return await llm.ainvoke(messages, **({} if seed is None else {"seed": seed + number}))

        tasks = [asyncio.ensure_future(sample(number)) for number in range(samples)]
        replies: list[AIMessage] = []
        votes: Counter[str] = Counter()
        try:
            for done in asyncio.as_completed(tasks):
                replies.append(await done)
                if (answer := read(replies[-1].text)) is not None:
                    votes[answer] += 1
                if is_decided(votes, samples - len(replies)):
                    break
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        best = votes.most_common(1)[0][0] if votes else None
        # Without a vote that can be read, the first reply is as good as any.
        won = next(reply for reply in replies if read(reply.text) == best)
        return {"messages": [won], "votes": dict(votes), "replies": [reply.text for reply in replies]}

    def sampler(state: SelfConsistencyState, config: RunnableConfig) -> dict[str, Any]:
        # Whether or not the caller is in an event loop, and in the context that knows the graph's node.
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(context.run, asyncio.run, asampler(state, config)).result()

    builder = StateGraph(SelfConsistencyState)
    builder.add_node("sampler", RunnableLambda(sampler, asampler))
    builder.add_edge(START, "sampler")
    builder.add_edge("sampler", END)
    return builder.compile(checkpointer=checkpointer)


def graph() -> CompiledStateGraph[Any, Any, Any, Any]:
    """The graph for LangGraph's own server, on the models that the environment names (`default_llm`)."""
    return build_self_consistency(default_llm(POLICIES).model_copy(update={"temperature": 0.7}))


def is_decided(votes: Counter[str], left: int) -> bool:
    """Whether the answers that are left cannot change which has most votes."""
    ranked = votes.most_common(2)
    if not ranked:
        return False
    second = ranked[1][1] if len(ranked) > 1 else 0
    return ranked[0][1] > second + left
