"""A target with a shared draft is shown what the draft writes, and the draft writes on from the target's own words."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lookahead_agent.decoding import DecodingSettings, Reply, lookahead
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep
from lookahead_agent.verifiers.exact import ExactVerifier
from tests.unit.scripts import Pair, ScriptedVerifier
from tests.virtual_time import run_in_virtual_time

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["First of all.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
ALL = ScriptedVerifier(lambda draft, target: True)


class Lines:
    """Remembers what is shown."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.shown: list[list[int]] = []
        self.closed = False

    def begin(self, prefix_ids: Sequence[int]) -> _Line:
        self.begun.append(list(prefix_ids))
        self.shown.append([])
        return _Line(self.shown[-1])

    def close(self) -> None:
        self.closed = True


class _Line:
    def __init__(self, shown: list[int]) -> None:
        self._shown = shown

    def extend(self, token_ids: Sequence[int]) -> None:
        self._shown.extend(token_ids)


class SharedDraftScript(ScriptedEngine):
    """A scripted target that takes guesses, and remembers them."""

    shared_draft = True
    lines: Lines

    def draft_lines(self, prompt_ids: Sequence[int]) -> Lines:
        self.lines = Lines()
        return self.lines


class SharedDraftPair(Pair):
    """A pair whose target is guided."""

    target: SharedDraftScript

    def __init__(self, target: Sequence[ScriptedStep | str], draft: Sequence[ScriptedStep | str]) -> None:
        super().__init__(list(target), list(draft))
        self.target.__class__ = SharedDraftScript

    def text(self, number: int) -> str:
        """Prefix and tokens of a line, without the prompt."""
        ids = [*self.target.lines.begun[number], *self.target.lines.shown[number]]
        return self.tokenizer.decode(ids[len(self.prompt) :])

    async def guess(self, settings: DecodingSettings | None = None, sampling: Sampling | None = None) -> Reply:
        """A reply of the target alone, with guesses."""
        reply = await lookahead(self.request(sampling), self.target, self.draft, None, settings)
        self.check_accounts(reply)
        return reply


def test_a_target_without_a_verifier_is_shown_a_draft_that_follows_it() -> None:
    pair = SharedDraftPair(STEPS, STEPS)
    reply = run_in_virtual_time(pair.guess())
    assert reply.text == "".join(STEPS)
    assert reply.report.steps == 4
    assert reply.report.accepted == 0
    assert len(pair.target.requests) == 1
    assert pair.text(0).startswith("First this.\n\nThen that.")
    assert pair.target.lines.closed
    assert reply.report.draft_tokens.speculative == reply.report.draft_tokens.generated > 0


def test_the_draft_begins_anew_where_the_target_says_something_else() -> None:
    pair = SharedDraftPair(STEPS, OTHER)
    reply = run_in_virtual_time(pair.guess())
    assert reply.text == "".join(STEPS)
    begun = [pair.tokenizer.decode(prefix[len(pair.prompt) :]) for prefix in pair.target.lines.begun]
    assert begun[0] == ""
    assert begun[1].startswith("First this")
    assert all("".join(STEPS).startswith(prefix) for prefix in begun), "always after the target's own words"


def test_a_draft_that_is_slow_begins_anew_from_the_targets_last_word() -> None:
    fast = [ScriptedStep("one two three four five six seven eight nine ten.\n\n", 1), ScriptedStep("Done.", 1)]
    slow = [ScriptedStep("one two three four five six seven eight nine ten.\n\n", 60), ScriptedStep("Done.", 1)]
    pair = SharedDraftPair(fast, slow)
    reply = run_in_virtual_time(pair.guess())
    assert reply.report.seconds["total"] == pytest.approx(2), "nobody waits for the draft"
    assert len(pair.target.lines.begun) > 2


def test_without_shared_draft_the_draft_stays_idle() -> None:
    pair = SharedDraftPair(STEPS, STEPS)
    reply = run_in_virtual_time(pair.guess(DecodingSettings(shared_draft=False)))
    assert reply.report.draft_tokens.generated == 0


def test_a_seeded_sampled_reply_gets_no_guesses_that_could_change_it() -> None:
    for sampling, draft_tokens in (
        (Sampling(max_tokens=99, temperature=0.7, seed=1), False),
        (Sampling(max_tokens=99, temperature=0.7), True),
        (Sampling(max_tokens=99, seed=1), True),
    ):
        pair = SharedDraftPair(STEPS, STEPS)
        reply = run_in_virtual_time(pair.guess(sampling=sampling))
        assert (reply.report.draft_tokens.generated > 0) == draft_tokens


def test_draft_steps_are_shown_and_the_shadow_takes_over_where_the_target_leaves_them() -> None:
    pair = SharedDraftPair(STEPS, OTHER)
    reply = pair.run(ExactVerifier(), DecodingSettings(depth=2))
    assert reply.text == "".join(STEPS)
    assert pair.text(0).startswith("First of all.\n\n")
    begun = [pair.tokenizer.decode(prefix[len(pair.prompt) :]) for prefix in pair.target.lines.begun]
    assert "First this" in begun, "in the middle of the target's own first step"
    assert reply.report.draft_tokens.speculative > 0
    assert reply.report.accepted > 0


def test_a_draft_that_fails_while_it_only_guesses_costs_nothing() -> None:
    broken = [ScriptedStep("First", 1, error="out of memory")] * 4
    pair = SharedDraftPair(STEPS, broken)
    reply = run_in_virtual_time(pair.guess())
    assert reply.text == "".join(STEPS)
    assert len(pair.target.lines.begun) == 1


def test_with_two_tokenizers_nothing_is_shown() -> None:
    pair = Pair(STEPS, STEPS, two_tokenizers=True)
    pair.target.__class__ = SharedDraftScript
    assert pair.run(ALL).text == "".join(STEPS)
    assert not hasattr(pair.target, "lines")


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 2.9, 3.0, 3.3, 4.7, 6.1, 8.0])
@pytest.mark.parametrize("verified", [False, True])
def test_cancelling_at_any_moment_leaves_no_request_and_no_line(after: float, verified: bool) -> None:
    pair = SharedDraftPair(STEPS, OTHER)

    async def cancelled() -> None:
        verifier = ScriptedVerifier(lambda d, t: d == t, seconds=0.4) if verified else None
        task = asyncio.create_task(lookahead(pair.request(), pair.target, pair.draft, verifier))
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.draft is not None
        assert pair.target.in_flight == pair.draft.in_flight == 0
        assert pair.target.lines.closed or after == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_in_virtual_time(cancelled())
