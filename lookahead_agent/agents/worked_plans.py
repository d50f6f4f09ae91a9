"""What a planner with a calculator is told: worked examples, which a small draft model follows better than rules."""

from __future__ import annotations

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

_PLANNER = """You plan how to solve a problem with a calculator. Write only the plan: one calculation per line, the \
last one giving the answer. Take the numbers from the problem; "result 1" stands for what line 1 comes to."""

_EXAMPLES = (
    (
        "A teacher buys 12 pens at $1.50 each and 3 books at $20 each. She pays with a $100 bill. How much change does "
        "she get?",
        "Cost of the pens: 12 * 1.50",
        "Cost of the books: 3 * 20",
        "Cost of everything: result 1 + result 2",
        "Change: 100 - result 3",
    ),
    (
        "Tom runs 4 miles on each weekday and half as far on Saturday and on Sunday. How many miles does he run in 3 "
        "weeks?",
        "Miles on weekdays: 4 * 5",
        "Miles at the weekend: 4 / 2 * 2",
        "Miles in a week: result 1 + result 2",
        "Miles in 3 weeks: result 3 * 3",
    ),
    (
        "A shop had 240 apples. It sold 25% of them on Monday and 60 more on Tuesday. The rest is packed in bags of 8. "
        "How many bags are there?",
        "Apples sold on Monday: 240 * 25 / 100",
        "Apples left: 240 - result 1 - 60",
        "Bags: result 2 / 8",
    ),
)


def worked_plans() -> list[BaseMessage]:
    """The messages before the problem: what to do, and three problems with their plans."""
    shown: list[BaseMessage] = [SystemMessage(_PLANNER)]
    for problem, *lines in _EXAMPLES:
        plan = "\n".join(f"{number}. {line}" for number, line in enumerate(lines, 1))
        shown += [HumanMessage(problem), AIMessage(plan)]
    return shown
