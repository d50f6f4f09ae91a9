"""A shared draft: the target receives the draft's tokens, and the draft follows the target's text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lookahead_agent.decoding import DecodingSettings, Reply, lookahead
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.unit.scripts import Pair, ScriptedVerifier
from tests.virtual_time import run_in_virtual_time

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["First of all.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)


class LineRecorder:
    """Records the draft lines that a target receives."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []
        self.tokens: list[list[int]] = []
        self.closed = False

    def begin(self, prefix_ids: Sequence[int]) -> _RecordedLine:
        self.prefixes.append(list(prefix_ids))
        self.tokens.append([])
        return _RecordedLine(self.tokens[-1])

    def close(self) -> None:
        self.closed = True


class _RecordedLine:
    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)


class SharedDraftScript(ScriptedEngine):
    """A scripted target that accepts draft lines and records them."""

    shared_draft = True
    lines: LineRecorder

    def draft_lines(self, prompt_ids: Sequence[int]) -> LineRecorder:
        self.lines = LineRecorder()
        return self.lines


class SharedDraftPair(Pair):
    """A scripted pair whose target has a shared draft."""

    target: SharedDraftScript

    def __init__(self, target: Sequence[ScriptedStep | str], draft: Sequence[ScriptedStep | str]) -> None:
        super().__init__(list(target), list(draft))
        self.target.__class__ = SharedDraftScript

    def line_text(self, number: int) -> str:
        """Return the prefix and tokens of a line as text, without the prompt."""
        ids = [*self.target.lines.prefixes[number], *self.target.lines.tokens[number]]
        return self.tokenizer.decode(ids[len(self.prompt) :])

    async def speculate(self, settings: DecodingSettings | None = None, sampling: Sampling | None = None) -> Reply:
        """Generate a reply in which the draft proposes tokens and no step is verified."""
        reply = await lookahead(self.request(sampling), self.target, self.draft, None, settings)
        self.check_accounts(reply)
        return reply


def test_target_without_a_verifier_receives_draft_tokens_and_accepts_no_step() -> None:
    pair = SharedDraftPair(STEPS, STEPS)
    reply = run_in_virtual_time(pair.speculate())
    assert reply.text == "".join(STEPS)
    assert reply.report.steps == 4
    assert reply.report.accepted == 0
    assert len(pair.target.requests) == 1
    assert pair.line_text(0).startswith("First this.\n\nThen that.")
    assert pair.target.lines.closed
    assert reply.report.draft_tokens.speculative == reply.report.draft_tokens.total > 0


def test_draft_restarts_from_the_targets_text_after_a_divergence() -> None:
    pair = SharedDraftPair(STEPS, OTHER)
    reply = run_in_virtual_time(pair.speculate())
    assert reply.text == "".join(STEPS)
    prefixes = [pair.tokenizer.decode(prefix[len(pair.prompt) :]) for prefix in pair.target.lines.prefixes]
    assert prefixes[0] == ""
    assert prefixes[1].startswith("First this")
    assert all("".join(STEPS).startswith(prefix) for prefix in prefixes), "every line continues the target's text"


def test_slow_draft_restarts_from_the_targets_latest_token_without_delaying_it() -> None:
    fast = [ScriptedStep("one two three four five six seven eight nine ten.\n\n", 1), ScriptedStep("Done.", 1)]
    slow = [ScriptedStep("one two three four five six seven eight nine ten.\n\n", 60), ScriptedStep("Done.", 1)]
    pair = SharedDraftPair(fast, slow)
    reply = run_in_virtual_time(pair.speculate())
    assert reply.report.seconds["total"] == pytest.approx(2), "the target does not wait for the draft"
    assert len(pair.target.lines.prefixes) > 2


def test_draft_stays_idle_if_shared_draft_is_disabled() -> None:
    pair = SharedDraftPair(STEPS, STEPS)
    reply = run_in_virtual_time(pair.speculate(DecodingSettings(shared_draft=False)))
    assert reply.report.draft_tokens.total == 0


def test_seeded_sampling_gets_no_draft_tokens() -> None:
    for sampling, expected in (
        (Sampling(max_tokens=99, temperature=0.7, seed=1), False),
        (Sampling(max_tokens=99, temperature=0.7), True),
        (Sampling(max_tokens=99, seed=1), True),
    ):
        pair = SharedDraftPair(STEPS, STEPS)
        reply = run_in_virtual_time(pair.speculate(sampling=sampling))
        assert (reply.report.draft_tokens.total > 0) == expected


def test_draft_writes_no_token_after_the_limit_of_the_reply() -> None:
    pair = SharedDraftPair(STEPS, OTHER)
    limit = 9
    run_in_virtual_time(pair.speculate(sampling=Sampling(max_tokens=limit)))
    assert pair.draft is not None
    written = [len(ids) - len(pair.prompt) + sampling.max_tokens for ids, sampling in pair.draft.requests]
    assert len(written) > 1
    assert set(written) == {limit}


def test_prompt_of_the_draft_is_counted_once_with_its_cached_tokens() -> None:
    pair = SharedDraftPair(STEPS, OTHER)
    assert pair.draft is not None
    pair.draft.prefix_cache = True
    for cached in (0, len(pair.prompt) - 1):
        reply = run_in_virtual_time(lookahead(pair.request(), pair.target, pair.draft, None))
        prompt = reply.report.draft_prompt
        assert (prompt.total, prompt.cached) == (len(pair.prompt), cached)


def test_target_receives_draft_steps_and_the_follower_continues_after_a_divergence() -> None:
    pair = SharedDraftPair(STEPS, OTHER)
    reply = pair.run(ExactVerifier(), DecodingSettings(depth=2))
    assert reply.text == "".join(STEPS)
    assert pair.line_text(0).startswith("First of all.\n\n")
    prefixes = [pair.tokenizer.decode(prefix[len(pair.prompt) :]) for prefix in pair.target.lines.prefixes]
    assert "First this" in prefixes, "a line starts in the middle of the target's first step"
    assert reply.report.draft_tokens.speculative > 0
    assert reply.report.accepted > 0


def test_failed_draft_without_a_verifier_leaves_the_reply_unchanged() -> None:
    broken = [ScriptedStep("First", 1, error="out of memory")] * 4
    pair = SharedDraftPair(STEPS, broken)
    reply = run_in_virtual_time(pair.speculate())
    assert reply.text == "".join(STEPS)
    assert len(pair.target.lines.prefixes) == 1


def test_target_receives_no_draft_tokens_with_two_tokenizers() -> None:
    pair = Pair(STEPS, STEPS, two_tokenizers=True)
    pair.target.__class__ = SharedDraftScript
    assert pair.run(ACCEPT_ALL).text == "".join(STEPS)
    assert not hasattr(pair.target, "lines")


@pytest.mark.parametrize("after", [0.0, 0.5, 1.0, 2.9, 3.0, 3.3, 4.7, 6.1, 8.0])
@pytest.mark.parametrize("verified", [False, True])
def test_cancellation_at_any_time_leaves_no_request_and_closes_the_lines(after: float, verified: bool) -> None:
    pair = SharedDraftPair(STEPS, OTHER)

    async def cancel_reply() -> None:
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

    run_in_virtual_time(cancel_reply())
