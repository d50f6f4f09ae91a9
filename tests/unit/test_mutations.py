"""Mutation tests: the property tests of the decoder's guarantees must fail for each broken rule."""

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

# The examples depend on the imported modules. A mutated run ends at its first failing example.
MAX_EXAMPLES = 5000
quickly = settings(
    derandomize=True,
    database=None,
    phases=[Phase.generate],  # a failing case is not shown, so it is not shrunk
    suppress_health_check=list(HealthCheck),
)


def scheduler_test(examples: int) -> None:
    @settings(quickly, max_examples=examples)
    @given(**test_scheduler.EVERYTHING)
    def check(**case: Any) -> None:
        test_scheduler.hold_guarantees(**case)

    check()


def loop_test(examples: int) -> None:
    @settings(quickly, max_examples=examples)
    @given(case=test_driver_faults.cases())
    def check(case: test_driver_faults.Case) -> None:
        test_driver_faults.hold_guarantees(case)

    check()


def accept_incomparable_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(scheduler, "usable", lambda draft: True)
    patch.setattr(scheduler, "comparable", lambda draft, target: True)


def keep_descendants_of_rejected_steps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LookaheadScheduler, "_drop_below", lambda *_: None)


def speculate_inside_an_action(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Node, "opens_action", False)


def ignore_rejections(patch: pytest.MonkeyPatch) -> None:
    def clear_verdicts(self: LookaheadScheduler, node: Node, actions: list[Any]) -> None:
        for candidate in node.candidates:
            candidate.accepted = None

    patch.setattr(LookaheadScheduler, "_reject_hopeless", clear_verdicts)


def miscount_aborted_tokens(patch: pytest.MonkeyPatch) -> None:
    real = Streams.retire

    def retire_without_unread(self: Streams, stream: Any, reader: Any = None) -> None:
        stream.unread.clear()
        real(self, stream, reader)

    patch.setattr(Streams, "retire", retire_without_unread)


def leave_requests_running(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Streams, "retire", lambda *_: None)


def treat_draft_tokens_as_target_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Prefixes, "from_draft", lambda self, job, node, step: step)


@pytest.mark.parametrize(
    ("mutation", "check"),
    [
        (accept_incomparable_steps, scheduler_test),
        (keep_descendants_of_rejected_steps, scheduler_test),
        (speculate_inside_an_action, scheduler_test),
        (ignore_rejections, scheduler_test),
        (miscount_aborted_tokens, loop_test),
        (leave_requests_running, loop_test),
        (treat_draft_tokens_as_target_tokens, loop_test),
    ],
)
def test_property_test_detects_a_broken_rule(
    mutation: Callable[[pytest.MonkeyPatch], None], check: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, KeyError, ExceptionGroup)):
        check(MAX_EXAMPLES)


@pytest.mark.parametrize("check", [scheduler_test, loop_test])
def test_property_test_passes_without_a_mutation(check: Callable[[int], None]) -> None:
    check(600)
