"""Few-shot prompts of planners and thinkers: a small draft model follows worked examples better than rules."""

from __future__ import annotations

from collections.abc import Sequence

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

from lookahead_agent.agents.calculations import with_results

_PLANNER = """You plan how to solve a problem with a calculator. Write only the plan: one calculation per line, the \
last one giving the answer. Take the numbers from the problem; "result 1" stands for what line 1 comes to."""

_THINKER = """You think about how to solve a problem with a calculator, one calculation at a time. Write only the next \
calculation, with numbers from the problem or from what came out so far. When the problem is solved, write "Done."."""

_NEXT = """You think about how to solve a problem with tools, one step at a time. Write only what to do next, in one \
short line, and work out nothing. When the results answer the problem, write "Done."."""

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


_ERRANDS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Who wrote the report on bees, and how old was she then?",
        (
            ("Find who wrote the report on bees, and when.", "The report on bees (2019) is by Ida Holm."),
            ("Find when Ida Holm was born.", "Ida Holm, born in 1961 in Bergen, studied in Oslo."),
            ("Calculate 2019 - 1961.", "58"),
        ),
    ),
    (
        "A shop had 240 apples and sold 25% of them. How many are left?",
        (("Calculate 240 - 240 * 25 / 100.", "180"),),
    ),
)


def plan_examples() -> list[BaseMessage]:
    """The messages before a problem for the planner: the task, and three problems with their plans."""
    shown: list[BaseMessage] = [SystemMessage(_PLANNER)]
    for problem, lines in _EXAMPLES:
        plan = "\n".join(f"{number}. {line}" for number, (line, _) in enumerate(lines, 1))
        shown += [HumanMessage(problem), AIMessage(plan)]
    return shown


def calculation_prompt(question: str, so_far: Sequence[AnyMessage]) -> list[BaseMessage]:
    """The messages before the next thought of a thinker who has a calculator: one calculation.

    Args:
        question: The problem.
        so_far: Thoughts, calls and results. Calls are left out, for a thought that is a calculation says the same.
    """
    examples = []
    for problem, lines in _EXAMPLES:
        results = dict(enumerate((result for _, result in lines), 1))
        worked = [(with_results(line, results.__getitem__), result) for line, result in lines]
        examples.append((problem, worked))
    return _thoughts(_THINKER, examples, question, so_far)


def next_step_prompt(question: str, so_far: Sequence[AnyMessage]) -> list[BaseMessage]:
    """As `calculation_prompt`, for a thinker who has any tools: one line that says what to do next."""
    return _thoughts(_NEXT, _ERRANDS, question, so_far)


def _thoughts(
    system: str,
    examples: Sequence[tuple[str, Sequence[tuple[str, str]]]],
    question: str,
    so_far: Sequence[AnyMessage],
) -> list[BaseMessage]:
    shown: list[BaseMessage] = [SystemMessage(system)]
    for problem, lines in examples:
        shown.append(HumanMessage(problem))
        for line, result in lines:
            shown += [AIMessage(line), HumanMessage(result)]
        shown.append(AIMessage(DONE))
    shown.append(HumanMessage(question))
    for message in so_far:
        if isinstance(message, ToolMessage):
            shown.append(HumanMessage(message.text))
        elif not (isinstance(message, AIMessage) and (message.tool_calls or message.invalid_tool_calls)):
            shown.append(AIMessage(message.text.removeprefix("Thought: ")))
    return shown
