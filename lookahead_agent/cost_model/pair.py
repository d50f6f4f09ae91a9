"""A pair of models whose engines start one by one, and the measurement of its costs and acceptance rates."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from langchain_core.messages import HumanMessage

from lookahead_agent.bench.config import TaskConfig
from lookahead_agent.bench.problems import Problem
from lookahead_agent.bench.runner import solve
from lookahead_agent.bench.samples import CallRecorder, acceptance_of, environment
from lookahead_agent.chat.messages import template_messages
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts, measure
from lookahead_agent.cost_model.estimator import Acceptance
from lookahead_agent.engines.engine_pool import POOL
from lookahead_agent.engines.protocol import Engine, sequence_logprobs
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments, require_vllm, runs_on_cpu
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.gpus import memory_shares
from lookahead_agent.models.catalogue import ModelFacts, ModelSet
from lookahead_agent.models.resolve import choose_models, fetch, fetch_tokenizer
from lookahead_agent.modes.table import Kernel, Precision
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec, select_engines
from lookahead_agent.runtime.weights import Platform, weights_in
from lookahead_agent.system import background
from lookahead_agent.system.machine import available_cores
from lookahead_agent.system.progress import LogProgress, Progress

ModelRole = Literal["target", "draft"]


@dataclass(eq=False)
class Pair:
    """A target and a draft, whose files are fetched at once and whose engines start on demand."""

    model: str
    draft_model: str | None
    _: KW_ONLY
    dummy_weights: bool  # whether weights are made up, so that only configurations and tokenizers are fetched
    engine_args: Mapping[str, Any]  # arguments of both engines
    precision: Precision | None  # precision of the target's weights: see `choose_kernels`
    draft_precision: Precision | None  # precision of the draft's weights
    progress: Progress

    def __post_init__(self) -> None:
        require_vllm()
        dummy_weights, progress = self.dummy_weights, self.progress
        precisions: dict[ModelRole, Precision | None] = {"target": self.precision, "draft": self.draft_precision}
        if dummy_weights and "int8" in precisions.values():
            raise ConfigurationError("int8 is read from a folder, and made-up weights have none: choose bf16")
        models = choose_models(self.model, self.draft_model)
        assert models.draft is not None  # `choose_models` requires one
        facts: dict[ModelRole, ModelFacts] = {"target": models.target, "draft": models.draft}
        fetched = {role: (fetch_tokenizer if dummy_weights else fetch)(each, progress) for role, each in facts.items()}
        kernels = choose_kernels(models, precisions, self.engine_args, fetched, dummy_weights)
        self.names = {str(role): model.name for role, model in facts.items()}
        self.kernels = {str(role): kernel for role, kernel in kernels.items() if kernel is not None}
        self.divided = runs_on_cpu()  # whether each engine has cores of its own; a GPU is shared
        self.every_core: str | None = None
        self.shares: dict[ModelRole, str | None] = {"target": None, "draft": None}  # shares of the cores; None on a GPU
        if self.divided:
            from lookahead_agent.cpu import format_cores, share_cores

            self.every_core = format_cores(available_cores())
            target, draft = share_cores(available_cores(), with_draft=True)
            self.shares = {"target": format_cores(target), "draft": format_cores(draft)}
        self.arguments: dict[str, dict[str, Any]] = {}
        self._folders: dict[ModelRole, Path] = {}
        load_format = {"load_format": "dummy"} if dummy_weights else {}
        for role, folder in fetched.items():
            weights = weights_in(folder, kernels[role], Platform.detect())
            self._folders[role] = folder if dummy_weights else weights.write(progress)
            self.arguments[role] = {**weights.arguments, **self.engine_args, **load_format}
        if not self.divided:
            engines = {role: (self._folders[role], self.arguments[role]) for role in fetched}
            for name, share in memory_shares(engines).items():
                self.arguments[name].setdefault("gpu_memory_utilization", share)

    @contextmanager
    def engine(self, role: ModelRole, cores: str | None) -> Iterator[VLLMEngine]:
        """Start an engine of one of the models, or share a running one; the last user shuts it down."""
        config = VLLMConfig(
            self._folders[role], cores, as_arguments(self.arguments[role]), beside_draft=role == "target"
        )
        with self.progress.task(f"Loading {role} model {self.names[role]}"):
            started = POOL.acquire(config)
        try:
            yield started
        finally:
            POOL.release(config)


def choose_kernels(
    models: ModelSet,
    precisions: Mapping[ModelRole, Precision | None],
    engine_args: Mapping[str, Any],
    folders: Mapping[ModelRole, Path],
    dummy_weights: bool,
    select: Callable[[RuntimeSpec, Path, Path], EngineSetup] = select_engines,
) -> dict[ModelRole, Kernel | None]:
    """The precision of each model's weights; None: vLLM's default. "auto" is resolved as for a chat model."""
    chosen: Mapping[str, Kernel] = {}
    if "auto" in precisions.values() and not dummy_weights:
        target, draft = (precisions[role] or "auto" for role in ("target", "draft"))
        spec = RuntimeSpec(models, engine_args, engine_args, precision=target, draft_precision=draft)
        chosen = select(spec, folders["target"], folders["draft"]).precision
    return {role: chosen.get(role) if fixed == "auto" else fixed for role, fixed in precisions.items()}


def measure_pair(pair: Pair, progress: Progress | None = None) -> MachineCosts:
    """Measure the costs of a pair on this machine, with engines that are loaded already where possible."""
    progress = progress or LogProgress()

    def measure_engine(title: str, engine: Engine, beside: Engine | None = None) -> BatchCosts:
        with progress.task(f"Measuring {title}"):
            # A forward pass on a GPU takes milliseconds, so longer replies are measured there.
            return background.run(measure(engine, beside=beside, tokens=16 if pair.divided else 48))

    with (
        pair.engine("target", pair.shares["target"]) as target,
        pair.engine("draft", pair.shares["draft"]) as draft,
    ):
        target_beside = measure_engine("the target beside the draft", target, draft)
        draft_beside = measure_engine("the draft beside the target", draft, target)
        # A GPU is shared, so the same engines run alone. On a CPU, engines with all cores do.
        engines: dict[ModelRole, Engine] = {"target": target, "draft": draft}
        alone = (
            {} if pair.divided else {role: measure_engine(f"the {role} alone", each) for role, each in engines.items()}
        )
    for role in engines if pair.divided else ():
        with pair.engine(role, pair.every_core) as engine:
            alone[role] = measure_engine(f"the {role} alone", engine)
    return MachineCosts(
        target=alone["target"],
        beside=target_beside,
        draft=draft_beside,
        draft_alone=alone["draft"],
        environment=environment(),
        models=dict(pair.names),
        precision=pair.kernels,
        dummy_weights=pair.dummy_weights,
    )


def measure_acceptance(llm: ChatLookahead, problems: Sequence[Problem], progress: Progress | None = None) -> Acceptance:
    """Measure acceptance rates on a few problems.

    A token counts as accepted if its probability under the draft is above 0.5. That gives a lower bound, since the
    likeliest token may have less. `llm` streams, returns token ids, and has the policy to estimate for.
    """
    recorder = CallRecorder()
    likely: list[bool] = []
    with (progress or LogProgress()).task(f"Measuring acceptance on {len(problems)} problems"):
        for problem in problems:
            solve(TaskConfig(), llm, problem.question, llm.seed or 0, {"callbacks": [recorder]})
            likely += background.run(_likely_tokens(llm, problem.question, recorder.calls[-1].token_ids or []))
    steps = sum(call.steps for call in recorder.calls)
    if not steps or not likely:
        raise ConfigurationError("no reply had a step to compare: give --alpha and --token-alpha")
    verdicts = [seconds for call in recorder.calls for seconds in call.verdicts]
    step_tokens, verifier = sum(call.output_tokens for call in recorder.calls) / steps, mean(verdicts or [0.0])
    return Acceptance(acceptance_of(recorder.calls), sum(likely) / len(likely), step_tokens, verifier)


async def _likely_tokens(llm: ChatLookahead, question: str, reply: Sequence[int]) -> list[bool]:
    async with llm.backend.engines(as_policy(llm.policy)) as engines:
        draft = engines.draft
        if draft is None or draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint:
            raise ConfigurationError("target and draft have different tokenizers: give --token-alpha")
        prompt = draft.tokenizer.chat_prompt(template_messages([HumanMessage(question)]))
        return [value > math.log(0.5) for value in await sequence_logprobs(draft, prompt, reply)]


@dataclass(frozen=True)
class PairMeasurement:
    """The functions with which commands measure a pair of models; tests replace them."""

    pair: Callable[..., Pair] = Pair
    costs: Callable[..., MachineCosts] = measure_pair
    acceptance: Callable[..., Acceptance] = measure_acceptance


PAIR_MEASUREMENT = ContextVar("pair_measurement", default=PairMeasurement())  # noqa: B039
