"""Has target and draft write over problems, and the target go on from a step of each: pairs labelled by what follows.

The target writes a reply. After each of its steps but the last the draft writes its own next step; of the positions
where the two are comparable one is drawn. From there the target goes on, several times from the draft's step
and several times from its own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lookahead_agent.bench.problems import AnswerKind, Problem, final_number, is_correct
from lookahead_agent.bench.resources import environment
from lookahead_agent.calibration.pairs import LabelledPair, OutcomeRule, OutcomesRow, PairRow, labelled_pairs, pair_rows
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding.prefixes import Vocabularies
from lookahead_agent.decoding.segmenter import PrefixContext, Segmentation, Segmenter
from lookahead_agent.decoding.step import Step, comparable
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.jsonl import RowFile
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.random_accept import draw

_SEEDS = 1 << 31


@dataclass(frozen=True)
class CollectionSettings:
    """The settings of a collection.

    Raises:
        ConfigurationError: A value out of its range.
    """

    answer: AnswerKind = "number"  # how answers are compared
    rule: OutcomeRule = field(default_factory=OutcomeRule)  # decides which continuations a pair needs
    temperature: float = 0.7  # of continuations, above 0: they are compared by chance
    at_once: int = 24  # replies that are written at the same time
    seed: int = 0  # of all that is drawn

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigurationError("continuations are compared by chance: choose a temperature above 0")
        if min(self.at_once, self.rule.seeds, self.rule.confirm) < 1:
            raise ConfigurationError("replies at once and continuations are at least 1")


class Collector:
    """Collects pairs into a file; nothing is loaded yet.

    Args:
        llm: A chat model with a draft engine. Replies and draft steps are sampled as it would.
        problems: What is asked.
        how: How.
        out: Where rows are, or will be.

    Raises:
        ConfigurationError: `out` has rows of other settings, or a problem without an answer is no matter of numbers.
    """

    def __init__(self, llm: ChatLookahead, problems: Sequence[Problem], how: CollectionSettings, out: Path) -> None:
        self._llm = llm
        self._problems = problems
        self._how = how
        self._file = RowFile(out)
        self._sampling = llm.request("", CallOptions()).sampling
        if how.answer != "number" and (open_ := next((each for each in problems if each.answer is None), None)):
            raise ConfigurationError(
                f"the problem {open_.id!r} has no answer, and replies can be held against each other only as numbers"
            )
        self._rules = as_policy(llm.policy)
        self._settings: dict[str, Any] = {
            "temperature": self._sampling.temperature,
            "top_p": self._sampling.top_p,
            "top_k": self._sampling.top_k,
            "max_tokens": self._sampling.max_tokens,
            "delimiter": str(self._rules.delimiter),
            "answer": how.answer,
            "temperature_on": how.temperature,
            "seed": how.seed,
        }
        known = {problem.id: problem.fingerprint for problem in problems}
        for row in pair_rows(self._file.rows):
            if any(row["settings"].get(name) != value for name, value in self._settings.items()):
                raise ConfigurationError(f"{self._file.path} has pairs of other settings: choose another file")
            if known.get(row["problem"], row["fingerprint"]) != row["fingerprint"]:
                raise ConfigurationError(
                    f"the problem {row['problem']!r} is another in {self._file.path}: choose another file"
                )

    @property
    def pairs(self) -> dict[str, LabelledPair]:
        """The pairs by problem."""
        return labelled_pairs(self._file.rows)

    def run(self, progress: Progress) -> None:
        """Collect the pairs and outcomes that the file lacks.

        Raises:
            EngineError: An engine failed; a rerun goes on.
            MissingExtraError: The answers' kind needs a library that is not installed.
        """
        with self._file.writing():
            seen = {row["problem"] for row in pair_rows(self._file.rows)}
            pairless = [problem for problem in self._problems if problem.id not in seen]
            if not pairless and not self._unfinished():
                return
            self._llm.start(progress)
            # Problems go in turns: after any interruption nearly all pairs that are there have their label.
            size, done = 2 * self._how.at_once, len(self._problems) - len(pairless)
            with progress.task("Collecting pairs", len(self._problems)) as task:
                for begin in range(0, max(1, len(pairless)), size):
                    task.advance(done + begin)
                    background.run(self._turn(pairless[begin : begin + size]))
                task.advance(len(self._problems))

    async def _turn(self, problems: Sequence[Problem]) -> None:
        policy = as_policy(self._llm.policy)
        async with self._llm.backend.engines(policy) as engines:
            if engines.draft is None:
                raise ConfigurationError(engines.problem or "there is no draft model to collect steps of")
            work = _Work(engines, engines.draft, self._how, self._sampling, self._rules)
            settings = self._settings | {"models": engines.names, "precision": engines.precision}
            if any(row["settings"] != settings for row in pair_rows(self._file.rows)):
                raise ConfigurationError(f"{self._file.path} has pairs of other models: choose another file")
            replies = await background.all_of(work.reply(problem) for problem in problems)
            # The two engines may be on the same cores, so they work one after the other.
            async with aclosing(background.as_they_come(map(work.pair, problems, replies))) as pairs:
                async for pair in pairs:
                    row = pair.model_copy(update={"settings": settings, "environment": environment()})
                    self._file.append(row.model_dump(mode="json"))
            async with aclosing(background.as_they_come(map(work.outcomes, self._unfinished()))) as outcomes:
                async for outcome in outcomes:
                    self._file.append(outcome.model_dump(mode="json"))

    def _unfinished(self) -> list[LabelledPair]:
        """Pairs of which nobody knows yet whether they change the outcome."""
        return [pair for pair in self.pairs.values() if pair.changes_outcome(self._how.rule) is None]


class _Work:
    """The requests to the engines."""

    def __init__(
        self, engines: EngineSet, draft: Engine, how: CollectionSettings, sampling: Sampling, rules: VerifierPolicy
    ) -> None:
        self._target = engines.target
        self._draft = draft
        self._vocabularies = Vocabularies(self._target.tokenizer, draft.tokenizer)
        self._how = how
        self._sampling = sampling
        self._rules = rules
        self._room = asyncio.Semaphore(how.at_once)

    async def reply(self, problem: Problem) -> list[Step]:
        """The target's reply to a problem, in steps."""
        return await self._steps(self._target, problem, (), "reply")

    async def pair(self, problem: Problem, steps: Sequence[Step]) -> PairRow:
        """Two steps of a position of the reply, drawn from those with two comparable steps."""
        row = PairRow(
            problem=problem.id,
            fingerprint=problem.fingerprint,
            question=problem.question,
            answer=problem.answer,
            reply=_text(steps),
        )
        drafts = await background.all_of(self._draft_step(problem, steps[:at]) for at in range(len(steps)))
        possible = [at for at, draft in enumerate(drafts) if comparable(draft, steps[at])]
        if not possible:
            return row
        at = possible[int(draw(self._how.seed, "position", problem.fingerprint) * len(possible))]
        return row.model_copy(
            update={
                "before": _text(steps[:at]),
                "before_ids": _ids(steps[:at]),
                "position": at,
                "positions": len(possible),
                "draft": drafts[at],
                "target": steps[at],
            }
        )

    async def outcomes(self, pair: LabelledPair) -> OutcomesRow:
        """The answers that the target comes to from each of two steps, as often as the rule asks."""
        row = pair.row
        steps = {"draft": row.pair.draft, "target": row.pair.target}
        right: dict[str, list[bool]] = {"draft": [], "target": []}
        answer = row.answer
        prompt = self._prompt(self._target, row.question)
        while missing := self._how.rule.missing(right["draft"], right["target"]):
            numbers = range(len(right["draft"]), len(right["draft"]) + missing)
            texts = {
                side: await background.all_of(self._whole(prompt, row, step, side, number) for number in numbers)
                for side, step in steps.items()
            }
            if answer is None:
                answer = _most_common_answer([row.reply, *texts["target"]])
            for side, of_side in texts.items():
                right[side] += [await self._is_right(text, answer) for text in of_side]
        return OutcomesRow(problem=row.problem, answer=answer, draft=right["draft"], target=right["target"])

    async def _whole(self, prompt: Sequence[int], row: PairRow, step: Step, side: str, number: int) -> str:
        """The reply up to a step and on from it."""
        if step.end.ends_reply:
            return row.before + step.text
        prefix = (*row.before_ids, *step.token_ids)
        left = self._sampling.max_tokens - len(prefix)
        if left < 1:
            return row.before + step.text
        seeded = self._seeded(row.problem, side, number)
        sampling = replace(seeded, max_tokens=left, temperature=self._how.temperature)
        ids: list[int] = []
        async with self._room, aclosing(self._target.generate((*prompt, *prefix), sampling)) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
        return self._target.tokenizer.decode([*prefix, *ids])

    async def _is_right(self, text: str, answer: str | None) -> bool:
        if answer is None:
            return False
        return await asyncio.to_thread(is_correct, text, answer, self._how.answer)

    async def _draft_step(self, problem: Problem, before: Sequence[Step]) -> Step:
        prefix = [token for step in before for token in self._vocabularies.to_draft(step)]
        (step,) = await self._steps(self._draft, problem, before, f"draft {len(before)}", prefix=prefix, most=1)
        return self._vocabularies.from_draft(step, self._sampling.max_tokens - len(_ids(before)))

    async def _steps(
        self,
        engine: Engine,
        problem: Problem,
        before: Sequence[Step],
        name: str,
        *,
        prefix: Sequence[int] = (),
        most: int | None = None,
    ) -> list[Step]:
        """Steps that an engine writes after others."""
        rules = Segmentation(
            delimiter=self._rules.delimiter,
            max_step_tokens=self._rules.max_step_tokens,
            eos_ids=engine.tokenizer.eos_ids,
        )
        seen = PrefixContext(rules.lookback).then(_text(before))
        prompt = (*self._prompt(engine, problem.question), *prefix)
        stream = engine.tokenizer.stream(prompt)
        budget = self._sampling.max_tokens - len(prefix)
        sampling = replace(self._seeded(problem.id, name, 0), max_tokens=budget)
        steps: list[Step] = []
        segmenter = Segmenter(rules, stream, seen, budget)
        reason: str | None = None
        async with self._room, aclosing(engine.generate(prompt, sampling)) as deltas:
            async for delta in deltas:
                reason = delta.finish_reason
                for token in delta.token_ids:
                    step = segmenter.push(token)
                    if step is None:
                        continue
                    steps.append(step)
                    if step.end.ends_reply or len(steps) == most:
                        return steps
                    seen = seen.then(step.text)
                    budget -= len(step.token_ids)
                    segmenter = Segmenter(rules, stream, seen, budget)
        return [*steps, segmenter.close(reason)]

    def _seeded(self, problem: str, name: str, number: int) -> Sampling:
        return replace(self._sampling, seed=int(draw(self._how.seed, problem, name, number) * _SEEDS))

    @staticmethod
    def _prompt(engine: Engine, question: str) -> list[int]:
        return engine.tokenizer.chat_prompt([{"role": "user", "content": question}])


def _text(steps: Iterable[Step]) -> str:
    return "".join(step.text for step in steps)


def _ids(steps: Iterable[Step]) -> tuple[int, ...]:
    return tuple(token for step in steps for token in step.token_ids)


def _most_common_answer(texts: Sequence[str]) -> str | None:
    """The number that most of the texts end with; None: none ends with any."""
    numbers = Counter(number for text in texts if (number := final_number(text)) is not None)
    return str(numbers.most_common(1)[0][0]) if numbers else None
