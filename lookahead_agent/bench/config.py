"""Settings of a benchmark (tasks, modes, policies, models), and the configurations of a task."""

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
from lookahead_agent.models.catalogue import DEFAULT_SET
from lookahead_agent.modes.table import LOOKAHEAD, Precision
from lookahead_agent.policy import DEFAULT_DEPTH, as_policy

ModeName = Literal[
    "off", "auto", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft", "specreason", "random", "peer"
]
"""The target alone; the automatic configuration; token speculation, also with a shared draft; Lookahead Reasoning, also
with each token speculation. Further: two baselines of step speculation, and another program's server."""

TaskName = Literal[
    "questions", "plan_execute", "react", "rewoo", "llm_compiler", "reflection", "supervisor", "self_consistency"
]
"""Plain questions to the chat model, or the template that solves the problems."""

PEER: ModeName = "peer"
MODES: tuple[ModeName, ...] = tuple(mode for mode in get_args(ModeName) if mode != PEER)
TASKS: tuple[TaskName, ...] = get_args(TaskName)

BASELINE: ModeName = "off"

NODES = "nodes"  # value in place of a policy: the template's policy of each node ("balanced" for plain questions)

VARIANT = re.compile(rf"off ({'|'.join(get_args(Precision))})")  # the target alone in another precision

_PEER_PATTERN = re.compile(r"[\w.+ -]+=https?://\S+")
_PEER_EXAMPLE = "llama.cpp=http://127.0.0.1:8080/v1"
_DEFAULT_POLICY = "balanced"
_PAIR_FIELDS = {"draft_url", "judge_url", "judge_model", "embedding_model", "draft_engine_args", "judge_engine_args"}
_MODE_POLICIES = {"specreason": "specreason", "random": "random", "auto": NODES}


class TaskConfig(BaseModel):
    """A task and its configurations."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""  # name in reports; empty: `task`
    task: TaskName = "questions"
    dataset: str = OWN  # JSON Lines file with question and answer, or "own"
    limit: int | None = Field(None, ge=1)  # number of problems; None: all
    skip: int = Field(0, ge=0)  # problems to skip at the beginning of the file
    prompt: str = ""  # appended to each question after a blank line
    modes: tuple[ModeName, ...] = ("off", "auto")  # "off" is added unless there are peers
    # OpenAI-compatible servers, each "name=URL"; the first is the baseline where "off" is not measured
    peers: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()  # "off" in other precisions, such as "off int8"
    # Policies of the "lr" modes, with options as in "balanced:depth=8", or "nodes"
    policies: tuple[str, ...] = (NODES,)
    depths: tuple[int, ...] = ()  # depths (γ) for each policy; empty: the policy's own, else 4
    # Replies to each problem in each configuration; sample s has the seed `seed + s`, if there is a `seed`
    samples: int = Field(1, ge=1)
    concurrency: int = Field(1, ge=1)  # problems at once
    tools: tuple[str, ...] = ()  # sources for `load_tools`; empty: the tools for problems with numbers
    parity: bool = False  # whether the mode "auto" uses the policy "exact" for nodes that speculate
    max_tokens: int = Field(512, ge=1)

    @field_validator("modes")
    @classmethod
    def _order_modes(cls, modes: tuple[ModeName, ...]) -> tuple[ModeName, ...]:
        if not modes or PEER in modes:
            raise ValueError("no mode is named" if not modes else "servers are named by peers")
        return tuple(sorted(dict.fromkeys(modes), key=lambda mode: mode != BASELINE))

    @field_validator("peers")
    @classmethod
    def _names_and_urls(cls, peers: tuple[str, ...]) -> tuple[str, ...]:
        names = [peer.partition("=")[0] for peer in peers]
        for peer in peers:
            if _PEER_PATTERN.fullmatch(peer) is None:
                raise ValueError(f"{peer!r} is not a server: write it as in {_PEER_EXAMPLE}")
        if len({*names, *get_args(ModeName)}) < len(names) + len(get_args(ModeName)):
            raise ValueError(f"each server needs a name of its own, which no mode has: {', '.join(names)}")
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
                raise ValueError(f'{variant!r} is not a variant: write it as in "off int8"')
        if self.tools and self.task in ("questions", "reflection", "self_consistency"):
            raise ValueError(f"tools are for templates that call some: {self.task} calls none")
        explicit = self.model_fields_set & {"policies", "depths"}
        if explicit and not set(LOOKAHEAD) & set(self.modes):
            raise ValueError(
                f"{', '.join(sorted(explicit))} are for the modes {', '.join(LOOKAHEAD)}, which are not measured"
            )
        return self


class BenchConfig(BaseModel):
    """A benchmark."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = DEFAULT_SET
    draft_model: str | None = None  # None: the catalogue's; the same for `embedding_model`
    judge_model: str | None = None  # None: the target judges
    embedding_model: str | None = None
    # URL of the target's server; None: an engine of this process; the same for the next two
    base_url: str | None = None
    draft_url: str | None = None  # the draft's
    judge_url: str | None = None  # the judge's
    # Arguments of the target's vLLM engine; the next two are the draft's and the judge's
    engine_args: dict[str, Any] = Field(default_factory=dict)
    draft_engine_args: dict[str, Any] = Field(default_factory=dict)
    judge_engine_args: dict[str, Any] = Field(default_factory=dict)
    # `ChatLookahead.token_speculation` in the modes "sd" and "lr+sd"
    token_speculation: str | dict[str, Any] = "draft_model"
    precision: Precision = "auto"  # precision of the target's weights in all modes but "auto"
    # 0 is greedy; None: the model's recommended value; the same for the next two
    temperature: float | None = Field(0.0, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)  # 0 is no limit
    # The seed of the first sample; None: replies have no seed. A sampled reply with a seed gets no tokens of a shared
    # draft.
    seed: int | None = None
    # Blocks of modes whose engines are in memory together, measured one after the other if not all fit. Each block has
    # "off" as its baseline; empty: one block
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
    """Return the files of the packaged benchmarks by name."""
    folder = Path(str(resources.files("lookahead_agent.bench"))) / "configs"
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def load_config(name: str) -> BenchConfig:
    """Read the settings of a packaged benchmark or a TOML file; raises ConfigurationError if they are invalid."""
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
    """Validate the fields of a benchmark; raises ConfigurationError if they are invalid."""
    try:
        return BenchConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigurationError(f"this is not a benchmark: {validation_message(error)}") from error


@dataclass(frozen=True)
class TaskConfiguration:
    """One configuration of a task."""

    mode: ModeName
    policy: str  # policy of nodes with step speculation, or "nodes"
    changes: str = ""  # options of that policy, as in "depth=8"
    precision: Precision | None = None  # precision of the target's weights; None: the benchmark's
    peer: str = ""  # name and URL of a server, as in "llama.cpp=http://127.0.0.1:8080/v1"

    @property
    def name(self) -> str:
        """The name in results and tables, unique in its task."""
        if self.peer:
            return self.peer.partition("=")[0]
        policy = self.policy if self.mode in LOOKAHEAD and self.policy != NODES else ""
        return " ".join(filter(None, (self.mode, policy, self.changes, self.precision)))

    @property
    def speculates_on_steps(self) -> bool:
        """Whether a draft model may write steps."""
        return self.mode not in ("off", "sd", "shared_draft", PEER)

    def token_speculation(self, method: str | dict[str, Any]) -> str | dict[str, Any]:
        """Return the chat model's `token_speculation`; `method` is the benchmark's, for "sd" and "lr+sd"."""
        if self.mode in ("sd", "lr+sd"):
            return method
        if self.mode in ("shared_draft", "lr+shared_draft"):
            return "shared_draft"
        return "auto" if self.mode == "auto" else "none"

    def policies(self, node_policies: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Return the default policy and those of nodes; nodes that do not speculate in the template get "off"."""
        if not self.speculates_on_steps:
            return "off", {}

        def with_changes(policy: str) -> str:
            return f"{policy}:{self.changes}" if self.changes else policy

        default = with_changes(_DEFAULT_POLICY if self.policy == NODES else self.policy)
        return default, {
            node: (with_changes(policy) if self.policy == NODES else default) if as_policy(policy).speculates else "off"
            for node, policy in node_policies.items()
        }


def configurations_of(task: TaskConfig) -> list[TaskConfiguration]:
    """List all configurations of a task, the baseline first; raises an error for unknown policies."""
    configurations = []
    for mode in task.modes:
        if mode not in LOOKAHEAD:
            lossless = task.parity and mode == "auto"
            configurations.append(TaskConfiguration(mode, "exact" if lossless else _MODE_POLICIES.get(mode, "off")))
            if mode == BASELINE:
                precisions = [cast(Precision, variant.removeprefix("off ")) for variant in dict.fromkeys(task.variants)]
                configurations += [TaskConfiguration(mode, "off", precision=precision) for precision in precisions]
            continue
        for policy, depth in product(task.policies, task.depths or (None,)):
            configurations.append(TaskConfiguration(mode, policy, f"depth={depth}" if depth is not None else ""))
    configurations += [TaskConfiguration(PEER, "off", peer=peer) for peer in task.peers]
    node_policies = template_policies(task)
    for configuration in configurations:
        default, nodes = configuration.policies(node_policies)
        for name in (default, *nodes.values()):
            as_policy(name)
    return configurations


def template_policies(task: TaskConfig) -> dict[str, str]:
    """Return the policies of a task's template by node; empty for plain questions."""
    return {} if task.task == "questions" else dict(template("graphs", task.task).POLICIES)


def chat_model(
    config: BenchConfig,
    task: TaskConfig,
    configuration: TaskConfiguration,
    *,
    on_cpu: bool | None = None,
    make: Callable[..., ChatLookahead] = ChatLookahead,
) -> ChatLookahead:
    """Create the chat model of a configuration; nothing is loaded yet. `on_cpu` is None to detect it."""
    on_cpu = runs_on_cpu() if on_cpu is None else on_cpu
    default, nodes = configuration.policies(template_policies(task))
    method = configuration.token_speculation(config.token_speculation)
    fields: dict[str, Any] = {
        **config.model_dump(include={"model", "engine_args", "temperature", "top_p", "top_k"}),
        "draft_model": config.draft_model if configuration.speculates_on_steps or method != "none" else None,
        "policy": default,
        "policies": nodes,
        "depth": DEFAULT_DEPTH if configuration.mode in LOOKAHEAD else "auto",
        "token_speculation": method,
        "precision": "auto" if configuration.mode == "auto" else configuration.precision or config.precision,
        "max_tokens": task.max_tokens,
        "return_token_ids": True,
        "use_daemon": False,  # the benchmark measures engines of its own
        "streaming": True,  # so that callbacks get the first token
    }
    if config.base_url is not None:
        fields["base_url"] = config.base_url
    # On a CPU, `off` has an engine of its own, since a pair divides the cores. On a GPU it shares the pair's engines:
    # the policy here loads the draft, and each call's policy is "off".
    shares_engines = configuration.mode == BASELINE and not on_cpu
    if shares_engines:
        fields |= {"policy": "exact", "depth": DEFAULT_DEPTH, "draft_model": config.draft_model}
    if configuration.speculates_on_steps or method == "shared_draft" or shares_engines:
        fields |= config.model_dump(include=_PAIR_FIELDS)
    return make(**fields)
