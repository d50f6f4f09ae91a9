"""Self-consistency: several reasoned answers in one batch, and a vote (Wang et al., 2022).

    sampler (k answers in parallel, until the vote is decided) ──▶ (answer)

The answers share one batch of the engine. The sampler cancels answers that can no longer change the vote. An answer is
a long thought with a short result, so the sampler's policy is lenient. The vote corrects a wrong answer unless most
answers are wrong. The policy "fast" costs a third of the correct answers.

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

from lookahead_agent.agents.prompts import reply_limit, since_last_question
from lookahead_agent.agents.templates import default_llm

SAMPLER = """You answer a question. Think in short steps with a blank line between them. End with one line that has \
only the answer, as short as it can be, like this:

Answer: Lisbon"""

_ANSWER = re.compile(r"answer\W*[:=]\s*(.+)", re.IGNORECASE)

POLICIES = {"sampler": "balanced"}


class SelfConsistencyState(MessagesState, total=False):
    """`messages`, which end with a reply that has the winning answer, and the votes on the last question.

    `replies` holds the texts of complete replies only.
    """

    votes: dict[str, int]
    replies: list[str]


def answer_of(text: str) -> str | None:
    """Extract a reply's answer. A lone number loses its unit, thousands separators and trailing decimal zeros."""
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
        tools: Must be empty. The parameter keeps the signature of the other templates.
        checkpointer: Saves the state after every node.
        samples: Number of answers (k), in parallel up to the run's `max_concurrency`.
        read: Extracts the answer from a reply. Equal answers are votes for the same.

    Raises:
        ValueError: `tools` is not empty, or `samples` is below 1.
    """
    if tools:
        raise ValueError("self_consistency uses no tools: give them to react or plan_execute")
    if samples < 1:
        raise ValueError("samples is at least 1")

    async def asampler(state: SelfConsistencyState, config: RunnableConfig) -> dict[str, Any]:
        since_last_question(state["messages"])  # an empty question is an error
        messages = [SystemMessage(SAMPLER), *state["messages"]]
        # With one seed, all samples would be equal: each gets a seed of its own.
        seed = getattr(llm, "seed", None)
        limit: dict[str, Any] = reply_limit(llm)
        slots = asyncio.Semaphore(config.get("max_concurrency") or samples)

        async def sample(number: int) -> AIMessage:
            async with slots:
                return await llm.ainvoke(messages, **limit, **({} if seed is None else {"seed": seed + number}))

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
        # If no reply has a readable answer, the first reply wins.
        winner = next(reply for reply in replies if read(reply.text) == best)
        return {"messages": [winner], "votes": dict(votes), "replies": [reply.text for reply in replies]}

    def sampler(state: SelfConsistencyState, config: RunnableConfig) -> dict[str, Any]:
        # A thread of its own works inside a running event loop too. The context holds the graph's node.
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


def is_decided(votes: Counter[str], remaining: int) -> bool:
    """Whether the remaining answers can no longer change the winner."""
    ranked = votes.most_common(2)
    if not ranked:
        return False
    second = ranked[1][1] if len(ranked) > 1 else 0
    return ranked[0][1] > second + remaining
