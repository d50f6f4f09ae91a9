"""Measures pairs that have not been measured yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

from lookahead_agent.bench.row_file import RowFile
from lookahead_agent.calibration.pairs import LabelledPair, ScoresRow, labelled_pairs, pair_file
from lookahead_agent.calibration.scores import Measure, measure
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines import background
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import as_policy
from lookahead_agent.progress import Progress

_AT_ONCE = 8
_JUDGED = frozenset({"p_aligned", "p_swapped"})


def score_pairs(file: Path, measures: Sequence[Measure], make: Callable[[], ChatLookahead], progress: Progress) -> int:
    """Measure what is missing, and append it to the file of pairs.

    Args:
        file: The file.
        measures: What is measured.
        make: Makes the chat model that measures, if there is anything to measure; it is closed.
        progress: Told how far it is.

    Returns:
        How many pairs were measured.

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
        with make() as llm, progress.task("Measuring pairs", len(missing)) as task:
            llm.start(progress)
            for begin in range(0, len(missing), _AT_ONCE):
                background.run(_score(llm, missing[begin : begin + _AT_ONCE], judges, rows))
                task.advance(min(begin + _AT_ONCE, len(missing)))
    return len(missing)


async def _score(
    llm: ChatLookahead, missing: Sequence[tuple[LabelledPair, list[Measure]]], judges: set[str | None], rows: RowFile
) -> None:
    async with llm.access.engines(as_policy(llm.policy)) as engines:
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
