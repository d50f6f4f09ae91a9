"""Rows of results: samples with every model call that they took, and what the samples of a turn used together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead_agent.decoding import acceptance_rate
from lookahead_agent.errors import ConfigurationError

SCHEMA = 3

SampleKey = tuple[int, str, str, str, int]
"""Block, task, configuration, problem and number of a sample."""


class _Row(BaseModel):
    # A newer minor version may write more.
    model_config = ConfigDict(extra="ignore")


class StepTimes(_Row):
    """Durations in a call, in seconds.

    Attributes:
        verifier: Of each verdict.
        committed: From the begin of the call to each committed step.
    """

    verifier: list[float] = Field(default_factory=list)
    committed: list[float] = Field(default_factory=list)


class CallRecord(_Row):
    """One model call.

    Attributes:
        node: The graph's node; None outside a graph.
        started: Seconds from the begin of the sample.
        first_token: Seconds to its first committed token; None: unknown.
        accepted: Draft steps among the committed ones.
        verifier_calls: Draft steps that the verifier judged.
        judge_calls: Prompts to a judge model.
        tokens: By "target" and "draft": how many were "committed", "rejected", "aborted".
        busy: Seconds in which the draft, the target and the verifier had work.
        speculation_disabled: The reason; None: speculation ran to the end.
    """

    node: str | None = None
    policy: str
    started: float = 0.0
    seconds: float
    first_token: float | None = None
    prompt_tokens: int = 0
    output_tokens: int
    steps: int
    accepted: int
    verifier_calls: int = 0
    judge_calls: int = 0
    tokens: dict[str, dict[str, int]]
    busy: dict[str, float] = Field(default_factory=dict)
    speculation_disabled: str | None = None
    times: StepTimes = Field(default_factory=StepTimes)
    token_ids: list[int] | None = None


class TurnRecord(_Row):
    """Resources that samples running at once used together.

    Attributes:
        id: Its samples name it.
        seconds: Wall-clock time.
        cpu_seconds: Processor time of this process and its engines.
        own_cpu_seconds: This process's share of it: decoder, tokenizers, embedding model, benchmark.
        gpu_seconds: Time that GPUs were busy; None: unknown.
        peak_memory: Of these processes together, in bytes.
        joules: Energy; None: the machine does not report it.
    """

    schema_version: int = SCHEMA
    kind: Literal["turn"] = "turn"
    id: str
    seconds: float
    cpu_seconds: float | None = None
    own_cpu_seconds: float | None = None
    gpu_seconds: float | None = None
    peak_memory: int | None = None
    joules: float | None = None


class Sample(_Row):
    """A problem, solved in one configuration.

    Attributes:
        workload: "questions", or the template's name.
        problem: Its id.
        sample: Its number, from 0.
        block: Number of the block of modes that ran and are compared together.
        mode: See `config.ModeName`.
        policies: Of its calls.
        concurrency: Samples at once.
        seconds: Time to the answer.
        correct: None: nothing to check.
        answer: The reply, or the graph's answer.
        settings: All else that determines the result.
        engines: Models, cores and arguments of the engines.
        environment: Versions and hardware.
    """

    schema_version: int = SCHEMA
    kind: Literal["sample"] = "sample"
    task: str
    workload: str = "questions"
    dataset: str = ""
    problem: str
    problem_fingerprint: str = ""
    sample: int = 0
    block: int = 0
    seed: int | None = None
    mode: str
    configuration: str
    policies: list[str] = Field(default_factory=list)
    concurrency: int = 1
    seconds: float
    correct: bool | None
    answer: str = ""
    error: str | None = None
    calls: list[CallRecord]
    turn: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    engines: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> SampleKey:
        """Equal for equal work."""
        return self.block, self.task, self.configuration, self.problem, self.sample

    @property
    def output_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(call.output_tokens for call in self.calls)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replies over the time to the answer."""
        return max(self.output_tokens, 1) / self.seconds

    @property
    def acceptance_rate(self) -> float:
        """Share of the committed steps that the draft wrote."""
        return acceptance_of(self.calls)


@dataclass
class Results:
    """Contents of a file of results.

    Attributes:
        samples: In the order of measurement.
        turns: By id.
    """

    samples: list[Sample] = field(default_factory=list)
    turns: dict[str, TurnRecord] = field(default_factory=dict)


def acceptance_of(calls: Sequence[CallRecord]) -> float:
    """The acceptance rate of calls together."""
    return acceptance_rate(sum(call.accepted for call in calls), sum(call.steps for call in calls))


def read_results(rows: Iterable[Mapping[str, Any]]) -> Results:
    """Results from rows.

    Raises:
        ConfigurationError: A row is of another version, or no result.
    """
    results = Results()
    for number, row in enumerate(rows, 1):
        if (version := row.get("schema_version")) is not None and version != SCHEMA:
            raise ConfigurationError(
                f"row {number} was written by another version of lookahead-agent: its format is {version}, "
                f"this version reads {SCHEMA}"
            )
        try:
            if row.get("kind") == "turn":
                turn = TurnRecord.model_validate(row)
                results.turns[turn.id] = turn
            else:
                results.samples.append(Sample.model_validate(row))
        except ValidationError as error:
            raise ConfigurationError(f"row {number} is no result of a benchmark: {error}") from error
    return results
