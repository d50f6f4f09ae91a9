from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import ValidationError

from lookahead_agent.bench.config import TaskConfig, configurations_of
from lookahead_agent.errors import PolicyError
from lookahead_agent.policy import POLICIES, VerifierPolicy, as_policy
from lookahead_agent.verifiers import DraftStep, StepPair, Verdict
from tests.unit.chat import scripted_chat, scripted_engines


def test_policy_names_and_their_order() -> None:
    assert list(POLICIES) == ["off", "exact", "strict", "balanced", "fast", "specreason", "random"]


def test_error_of_an_unknown_name_lists_the_known_names() -> None:
    with pytest.raises(PolicyError, match="off, exact, strict, balanced, fast"):
        as_policy("lenient")


def test_fields_of_a_policy_are_validated() -> None:
    assert as_policy({"verifier": "embedding", "similarity": 0.9}).similarity == 0.9
    with pytest.raises(PolicyError, match="depth"):
        as_policy({"depth": 17})
    with pytest.raises(PolicyError, match="strictness"):
        as_policy({"strictness": 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"verifier": "exact", "similarity": 0.9},
        {"verifier": "embedding", "p_aligned": 0.9},
        {"verifier": "judge", "ask_judge_from": 0.5},
        {"verifier": "off", "same_numbers": True},
        {"verifier": "off", "depth": 2},
        {"verifier": "score", "similarity": 0.5},
        {"verifier": "score", "synchronous": True},
        {"verifier": "likelihood", "hedge": False},
        {"verifier": "random", "score": 5},
    ],
)
def test_field_that_the_verifier_ignores_is_rejected(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="does not use"):
        VerifierPolicy.model_validate(fields)


def test_ask_judge_from_above_similarity_is_rejected() -> None:
    with pytest.raises(ValidationError, match="never be asked"):
        VerifierPolicy(similarity=0.5, ask_judge_from=0.6)


def test_named_policies_have_risks() -> None:
    assert [POLICIES[name].risk for name in ("strict", "balanced", "fast")] == [0.02, 0.05, 0.1]
    assert [POLICIES[name].compares_results for name in ("strict", "balanced", "fast")] == [True, True, False]


def test_explicit_threshold_takes_precedence_over_a_certificate() -> None:
    assert as_policy("balanced:similarity=0.9").risk is None
    assert as_policy("balanced:risk=0.01:similarity=0.9").risk == 0.01
    assert as_policy("balanced:depth=2").risk == 0.05
    assert as_policy({"verifier": "embedding", "similarity": 0.9, "risk": 0.01}).name == "risk=0.01"
    with pytest.raises(PolicyError, match="'exact' does not use risk"):
        as_policy({"verifier": "exact", "risk": 0.01})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"delimiter": ""}, "matches the empty text"),
        ({"delimiter": re.compile("x*")}, "matches the empty text"),
        ({"draft_temperature": 0.5}, "no effect with width 1"),
        ({"similarity": float("nan")}, "finite number"),
        ({"verifier_timeout": float("inf")}, "finite number"),
        ({"delimiter": re.compile("(?:a?){1000000000}")}, "too large"),
        ({"width": 9}, "width"),
    ],
)
def test_unusable_values_are_rejected(fields: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=re.escape(message)):
        as_policy(fields)


class SameLength:
    """A verifier of one's own, whose instances have no hash."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameLength)

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(len(pair.draft.text) == len(pair.target.text), "length")


class DraftOnly:
    async def verify_draft(self, step: DraftStep) -> Verdict:
        return Verdict(True, "any")


class Synchronous:
    def verify(self, pair: StepPair) -> Verdict:
        return Verdict(True, "any")


class NeedsMore:
    def __init__(self, more: int) -> None:
        self.more = more


INSTANCE = SameLength()
HERE = __name__


def test_own_verifier_is_an_instance_or_a_name_wherever_a_policy_is_named() -> None:
    for policy in (
        VerifierPolicy(verifier=SameLength()),
        as_policy({"verifier": SameLength()}),
        as_policy({"verifier": f"{HERE}:SameLength"}),
        as_policy(f"{HERE}:SameLength"),
        as_policy(f"{HERE}:INSTANCE"),
        as_policy(f"{HERE}:SameLength:depth=3:delimiter=/:/"),
    ):
        assert isinstance(policy.own_verifier, SameLength)
        assert scripted_engines("a").verifier(policy) is policy.own_verifier
        assert (policy.speculates, policy.draft_first, policy.asks_judge, policy.embeds) == (True, False, False, False)
        assert isinstance(hash(policy), int)
        assert "SameLength" in policy.explain() or "INSTANCE" in policy.explain()
    assert (policy.depth, policy.name) == (3, f"{HERE}:SameLength:depth=3:delimiter=/:/")
    assert as_policy(f"{HERE}:DraftOnly").draft_first
    named = as_policy(f"{HERE}:SameLength")
    assert (
        VerifierPolicy.model_validate_json(named.model_dump_json(exclude_unset=True)).own_verifier is named.own_verifier
    )
    with pytest.raises(ValueError, match="name module:Class"):
        VerifierPolicy(verifier=SameLength()).model_dump_json()


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "gone_module:Class",
            "'gone_module:Class' cannot be imported from this folder or Python's path: .*gone_module",
        ),
        (f"{HERE}:Gone", "cannot be imported .*Gone"),
        (f"{HERE}:NeedsMore", "cannot be imported .*more"),
        (f"{HERE}:Synchronous", "is not a verifier: it has neither `async def verify"),
        (f"{HERE}:HERE", "is not a verifier"),
        (f"{HERE}:SameLength:similarity=0.5", "does not use similarity"),
        ({"verifier": SameLength}, "is a class: give an instance"),
        ({"verifier": 3}, "an object of int is not a verifier"),
        ({"verifier": "gone"}, "there is no verifier 'gone': choose one of"),
        ("balanced:strict", "'strict' in 'balanced:strict' is not FIELD=VALUE"),
        ("swift", "no policy is called 'swift': choose one of .* your own, as module:Class"),
    ],
)
def test_what_is_no_verifier_is_one_error_before_any_model_loads(policy: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as raised:
        as_policy(policy)
    assert "Value error" not in str(raised.value), "pydantic's words"


def test_own_verifier_decides_in_a_chat_and_in_a_node() -> None:
    replies = {"target": "Two is 2.\n\nSo it is 4.", "draft": "2 is two.\n\nSo it is 5."}
    policy = VerifierPolicy(verifier=SameLength(), depth=2)
    for fields in ({"policy": policy}, {"policies": {"planner": policy}}):
        llm = scripted_chat(lambda _: replies["target"], lambda _: replies["draft"], **fields)
        reply = llm.invoke("?", node="planner")
        assert reply.text == replies["draft"]
        assert reply.response_metadata["lookahead"]["accepted"] == 2
        assert llm.model_copy().invoke("?", node="planner").text == replies["draft"]
    task = TaskConfig(modes=("lr",), policies=(f"{HERE}:SameLength",), depths=(2,))
    measured = [each for each in configurations_of(task) if each.mode == "lr"]
    assert [each.policies({})[0] for each in measured] == [f"{HERE}:SameLength:depth=2"]
    with pytest.raises(PolicyError, match="cannot be imported"):
        configurations_of(TaskConfig(modes=("lr",), policies=("gone_module:Class",)))


def test_changes_after_a_name_are_applied_or_rejected() -> None:
    policy = as_policy("balanced:depth=8:width=2:early=false")
    assert (policy.name, policy.depth, policy.width, policy.early) == (
        "balanced:depth=8:width=2:early=false",
        8,
        2,
        False,
    )
    assert policy.similarity == POLICIES["balanced"].similarity
    assert as_policy("judge:p_aligned=0.9").verifier == "judge"
    assert as_policy("score").draft_first
    assert as_policy(r"balanced:delimiter=/\n+/").delimiter == re.compile(r"\n+")
    colons = as_policy(r"balanced:delimiter=/:|\n+/:depth=3")
    assert (colons.delimiter, colons.depth) == (re.compile(r":|\n+"), 3)
    assert as_policy("balanced:delimiter=/a/b:/").delimiter == re.compile("a/b:")
    for invalid in (
        "balanced:delimiter=/(/",
        "balanced:delimiter=/x?/",
        "balanced:delimiter=/(?:a?){1000000000}/",
        "balanced:delimiter=/" + "(" * 900 + "x" + ")" * 900 + "/",
        "balanced" + ":=/" * 100_000,
        "balanced:similarity=NaN",
        "balanced:depth=" + "[" * 1900,
        "balanced:depth",
        "balanced:depth=17",
        "balanced:strictness=1",
        "off:depth=2",
    ):
        with pytest.raises(PolicyError):
            as_policy(invalid)


def test_policy_knows_whether_it_needs_a_judge_or_an_embedding_model() -> None:
    assert as_policy("cascade").asks_judge
    assert as_policy("cascade").embeds
    assert not as_policy("judge").embeds
    assert as_policy("judge:risk=0.02").embeds, "a certificate may select embeddings"
    assert not as_policy({"ask_judge_from": None}).asks_judge
    assert not as_policy({"ask_judge_from": 0.85}).asks_judge
    assert as_policy({"ask_judge_from": 0.0}).asks_judge
    assert not as_policy("exact").embeds
    assert as_policy("judge").asks_judge


def test_policy_with_a_pattern_round_trips_through_json() -> None:
    policy = VerifierPolicy(verifier="exact", delimiter=re.compile(r"\n+", re.MULTILINE))
    restored = VerifierPolicy.model_validate_json(policy.model_dump_json(exclude_unset=True))
    assert restored == policy


@pytest.mark.parametrize("pattern", ["(", "a" * 2001, "(?P<n>a)(?P<n>b)"])
def test_invalid_pattern_in_json_is_rejected(pattern: str) -> None:
    with pytest.raises(PolicyError, match="pattern"):
        as_policy({"verifier": "exact", "delimiter": {"pattern": pattern, "flags": 0}})
