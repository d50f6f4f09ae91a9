"""Starts the engines that `plan` measures, and finds out how much of a draft is accepted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage

from lookahead_agent import background
from lookahead_agent.bench.environment import environment
from lookahead_agent.bench.problems import Problem
from lookahead_agent.bench.recorder import CallRecorder
from lookahead_agent.bench.samples import acceptance_rate
from lookahead_agent.bench.statistics import mean
from lookahead_agent.bench.tasks import ask
from lookahead_agent.chat_model import ChatLookahead
from lookahead_agent.engines.continuation import continuation_logprobs
from lookahead_agent.engines.cores import available_cores, binding, share_cores
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.shared import POOL
from lookahead_agent.engines.vllm_engine import VLLMConfig, as_arguments, require_vllm, runs_on_cpu
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.messages import template_messages
from lookahead_agent.models import ModelFacts, choose_models
from lookahead_agent.models.resolve import fetch, fetch_tokenizer
from lookahead_agent.plan.costs import BATCHES, BatchCosts, MachineCosts, measure
from lookahead_agent.plan.planner import Acceptance
from lookahead_agent.policy import as_policy
from lookahead_agent.progress import LogProgress, Progress
from lookahead_agent.runtime import GPU_SHARE


def measure_machine(
    model: str,
    draft_model: str | None = None,
    *,
    dummy_weights: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    draft_engine_args: Mapping[str, Any] | None = None,
    batches: Sequence[int] = BATCHES,
    progress: Progress | None = None,
) -> MachineCosts:
    """Measure what a pair of models costs on this machine.

    Args:
        model: Target: a catalogue name, a folder, or a Hub id.
        draft_model: Draft; None: the catalogue's.
        dummy_weights: Make weights up from the models' configurations, so that only these need to be there: a pair can
            be sized before it is downloaded.
        engine_args: Arguments of the target's engine.
        draft_engine_args: Arguments of the draft's engine.
        batches: Sizes of batches that are measured.
        progress: Shown what is done.

    Raises:
        ModelError: A model could not be fetched.
        EngineError: An engine could not start, or failed.
        MissingExtraError: vLLM is not installed.
    """
    require_vllm()
    progress = progress or LogProgress()
    models = choose_models(model, draft_model)
    assert models.draft is not None  # one was asked for
    pair = {"target": models.target, "draft": models.draft}
    get = fetch_tokenizer if dummy_weights else fetch
    folders = {role: get(facts, progress) for role, facts in pair.items()}
    names = {role: _name(facts) for role, facts in pair.items()}
    given = {"target": dict(engine_args or {}), "draft": dict(draft_engine_args or {})}
    for role, arguments in given.items():
        if dummy_weights:
            arguments["load_format"] = "dummy"
        if not runs_on_cpu():
            arguments.setdefault("gpu_memory_utilization", GPU_SHARE[role])

    @contextmanager
    def engine(role: str, cores: str | None) -> Iterator[Engine]:
        config = VLLMConfig(folders[role], cores, as_arguments(given[role]))
        with progress.task(f"Loading {role} model {names[role]}"):
            started = POOL.acquire(config)
        try:
            yield started
        finally:
            POOL.release(config)

    def measured(writing: Engine, beside: Engine | None, title: str) -> BatchCosts:
        with progress.task(f"Measuring {title}"):
            return background.run(measure(writing, batches, beside=beside))

    every = binding(available_cores()) if runs_on_cpu() else None
    shares = (
        [binding(cores) for cores in share_cores(available_cores(), with_draft=True)] if runs_on_cpu() else [None] * 2
    )
    alone: dict[str, BatchCosts] = {}
    with engine("target", shares[0]) as target, engine("draft", shares[1]) as draft:
        beside = measured(target, draft, "the target beside the draft")
        drafting = measured(draft, target, "the draft beside the target")
        if every is None:  # a GPU is not divided: the same engines, one at a time
            alone = {
                "target": measured(target, None, "the target by itself"),
                "draft": measured(draft, None, "the draft by itself"),
            }
    for role in () if alone else ("target", "draft"):
        with engine(role, every) as only:
            alone[role] = measured(only, None, f"the {role} by itself")
    return MachineCosts(
        target=alone["target"],
        beside=beside,
        draft=drafting,
        draft_alone=alone["draft"],
        environment=environment(),
        models=names,
        dummy_weights=dummy_weights,
    )


def measure_acceptance(llm: ChatLookahead, problems: Sequence[Problem], progress: Progress | None = None) -> Acceptance:
    """Find out how much of a draft is accepted, on a few problems.

    A token counts as one that the draft would have guessed if it gives it more than half of its probability: a lower
    bound, since the likeliest token may have less.

    Args:
        llm: A chat model that streams and returns token ids, with the policy that is planned for.
        problems: What it is asked.
        progress: Shown what is done.

    Raises:
        ConfigurationError: The draft has another tokenizer, or nothing could be compared.
        EngineError: The target failed.
    """
    progress = progress or LogProgress()
    recorder = CallRecorder()
    likely: list[bool] = []
    with progress.task(f"Measuring acceptance on {len(problems)} problems"):
        for problem in problems:
            ask(llm, problem.question, llm.seed or 0, {"callbacks": [recorder]})
            likely += background.run(_likely_tokens(llm, problem.question, recorder.calls[-1].token_ids or []))
    steps = sum(call.steps for call in recorder.calls)
    if not steps or not likely:
        raise ConfigurationError("no reply had a step to compare: give --alpha and --token-alpha")
    verdicts = [seconds for call in recorder.calls for seconds in call.times.verifier]
    return Acceptance(
        steps=acceptance_rate(recorder.calls),
        tokens=mean([float(one) for one in likely]),
        step_tokens=sum(call.output_tokens for call in recorder.calls) / steps,
        verifier=mean(verdicts),
    )


async def _likely_tokens(llm: ChatLookahead, question: str, reply: Sequence[int]) -> list[bool]:
    async with llm._engines(as_policy(llm.policy)) as engines:
        draft = engines.draft
        if draft is None or draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint:
            raise ConfigurationError("target and draft have different tokenizers: give --token-alpha")
        prompt = draft.tokenizer.chat_prompt(template_messages([HumanMessage(question)]))
        return [value > math.log(0.5) for value in await continuation_logprobs(draft, prompt, reply)]


def _name(facts: ModelFacts) -> str:
    """Its Hub id, or the folder's name."""
    folder = Path(facts.hub_id)
    return folder.name if folder.is_absolute() else facts.hub_id
