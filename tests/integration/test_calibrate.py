"""Step pairs of the packaged pair, labelled by their outcomes and scored."""

from __future__ import annotations

import math
from pathlib import Path

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.problems import dataset_file, read_problems
from lookahead_agent.calibration.collector import Collector
from lookahead_agent.calibration.fit import MEASURES
from lookahead_agent.calibration.pairs import OutcomeRule
from lookahead_agent.system.progress import LogProgress


def test_collector_labels_step_pairs_and_computes_every_measure(real: ChatLookahead, tmp_path: Path) -> None:
    rule = OutcomeRule(seeds=2, margin=2, confirm=3)
    problems = read_problems(dataset_file("own"), 2)
    llm = real.model_copy(update={"max_tokens": 64})
    collector = Collector(llm, problems, tmp_path / "pairs.jsonl", rule=rule, measures=MEASURES, at_once=6)
    collector.run(LogProgress())
    pairs = collector.pairs
    assert pairs, "two replies yield at least one step that the draft writes, too"
    for pair in pairs.values():
        row = pair.row
        assert row.draft is not None
        assert row.target is not None
        assert row.reply.startswith(row.before + row.target.text)
        assert row.draft.end is row.target.end
        assert pair.changes_outcome is not None
        if pair.outcomes is not None:
            assert len(pair.outcomes.draft) == len(pair.outcomes.target) in (2, 5)
        assert set(pair.scores) == set(MEASURES)
        assert all(math.isfinite(value) for value in pair.scores.values())
        assert -1 <= pair.scores["similarity"] <= 1.0001
        assert 0 <= pair.scores["p_aligned"] <= 1
        assert 0 <= pair.scores["p_swapped"] <= 1
    certified = real.invoke(problems[0].question, policy="risk=0.02", max_tokens=24).response_metadata["lookahead"]
    assert certified["certificate"].startswith(("exact, since", "risk "))
