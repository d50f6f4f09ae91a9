"""Rows of results, version by version.

Version 1 was written by `lookahead-agent compare` (0.1): a reply to a problem by a policy. Version 2 is a sample of a
benchmark: a problem, done in one way, with every call that it took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead_agent.errors import ConfigurationError

SCHEMA = 2

_FATES = dict[str, int]

SampleKey = tuple[int, str, str, str, int]
"""Block, task, arm, problem and number of a sample."""


class _Row(BaseModel):
    # A newer minor version may write more.
    model_config = ConfigDict(extra="ignore")


class StepTimes(_Row):
    """How long the steps of a call took, in seconds.

    Attributes:
        draft: Each complete draft step.
        target: Each complete target step, whether or not it was committed.
        verifier: Each verdict.
        committed: When each step was committed, since the call began.
        verdicts: What decided each verdict, and the measure that was held against the threshold, if there was one.
    """

    draft: list[float] = Field(default_factory=list)
    target: list[float] = Field(default_factory=list)
    verifier: list[float] = Field(default_factory=list)
    committed: list[float] = Field(default_factory=list)
    verdicts: list[tuple[str, float | None]] = Field(default_factory=list)


class CallRecord(_Row):
    """One model call.

    Attributes:
        node: The graph's node; None outside a graph.
        policy: Name of its policy.
        started: When it began, in seconds since the sample did.
        seconds: How long it took.
        first_token: Seconds to its first committed token; None: unknown.
        prompt_tokens: Tokens that it read.
        output_tokens: Tokens of the reply.
        steps: Steps of the reply.
        accepted: Those of them that the draft wrote.
        verifier_calls: Draft steps that were judged.
        judge_calls: Questions to a language model that it took.
        tokens: Of "target" and "draft": how many were "committed", "rejected", "aborted".
        busy: Seconds in which the draft, the target and the verifier had work.
        speculation_disabled: Why speculation ended early; None if it did not.
        times: Of its steps.
        token_ids: The reply's tokens.
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
    tokens: dict[str, _FATES]
    busy: dict[str, float] = Field(default_factory=dict)
    speculation_disabled: str | None = None
    times: StepTimes = Field(default_factory=StepTimes)
    token_ids: list[int] | None = None


class TurnRecord(_Row):
    """What the samples that ran at once took together.

    Attributes:
        id: That its samples name.
        seconds: Wall-clock time.
        cpu_seconds: Processor time of this process and the engines that were used.
        own_cpu_seconds: Of that, this process's: the decoder, tokenizers, the embedding model, and the benchmark.
        gpu_seconds: Time that GPUs were busy; None: unknown.
        peak_memory: Most memory that these processes had at once, in bytes.
        joules: Energy that the machine says it used; None: it does not say.
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
    """A problem, done in one way.

    Attributes:
        schema_version: Of this row.
        task: Name of the task.
        does: "questions", or the template's name.
        dataset: Where the problem is from.
        problem: Its id.
        problem_fingerprint: Of its text.
        sample: Number of the sample, from 0.
        block: Number of the block of modes that it was measured in, and is compared in.
        seed: Of its sampling.
        mode: See `config.ModeName`.
        configuration: Name of the way in which it was done.
        policies: Policies that the calls had.
        concurrency: Samples at once.
        seconds: Time to the answer.
        right: Whether it is right; None: nothing to check.
        answer: The reply, or the graph's answer.
        error: What went wrong; None if nothing did.
        calls: Its model calls.
        turn: Id of its turn: samples that ran at once.
        timeline: Each step, of samples that are shown as a picture.
        settings: What else determines the result.
        engines: Models, cores and arguments of the engines.
        environment: Versions and hardware.
    """

    schema_version: int = SCHEMA
    kind: Literal["sample"] = "sample"
    task: str
    does: str = "questions"
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
    right: bool | None
    answer: str = ""
    error: str | None = None
    calls: list[CallRecord]
    turn: str | None = None
    timeline: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    engines: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> SampleKey:
        """What the sample is of."""
        return self.block, self.task, self.configuration, self.problem, self.sample

    @property
    def output_tokens(self) -> int:
        """Tokens of all replies."""
        return sum(call.output_tokens for call in self.calls)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all replies over the time to the answer."""
        return max(self.output_tokens, 1) / self.seconds


class Tie(_Row):
    """Why an "exact" reply is not the target's own.

    Attributes:
        task: Of the sample, as of the next two.
        configuration: Of the sample.
        problem: Of the sample.
        at: Index of the first token that differs.
        gap: How much likelier the target finds one of the two tokens, in nats; None: neither is among the likeliest.
    """

    schema_version: int = SCHEMA
    kind: Literal["tie"] = "tie"
    task: str
    configuration: str
    problem: str
    at: int
    gap: float | None


@dataclass
class Results:
    """What a file of results has.

    Attributes:
        samples: In the order in which they were measured.
        turns: By id.
        ties: Traced differences.
    """

    samples: list[Sample] = field(default_factory=list)
    turns: dict[str, TurnRecord] = field(default_factory=dict)
    ties: list[Tie] = field(default_factory=list)


def acceptance_rate(calls: Sequence[CallRecord]) -> float:
    """Share of the steps of these calls that the draft wrote; 0 of nothing."""
    return sum(call.accepted for call in calls) / max(sum(call.steps for call in calls), 1)


def read_results(rows: Iterable[Mapping[str, Any]]) -> Results:
    """Rows of any version as results of this one.

    Raises:
        ConfigurationError: A row is of a newer version, or of none.
    """
    results = Results()
    for number, row in enumerate(rows, 1):
        version = row.get("schema_version", 1)
        if version > SCHEMA:
            raise ConfigurationError(f"row {number} was written by a newer version of lookahead-agent: update it")
        try:
            match row.get("kind", "sample"):
                case "turn":
                    turn = TurnRecord.model_validate(row)
                    results.turns[turn.id] = turn
                case "tie":
                    results.ties.append(Tie.model_validate(row))
                case _:
                    results.samples.append(Sample.model_validate(row if version == SCHEMA else _from_version_1(row)))
        except (ValidationError, KeyError, TypeError) as error:
            raise ConfigurationError(f"row {number} is no result of a benchmark: {error}") from error
    return results


def _from_version_1(row: Mapping[str, Any]) -> dict[str, Any]:
    figures = row["lookahead"]
    policy, _, token_speculation = str(row["policy"]).partition("+")
    off = policy == "off"
    if off:
        mode = configuration = "sd" if token_speculation else "off"
    elif policy in ("specreason", "random") and not token_speculation:
        mode = configuration = policy
    else:
        mode = "lr+sd" if token_speculation else "lr"
        configuration = f"{mode} {policy}"
    return {
        "task": "questions",
        "problem": row["id"],
        "mode": mode,
        "configuration": configuration,
        "policies": [policy],
        "concurrency": row.get("settings", {}).get("concurrency", 1),
        "seconds": row["seconds"],
        "right": row["right"],
        "answer": row.get("text", ""),
        "calls": [
            {
                "node": figures.get("node"),
                "policy": figures["policy"],
                "seconds": row["seconds"],
                "output_tokens": len(row["token_ids"]),
                "steps": figures["steps"],
                "accepted": figures["accepted"],
                "verifier_calls": figures["verifier_calls"],
                "judge_calls": figures.get("judge_calls", 0),
                "tokens": figures["tokens"],
                "busy": figures["seconds"],
                "speculation_disabled": figures.get("speculation_disabled"),
                "token_ids": row["token_ids"],
            }
        ],
        "settings": row.get("settings", {}),
    }
