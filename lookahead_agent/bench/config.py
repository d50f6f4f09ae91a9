"""The settings of a benchmark (tasks, modes, policies, models), and the configurations of a task."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lookahead_agent.agents.templates import template
from lookahead_agent.bench.problems import OWN
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.models.catalogue import DEFAULT_SET
from lookahead_agent.policy import DEFAULT_DEPTH, as_policy

ModeName = Literal[
    "off", "auto", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft", "specreason", "random", "peer"
]
"""The target alone; the automatic configuration; token speculation; with a shared draft; Lookahead Reasoning; with each
kind of token speculation; two baselines for step speculation; a server of another program."""

TaskName = Literal[
    "questions", "plan_execute", "react", "rewoo", "llm_compiler", "reflection", "supervisor", "self_consistency"
]
"""Questions to the chat model itself, or the template that solves them."""

PEER: ModeName = "peer"
MODES: tuple[ModeName, ...] = tuple(mode for mode in get_args(ModeName) if mode != PEER)
TASKS: tuple[TaskName, ...] = get_args(TaskName)

BASELINE: ModeName = "off"
LOOKAHEAD: tuple[ModeName, ...] = ("lr", "lr+sd", "lr+shared_draft")  # modes with policies and depths

NODES = "nodes"  # in place of a policy: each node's own in the template ("balanced" for plain questions)

VARIANT = re.compile(rf"off ({'|'.join(get_args(Precision))})")  # the target alone in another precision

_PEER_PATTERN = re.compile(r"[\w.+ -]+=https?://\S+")
_PEER_EXAMPLE = "llama.cpp=http://127.0.0.1:8080/v1"
_DEFAULT_POLICY = "balanced"
_OF_PAIRS = {"draft_url", "judge_url", "judge_model", "embedding_model", "draft_engine_args", "judge_engine_args"}
_MODE_POLICIES = {"specreason": "specreason", "random": "random", "auto": NODES}


class TaskConfig(BaseModel):
    """A task and its configurations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""  # in reports; empty: as `task`
    task: TaskName = "questions"
    dataset: str = OWN  # JSON Lines file with question and answer, or "own"
    limit: int | None = Field(None, ge=1)  # number of problems; None: all
    skip: int = Field(0, ge=0)  # problems to leave out at the file's beginning
    prompt: str = ""  # follows each question after a blank line
    modes: tuple[ModeName, ...] = ("off", "auto")  # "off" is always among them, but where there are peers
    # OpenAI-compatible servers, each "name=URL"; the first is the baseline where "off" is not measured
    peers: tuple[str, ...] = ()
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

    @field_validator("modes")
    @classmethod
    def _known_modes(cls, modes: tuple[ModeName, ...]) -> tuple[ModeName, ...]:
        if not modes or PEER in modes:
            raise ValueError("no mode is named" if not modes else "servers are named by peers")
        return tuple(sorted(dict.fromkeys(modes), key=lambda mode: mode != BASELINE))

    @field_validator("peers")
    @classmethod
    def _names_and_urls(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        names = [peer.partition("=")[0] for peer in peers]
        for peer in peers:
            if _PEER_PATTERN.fullmatch(peer) is None:
                raise ValueError(f"{peer!r} is no server: write it as in {_PEER_EXAMPLE}")
        if len({*names, *get_args(ModeName)}) < len(names) + len(get_args(ModeName)):
            raise ValueError(f"each server needs a name of its own, which is no mode's: {', '.join(names)}")
        return peers

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.name:
            object.__setattr__(self, "name", self.task)
        if not self.peers and BASELINE not in self.modes:
            object.__setattr__(self, "modes", (BASELINE, *self.modes))
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
    def _consistent(self) -> Self:
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


@dataclass(frozen=True)
class Configuration:
    """One configuration of a task."""

    mode: ModeName  # its mode
    policy: str  # of nodes that speculate on steps, or "nodes"
    changes: str = ""  # of that policy, as in "depth=8"
    precision: Precision | None = None  # of the target's weights; None: the benchmark's
    peer: str = ""  # name and URL of a server, as in "llama.cpp=http://127.0.0.1:8080/v1"

    @property
    def name(self) -> str:
        """Unique name for tables."""
        if self.peer:
            return self.peer.partition("=")[0]
        policy = self.policy if self.mode in LOOKAHEAD and self.policy != NODES else ""
        return " ".join(filter(None, (self.mode, policy, self.changes, self.precision)))

    @property
    def speculates_on_steps(self) -> bool:
        """Whether a draft model may write steps."""
        return self.mode not in ("off", "sd", "shared_draft", PEER)

    def token_speculation(self, method: str | dict[str, Any]) -> str | dict[str, Any]:
        """The chat model's `token_speculation`; `method` is the benchmark's, of "sd" and "lr+sd"."""
        if self.mode in ("sd", "lr+sd"):
            return method
        if self.mode in ("shared_draft", "lr+shared_draft"):
            return "shared_draft"
        return "auto" if self.mode == "auto" else "none"

    def policies(self, of_template: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """The default policy and those of nodes: only nodes that speculate in the template speculate here."""
        if not self.speculates_on_steps:
            return "off", {}

        def changed(policy: str) -> str:
            return f"{policy}:{self.changes}" if self.changes else policy

        default = changed(_DEFAULT_POLICY if self.policy == NODES else self.policy)
        return default, {
            node: (changed(policy) if self.policy == NODES else default) if as_policy(policy).speculates else "off"
            for node, policy in of_template.items()
        }


def configurations_of(task: TaskConfig) -> list[Configuration]:
    """All configurations of a task, the baseline first."""
    found = []
    for mode in task.modes:
        if mode not in LOOKAHEAD:
            lossless = task.parity and mode == "auto"
            found.append(Configuration(mode, "exact" if lossless else _MODE_POLICIES.get(mode, "off")))
            if mode == BASELINE:
                precisions = [cast(Precision, variant.removeprefix("off ")) for variant in dict.fromkeys(task.variants)]
                found += [Configuration(mode, "off", precision=precision) for precision in precisions]
            continue
        for policy, depth in product(task.policies, task.depths or (None,)):
            found.append(Configuration(mode, policy, f"depth={depth}" if depth is not None else ""))
    found += [Configuration(PEER, "off", peer=peer) for peer in task.peers]
    of_template = template_policies(task)
    for configuration in found:
        default, nodes = configuration.policies(of_template)
        for name in (default, *nodes.values()):
            as_policy(name)
    return found


def template_policies(task: TaskConfig) -> dict[str, str]:
    """The policies of a task's template, by node; none for plain questions."""
    return {} if task.task == "questions" else dict(template("graphs", task.task).POLICIES)


def chat_model(
    config: BenchConfig,
    task: TaskConfig,
    configuration: Configuration,
    *,
    on_cpu: bool | None = None,
    make: Callable[..., ChatLookahead] = ChatLookahead,
) -> ChatLookahead:
    """The chat model of a configuration; nothing is loaded yet. `on_cpu` is None for this machine's."""
    on_cpu = runs_on_cpu() if on_cpu is None else on_cpu
    default, nodes = configuration.policies(template_policies(task))
    tokens = configuration.token_speculation(config.token_speculation)
    fields: dict[str, Any] = {
        **config.model_dump(include={"model", "engine_args", "temperature", "top_p", "top_k"}),
        "draft_model": config.draft_model if configuration.speculates_on_steps or tokens != "none" else None,
        "policy": default,
        "policies": nodes,
        "depth": DEFAULT_DEPTH if configuration.mode in LOOKAHEAD else "auto",
        "token_speculation": tokens,
        "precision": "auto" if configuration.mode == "auto" else configuration.precision or config.precision,
        "max_tokens": task.max_tokens,
        "return_token_ids": True,
        "use_daemon": False,  # the engines of this run are measured
        "streaming": True,  # or callbacks are not told of the first token
    }
    if config.base_url is not None:
        fields["base_url"] = config.base_url
    # Cores are divided, so that on a CPU `off` has an engine of its own. On a GPU it has the pair's: the policy here is
    # one that loads the draft, and each call's decides.
    shares_engines = configuration.mode == BASELINE and not on_cpu
    if shares_engines:
        fields |= {"policy": "exact", "depth": DEFAULT_DEPTH, "draft_model": config.draft_model}
    if configuration.speculates_on_steps or tokens == "shared_draft" or shares_engines:
        fields |= config.model_dump(include=_OF_PAIRS)
    return make(**fields)
