"""Costs of a pair of models on a machine: seconds per token, by the number of replies at once."""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.engines.shared_draft_proposer import cost_at
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.cache import writable, write_whole

BATCHES = (1, 2, 4, 8, 16)

_PROMPT_TOKENS = 128
_TOKENS = 16
_REPEATS = 3
# Tokens of a prefill and of a batch that is not complete yet are no measure.
_LEAVE_OUT = 4


class BatchCosts(BaseModel):
    """Seconds that an engine takes per token of each reply, by how many replies it writes at once."""

    model_config = ConfigDict(frozen=True)

    seconds: dict[int, float]  # by size of the batch

    @field_validator("seconds")
    @classmethod
    def _measured_alone(cls, seconds: dict[int, float]) -> dict[int, float]:
        if 1 not in seconds or min(seconds.values()) <= 0:
            raise ValueError("costs are above 0 and begin with a batch of 1")
        return dict(sorted(seconds.items()))

    def at(self, batch: float) -> float:
        """Seconds per token in a batch of this size, between measured sizes by a straight line, beyond them too."""
        return max(cost_at(self.seconds, batch), min(self.seconds.values()))

    def free_batch(self, tolerance: float = 0.25) -> int:
        """The largest batch in which a token takes at most so much longer than alone (M of the paper)."""
        size = 1
        while size < 64 and self.at(size + 1) <= (1 + tolerance) * self.at(1):
            size += 1
        return size

    def shared_by(self, replies: int) -> Self:
        """The costs for one of so many replies at once."""
        return type(self)(seconds={size: self.at(size * replies) for size in self.seconds})


class MachineCosts(BaseModel):
    """Costs of a pair of models on a machine."""

    model_config = ConfigDict(frozen=True)

    target: BatchCosts  # the target alone, with all cores
    beside: BatchCosts  # the target beside a draft that writes, on its share of the cores
    draft: BatchCosts  # the draft beside the target
    draft_alone: BatchCosts  # the draft with all cores, as it writes draft tokens for the target
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware
    models: dict[str, str] = Field(default_factory=dict)  # the models' names
    precision: dict[str, str] = Field(default_factory=dict)  # of their weights, where it was given or chosen
    dummy_weights: bool = False  # whether the weights were made up; the costs are the same

    @property
    def c(self) -> float:
        """The cost ratio: time of a draft step over that of a target step, side by side."""
        return self.draft.at(1) / self.beside.at(1)

    def describe(self) -> str:
        """The cost ratio, and the steps at once that cost little."""
        return f"c = {self.c:.2f}; {self.beside.free_batch()} steps at once cost at most a quarter more than one"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows: milliseconds per token by the number of replies at once."""
        rows = {"target alone": self.target, "target beside the draft": self.beside}
        rows |= {"draft beside the target": self.draft, "draft alone": self.draft_alone}
        sizes = list(self.target.seconds)
        cells = [[name, *(f"{1000 * costs.at(size):.1f}" for size in sizes)] for name, costs in rows.items()]
        return ["milliseconds per token", *(f"{size} at once" for size in sizes)], cells

    def shared_by(self, replies: int) -> Self:
        """The same for one of so many replies that are written at once."""
        names = ("target", "beside", "draft", "draft_alone")
        return self.model_copy(update={name: getattr(self, name).shared_by(replies) for name in names})


async def measure(
    engine: Engine,
    batches: Sequence[int] = BATCHES,
    *,
    beside: Engine | None = None,
    tokens: int = _TOKENS,
    now: Callable[[], float] = time.monotonic,
) -> BatchCosts:
    """Measure an engine, with replies of so many tokens, while the one `beside` writes.

    Sizes of batches that the engine does not write at once are left out.
    """
    prompt = min(_PROMPT_TOKENS, engine.context_length - tokens - 1)
    if prompt < 1 or tokens <= _LEAVE_OUT + 1:
        raise ConfigurationError(f"a context of {engine.context_length} tokens is too short for {tokens} of a reply")
    seconds = {}
    async with _busy(beside):
        await _seconds_per_token(engine, 1, prompt, tokens, 0, now)  # warms up
        for batch in batches:
            found = [await _seconds_per_token(engine, batch, prompt, tokens, number, now) for number in range(_REPEATS)]
            together = [each for each in found if each is not None]
            if len(together) < len(found):
                break  # some waited for others to end, as larger batches would
            seconds[batch] = statistics.median(together)
    return BatchCosts(seconds=seconds)


async def _seconds_per_token(
    engine: Engine, batch: int, prompt: int, tokens: int, number: int, now: Callable[[], float]
) -> float | None:
    """None if the batch was not written at once."""
    times: list[list[float]] = [[] for _ in range(batch)]

    async def write(index: int) -> None:
        # Different prompts, or the prefix cache would make all but one for nothing.
        ids = meaningless_prompt(engine, prompt, 1000 * number + 37 * batch + index)
        async with aclosing(engine.generate(ids, always_the_same(engine, tokens))) as deltas:
            async for delta in deltas:
                times[index] += [now()] * len(delta.token_ids)

    await asyncio.gather(*map(write, range(batch)))
    together = max(at[_LEAVE_OUT] for at in times), min(at[-1] for at in times)
    if together[0] >= together[1]:
        return None
    written = [sum(together[0] <= at <= together[1] for at in of_one) - 1 for of_one in times]
    return (together[1] - together[0]) / max(statistics.mean(written), 1.0)


@asynccontextmanager
async def _busy(engine: Engine | None) -> AsyncIterator[None]:
    """Have an engine write one reply after another."""
    if engine is None:
        yield
        return

    async def write() -> None:
        for number in itertools.count(1):
            reply = engine.generate(meaningless_prompt(engine, 32, number), always_the_same(engine, 256))
            async with aclosing(reply) as deltas:
                async for _ in deltas:
                    continue

    writing = asyncio.create_task(write())
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
    if not writing.cancelled() and (error := writing.exception()) is not None:
        raise error


def meaningless_prompt(engine: Engine, length: int, salt: int) -> list[int]:
    """Tokens that mean nothing, the same for the same salt."""
    size = max(engine.tokenizer.size - 300, 1)
    return [(salt * 7919 + index * 104_729) % size for index in range(length)]


def always_the_same(engine: Engine, tokens: int) -> Sampling:
    """One token is allowed, which does not end a reply: all are as long as they should be."""
    allowed = next(token for token in range(engine.tokenizer.size) if token not in engine.tokenizer.eos_ids)
    return Sampling(max_tokens=tokens, temperature=0.0, allowed_token_ids=(allowed,))


def read_costs(file: Path | None) -> MachineCosts | None:
    """Measured costs; None if there is no file yet."""
    if file is None or not file.exists():
        return None
    try:
        return MachineCosts.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigurationError(f"{file} has no measured costs: choose another --costs, or delete it") from error


def write_costs(file: Path, measured: MachineCosts) -> None:
    """Keep measured costs."""
    with writable(file):
        write_whole(file, measured.model_dump_json(indent=1) + "\n")
