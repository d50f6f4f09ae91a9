"""Predicted speed of draft steps on a GPU, on the target alone and on a target whose head drafts its tokens.

The costs of a forward pass were measured on an H100. The rest is computed: a head makes the target 1.70 times as fast,
as its authors publish, at every batch size; verdicts take no time. The figures on a head are therefore upper bounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lookahead_agent.cost_model.costs import BatchCosts, MachineCosts, read_costs
from lookahead_agent.cost_model.estimator import Acceptance, best_settings

FOLDER = Path(__file__).parent
ALPHAS = (0.45, 0.6, 0.8)
HEAD = 1.7  # speed of a target with its head
STEP_TOKENS, TOKEN_ALPHA = 24, 0.7


def measured(file: str) -> MachineCosts:
    """The costs in a file of this folder."""
    costs = read_costs(FOLDER / file)
    assert costs is not None
    return costs


def on_own_gpus(costs: MachineCosts) -> MachineCosts:
    """The costs if neither model slows the other."""
    return costs.model_copy(update={"beside": costs.target, "draft": costs.draft_alone})


def with_head(costs: MachineCosts) -> MachineCosts:
    """The costs of a target with a head, per token."""

    def faster(costs: BatchCosts) -> BatchCosts:
        return BatchCosts(seconds={size: seconds / HEAD for size, seconds in costs.seconds.items()})

    return costs.model_copy(update={"target": faster(costs.target), "beside": faster(costs.beside)})


def speeds(costs: MachineCosts) -> list[str]:
    """The speed of the best `lr`, relative to the same target without steps, by acceptance rate."""
    found = []
    for alpha in ALPHAS:
        (best,) = best_settings(costs, Acceptance(alpha, TOKEN_ALPHA, STEP_TOKENS), ["lr"])
        found.append(f"{best.speedup:.2f}")
    return found


def rows() -> Iterator[str]:
    """The rows of the table in `docs/how-to/gpu.md`."""
    small, large = measured("gpu-h100-8b-costs.json"), measured("gpu-h100-32b-costs.json")
    pairs = {
        ("8B, 0.6B", "one, in turns"): small,
        ("8B, 0.6B", "one, MPS with a fifth for the draft"): measured("gpu-h100-8b-mps-fifth-costs.json"),
        ("8B, 0.6B", "one for each"): on_own_gpus(small),
        ("32B, 1.7B", "one, in turns"): large,
        ("32B, 1.7B", "one for each"): on_own_gpus(large),
    }
    for names, costs in pairs.items():
        yield f"| {' | '.join([*names, *speeds(costs), *speeds(with_head(costs))])} |"


if __name__ == "__main__":
    for row in rows():
        print(row)
