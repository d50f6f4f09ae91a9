"""The settings of a benchmark: tasks, modes, policies, models."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lookahead_agent.bench.problems import OWN, AnswerKind
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.models import DEFAULT_SET

ModeName = Literal["off", "auto", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft", "specreason", "random"]
"""The target alone; the automatic configuration; token speculation; with a shared draft; Lookahead Reasoning; with each
kind of token speculation; two baselines for step speculation."""

TaskName = Literal[
    "questions", "plan_execute", "react", "rewoo", "llm_compiler", "reflection", "supervisor", "self_consistency"
]
"""Questions to the chat model itself, or the template that solves them."""

MODES: tuple[ModeName, ...] = get_args(ModeName)
TASKS: tuple[TaskName, ...] = get_args(TaskName)

BASELINE: ModeName = "off"
LOOKAHEAD: tuple[ModeName, ...] = ("lr", "lr+sd", "lr+shared_draft")
"""Modes with policies and depths."""

NODES = "nodes"
"""In place of a policy: each node's own in the template ("balanced" for plain questions)."""

VARIANT = re.compile(rf"off (?P<precision>{'|'.join(get_args(Precision))})")
"""The target alone in another precision."""


class TaskConfig(BaseModel):
    """A task and its configurations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""  # in reports; empty: as `task`
    task: TaskName = "questions"
    dataset: str = OWN  # JSON Lines file with question and answer, or "own"
    answer: AnswerKind = "number"
    limit: int | None = Field(None, ge=1)  # number of problems; None: all
    skip: int = Field(0, ge=0)  # problems to leave out at the file's beginning
    prompt: str = ""  # follows each question after a blank line
    modes: tuple[ModeName, ...] = ("off", "auto")  # "off" is always among them
    variants: tuple[str, ...] = ()  # of "off", by their names in results, such as "off int8" in another precision
    # Verifier policies of lookahead, with changes as in "balanced:depth=8", or "nodes"
    policies: tuple[str, ...] = (NODES,)
    depths: tuple[int, ...] = ()  # depths (γ) of each of them; none: the policy's own, else 4
    # Replies to each problem in each configuration; with a `seed`, sample s has the seed `seed + s`
    samples: int = Field(1, ge=1)
    concurrency: int = Field(1, ge=1)  # problems at once
    tools: tuple[str, ...] = ()  # of the template, as for `load_tools`; none: those of problems with numbers
    parity: bool = False  # whether nodes that speculate do so under "exact" in the mode "auto", too
    max_tokens: int = Field(512, ge=1)

    def full_question(self, question: str) -> str:
        """The question with the task's prompt."""
        return f"{question}\n\n{self.prompt}" if self.prompt else question

    @field_validator("modes")
    @classmethod
    def _with_baseline(cls, modes: tuple[ModeName, ...]) -> tuple[ModeName, ...]:
        if not modes:
            raise ValueError("no mode is named")
        return (BASELINE, *(mode for mode in dict.fromkeys(modes) if mode != BASELINE))

    @model_validator(mode="after")
    def _consistent(self) -> TaskConfig:
        if not self.name:
            object.__setattr__(self, "name", self.task)
        if not self.policies:
            raise ValueError("policies need an entry")
        for variant in self.variants:
            if VARIANT.fullmatch(variant) is None:
                raise ValueError(f'{variant!r} is no variant: write it as in "off int8"')
        if self.tools and self.task in ("questions", "reflection", "self_consistency"):
            raise ValueError(f"tools are for templates that call some: {self.task} calls none")
        given = self.model_fields_set & {"policies", "depths"}
        if given and not set(LOOKAHEAD) & set(self.modes):
            raise ValueError(
                f"{', '.join(sorted(given))} are for the modes {', '.join(LOOKAHEAD)}, which are not measured"
            )
        return self


class BenchConfig(BaseModel):
    """A benchmark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = DEFAULT_SET
    draft_model: str | None = None  # None: the catalogue's, as for `embedding_model`
    judge_model: str | None = None  # None: the target judges
    embedding_model: str | None = None
    # The target's server; None: an engine in this process, as for the next two
    base_url: str | None = None
    draft_url: str | None = None  # the draft's
    judge_url: str | None = None  # the judge's
    # Arguments of the target's vLLM engine; the next two are the draft's and the judge's
    engine_args: dict[str, Any] = Field(default_factory=dict)
    draft_engine_args: dict[str, Any] = Field(default_factory=dict)
    judge_engine_args: dict[str, Any] = Field(default_factory=dict)
    # The method of "sd" and "lr+sd": as `ChatLookahead.token_speculation`
    token_speculation: str | dict[str, Any] = "draft_model"
    precision: Precision = "auto"  # of the target's weights in all modes but "auto": as `ChatLookahead.precision`
    # 0 is greedy; None: the value that the model's makers recommend, as for the next two
    temperature: float | None = Field(0.0, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0 is no limit
    # Of the first sample; None: replies have none. A sampled reply with a seed gets no draft tokens from a shared
    # draft
    seed: int | None = None
    # Modes whose engines are in memory together, block after block, where all at once would not fit. "off" is part of
    # each, and the baseline of its modes; none: one block
    blocks: tuple[tuple[ModeName, ...], ...] = ()
    tasks: tuple[TaskConfig, ...] = Field(default=(TaskConfig(),), min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> BenchConfig:
        if self.temperature == 0 and any(task.samples > 1 for task in self.tasks):
            raise ValueError("several samples at temperature 0 are the same reply again: raise the temperature")
        listed = [mode for block in self.blocks for mode in block if mode != BASELINE]
        wanted = {mode for task in self.tasks for mode in task.modes if mode != BASELINE}
        if self.blocks and (len(set(listed)) < len(listed) or wanted - set(listed)):
            raise ValueError("blocks name each mode that is measured once")
        if self.temperature != 0 and any(task.parity for task in self.tasks):
            raise ValueError("parity needs temperature 0: sampled replies differ by chance")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("two tasks have one name: give each a name of its own")
        return self


def packaged_configs() -> dict[str, Path]:
    """The benchmarks that ship with the package, by name."""
    folder = Path(str(resources.files("lookahead_agent.bench"))) / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def load_config(name: str) -> BenchConfig:
    """Read the settings of a packaged benchmark, or of a TOML file."""
    file = packaged_configs().get(name, Path(name))
    if not file.is_file():
        known = ", ".join(packaged_configs())
        raise ConfigurationError(f"there is no benchmark {name}: give a TOML file, or one of {known}")
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error
    return make_config(fields)


def make_config(fields: dict[str, Any]) -> BenchConfig:
    """The settings from fields."""
    try:
        return BenchConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"this is no benchmark: {validation_message(error)}") from error
