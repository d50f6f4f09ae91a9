"""The ways in which a task is done: modes, and for lookahead each policy, depth, width and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from lookahead_agent.agents.templates import template
from lookahead_agent.bench.config import BASELINE, BESIDES, LOOKAHEAD, NODES, BenchConfig, ModeName, TaskConfig
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cpu.cores import available_cores, binding, share_cores
from lookahead_agent.engines.vllm_engine import runs_on_cpu
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.policy import DEFAULT_DEPTH, as_policy

_DEFAULT_POLICY = "balanced"
_OWN_POLICIES = {"specreason": "specreason", "random": "random", "auto": NODES}


@dataclass(frozen=True)
class Configuration:
    """One way of doing a task.

    Attributes:
        mode: Its mode.
        policy: The policy of the steps that are speculated on, or "nodes".
        changes: Changes of that policy, as in "depth=8:synchronous=true"; empty: none.
        precision: Of the target's weights; None: the benchmark's.
        one_by_one: Whether a template's calls wait for each other.
        asked: Whether a template asks a model to put calculations into calls too (`calculate=False`).
    """

    mode: ModeName
    policy: str
    changes: str = ""
    precision: Precision | None = None
    one_by_one: bool = False
    asked: bool = False

    @property
    def name(self) -> str:
        """Short name for tables; different arms have different ones."""
        if self.mode not in LOOKAHEAD:
            precision = f" {self.precision}" if self.precision is not None else ""
            how = (" asked" if self.asked else "") + (" one by one" if self.one_by_one else "")
            return self.mode + precision + how
        policy = "" if self.policy == NODES else f" {self.policy}"
        return f"{self.mode}{policy}" + (f" {self.changes.replace(':', ' ')}" if self.changes else "")

    @property
    def speculates_on_steps(self) -> bool:
        """Whether a draft model writes steps, be it only where that is fastest."""
        return self.mode not in ("off", "sd", "shared_draft")

    def token_speculation(self, method: str | dict[str, Any]) -> str | dict[str, Any]:
        """How tokens are guessed inside the target's steps.

        Args:
            method: The benchmark's, of "sd" and "lr+sd".
        """
        if self.mode in ("sd", "lr+sd"):
            return method
        return {"auto": "auto", "shared_draft": "shared_draft", "lr+shared_draft": "shared_draft"}.get(
            self.mode, "none"
        )

    @property
    def policy_of_call(self) -> str | None:
        """The policy of every call, whatever the chat model has; None: the chat model's."""
        return None if self.speculates_on_steps else "off"

    def policies(self, own: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """The default policy and those of nodes.

        Args:
            own: The template's policies by node; nodes that do not speculate there do not here.
        """
        if not self.speculates_on_steps:
            return "off", {}
        if self.policy != NODES:
            chosen = self._changed(self.policy)
            return chosen, {node: chosen if as_policy(policy).speculates else "off" for node, policy in own.items()}
        nodes = {
            node: self._changed(policy) if as_policy(policy).speculates else policy for node, policy in own.items()
        }
        return self._changed(_DEFAULT_POLICY), nodes

    def _changed(self, policy: str) -> str:
        return f"{policy}:{self.changes}" if self.changes else policy


def configurations_of(task: TaskConfig) -> list[Configuration]:
    """All ways in which a task is done, the baseline first.

    Raises:
        PolicyError: A policy does not exist or cannot be changed so.
    """
    configurations = []
    for mode in task.modes:
        if mode not in LOOKAHEAD:
            configurations.append(Configuration(mode, _OWN_POLICIES.get(mode, "off")))
            configurations += [
                configuration
                for configuration in map(_besides, dict.fromkeys(task.besides))
                if configuration.mode == mode
            ]
            continue
        for policy, depth, width, schedule in product(
            task.policies, task.depths or (None,), task.widths or (None,), task.schedules
        ):
            changes = [f"depth={depth}"] if depth is not None else []
            changes += [f"width={width}"] if width is not None else []
            changes += ["synchronous=true"] if schedule == "sync" else []
            configurations.append(Configuration(mode, policy, ":".join(changes)))
    own = template_policies(task)
    for configuration in configurations:
        default, nodes = configuration.policies(own)
        for name in (default, *nodes.values()):
            as_policy(name)
    return configurations


def _besides(way: str) -> Configuration:
    found = BESIDES.fullmatch(way)
    assert found is not None, "the configuration was checked"
    mode, precision = cast(ModeName, found["mode"]), cast("Precision | None", found["precision"])
    asked, one_by_one = found["asked"] is not None, found["one_by_one"] is not None
    return Configuration(mode, _OWN_POLICIES.get(mode, "off"), precision=precision, asked=asked, one_by_one=one_by_one)


def template_policies(task: TaskConfig) -> dict[str, str]:
    """The policies of a task's template, by node; none for plain questions."""
    return {} if task.task == "questions" else dict(template("graphs", task.task).POLICIES)


def chat_model(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
    """The chat model of an arm; nothing is loaded yet.

    Raises:
        ConfigurationError: The fields contradict each other.
        LookaheadError: The models cannot work.
    """
    default, nodes = configuration.policies(template_policies(task))
    tokens = configuration.token_speculation(config.token_speculation)
    fields: dict[str, Any] = {
        "model": config.model,
        "draft_model": config.draft_model if configuration.speculates_on_steps or tokens != "none" else None,
        "engine_args": config.engine_args,
        "policy": default,
        "policies": nodes,
        "depth": DEFAULT_DEPTH if configuration.mode in LOOKAHEAD else "auto",
        "token_speculation": tokens,
        "precision": "auto" if configuration.mode == "auto" else configuration.precision or config.precision,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_tokens": task.max_tokens,
        "return_token_ids": True,
        # What is measured are the engines of this run.
        "use_running": False,
        # Callbacks are told of the first token only when a reply streams.
        "streaming": True,
    }
    if config.base_url is not None:
        fields["base_url"] = config.base_url
    # Cores are divided, so that on a CPU `off` has an engine of its own. On a GPU it has the pair's: the policy here is
    # one that loads the draft, and `policy_of_call` what counts.
    shares_engines = configuration.mode == BASELINE and not runs_on_cpu()
    if shares_engines:
        fields |= {"policy": "exact", "depth": DEFAULT_DEPTH, "draft_model": config.draft_model}
    if configuration.speculates_on_steps or tokens == "shared_draft" or shares_engines:
        fields |= {
            "draft_url": config.draft_url,
            "judge_url": config.judge_url,
            "judge_model": config.judge_model,
            "embedding_model": config.embedding_model,
            "draft_engine_args": config.draft_engine_args,
            "judge_engine_args": config.judge_engine_args,
        }
    if config.extra_device_for_draft and config.draft_url is None:
        if not runs_on_cpu():
            raise ConfigurationError("extra_device_for_draft needs draft_url: a server that runs on another GPU")
        targets, drafts = share_cores(available_cores(), with_draft=True)
        if len(available_cores()) < 2:
            raise ConfigurationError("extra_device_for_draft needs two cores at least")
        fields["cores"] = binding(targets), binding(drafts)
    return ChatLookahead.model_validate(fields)
