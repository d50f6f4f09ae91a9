"""What weights of fewer bits cost: how likely each precision finds worked solutions, problem by problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_agent.bench.row_file import RowFile
from lookahead_agent.bench.statistics import Estimate, difference, estimate
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.jsonl import read_lines, read_value
from lookahead_agent.policy import as_policy
from lookahead_agent.progress import Progress


@dataclass(frozen=True)
class Solution:
    """A problem with a worked solution.

    Attributes:
        id: Of the problem.
        question: The text that is asked.
        text: The solution.
    """

    id: str
    question: str
    text: str


@dataclass(frozen=True)
class PrecisionResult:
    """How one precision does.

    Attributes:
        precision: Of the target's weights.
        solutions: How many were read.
        perplexity: Of the solutions' tokens, all alike in weight.
        against: The difference of the mean log-probability of a token from the first precision's, in nats, with a
            paired 95 % interval over solutions; below 0 is worse. None for the first.
    """

    precision: str
    solutions: int
    perplexity: float
    against: Estimate | None


def read_solutions(file: Path, limit: int | None = None) -> list[Solution]:
    """Problems of a JSON Lines file that have a `solution`.

    Raises:
        ConfigurationError: The file cannot be read, or none has one.
    """
    try:
        rows = [read_value(line) for line in read_lines(file) if line.strip()]
        found = [
            Solution(str(row.get("id", number)), str(row["question"]), str(row["solution"]))
            for number, row in enumerate(rows, 1)
            if row.get("solution")
        ]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigurationError(f"{file} cannot be read as problems with solutions: {error!r}") from error
    if not found:
        raise ConfigurationError(f"no problem in {file} has a solution")
    return found[:limit]


def compare_precisions(
    solutions: Sequence[Solution],
    precisions: Sequence[Precision],
    out: Path,
    progress: Progress,
    make: Callable[[Precision], ChatLookahead],
) -> list[PrecisionResult]:
    """Read the solutions in each precision; what is in `out` already is not read again.

    Args:
        solutions: What is read.
        precisions: One after another, for their engines need not fit into memory at once.
        out: Rows of results, appended as they come.
        progress: Told how far it is.
        make: Makes the chat model of a precision; its engines are shut down after it.

    Raises:
        ConfigurationError: `out` is something else, or a solution does not fit the context.
        EngineError: An engine failed.
    """
    with RowFile(out).writing() as rows:
        done = {(row["precision"], row["problem"]): row for row in rows.rows}
        for precision in precisions:
            missing = [solution for solution in solutions if (precision, solution.id) not in done]
            if not missing:
                continue
            with make(precision) as llm:
                llm.start(progress)
                with progress.task(f"Reading solutions in {precision}", len(missing)) as task:
                    for number, solution in enumerate(missing, 1):
                        row = background.run(_read(llm, precision, solution))
                        rows.append(row)
                        done[precision, solution.id] = row
                        task.advance(number)
    return _results([[done[precision, solution.id] for solution in solutions] for precision in precisions])


async def _read(llm: ChatLookahead, precision: str, solution: Solution) -> dict[str, Any]:
    async with llm.access.engines(as_policy(llm.policy)) as engines:
        logprobs = await _logprobs(engines.target, solution)
    return {"precision": precision, "problem": solution.id, "tokens": len(logprobs), "logprob": sum(logprobs)}


async def _logprobs(engine: Engine, solution: Solution) -> list[float]:
    """Log-probabilities of a solution's tokens as the reply to its question, in nats."""
    prompt = engine.tokenizer.chat_prompt([{"role": "user", "content": solution.question}])
    ids = [*prompt, *engine.tokenizer.encode(solution.text)]
    sampling = Sampling(max_tokens=1, prompt_logprobs=True)
    async with aclosing(engine.generate(ids, sampling)) as deltas:
        async for delta in deltas:
            if delta.prompt_logprobs is not None:
                return [known for known in delta.prompt_logprobs[len(prompt) :] if known is not None]
    raise EngineError("the engine gave no log-probabilities of the prompt")


def _results(of_precisions: Sequence[Sequence[dict[str, Any]]]) -> list[PrecisionResult]:
    first = [row["logprob"] / row["tokens"] for row in of_precisions[0]]
    results = []
    for number, rows in enumerate(of_precisions):
        own = [row["logprob"] / row["tokens"] for row in rows]
        tokens = sum(row["tokens"] for row in rows)
        results.append(
            PrecisionResult(
                rows[0]["precision"],
                len(rows),
                math.exp(-sum(row["logprob"] for row in rows) / tokens),
                estimate(difference, own, first) if number else None,
            )
        )
    return results
