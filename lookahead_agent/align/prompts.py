"""What the target is asked, for the draft to learn from its replies: questions of a dataset, or what agents asked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_agent.bench.problems import read_problems
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.trace.recorder import read_trace


@dataclass(frozen=True)
class Prompt:
    """What the target is asked.

    Attributes:
        messages: In OpenAI's format.
    """

    messages: tuple[dict[str, Any], ...]

    @property
    def id(self) -> str:
        """Equal for equal messages."""
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()[:16]


def prompts_of_dataset(file: Path, limit: int | None = None, skip: int = 0) -> list[Prompt]:
    """A dataset's questions.

    Args:
        file: JSON Lines with `question`.
        limit: How many; None: all.
        skip: To leave out at its beginning.

    Raises:
        ConfigurationError: The file is something else.
    """
    problems = read_problems(file, limit, skip)
    return _each_once([Prompt(({"role": "user", "content": problem.question},)) for problem in problems])


def prompts_of_traces(files: Sequence[Path]) -> list[Prompt]:
    """What chat models were asked in recorded runs, but for calls with tools or a format.

    Raises:
        ConfigurationError: A file is no trace, or nothing was asked in any of them.
    """
    found = [Prompt(tuple(row["messages"])) for file in files for row in read_trace(file) if row["type"] == "asked"]
    if not found:
        raise ConfigurationError(
            "nothing was asked in these traces that a draft could learn from: record runs of agents whose planner has "
            "no tools bound to it, with this version (lookahead-agent agent --trace run.jsonl)"
        )
    return _each_once(found)


def _each_once(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list({prompt.id: prompt for prompt in prompts}.values())
