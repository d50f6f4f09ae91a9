"""The problem set that ships with the package: word problems in several steps, made by a program from a seed.

Nobody has trained on them, and every answer is certain. `python -m lookahead_agent.bench.generated` writes the file
anew; a test checks that it is the one that ships.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from lookahead_agent.jsonl import line_of

COUNT = 60
SEED = 2025

_NAMES = ("Ada", "Bruno", "Chen", "Dilara", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jun", "Kaya", "Leon")


def _shop(pick: random.Random) -> tuple[str, int]:
    name = pick.choice(_NAMES)
    pens, books = pick.randint(3, 15), pick.randint(2, 9)
    pen, book = pick.randint(2, 6), pick.randint(8, 19)
    paid = 10 * ((pens * pen + books * book) // 10 + pick.randint(2, 6))
    question = (
        f"{name} buys {pens} pens for ${pen} each and {books} notebooks for ${book} each, and pays with ${paid}. "
        "How many dollars of change are given back?"
    )
    return question, paid - pens * pen - books * book


def _crates(pick: random.Random) -> tuple[str, int]:
    crates, apples, sold, eaten = pick.randint(9, 25), pick.randint(20, 48), pick.randint(2, 8), pick.randint(5, 18)
    question = (
        f"A farmer fills {crates} crates with {apples} apples each. {sold} full crates are sold at the market, and "
        f"{eaten} of the other apples are eaten. How many apples are left?"
    )
    return question, (crates - sold) * apples - eaten


def _trip(pick: random.Random) -> tuple[str, int]:
    name = pick.choice(_NAMES)
    first, second = pick.randint(40, 90), pick.randint(50, 110)
    hours, more = pick.randint(2, 5), pick.randint(2, 4)
    total = first * hours + second * more + pick.randint(15, 120)
    question = (
        f"{name} drives {hours} hours at {first} km per hour and then {more} hours at {second} km per hour. The whole "
        f"way is {total} km long. How many kilometres are left?"
    )
    return question, total - first * hours - second * more


def _wages(pick: random.Random) -> tuple[str, int]:
    name = pick.choice(_NAMES)
    wage, hours, extra = pick.randint(12, 30), pick.randint(20, 40), pick.randint(2, 9)
    rent = pick.randint(90, 200)
    question = (
        f"{name} earns ${wage} an hour for {hours} hours, and twice as much an hour for {extra} hours on Sunday. "
        f"${rent} of it go to the rent. How many dollars remain?"
    )
    return question, wage * hours + 2 * wage * extra - rent


def _tank(pick: random.Random) -> tuple[str, int]:
    minutes, rate, leak = pick.randint(12, 45), pick.randint(11, 30), pick.randint(2, 9)
    start = pick.randint(50, 400)
    question = (
        f"A tank holds {start} litres of water. For {minutes} minutes a pump adds {rate} litres every minute while "
        f"{leak} litres leak out every minute. How many litres are in the tank then?"
    )
    return question, start + minutes * (rate - leak)


def _seats(pick: random.Random) -> tuple[str, int]:
    rows, seats = pick.randint(14, 32), pick.randint(12, 26)
    adults, price = pick.randint(60, 140), pick.randint(8, 15)
    children = pick.randint(30, min(120, rows * seats - adults - 1))
    half = 2 * (price // 2)
    question = (
        f"A theatre has {rows} rows of {seats} seats. {adults} adults pay ${half} each and {children} children pay "
        "half as much each. How many dollars would a full house of adults have brought in more?"
    )
    return question, rows * seats * half - adults * half - children * half // 2


_KINDS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_shop, _crates, _trip, _wages, _tank, _seats)


def problems(count: int = COUNT, seed: int = SEED) -> Iterator[dict[str, str]]:
    """Problems, as rows with `id`, `question` and `answer`; the kinds take turns."""
    pick = random.Random(seed)
    for number in range(count):
        question, answer = _KINDS[number % len(_KINDS)](pick)
        yield {"id": f"own-{number}", "question": question, "answer": str(answer)}


def write(file: Path) -> None:
    """Write them to a JSON Lines file."""
    file.write_text("".join(map(line_of, problems())), encoding="utf-8")


if __name__ == "__main__":
    write(Path(__file__).parent / "data" / "own.jsonl")
