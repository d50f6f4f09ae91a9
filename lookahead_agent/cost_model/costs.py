"""Costs of a pair of models on a machine: seconds per token, by the number of concurrent replies."""

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.files import writable, write_atomically
from lookahead_agent.system.passes import cost_at

BATCHES = (1, 2, 4, 8, 16)

_PROMPT_TOKENS = 128
_TOKENS = 16
_REPEATS = 3
# First tokens of each reply, which are not measured: prefill, or a batch that is not full yet, changes their time.
_WARMUP_TOKENS = 4


class BatchCosts(BaseModel):
    """Seconds per token of each reply, by the number of replies that an engine generates at once."""

    model_config = ConfigDict(frozen=True)

    seconds: dict[int, float]  # seconds per token by batch size

    @field_validator("seconds")
    @classmethod
    def _check_sizes(cls, seconds: dict[int, float]) -> dict[int, float]:
        if 1 not in seconds or min(seconds.values()) <= 0:
            raise ValueError("costs are above 0 and begin with a batch of 1")
        return dict(sorted(seconds.items()))

    def at(self, batch: float) -> float:
        """Seconds per token at a batch size, by linear passes or extrapolation; at least the lowest measured."""
        return max(cost_at(self.seconds, batch), min(self.seconds.values()))

    def free_batch(self, tolerance: float = 0.25) -> int:
        """The largest batch, up to 64, whose tokens take at most `tolerance` longer than alone (M of the paper)."""
        size = 1
        while size < 64 and self.at(size + 1) <= (1 + tolerance) * self.at(1):
            size += 1
        return size


class MachineCosts(BaseModel):
    """Costs of a pair of models on a machine."""

    model_config = ConfigDict(frozen=True)

    target: BatchCosts  # the target alone, with all cores
    beside: BatchCosts  # the target on its share of the cores, while the draft generates
    draft: BatchCosts  # the draft on its share of the cores, while the target generates
    draft_alone: BatchCosts  # the draft on all cores, as it proposes draft tokens in the target's engine
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware
    models: dict[str, str] = Field(default_factory=dict)  # the models' names by role
    precision: dict[str, str] = Field(default_factory=dict)  # the weights' precision by role, where set or chosen
    dummy_weights: bool = False  # whether the weights are dummies, which cost the same

    @property
    def c(self) -> float:
        """The cost ratio: time of a draft step over that of a target step, both running."""
        return self.draft.at(1) / self.beside.at(1)

    def describe(self) -> str:
        """The cost ratio, and the number of concurrent steps that cost little."""
        return f"c = {self.c:.2f}; {self.beside.free_batch()} steps at once cost at most a quarter more than one"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headings and rows: milliseconds per token by the number of concurrent replies."""
        rows = {"target alone": self.target, "target beside the draft": self.beside}
        rows |= {"draft beside the target": self.draft, "draft alone": self.draft_alone}
        sizes = list(self.target.seconds)
        cells = [[name, *(f"{1000 * costs.at(size):.1f}" for size in sizes)] for name, costs in rows.items()]
        return ["milliseconds per token", *(f"{size} at once" for size in sizes)], cells


async def measure(
    engine: Engine,
    batches: Sequence[int] = BATCHES,
    *,
    beside: Engine | None = None,
    tokens: int = _TOKENS,
    now: Callable[[], float] = time.monotonic,
) -> BatchCosts:
    """Measure an engine with replies of `tokens` tokens, while the engine `beside` generates.

    The result ends before the first batch size that the engine does not run at once.
    """
    prompt = min(_PROMPT_TOKENS, engine.context_length - tokens - 1)
    if prompt < 1 or tokens <= _WARMUP_TOKENS + 1:
        raise ConfigurationError(f"a context of {engine.context_length} tokens is too short for {tokens} of a reply")
    seconds = {}
    async with _background_load(beside):
        await _seconds_per_token(engine, 1, prompt, tokens, 0, now)  # warm-up
        for batch in batches:
            times = [await _seconds_per_token(engine, batch, prompt, tokens, number, now) for number in range(_REPEATS)]
            known = [value for value in times if value is not None]
            if len(known) < len(times):
                break  # some replies waited in the queue, as they would in larger batches
            seconds[batch] = statistics.median(known)
    return BatchCosts(seconds=seconds)


async def _seconds_per_token(
    engine: Engine, batch: int, prompt: int, tokens: int, number: int, now: Callable[[], float]
) -> float | None:
    """Seconds per token of each reply; None if the engine did not generate the whole batch at once."""
    times: list[list[float]] = [[] for _ in range(batch)]

    async def write(index: int) -> None:
        # Different prompts, since equal ones would hit the prefix cache.
        ids = _prompt(engine, prompt, 1000 * number + 37 * batch + index)
        async with aclosing(engine.generate(ids, _fix_length(engine, tokens))) as deltas:
            async for delta in deltas:
                times[index] += [now()] * len(delta.token_ids)

    await asyncio.gather(*map(write, range(batch)))
    overlap = max(at[_WARMUP_TOKENS] for at in times), min(at[-1] for at in times)
    if overlap[0] >= overlap[1]:
        return None
    counts = [sum(overlap[0] <= at <= overlap[1] for at in reply_times) - 1 for reply_times in times]
    return (overlap[1] - overlap[0]) / max(statistics.mean(counts), 1.0)


@asynccontextmanager
async def _background_load(engine: Engine | None) -> AsyncIterator[None]:
    """Keep an engine busy with one reply after another."""
    if engine is None:
        yield
        return

    async def write() -> None:
        for number in itertools.count(1):
            reply = engine.generate(_prompt(engine, 32, number), _fix_length(engine, 256))
            async with aclosing(reply) as deltas:
                async for _ in deltas:
                    continue

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _prompt(engine: Engine, length: int, salt: int) -> list[int]:
    """A prompt of meaningless tokens, the same for the same salt."""
    size = max(engine.tokenizer.size - 300, 1)
    return [(salt * 7919 + index * 104_729) % size for index in range(length)]


def _fix_length(engine: Engine, tokens: int) -> Sampling:
    """Sampling that allows a single token, which does not end a reply: every reply has `tokens` tokens."""
    allowed = next(token for token in range(engine.tokenizer.size) if token not in engine.tokenizer.eos_ids)
    return Sampling(max_tokens=tokens, temperature=0.0, allowed_token_ids=(allowed,))


def read_costs(file: Path | None) -> MachineCosts | None:
    """Read measured costs; None without a file. Raises ConfigurationError if the file holds none."""
    if file is None:
        return None
    try:
        if not file.exists():
            return None
        return MachineCosts.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise ConfigurationError(f"{file} has no measured costs: choose another --costs, or delete it") from error


def write_costs(file: Path, measured: MachineCosts) -> None:
    """Write measured costs to a file; raises ConfigurationError if that fails."""
    with writable(file):
        write_atomically(file, measured.model_dump_json(indent=1) + "\n")
