"""Rules broken on purpose: the tests that hold the decoder's guarantees must notice each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from lookahead_agent.decoding import scheduler
from lookahead_agent.decoding.prefixes import Prefixes
from lookahead_agent.decoding.scheduler import LookaheadScheduler
from lookahead_agent.decoding.step import Node
from lookahead_agent.decoding.streams import Streams
from tests.unit import test_driver_faults, test_scheduler

# Which examples are generated depends on the modules that are imported; the first that a broken rule fails ends it.
UNTIL_ONE_FAILS = 5000
quickly = settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # nobody reads here what a failing case would shrink to
    suppress_health_check=list(HealthCheck),
)


def of_the_scheduler(examples: int) -> None:
    @settings(quickly, max_examples=examples)
    @given(**test_scheduler.EVERYTHING)
    def hold(**case: Any) -> None:
        test_scheduler.hold_guarantees(**case)

    hold()


def of_the_loop(examples: int) -> None:
    @settings(quickly, max_examples=examples)
    @given(case=test_driver_faults.cases())
    def hold(case: test_driver_faults.Case) -> None:
        test_driver_faults.hold_guarantees(case)

    hold()


def accept_what_cannot_be_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "usable", lambda draft: True)
    patch.setattr(scheduler, "comparable", lambda draft, target: True)


def forget_what_follows_a_loser(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LookaheadScheduler, "_drop_below", lambda *_: None)


def speculate_inside_an_action(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "opens_action", False)


def ignore_refusals(patch: pytest.MonkeyPatch) -> None:
    def never(self: LookaheadScheduler, node: Node, actions: list[Any]) -> None:
        for candidate in node.open_candidates:
            candidate.accepted = None

    patch.setattr(LookaheadScheduler, "_reject_hopeless", never)


def lose_count_of_aborted_tokens(patch: pytest.MonkeyPatch) -> None:
    real = Streams.retire

    def wrong(self: Streams, stream: Any, reader: Any = None) -> None:
        stream.unread.clear()
        real(self, stream, reader)

    patch.setattr(Streams, "retire", wrong)


def leave_requests_running(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "retire", lambda *_: None)


def mistake_the_drafts_tokens_for_the_targets(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "from_draft", lambda self, job, node, step: step)


@pytest.mark.parametrize(
    ("mutation", "test"),
    [
        (accept_what_cannot_be_compared, of_the_scheduler),
        (forget_what_follows_a_loser, of_the_scheduler),
        (speculate_inside_an_action, of_the_scheduler),
        (ignore_refusals, of_the_scheduler),
        (lose_count_of_aborted_tokens, of_the_loop),
        (leave_requests_running, of_the_loop),
        (mistake_the_drafts_tokens_for_the_targets, of_the_loop),
    ],
)
def test_a_broken_rule_is_noticed(
    mutation: Callable[[pytest.MonkeyPatch], None], test: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, ExceptionGroup)):
        test(UNTIL_ONE_FAILS)


@pytest.mark.parametrize("test", [of_the_scheduler, of_the_loop])
def test_unbroken_rules_pass_the_same_tests(test: Callable[[int], None]) -> None:
    test(600)
