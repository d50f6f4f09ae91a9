"""What changed from one file of results to another, and whether it is more than noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lookahead_agent.bench.samples import Results, Sample, acceptance_rate
from lookahead_agent.bench.statistics import Estimate, difference
from lookahead_agent.bench.summary import by_configuration, over_problems, pairs, right_difference, speedup
from lookahead_agent.errors import ConfigurationError


@dataclass(frozen=True)
class Change:
    """What changed for one way of doing a task, over the samples that both files have.

    Attributes:
        task: Name of the task.
        configuration: Name of the way.
        samples: How many both have.
        speed: The first file's seconds over the second's: the median over problems; above 1 the second is faster.
        right: Right answers of the second file minus the first's, as a share; None: nothing to check.
        acceptance: The same for steps that the draft wrote, problem by problem.
    """

    task: str
    configuration: str
    samples: int
    speed: Estimate
    right: Estimate | None
    acceptance: Estimate

    def verdicts(self) -> list[str]:
        """What is more than noise, in words: what the 95 % intervals exclude."""
        found = []
        if self.speed.excludes(1):
            found.append("faster" if self.speed.value > 1 else "slower")
        if self.right is not None and self.right.excludes(0):
            found.append("more right answers" if self.right.value > 0 else "fewer right answers")
        if self.acceptance.excludes(0):
            found.append("more accepted" if self.acceptance.value > 0 else "less accepted")
        return found


def changes(first: Results, second: Results) -> list[Change]:
    """What changed, for each task and way that both have.

    Raises:
        ConfigurationError: They have nothing in common.
    """
    before, after = by_configuration(first.samples), by_configuration(second.samples)
    found = []
    for key in before.keys() & after.keys():
        both = pairs(after[key], before[key])
        if both:
            found.append(_change(key, both))
    if not found:
        raise ConfigurationError("the two files have no problem in common that was done in the same way")
    order = list(before)
    return sorted(found, key=lambda change: order.index((change.task, change.configuration)))


def _change(key: tuple[str, str], both: Sequence[tuple[Sample, Sample]]) -> Change:
    return Change(
        *key,
        len(both),
        speedup(both),
        right_difference(both),
        over_problems(difference, both, lambda sample: acceptance_rate(sample.calls)),
    )
