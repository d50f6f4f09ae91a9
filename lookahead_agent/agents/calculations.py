"""Lines of a plan that are calculations: the graph carries them out, and no model puts them into a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from langchain_core.tools import BaseTool

RESULT = re.compile(r"\b(?:result|step)\s*#?(\d{1,4})\b", re.IGNORECASE)
"""How a line names what another one comes to."""

_ARITHMETIC = re.compile(r"[\s\d.,+*/×÷()%$€£^−–-]+")
_OPERATOR = re.compile(r"[\d)%]\s*[+*/×÷^−–-]")
_NUMBERED = re.compile(r"[\W_]{0,4}(\d{1,4})[.)]\W{0,3}\s(.*\S)")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_ABOUT = re.compile(r"([^:=]*[^\W\d_][^:=]*)([:=])")
_AMOUNT = re.compile(r"[$€£]?-?\d[\d.,]*%?\s+[^\W\d_][^\d+*/()]*")
_TIMES = re.compile(r"(?<=[\d)])\s*x\s*(?=[\d(]|result)")


def find_calculator(tools: Sequence[BaseTool]) -> BaseTool | None:
    """The tool named "calculator", if there is one that takes one argument: an expression."""
    return next((tool for tool in tools if tool.name == "calculator" and len(tool.args) == 1), None)


def calculator_arguments(calculator: BaseTool, expression: str) -> dict[str, str]:
    """The arguments of a call of such a tool."""
    return {next(iter(calculator.args)): expression}


def calculation(line: str) -> str | None:
    """The calculation in a plan's line without its number, such as "result 1 + 60" in "Total cost: result 1 + 60".

    A result that the line works out itself ("3 * 20 = 60 dollars") is left out. None: the line says something else, or
    more than that.
    """
    line = _TIMES.sub(" * ", RESULT.sub(r"result \1", line))
    sides = [side.strip().rstrip(".") for side in re.split("[:=]", line)]
    # "= 10 miles" is the result of a calculation, and alone is none.
    if len(sides) > 1 and _AMOUNT.fullmatch(sides[-1]) and _OPERATOR.search(sides[-2]) and _arithmetic(sides[-2]):
        sides.pop()
    possible = [side for side in sides if _arithmetic(side)]
    if not possible or not _arithmetic(sides[-1]):
        return None
    # Numbers alone count only where nothing is calculated: "Pens: 12".
    return next((side for side in possible if _OPERATOR.search(side)), possible[-1])


def _arithmetic(text: str) -> bool:
    return _ARITHMETIC.fullmatch(RESULT.sub("1", text)) is not None and re.search(r"\d", text) is not None


class PlanReader:
    """Reads a plan's lines as "2. Total: result 1 + 60", in their order.

    A line names what another one comes to by its number, or by what that line says it is about: "3. Each: total / 4".
    """

    def __init__(self) -> None:
        self._about: dict[str, int | None] = {}

    def calculation(self, line: str) -> tuple[int, str] | None:
        """The next line's number and its calculation, which names results of earlier lines; None for another line."""
        found = _NUMBERED.match(line)
        if found is None:
            return None
        number = int(found[1])
        expression = calculation(self.named_by_number(number, found[2]))
        if expression is None or any(not 0 < other < number for other in named_results(expression)):
            return None
        return number, expression

    def named_by_number(self, number: int, line: str) -> str:
        """The next line, without its number, as a calculation that names results by number, if it is one at all."""
        about, sign, rest = _split(line)
        named = f"{about}{sign}{self._by_number(rest)}"
        about = about.strip().lower()
        if about and not RESULT.search(f"{about} 1"):  # "result" names lines by their numbers
            # A name of two lines names neither.
            self._about[about] = None if about in self._about else number
        return line if calculation(named) is None else named

    def _by_number(self, text: str) -> str:
        known = {about: number for about, number in self._about.items() if number is not None}
        if not known:
            return text
        longest_first = "|".join(re.escape(about) for about in sorted(known, key=len, reverse=True))
        names = re.compile(rf"(?<!\w)(?:the\s+)?({longest_first})(?!\w)", re.IGNORECASE)
        return names.sub(lambda match: f"result {known[match[1].lower()]}", text)


def _split(line: str) -> tuple[str, str, str]:
    """What a line is about, the sign that ends that, and the rest; about nothing, where it calculates at once."""
    found = _ABOUT.match(line)
    return (found[1], found[2], line[found.end() :]) if found else ("", "", line)


def named_results(text: str) -> set[int]:
    """Numbers of the results that a text names."""
    return {int(number) for number in RESULT.findall(text)}


def with_results(expression: str, result: Callable[[int], str]) -> str:
    """A calculation with something in the place of each result that it names."""
    return RESULT.sub(lambda match: result(int(match[1])), expression)


def with_placeholders(expression: str, placeholder: str) -> str:
    """A calculation that names results as "#E1" or "$1", by its placeholder. Amounts of money lose their sign."""
    # A result may be below zero, and -2^2 is not (-2)^2.
    name = f"({placeholder}%d)" if "^" in expression or "**" in expression else f"{placeholder}%d"
    return with_results(re.sub("[$€£]", "", expression), lambda number: name % number)


def fill_results(line: str, results: Mapping[int, str]) -> str | None:
    """A line's `calculation` with the results that it names, by their numbers.

    None: the line is something else, or names a result that is missing or no number.
    """
    expression = calculation(line)
    if expression is None:
        return None
    known = {number: results.get(number, "") for number in named_results(expression)}
    if not all(map(_NUMBER.fullmatch, known.values())):
        return None
    return with_results(expression, lambda number: f"({known[number]})" if known[number] < "0" else known[number])
