"""Starts the engines that `plan` measures, and finds out how much of a draft is accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import HumanMessage

from lookahead_agent.bench.environment import environment
from lookahead_agent.bench.problems import Problem
from lookahead_agent.bench.recorder import CallRecorder
from lookahead_agent.bench.samples import acceptance_rate
from lookahead_agent.bench.statistics import mean
from lookahead_agent.bench.tasks import ask
from lookahead_agent.chat.messages import template_messages
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cost_model.costs import BATCHES, BatchCosts, MachineCosts, measure
from lookahead_agent.cost_model.estimator import Acceptance
from lookahead_agent.cost_model.pair import Pair, Role
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.sequence_logprobs import sequence_logprobs
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.policy import as_policy
from lookahead_agent.progress import LogProgress, Progress


def measure_machine(
    model: str,
    draft_model: str | None = None,
    *,
    dummy_weights: bool = False,
    engine_args: Mapping[str, Any] | None = None,
    draft_engine_args: Mapping[str, Any] | None = None,
    precision: Precision = "auto",
    draft_precision: Precision = "auto",
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
        precision: Of the target's weights; "auto": as they are chosen here.
        draft_precision: Of the draft's.
        batches: Sizes of batches that are measured.
        progress: Shown what is done.

    Raises:
        ModelError: A model could not be fetched.
        EngineError: An engine could not start, or failed.
        MissingExtraError: vLLM is not installed.
    """
    progress = progress or LogProgress()
    pair = Pair(
        model,
        draft_model,
        dummy_weights=dummy_weights,
        engine_args=engine_args or {},
        draft_engine_args=draft_engine_args or {},
        precision=precision,
        draft_precision=draft_precision,
        progress=progress,
    )
    return measure_pair(pair, batches, progress)


def measure_pair(pair: Pair, batches: Sequence[int] = BATCHES, progress: Progress | None = None) -> MachineCosts:
    """Measure what a pair costs on this machine; engines that somebody holds are not loaded again.

    Args:
        pair: The models.
        batches: Sizes of batches that are measured.
        progress: Shown what is done.

    Raises:
        EngineError: An engine could not start, or failed.
    """
    progress = progress or LogProgress()

    def measured(writing: Engine, beside: Engine | None, title: str) -> BatchCosts:
        with progress.task(f"Measuring {title}"):
            return background.run(measure(writing, batches, beside=beside))

    roles: tuple[Role, ...] = ("target", "draft")
    alone: dict[Role, BatchCosts] = {}
    with (
        pair.engine("target", pair.shares["target"]) as target,
        pair.engine("draft", pair.shares["draft"]) as draft,
    ):
        beside = measured(target, draft, "the target beside the draft")
        drafting = measured(draft, target, "the draft beside the target")
        if not pair.divided:  # a GPU is shared: the same engines, one at a time
            alone = {
                "target": measured(target, None, "the target by itself"),
                "draft": measured(draft, None, "the draft by itself"),
            }
    for role in () if alone else roles:
        with pair.engine(role, pair.every_core) as only:
            alone[role] = measured(only, None, f"the {role} by itself")
    return MachineCosts(
        target=alone["target"],
        beside=beside,
        draft=drafting,
        draft_alone=alone["draft"],
        environment=environment(),
        models={role: pair.names[role] for role in roles},
        precision=pair.precision,
        dummy_weights=pair.dummy_weights,
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
    async with llm.access.engines(as_policy(llm.policy)) as engines:
        draft = engines.draft
        if draft is None or draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint:
            raise ConfigurationError("target and draft have different tokenizers: give --token-alpha")
        prompt = draft.tokenizer.chat_prompt(template_messages([HumanMessage(question)]))
        return [value > math.log(0.5) for value in await sequence_logprobs(draft, prompt, reply)]
