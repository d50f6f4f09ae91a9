"""The difference between two files of results, and whether it is more than noise."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead_agent.bench.samples import Results
from lookahead_agent.bench.statistics import Estimate, mean_difference
from lookahead_agent.bench.summary import accuracy_difference, by_configuration, over_problems, pairs, speedup
from lookahead_agent.errors import ConfigurationError


@dataclass(frozen=True)
class Change:
    """One configuration of a task, over the samples that both files have."""

    task: str
    configuration: str
    samples: int  # number of samples in both files
    # The first file's seconds over the second's: the median over problems; above 1 the second is faster
    speed: Estimate
    accuracy: Estimate | None  # of the second file minus the first's; None: nothing to check
    acceptance: Estimate  # the same of the share of steps that the draft wrote, problem by problem

    def verdicts(self) -> list[str]:
        """Changes that are more than noise: the 95 % intervals exclude equality."""
        found = []
        if self.speed.excludes(1):
            found.append("faster" if self.speed.value > 1 else "slower")
        if self.accuracy is not None and self.accuracy.excludes(0):
            found.append("more correct answers" if self.accuracy.value > 0 else "fewer correct answers")
        if self.acceptance.excludes(0):
            found.append("more accepted" if self.acceptance.value > 0 else "less accepted")
        return found


def changes(first: Results, second: Results) -> list[Change]:
    """The changes of each task and configuration that both have.

    Raises:
        ConfigurationError: They have nothing in common.
    """
    before, after = by_configuration(first.samples), by_configuration(second.samples)
    common = {key: both for key in before if key in after and (both := pairs(after[key], before[key]))}
    if not common:
        raise ConfigurationError("the two files have no problem in common that ran in the same configuration")
    return [
        Change(
            *key,
            len(both),
            speedup(both),
            accuracy_difference(both),
            over_problems(mean_difference, both, lambda sample: sample.acceptance_rate),
        )
        for key, both in common.items()
    ]
