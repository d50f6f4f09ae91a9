"""Measures a pair of models: costs and acceptance rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from statistics import mean

from langchain_core.messages import HumanMessage

from lookahead_agent.bench.problems import Problem
from lookahead_agent.bench.recorder import CallRecorder
from lookahead_agent.bench.resources import environment
from lookahead_agent.bench.samples import acceptance_of
from lookahead_agent.bench.tasks import ask
from lookahead_agent.chat.messages import template_messages
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cost_model.costs import BATCHES, BatchCosts, MachineCosts, measure
from lookahead_agent.cost_model.estimator import EVERY, Acceptance, Grid
from lookahead_agent.cost_model.pair import Pair, Role
from lookahead_agent.engines import background
from lookahead_agent.engines.logprobs import sequence_logprobs
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import as_policy
from lookahead_agent.progress import LogProgress, Progress


def measure_pair(pair: Pair, batches: Sequence[int] = BATCHES, progress: Progress | None = None) -> MachineCosts:
    """Measure the costs of a pair on this machine; engines that are loaded already are not loaded again.

    Raises:
        EngineError: An engine could not start, or failed.
    """
    progress = progress or LogProgress()

    def measured(title: str, writing: Engine, beside: Engine | None = None) -> BatchCosts:
        with progress.task(f"Measuring {title}"):
            # A GPU's passes take milliseconds: more of them make a measurement.
            return background.run(measure(writing, batches, beside=beside, tokens=16 if pair.divided else 48))

    with (
        pair.engine("target", pair.shares["target"]) as target,
        pair.engine("draft", pair.shares["draft"]) as draft,
    ):
        target_beside = measured("the target beside the draft", target, draft)
        draft_beside = measured("the draft beside the target", draft, target)
        # A GPU is shared: the engines are the same. Cores are divided: others have all of them.
        engines: dict[Role, Engine] = {"target": target, "draft": draft}
        alone = {} if pair.divided else {role: measured(f"the {role} alone", of) for role, of in engines.items()}
    for role in engines if pair.divided else ():
        with pair.engine(role, pair.every_core) as only:
            alone[role] = measured(f"the {role} alone", only)
    return MachineCosts(
        target=alone["target"],
        beside=target_beside,
        draft=draft_beside,
        draft_alone=alone["draft"],
        environment=environment(),
        models=dict(pair.names),
        precision=pair.precision,
        dummy_weights=pair.dummy_weights,
    )


def measure_acceptance(llm: ChatLookahead, problems: Sequence[Problem], progress: Progress | None = None) -> Acceptance:
    """Measure acceptance rates on a few problems.

    A token counts as accepted if the draft gives it more than half of its probability: a lower bound, since the
    likeliest token may have less.

    Args:
        llm: Streams, returns token ids, and has the policy to estimate for.

    Raises:
        ConfigurationError: The draft has another tokenizer, or no step could be compared.
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
        steps=acceptance_of(recorder.calls),
        tokens=sum(likely) / len(likely),
        step_tokens=sum(call.output_tokens for call in recorder.calls) / steps,
        verifier=mean(verdicts) if verdicts else 0.0,
    )


async def _likely_tokens(llm: ChatLookahead, question: str, reply: Sequence[int]) -> list[bool]:
    async with llm.backend.engines(as_policy(llm.policy)) as engines:
        draft = engines.draft
        if draft is None or draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint:
            raise ConfigurationError("target and draft have different tokenizers: give --token-alpha")
        prompt = draft.tokenizer.chat_prompt(template_messages([HumanMessage(question)]))
        return [value > math.log(0.5) for value in await sequence_logprobs(draft, prompt, reply)]


@dataclass(frozen=True)
class PairMeasurement:
    """The measurement of a pair of models by a command; tests measure otherwise."""

    pair: Callable[..., Pair] = Pair
    costs: Callable[..., MachineCosts] = measure_pair
    acceptance: Callable[..., Acceptance] = measure_acceptance
    grid: Grid = EVERY  # the settings that `estimate` tries
    rates: Sequence[float] = tuple(eighth / 8 for eighth in range(9))  # the acceptance rates of its break-even map


_DEFAULT = PairMeasurement()
PAIR_MEASUREMENT: ContextVar[PairMeasurement] = ContextVar("pair_measurement", default=_DEFAULT)
