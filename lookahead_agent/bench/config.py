"""What a benchmark measures: tasks, modes, policies, models."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lookahead_agent.bench.answers import AnswerKind
from lookahead_agent.bench.problems import OWN
from lookahead_agent.errors import ConfigurationError, in_words
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.models import DEFAULT_SET

ModeName = Literal["off", "auto", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft", "specreason", "random"]
"""The target alone; what the library does by itself; token-level speculation; the same by what the draft writes beside
the target; Lookahead Reasoning; with each of the two; and two baselines at the step level."""

TaskName = Literal[
    "questions", "plan_execute", "react", "rewoo", "llm_compiler", "reflection", "supervisor", "self_consistency"
]
"""Questions to the chat model itself, or a template that is given them."""

MODES: tuple[ModeName, ...] = get_args(ModeName)
TASKS: tuple[TaskName, ...] = get_args(TaskName)

CALCULATING: tuple[TaskName, ...] = ("plan_execute", "react", "rewoo", "llm_compiler", "supervisor")
"""Templates that carry out calculations as they stand."""
BASELINE: ModeName = "off"
LOOKAHEAD: tuple[ModeName, ...] = ("lr", "lr+sd", "lr+shared_draft")
"""The modes that policies, depths, widths and schedules are for."""

NODES = "nodes"
"""In place of a policy: the template's own, node by node ("balanced" for plain questions)."""

BESIDES = re.compile(
    rf"(?P<mode>off|auto)(?: (?P<precision>{'|'.join(get_args(Precision))}))?"
    r"(?P<asked> asked)?(?P<one_by_one> one by one)?"
)
"""A way besides a mode: in another precision, with calculations put into calls by a model, with calls one by one."""


class TaskConfig(BaseModel):
    """A task, and the ways in which it is done.

    Attributes:
        name: For reports, different from those of other tasks; empty: as `task`.
        task: "questions", or a template's name.
        dataset: JSON Lines file with question and answer, or "own".
        answer: How answers are compared.
        limit: How many problems.
        skip: Problems to leave out at the file's beginning.
        prompt: Put after each question, after a blank line.
        modes: What is compared; "off" is always measured too.
        besides: Other ways of "off" and "auto", by the names that results have: "off int8" is the target alone in
            another precision, "auto one by one" a template whose model calls wait for each other, and "off asked" one
            whose model puts each calculation into a call; "off bf16 asked one by one" all of that. The last two are
            for templates, "asked" for those that calculate.
        policies: Verifier policies of lookahead, with changes as in "balanced:depth=8"; "nodes" for the
            template's own.
        depths: Depths (γ) to try of each of them; none: the policy's own, else 4.
        widths: Widths (w) to try; none: the policy's own.
        schedules: "async", and "sync" for the paper's simpler variant.
        samples: Replies to each problem in each way; with a `seed`, sample s has the seed `seed + s`.
        concurrency: Problems at once.
        max_tokens: Most tokens of a reply.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    task: TaskName = "questions"
    dataset: str = OWN
    answer: AnswerKind = "number"
    limit: int | None = Field(None, ge=1)
    skip: int = Field(0, ge=0)
    prompt: str = ""
    modes: tuple[ModeName, ...] = ("off", "auto")
    besides: tuple[str, ...] = ()
    policies: tuple[str, ...] = (NODES,)
    depths: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    schedules: tuple[Literal["async", "sync"], ...] = ("async",)
    samples: int = Field(1, ge=1)
    concurrency: int = Field(1, ge=1)
    max_tokens: int = Field(512, ge=1)

    def asked(self, question: str) -> str:
        """What the model is asked for a problem."""
        return f"{question}\n\n{self.prompt}" if self.prompt else question

    @field_validator("modes")
    @classmethod
    def _with_baseline(cls, modes: tuple[ModeName, ...]) -> tuple[ModeName, ...]:
        if not modes:
            raise ValueError("no mode is named")
        return (BASELINE, *(mode for mode in dict.fromkeys(modes) if mode != BASELINE))

    @model_validator(mode="after")
    def _whole(self) -> TaskConfig:
        if not self.name:
            object.__setattr__(self, "name", self.task)
        if not self.policies or not self.schedules:
            raise ValueError("policies and schedules need an entry each")
        for way in self.besides:
            self._check_besides(way)
        if not set(LOOKAHEAD) & set(self.modes):
            given = self.model_fields_set & {"policies", "depths", "widths", "schedules"}
            if given:
                raise ValueError(
                    f"{', '.join(sorted(given))} are for the modes {', '.join(LOOKAHEAD)}, which are not measured"
                )
        return self

    def _check_besides(self, way: str) -> None:
        found = BESIDES.fullmatch(way)
        if found is None or way in self.modes:
            raise ValueError(f'besides has no way {way!r}: say as in "off bf16 asked one by one" what is otherwise')
        if found["mode"] not in self.modes:
            raise ValueError(f"besides has {way!r}, but {found['mode']} is not among the modes")
        if found["mode"] == "auto" and found["precision"]:
            raise ValueError(f"besides has {way!r}, but auto chooses its precision")
        if found["one_by_one"] and self.task == "questions":
            raise ValueError(f"besides has {way!r}, which is for templates: a question is one call")
        if found["asked"] and self.task not in CALCULATING:
            raise ValueError(f"besides has {way!r}, which is for templates that calculate: {', '.join(CALCULATING)}")


class BenchConfig(BaseModel):
    """A benchmark.

    Attributes:
        name: For reports.
        about: What it is for, and where its settings are from.
        model: Target model.
        draft_model: Draft model; None: the catalogue's.
        judge_model: Judge of its own; None: the target.
        embedding_model: Embedding model; None: the catalogue's.
        base_url: The target's server, or servers; None: in this process, as of the next two. `ChatLookahead` has more.
        draft_url: The draft's.
        judge_url: The judge's.
        engine_args: Arguments of the target's vLLM engine.
        draft_engine_args: Of the draft's.
        judge_engine_args: Of the judge's.
        token_speculation: The method of "sd" and "lr+sd": as `ChatLookahead.token_speculation`.
        precision: Of the target's weights in all modes but "auto", which chooses its own: as `ChatLookahead.precision`.
        extra_device_for_draft: The paper's arrangement: "off" and "sd" run on the target's share of the machine alone,
            and the draft has a device more: on a CPU other cores, else the GPU of `draft_url`. Without it every mode
            has the same cores or devices.
        temperature: 0 is greedy; None: what the model's makers recommend.
        top_p: None: what the model's makers recommend.
        top_k: As `top_p`; 0 is no limit.
        seed: Of the first sample; None: replies have none (a sampled reply with a seed gets no guesses of tokens from a
            shared draft, since they would change which random numbers it takes).
        blocks: Modes whose engines are in memory together, block after block, where all at once would not fit. "off"
            is part of each, and each is compared with its own; none: all modes take turns from beginning to end.
        tasks: What is done.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "bench"
    about: str = ""
    model: str = DEFAULT_SET
    draft_model: str | None = None
    judge_model: str | None = None
    embedding_model: str | None = None
    base_url: str | list[str] | None = None
    draft_url: str | list[str] | None = None
    judge_url: str | list[str] | None = None
    engine_args: dict[str, Any] = Field(default_factory=dict)
    draft_engine_args: dict[str, Any] = Field(default_factory=dict)
    judge_engine_args: dict[str, Any] = Field(default_factory=dict)
    token_speculation: str | dict[str, Any] = "draft_model"
    precision: Precision = "auto"
    extra_device_for_draft: bool = False
    temperature: float | None = Field(0.0, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    seed: int | None = None
    blocks: tuple[tuple[ModeName, ...], ...] = ()
    tasks: tuple[TaskConfig, ...] = Field(default=(TaskConfig(),), min_length=1)

    @model_validator(mode="after")
    def _consistent(self) -> BenchConfig:
        if self.draft_url is not None and not self.extra_device_for_draft:
            raise ValueError("a draft behind a server has a device more than 'off': say extra_device_for_draft = true")
        if self.temperature == 0 and any(task.samples > 1 for task in self.tasks):
            raise ValueError("several samples at temperature 0 are the same reply again: raise the temperature")
        listed = [mode for block in self.blocks for mode in block if mode != BASELINE]
        wanted = {mode for task in self.tasks for mode in task.modes if mode != BASELINE}
        if self.blocks and (len(set(listed)) < len(listed) or wanted - set(listed)):
            raise ValueError("blocks name each mode that is measured once")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError("two tasks have one name: give each a name of its own")
        return self


def packaged_configs() -> dict[str, Path]:
    """The configurations that ship with the package, by name."""
    folder = Path(str(resources.files("lookahead_agent.bench"))) / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def load_config(name: str) -> BenchConfig:
    """Read a configuration.

    Args:
        name: Of one that ships with the package, or the path of a TOML file.

    Raises:
        ConfigurationError: There is none, or it is wrong.
    """
    file = packaged_configs().get(name, Path(name))
    if not file.is_file():
        known = ", ".join(packaged_configs())
        raise ConfigurationError(f"there is no configuration {name}: give a TOML file, or one of {known}")
    try:
        fields = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} is not TOML: {error}") from error
    return make_config({"name": file.stem} | fields)


def make_config(fields: dict[str, Any]) -> BenchConfig:
    """A configuration from fields.

    Raises:
        ConfigurationError: They are wrong; the message names each.
    """
    try:
        return BenchConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"this is no benchmark: {in_words(error)}") from error
