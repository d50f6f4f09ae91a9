"""The chooser selects the fastest mode for each node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from lookahead_agent.decoding import ReplyRequest, lookahead
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.modes.chooser import MAX_PROMPT_TOKENS_PER_REPLY_TOKEN, TRY_AFTER, Mode, ModeChooser
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.virtual_time import run_in_virtual_time

MODES: tuple[Mode, ...] = ("sd", "lr+sd", "off")


def choose_modes(chooser: ModeChooser, seconds: dict[Mode, float], replies: int, node: str = "planner") -> list[Mode]:
    """Choose and learn the modes of consecutive replies; `seconds` is the time per token of each mode."""
    modes: list[Mode] = []
    for _ in range(replies):
        mode = chooser.choose(node, MODES).mode
        chooser.learn(node, mode, seconds[mode])
        modes.append(mode)
    return modes


def test_node_settles_on_the_fastest_mode_and_rarely_tries_others() -> None:
    chooser = ModeChooser()
    modes = choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 200)
    assert modes[0] == "sd", "expected to be fastest"
    assert modes[-20:].count("lr+sd") >= 19
    assert modes.count("off") < 12


def test_node_leaves_a_mode_that_became_slow_and_returns_once_it_is_fast_again() -> None:
    chooser = ModeChooser()
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 100)
    slow = choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.3, "off": 0.08}, 300)
    assert slow[-20:].count("off") >= 17
    fast = choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 300)
    assert fast[-20:].count("lr+sd") >= 17


def test_small_speed_differences_do_not_switch_the_mode() -> None:
    chooser = ModeChooser()
    modes = choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.095, "off": 0.2}, 60)
    assert modes.count("sd") > 0.8 * len(modes)


def test_each_node_has_its_own_mode() -> None:
    chooser = ModeChooser()
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 60, "planner")
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.4, "off": 0.2}, 60, "executor")
    assert chooser.choose("planner", MODES).mode == "lr+sd"
    assert chooser.choose("executor", MODES).mode == "sd"


def test_draft_is_left_out_if_it_would_prefill_far_more_tokens_than_it_saves() -> None:
    chooser = ModeChooser()

    def left_out(node: str, prompt_tokens: float, replies: int) -> bool:
        for _ in range(replies):
            chooser.learn_tokens(node, int(prompt_tokens), 10)
        choice = chooser.without_draft(node)
        return choice is not None and choice.mode == "off"

    long_prompt = 1.2 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10
    assert not left_out("router", long_prompt, 3), "the first replies also prefill what a node's conversations share"
    assert left_out("router", long_prompt, 1)
    assert not left_out("writer", 0.9 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10, 20)
    assert left_out("router", 0.7 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10, 20), "a small difference changes nothing"
    assert not left_out("router", 0.4 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10, 20)


def test_load_switches_to_the_busy_mode_if_the_engines_offer_it() -> None:
    chooser = ModeChooser()
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 100)
    assert chooser.choose("planner", MODES, waiting=8).mode == "sd"
    assert "8 requests" in chooser.choose("planner", MODES, waiting=8).reason
    assert chooser.choose("planner", MODES, waiting=8, busy="off").mode == "off"
    assert chooser.choose("planner", ("lr", "lr+sd"), waiting=8, busy="off").mode == "lr", "off is not offered"


def test_reason_of_a_choice_includes_measured_times() -> None:
    chooser = ModeChooser()
    assert chooser.choose("planner", MODES).reason == "expected to be fastest here"
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.2, "off": 0.2}, TRY_AFTER - 1)
    assert "sd 100" in chooser.choose("planner", MODES).reason
    chooser.learn("planner", "sd", 0.1)
    assert chooser.choose("planner", MODES).reason == "tried again"


class ContendedEngine:
    """An engine that slows down with each concurrent request, and writes the rest of a fixed reply after a prompt."""

    def __init__(self, tokenizer: ScriptedTokenizer, reply: Sequence[int], seconds: float) -> None:
        self.tokenizer = tokenizer
        self.context_length = 1 << 16
        self.healthy = True
        self.in_flight = 0
        self._reply = reply
        self._seconds = seconds

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        self.in_flight += 1
        try:
            for index in range(len(prompt_ids) - 1, len(self._reply)):
                await asyncio.sleep(self._seconds * (1 + 0.25 * (self.in_flight - 1)))
                last = index == len(self._reply) - 1
                yield Delta((self._reply[index],), finish_reason="stop" if last else None)
        finally:
            self.in_flight -= 1

    def close(self) -> None:
        """Nothing to do."""


def seconds_per_token(mode: Mode, *, accepted: bool) -> float:
    """Decode a reply of ten steps and return its virtual seconds per token; "lr+sd" decodes with draft steps."""

    async def decode() -> float:
        tokenizer = ScriptedTokenizer()
        steps = [f"step {number} says so and so\n\n" for number in range(10)]
        rejected_steps = [step.replace("and so", "and thus") for step in steps]
        texts = "".join(steps), "".join(steps if accepted else rejected_steps)
        ids = [[*tokenizer.encode(text), ScriptedTokenizer.EOS] for text in texts]
        target, draft = ContendedEngine(tokenizer, ids[0], 0.1), ContendedEngine(tokenizer, ids[1], 0.03)
        verifier = ExactVerifier() if mode == "lr+sd" else None
        started = asyncio.get_running_loop().time()
        reply = await lookahead(ReplyRequest((1,), Sampling(max_tokens=500)), target, draft, verifier)
        assert reply.token_ids == tuple(ids[0])
        return (asyncio.get_running_loop().time() - started) / len(reply.token_ids)

    return run_in_virtual_time(decode())


def test_draft_steps_stop_when_acceptance_collapses_and_resume_when_it_recovers() -> None:
    two_modes: tuple[Mode, Mode] = ("sd", "lr+sd")
    paces = {(mode, ok): seconds_per_token(mode, accepted=ok) for mode in two_modes for ok in (True, False)}
    assert paces["lr+sd", True] < 0.8 * paces["sd", True]
    assert paces["lr+sd", False] > paces["sd", False], "rejected steps cost time"
    chooser, used = ModeChooser(), []
    for number in range(120):
        mode = chooser.choose("planner", two_modes).mode
        chooser.learn("planner", mode, paces[mode, not 40 <= number < 80])
        used.append(mode)
    last_modes = [used[end - 15 : end] for end in (40, 80, 120)]
    assert last_modes[0].count("lr+sd") >= 12
    assert last_modes[1].count("lr+sd") <= 3
    assert last_modes[2].count("lr+sd") >= 12
