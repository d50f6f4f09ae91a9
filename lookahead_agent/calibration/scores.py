"""Scores of pairs by the measures of verifiers, and the policies whose thresholds can be learnt from them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from lookahead_agent.calibration.pairs import LabelledPair, PairRow, ScoresRow, labelled_pairs, pair_file
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.decoding.verifier import DraftStep
from lookahead_agent.engines import background
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import RowFile
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.progress import Progress
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers import JudgeVerifier, LikelihoodVerifier, ScoreVerifier
from lookahead_agent.verifiers.prefilter import rejection

Measure = Literal["similarity", "p_aligned", "p_swapped", "score", "likelihood"]
"""Cosine similarity; the judge's p(aligned), and the same with the two steps in each other's place; the target's mark
of the draft's step, from 0 to 9; the mean log-probability of the draft's step under the target, in nats per token."""

MEASURES: tuple[Measure, ...] = get_args(Measure)

_AT_ONCE = 8
_JUDGED = frozenset({"p_aligned", "p_swapped"})


def score_pairs(file: Path, measures: Sequence[Measure], make: Callable[[], ChatLookahead], progress: Progress) -> int:
    """Measure what a file of pairs lacks, append it, and return how many pairs were measured.

    `make` makes the chat model, if there is anything to measure; it is closed.

    Raises:
        ConfigurationError: There is no such file, or it is something else; or there is no embedder or judge; or another
            judge has been asked about these pairs.
        EngineError: An engine failed; a rerun goes on.
    """
    with pair_file(file).writing() as rows:
        pairs = labelled_pairs(rows.rows).values()
        judges = {pair.judge for pair in pairs if _JUDGED & pair.scores.keys()}
        missing = [(pair, names) for pair in pairs if (names := [name for name in measures if name not in pair.scores])]
        if not missing:
            return 0
        with make() as llm, progress.task("Measuring pairs", len(missing)) as advance:
            llm.start(progress)
            for begin in range(0, len(missing), _AT_ONCE):
                background.run(_score(llm, missing[begin : begin + _AT_ONCE], judges, rows))
                advance(min(begin + _AT_ONCE, len(missing)))
    return len(missing)


async def _score(
    llm: ChatLookahead, missing: Sequence[tuple[LabelledPair, list[Measure]]], judges: set[str | None], rows: RowFile
) -> None:
    async with llm.backend.engines(as_policy(llm.policy)) as engines:
        if engines.problem is not None or engines.embedder is None:
            raise ConfigurationError(engines.problem or "there is no embedding model to measure similarity with")
        judge = engines.names.get("judge")
        if others := judges - {judge}:
            raise ConfigurationError(
                f"{others.pop() or 'the target'} has judged these pairs, and not {judge or 'the target'}: measure in a "
                "copy of the file without its rows of scores"
            )

        async def one(pair: LabelledPair, names: list[Measure]) -> ScoresRow:
            scores = await measure(engines, pair.row, names)
            return ScoresRow(problem=pair.row.problem, scores=scores, judge=judge if _JUDGED & set(names) else None)

        async with aclosing(background.as_they_come(one(*each) for each in missing)) as found:
            async for scores in found:
                rows.append(scores.model_dump(mode="json"))


async def measure(engines: EngineSet, row: PairRow, names: Sequence[Measure]) -> dict[str, float]:
    """Measure a pair with the target, and the embedder and judge where they are asked."""
    pair = row.pair
    target = engines.target
    step: DraftStep | None = None
    if "score" in names or "likelihood" in names:
        prompt = await asyncio.to_thread(target.tokenizer.chat_prompt, [{"role": "user", "content": row.question}])
        step = DraftStep(row.question, row.before, pair.draft, (*prompt, *row.before_ids))
    found: dict[str, float] = {}
    for name in names:
        if name == "similarity":
            assert engines.embedder is not None
            found[name] = await engines.embedder.similarity(pair.draft.text.strip(), pair.target.text.strip())
        elif name in ("p_aligned", "p_swapped"):
            assert engines.judge is not None
            asked = pair if name == "p_aligned" else pair.swapped
            found[name] = (await JudgeVerifier(engines.judge, 0.0).verify(asked)).score or 0.0  # none: too long
        else:
            assert step is not None
            verifier = ScoreVerifier(target, 0.0) if name == "score" else LikelihoodVerifier(target, 0.0)
            verdict = await verifier.verify_draft(step)
            assert verdict.score is not None
            found[name] = verdict.score
    return found


@dataclass(frozen=True)
class Candidate:
    """A verifier whose threshold can be learnt."""

    name: str
    measure: Measure  # the measure that the threshold is of, and the policy's field for it
    grid: tuple[float, ...]  # thresholds to choose from, fixed before any pair is seen
    fields: Mapping[str, Any]  # of its policy, without the threshold

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures that decide about a pair."""
        return (*self._compared, "similarity") if self._rules.verifier == "cascade" else self._compared

    @property
    def decides(self) -> tuple[str, ...]:
        """Roles of the models on which the scores depend."""
        asked = {"similarity": "embedding", "p_aligned": "judge"}
        return ("target", "draft", *(role for name, role in asked.items() if name in self.measures))

    @property
    def draft_first(self) -> bool:
        """Whether draft steps are judged alone, without a target step."""
        return self._rules.draft_first

    def score(self, pair: LabelledPair) -> float | None:
        """The score that decides about a pair, infinite where no threshold matters; None: it was not measured."""
        if not self.draft_first:
            if pair.row.same_text:
                return math.inf
            of_pair = pair.row.pair
            texts = of_pair.draft.text.strip(), of_pair.target.text.strip()
            if self._rules.compares_results and rejection(*texts) is not None:
                return -math.inf
        if not all(name in pair.scores for name in self.measures):
            return None
        if self._rules.verifier == "cascade":
            similarity, ask_from = pair.scores["similarity"], self._rules.ask_judge_from
            if similarity >= self._rules.similarity:
                return math.inf
            if ask_from is None or similarity < ask_from:
                return -math.inf
        return min(pair.scores[name] for name in self._compared)

    def policy(self, threshold: float) -> VerifierPolicy:
        """The policy with a threshold."""
        return VerifierPolicy.model_validate({**self.fields, self.measure: threshold})

    @property
    def _compared(self) -> tuple[Measure, ...]:
        """The measures whose minimum is compared with the threshold: two where both orders are asked."""
        return (self.measure, "p_swapped") if self._rules.both_orders else (self.measure,)

    @cached_property
    def _rules(self) -> VerifierPolicy:
        """The policy without its threshold."""
        return VerifierPolicy.model_validate(self.fields)


_SHARES = tuple(number / 100 for number in range(101))
_NATS = tuple(number / 50 for number in range(-150, 1))
CANDIDATES: dict[str, Candidate] = {
    candidate.name: candidate
    for candidate in (
        Candidate("embedding", "similarity", _SHARES, {"verifier": "embedding"}),
        Candidate("embedding+results", "similarity", _SHARES, {"verifier": "embedding", "same_numbers": True}),
        Candidate("judge", "p_aligned", _SHARES, {"verifier": "judge", "same_numbers": False}),
        Candidate("judge+results", "p_aligned", _SHARES, {"verifier": "judge", "same_numbers": True}),
        Candidate("both orders", "p_aligned", _SHARES, {"verifier": "judge", "both_orders": True}),
        Candidate(
            "cascade",
            "p_aligned",
            _SHARES,
            {"verifier": "cascade", "similarity": 0.95, "ask_judge_from": 0.65, "both_orders": True},
        ),
        Candidate("score", "score", tuple(number / 10 for number in range(91)), {"verifier": "score"}),
        Candidate("likelihood", "likelihood", _NATS, {"verifier": "likelihood"}),
    )
}
"""Verifiers by name; "+results" compares numbers, units and equations first, and so do "both orders" and "cascade"."""
