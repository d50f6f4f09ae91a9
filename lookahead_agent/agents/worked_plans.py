"""What a planner with a calculator is told: worked examples, which a small draft model follows better than rules."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from lookahead_agent.agents.calculations import with_results

_PLANNER = """You plan how to solve a problem with a calculator. Write only the plan: one calculation per line, the \
last one giving the answer. Take the numbers from the problem; "result 1" stands for what line 1 comes to."""

_THINKER = """You think about how to solve a problem with a calculator, one calculation at a time. Write only the next \
calculation, with numbers from the problem or from what came out so far. When the problem is solved, write "Done."."""

DONE = "Done."

_EXAMPLES: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "A teacher buys 12 pens at $1.50 each and 3 books at $20 each. She pays with a $100 bill. How much change does "
        "she get?",
        (
            ("Cost of the pens: 12 * 1.50", "18"),
            ("Cost of the books: 3 * 20", "60"),
            ("Cost of everything: result 1 + result 2", "78"),
            ("Change: 100 - result 3", "22"),
        ),
    ),
    (
        "Tom runs 4 miles on each weekday and half as far on Saturday and on Sunday. How many miles does he run in 3 "
        "weeks?",
        (
            ("Miles on weekdays: 4 * 5", "20"),
            ("Miles at the weekend: 4 / 2 * 2", "4"),
            ("Miles in a week: result 1 + result 2", "24"),
            ("Miles in 3 weeks: result 3 * 3", "72"),
        ),
    ),
    (
        "A shop had 240 apples. It sold 25% of them on Monday and 60 more on Tuesday. The rest is packed in bags of 8. "
        "How many bags are there?",
        (
            ("Apples sold on Monday: 240 * 25 / 100", "60"),
            ("Apples left: 240 - result 1 - 60", "120"),
            ("Bags: result 2 / 8", "15"),
        ),
    ),
)


def worked_plans() -> list[BaseMessage]:
    """The messages before a problem that is to be planned: what to do, and three problems with their plans."""
    shown: list[BaseMessage] = [SystemMessage(_PLANNER)]
    for problem, lines in _EXAMPLES:
        plan = "\n".join(f"{number}. {line}" for number, (line, _) in enumerate(lines, 1))
        shown += [HumanMessage(problem), AIMessage(plan)]
    return shown


def worked_thoughts(question: str, so_far: Sequence[AnyMessage]) -> list[BaseMessage]:
    """The messages before the next thought of somebody who thinks one calculation at a time.

    Args:
        question: The problem.
        so_far: Thoughts, calls of the calculator, and what they came to; calls are left out here, for a thought that
            is a calculation says the same.
    """
    shown: list[BaseMessage] = [SystemMessage(_THINKER)]
    for problem, lines in _EXAMPLES:
        results = dict(enumerate((result for _, result in lines), 1))
        shown.append(HumanMessage(problem))
        for line, result in lines:
            shown += [AIMessage(with_results(line, results.__getitem__)), HumanMessage(result)]
        shown.append(AIMessage(DONE))
    shown.append(HumanMessage(question))
    for message in so_far:
        if isinstance(message, ToolMessage):
            shown.append(HumanMessage(message.text))
        elif not (isinstance(message, AIMessage) and message.tool_calls):
            shown.append(AIMessage(message.text.removeprefix("Thought: ")))
    return shown
