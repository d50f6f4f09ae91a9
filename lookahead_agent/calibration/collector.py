"""Collects pairs of steps from problems, labelled by the outcomes of the target's continuations.

The decoder writes a reply with a verifier that rejects every draft step and records each comparable pair. One pair is
drawn. The target then continues several times from the draft's step and several times from its own.
"""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lookahead_agent.bench.answers import final_number, is_correct
from lookahead_agent.bench.problems import Problem
from lookahead_agent.bench.samples import environment
from lookahead_agent.calibration.fit import JUDGED, Measure, measure
from lookahead_agent.calibration.pairs import (
    LabelledPair,
    OutcomeRule,
    OutcomesRow,
    PairRow,
    ScoresRow,
    labelled_pairs,
    pair_rows,
)
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding import DecodingSettings, ReplyRequest, lookahead
from lookahead_agent.decoding.step import Step
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.system.progress import Progress
from lookahead_agent.verifiers.model_free import hash_to_unit_interval

_SEEDS = 1 << 31
_TEMPERATURE = 0.7  # sampling temperature of continuations, which must vary


@dataclass(eq=False)
class Collector:
    """Collects pairs into a file, with a chat model that has draft, embedder and judge; `run` loads the models."""

    llm: ChatLookahead
    problems: Sequence[Problem]
    out: Path
    _: KW_ONLY
    measures: Sequence[Measure] = ("similarity",)  # measures of verifiers whose thresholds are learnt
    at_once: int = 24  # concurrent replies
    seed: int = 0  # seed of the drawn positions and of the continuations
    rule: OutcomeRule = field(default_factory=OutcomeRule)  # decides which continuations a pair needs

    def __post_init__(self) -> None:
        self._file = RowFile(self.out)
        self._sampling = self.llm.request("?", CallOptions()).sampling
        self._policy = as_policy(self.llm.policy)
        self._slots = asyncio.Semaphore(self.at_once)
        self._settings: dict[str, Any] = {
            **{name: getattr(self._sampling, name) for name in ("temperature", "top_p", "top_k", "max_tokens")},
            **{"delimiter": str(self._policy.delimiter), "temperature_on": _TEMPERATURE, "seed": self.seed},
        }
        known = {problem.id: problem.fingerprint for problem in self.problems}
        for row in pair_rows(self._file.rows):
            if any(row["settings"].get(name) != value for name, value in self._settings.items()):
                raise ConfigurationError(f"{self._file.path} has pairs of other settings: choose another file")
            if known.get(row["problem"], row["fingerprint"]) != row["fingerprint"]:
                other = f"the problem {row['problem']!r} is another in {self._file.path}"
                raise ConfigurationError(f"{other}: choose another file")

    @property
    def pairs(self) -> dict[str, LabelledPair]:
        """The pairs in the file, by problem."""
        return labelled_pairs(self._file.rows, self.rule)

    def run(self, progress: Progress) -> None:
        """Collect the pairs and outcomes that the file lacks."""
        with self._file.open_for_writing():
            seen = {row["problem"] for row in pair_rows(self._file.rows)}
            pairless = [problem for problem in self.problems if problem.id not in seen]
            if not pairless and not self._list_unlabelled() and not self._list_unmeasured():
                return
            self.llm.start(progress)
            # Problems are collected in batches: after an interruption, nearly all pairs in the file have their label.
            size, done = 2 * self.at_once, len(self.problems) - len(pairless)
            with progress.task("Collecting pairs", len(self.problems)) as advance:
                for begin in range(0, max(1, len(pairless)), size):
                    advance(done + begin)
                    background.run(self._collect_batch(pairless[begin : begin + size]))
                advance(len(self.problems))

    async def _collect_batch(self, problems: Sequence[Problem]) -> None:
        async with self.llm.backend.engines(self._policy) as engines:
            if engines.draft is None:
                raise ConfigurationError(engines.problem or "there is no draft model to collect steps of")
            models = {role: name for role, name in engines.names.items() if role != "judge"}
            settings = self._settings | {"models": models, "precision": engines.precision}
            if any(row["settings"] != settings for row in pair_rows(self._file.rows)):
                raise ConfigurationError(f"{self._file.path} has pairs of other models: choose another file")
            await self._append(self._pair(engines, engines.draft, problem, settings) for problem in problems)
            await self._append(self._outcomes(engines.target, pair) for pair in self._list_unlabelled())
            self._check_models(engines)
            await self._append(self._scores(engines, *unmeasured) for unmeasured in self._list_unmeasured())

    async def _append(self, rows: Iterable[Coroutine[Any, Any, BaseModel]]) -> None:
        async with aclosing(background.as_completed(rows)) as found:
            async for row in found:
                self._file.append(row.model_dump(mode="json"))

    def _list_unlabelled(self) -> list[LabelledPair]:
        """The pairs without a label yet."""
        return [pair for pair in self.pairs.values() if pair.changes_outcome is None]

    def _list_unmeasured(self) -> list[tuple[LabelledPair, list[Measure]]]:
        """The pairs that lack scores, with the missing measures."""
        missing = [(pair, [name for name in self.measures if name not in pair.scores]) for pair in self.pairs.values()]
        return [(pair, names) for pair, names in missing if names]

    def _check_models(self, engines: EngineSet) -> None:
        """Check that the verifiers' models are loaded, and that the judge is the one of the file's scores."""
        if engines.problem is not None or engines.embedder is None:
            raise ConfigurationError(engines.problem or "there is no embedding model to measure similarity with")
        judge = engines.names.get("judge")
        judges = {pair.judge for pair in self.pairs.values() if JUDGED & pair.scores.keys()}
        if JUDGED & set(self.measures) and (others := judges - {judge}):
            judged = f"{others.pop() or 'the target'} has judged these pairs, and not {judge or 'the target'}"
            raise ConfigurationError(f"{judged}: collect into a copy of the file without its rows of scores")

    async def _scores(self, engines: EngineSet, pair: LabelledPair, names: Sequence[Measure]) -> ScoresRow:
        async with self._slots:
            scores = await measure(engines, pair.row, names)
        judge = engines.names.get("judge") if JUDGED & set(names) else None
        return ScoresRow(problem=pair.row.problem, scores=scores, judge=judge)

    async def _pair(self, engines: EngineSet, draft: Engine, problem: Problem, shared: Mapping[str, Any]) -> PairRow:
        """Generate a reply and draw one of its comparable pairs."""
        target, recorder = engines.target, _PairRecorder()
        request = ReplyRequest(
            tuple(_prompt(target, problem.question)),
            self._sampling,
            problem.question,
            draft_prompt_ids=tuple(_prompt(draft, problem.question)),
        )
        settings = DecodingSettings(
            depth=1,
            synchronous=True,
            shared_draft=False,
            delimiter=self._policy.delimiter,
            max_step_tokens=self._policy.max_step_tokens,
        )
        async with self._slots:
            reply = await lookahead(request, target, draft, recorder, settings)
        if reply.report.speculation_disabled is not None:
            raise EngineError(reply.report.speculation_disabled)
        row: dict[str, Any] = {"settings": shared, "environment": environment(), "reply": reply.text}
        row |= {name: getattr(problem, name) for name in ("fingerprint", "question", "answer")}
        if recorder.pairs:
            pair = recorder.pairs[
                int(hash_to_unit_interval(self.seed, "position", problem.fingerprint) * len(recorder.pairs))
            ]
            before = bisect_left(reply.text_ends, len(pair.before)) + 1 if pair.before else 0
            row |= {name: getattr(pair, name) for name in ("before", "position", "draft", "target")}
            row |= {"before_ids": reply.token_ids[:before], "positions": len(recorder.pairs)}
        return PairRow(problem=problem.id, **row)

    async def _outcomes(self, target: Engine, pair: LabelledPair) -> OutcomesRow:
        """Continue from both steps as often as the rule needs, and check the answers."""
        row = pair.row
        steps = {"draft": row.pair.draft, "target": row.pair.target}
        correct: dict[str, list[bool]] = {"draft": [], "target": []}
        answer = row.answer
        while missing := self.rule.count_missing(correct["draft"], correct["target"]):
            numbers = range(len(correct["draft"]), len(correct["draft"]) + missing)
            texts = {
                side: await background.gather_or_cancel(
                    self._continuation(target, row, step, side, number) for number in numbers
                )
                for side, step in steps.items()
            }
            if answer is None:
                answer = _most_common_answer([row.reply, *texts["target"]])
            for side, of_side in texts.items():
                correct[side] += [answer is not None and bool(is_correct(text, answer)) for text in of_side]
        return OutcomesRow(problem=row.problem, answer=answer, draft=correct["draft"], target=correct["target"])

    async def _continuation(self, target: Engine, row: PairRow, step: Step, side: str, number: int) -> str:
        """Continue from a step and return the whole reply."""
        prefix = (*row.before_ids, *step.token_ids)
        budget = self._sampling.max_tokens - len(prefix)
        if step.end.ends_reply or budget < 1:
            return row.before + step.text
        seed = int(hash_to_unit_interval(self.seed, row.problem, side, number) * _SEEDS)
        sampling = replace(self._sampling, seed=seed, max_tokens=budget, temperature=_TEMPERATURE)
        prompt, ids = _prompt(target, row.question), list(prefix)
        async with self._slots, aclosing(target.generate((*prompt, *prefix), sampling)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
        return target.tokenizer.decode(ids)


class _PairRecorder:
    """A verifier that records every pair and rejects it."""

    def __init__(self) -> None:
        self.pairs: list[StepPair] = []

    async def verify(self, pair: StepPair) -> Verdict:
        self.pairs.append(pair)
        return Verdict(False, "collected")


def _prompt(engine: Engine, question: str) -> list[int]:
    return engine.tokenizer.chat_prompt([{"role": "user", "content": question}])


def _most_common_answer(texts: Sequence[str]) -> str | None:
    """The most common final number of the texts; None if no text ends with a number."""
    numbers = Counter(number for text in texts if (number := final_number(text)) is not None)
    return str(numbers.most_common(1)[0][0]) if numbers else None
