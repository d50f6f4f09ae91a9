"""Verifier policies: how far a node looks ahead and how strictly a draft step is judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lookahead_agent.errors import PolicyError

VerifierName = Literal["off", "exact", "embedding", "judge", "cascade"]

# Which thresholds each verifier reads: one given to a verifier that ignores it is a mistake worth an error.
_THRESHOLDS: dict[str, frozenset[str]] = {
    "off": frozenset(),
    "exact": frozenset(),
    "embedding": frozenset({"similarity"}),
    "judge": frozenset({"p_aligned", "same_numbers"}),
    "cascade": frozenset({"similarity", "ask_judge_from", "p_aligned", "same_numbers"}),
}


class VerifierPolicy(BaseModel):
    """A verifier and everything else that a node may choose.

    Attributes:
        name: Name in metadata and reports.
        verifier: "off" runs the target alone; "exact" accepts only the target's own tokens; "embedding" goes by
            similarity, "judge" by the target model's opinion; "cascade" combines them, cheapest first.
        similarity: Cosine similarity from which a pair is accepted, in [-1, 1] (embedding, cascade).
        ask_judge_from: Similarity from which the judge is asked about pairs below `similarity`; None: never (cascade).
        p_aligned: Least probability of "yes" with which the judge accepts, in [0, 1] (judge, cascade).
        same_numbers: Whether steps with different numbers are rejected before any model is asked (judge, cascade).
        depth: Steps in flight at the front (γ).
        delimiter: Text that ends a step.
        max_step_tokens: Length limit of a step in tokens; a draft step that is cut there is never accepted.
        hedge: Whether the target goes on after its own step while the verifier thinks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "custom"
    verifier: VerifierName = "cascade"
    similarity: float = Field(0.85, ge=-1, le=1)
    ask_judge_from: float | None = Field(0.65, ge=-1, le=1)
    p_aligned: float = Field(0.75, ge=0, le=1)
    same_numbers: bool = True
    depth: int = Field(4, ge=1, le=16)
    delimiter: str = Field("\n\n", min_length=1)
    max_step_tokens: int = Field(256, ge=1)
    hedge: bool = True

    @model_validator(mode="after")
    def _only_what_counts(self) -> VerifierPolicy:
        thresholds = frozenset().union(*_THRESHOLDS.values())
        if ignored := sorted((self.model_fields_set & thresholds) - _THRESHOLDS[self.verifier]):
            raise ValueError(f"the verifier {self.verifier!r} does not use {', '.join(ignored)}")
        asked_from = self.ask_judge_from if "ask_judge_from" in self.model_fields_set else None
        if asked_from is not None and asked_from > self.similarity:
            raise ValueError(
                f"ask_judge_from ({self.ask_judge_from}) is above similarity ({self.similarity}): "
                "the judge would never be asked"
            )
        return self

    @property
    def speculates(self) -> bool:
        """Whether the policy uses a draft model at all."""
        return self.verifier != "off"


# Thresholds from 260 step pairs of the default models on GSM8K problems, looked at by hand. With equal numbers, every
# pair above 0.85 but one (a line of code) meant the same, and most down to 0.65, where a 1.5B judge was sure (0.75 and
# more) of those that did. Unequal numbers were found at similarities of 0.99, and the judge was sure (0.97) of some:
# that is why numbers are compared first, and why similarity alone is only `fast`.
POLICIES: dict[str, VerifierPolicy] = {
    policy.name: policy
    for policy in (
        VerifierPolicy(name="off", verifier="off"),
        VerifierPolicy(name="exact", verifier="exact"),
        VerifierPolicy(
            name="strict",
            verifier="cascade",
            similarity=0.92,
            ask_judge_from=0.8,
            p_aligned=0.9,
            same_numbers=True,
        ),
        VerifierPolicy(
            name="balanced",
            verifier="cascade",
            similarity=0.85,
            ask_judge_from=0.65,
            p_aligned=0.75,
            same_numbers=True,
        ),
        VerifierPolicy(name="fast", verifier="embedding", similarity=0.85),
    )
}

PolicyLike = str | VerifierPolicy | Mapping[str, Any]
"""A policy's name, a policy, or the fields of one."""


def as_policy(policy: PolicyLike) -> VerifierPolicy:
    """Turn a name or fields into a policy.

    Raises:
        PolicyError: No policy has this name, or the fields contradict each other.
    """
    if isinstance(policy, VerifierPolicy):
        return policy
    if isinstance(policy, str):
        try:
            return POLICIES[policy]
        except KeyError:
            raise PolicyError(f"no policy is called {policy!r}: choose one of {', '.join(POLICIES)}") from None
    try:
        return VerifierPolicy.model_validate(policy)
    except ValidationError as error:
        problems = "; ".join(
            ".".join(str(part) for part in problem["loc"]) + (": " if problem["loc"] else "") + problem["msg"]
            for problem in error.errors()
        )
        raise PolicyError(f"this is not a policy: {problems}") from error


def choose_policy(
    *,
    call: PolicyLike | None,
    configurable: PolicyLike | None,
    node: str | None,
    policies: Mapping[str, PolicyLike],
    default: PolicyLike,
) -> VerifierPolicy:
    """Choose the policy of one call: the first of the call's own, the configuration's, the node's and the default.

    Args:
        call: Argument of the call.
        configurable: `config["configurable"]["lookahead_policy"]`.
        node: The LangGraph node that is running, None outside a graph.
        policies: Policies by node name.
        default: The model's.

    Raises:
        PolicyError: The chosen policy does not exist.
    """
    for candidate in (call, configurable, policies.get(node) if node else None):
        if candidate is not None:
            return as_policy(candidate)
    return as_policy(default)
