"""Compares an agent's actions with and without speculation, byte for byte."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

from lookahead_agent.bench.config import BASELINE
from lookahead_agent.bench.samples import Sample
from lookahead_agent.bench.summary import by_configuration
from lookahead_agent.errors import PolicyError
from lookahead_agent.policy import as_policy


@dataclass(frozen=True)
class Difference:
    """The first action in which a run with speculation differs from the run without it."""

    problem: str
    place: str  # the node and the number of its action, "the run", or "the answer"
    off: str  # the action without speculation; empty: none, as for `on`
    on: str
    promised: bool  # whether the policies promise equality


@dataclass(frozen=True)
class Parity:
    """The comparison of one configuration of a task with the target alone."""

    task: str
    configuration: str
    runs: int = 0  # runs that both configurations have
    acts: int = 0  # actions in replies and tool runs, without speculation
    promised: int = 0  # runs whose policies promise equality
    differences: list[Difference] = field(default_factory=list)  # one difference for each run that differs

    @property
    def holds(self) -> bool:
        """Whether no run differs whose policies promise equality."""
        return not any(difference.promised for difference in self.differences)


def parity(samples: Iterable[Sample]) -> list[Parity]:
    """Compare each configuration's runs with those of the target alone, problem by problem."""
    groups = by_configuration(samples)
    found = []
    for (task, configuration), members in groups.items():
        if configuration == BASELINE:
            continue
        alone = {(each.block, each.problem, each.sample): each for each in groups.get((task, BASELINE), [])}
        pairs = [(off, each) for each in members if (off := alone.get((each.block, each.problem, each.sample)))]
        found.append(
            Parity(
                task,
                configuration,
                len(pairs),
                sum(len(acts) for off, _ in pairs for acts in actions_of(off).values()),
                sum(_must_equal_target(off) and _must_equal_target(on) for off, on in pairs),
                [difference for off, on in pairs if (difference := _difference(off, on)) is not None],
            )
        )
    return found


def actions_of(sample: Sample) -> dict[str, list[str]]:
    """Collect the actions in each node's replies and the runs of each node's tools, in the order of the graph's steps.

    Actions of one step may run in parallel and are sorted; their order is in the reply that wrote them.
    """
    nodes: dict[str, list[tuple[int, float, str]]] = {}
    for call in sample.calls:
        if call.action is not None:
            acts = nodes.setdefault(f"replies of {call.path or 'the model'}", [])
            acts.append((call.step or 0, 0.0 if call.step else call.started, call.action))
    for run in sample.tools:
        acts = nodes.setdefault(f"tools of {run.path or 'the graph'}", [])
        acts.append((run.step or 0, 0.0 if run.step else run.started, f"{run.name}({run.arguments})"))
    return {node: [text for *_, text in sorted(acts)] for node, acts in nodes.items()}


def _difference(off: Sample, on: Sample) -> Difference | None:
    promised = _must_equal_target(off) and _must_equal_target(on)
    first, second = actions_of(off), actions_of(on)
    for node in dict.fromkeys((*first, *second)):
        pairs = zip_longest(first.get(node, []), second.get(node, []), fillvalue="")
        for number, (mine, other) in enumerate(pairs, 1):
            if mine != other:
                return Difference(off.problem, f"{node}, number {number}", mine, other, promised)
    if off.error != on.error:
        return Difference(off.problem, "the run", off.error or "", on.error or "", promised)
    if promised and off.answer != on.answer:
        return Difference(off.problem, "the answer", off.answer, on.answer, promised)
    return None


def _must_equal_target(sample: Sample) -> bool:
    """Whether all tokens of a run must be the target's own; at temperature 0, these are determined."""
    return all(call.accepted == 0 or _is_lossless(call.policy) for call in sample.calls)


def _is_lossless(policy: str) -> bool:
    try:
        known = as_policy(policy)
    except PolicyError:  # a user's own policy, of which only the name is known
        return False
    return not known.speculates or known.verifier == "exact"
