"""The configurations of a task: each mode and variant, and for lookahead each policy and depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, cast

from lookahead_agent.agents.templates import template
from lookahead_agent.bench.config import BASELINE, LOOKAHEAD, NODES, BenchConfig, ModeName, TaskConfig
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.policy import DEFAULT_DEPTH, as_policy

_DEFAULT_POLICY = "balanced"
_OF_PAIRS = {"draft_url", "judge_url", "judge_model", "embedding_model", "draft_engine_args", "judge_engine_args"}
_MODE_POLICIES = {"specreason": "specreason", "random": "random", "auto": NODES}


@dataclass(frozen=True)
class Configuration:
    """One configuration of a task."""

    mode: ModeName  # its mode
    policy: str  # of nodes that speculate on steps, or "nodes"
    changes: str = ""  # of that policy, as in "depth=8"
    precision: Precision | None = None  # of the target's weights; None: the benchmark's

    @property
    def name(self) -> str:
        """Unique name for tables."""
        policy = self.policy if self.mode in LOOKAHEAD and self.policy != NODES else ""
        return " ".join(filter(None, (self.mode, policy, self.changes, self.precision)))

    @property
    def speculates_on_steps(self) -> bool:
        """Whether a draft model may write steps."""
        return self.mode not in ("off", "sd", "shared_draft")

    def token_speculation(self, method: str | dict[str, Any]) -> str | dict[str, Any]:
        """The chat model's `token_speculation`; `method` is the benchmark's, of "sd" and "lr+sd"."""
        if self.mode in ("sd", "lr+sd"):
            return method
        if self.mode in ("shared_draft", "lr+shared_draft"):
            return "shared_draft"
        return "auto" if self.mode == "auto" else "none"

    @property
    def policy_of_call(self) -> str | None:
        """The policy that every call is given; None: the chat model's."""
        return None if self.speculates_on_steps else "off"

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
    # one that loads the draft, and `policy_of_call` decides.
    shares_engines = configuration.mode == BASELINE and not on_cpu
    if shares_engines:
        fields |= {"policy": "exact", "depth": DEFAULT_DEPTH, "draft_model": config.draft_model}
    if configuration.speculates_on_steps or tokens == "shared_draft" or shares_engines:
        fields |= config.model_dump(include=_OF_PAIRS)
    return make(**fields)
