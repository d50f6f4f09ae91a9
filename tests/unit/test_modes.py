"""Each node's replies are written in whatever way was fastest there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from lookahead_agent.decoding import ReplyRequest, lookahead
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.runtime.modes import READ_FOR_TOKEN, TRY_AFTER, Mode, ModeChooser
from lookahead_agent.verifiers.exact import ExactVerifier
from tests.virtual_time import run_in_virtual_time

MODES: tuple[Mode, ...] = ("sd", "lr+sd", "off")


def write(chooser: ModeChooser, seconds: dict[Mode, float], replies: int, node: str = "planner") -> list[Mode]:
    """So many replies, each of which takes what its mode takes."""
    modes: list[Mode] = []
    for _ in range(replies):
        mode = chooser.choose(node, MODES).mode
        chooser.learn(node, mode, seconds[mode])
        modes.append(mode)
    return modes


def test_a_node_settles_on_what_is_fastest_and_tries_the_others_seldom() -> None:
    chooser = ModeChooser()
    modes = write(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 200)
    assert modes[0] == "sd", "expected to be fastest"
    assert modes[-20:].count("lr+sd") >= 19
    assert modes.count("off") < 12


def test_what_was_fastest_and_is_no_longer_is_left_and_taken_up_again() -> None:
    chooser = ModeChooser()
    write(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 100)
    hard = write(chooser, {"sd": 0.1, "lr+sd": 0.3, "off": 0.08}, 300)
    assert hard[-20:].count("off") >= 17
    easy = write(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 300)
    assert easy[-20:].count("lr+sd") >= 17


def test_small_differences_change_nothing() -> None:
    chooser = ModeChooser()
    modes = write(chooser, {"sd": 0.1, "lr+sd": 0.095, "off": 0.2}, 60)
    in_use = [mode for number, mode in enumerate(modes) if mode == "sd" or number > 0]
    assert in_use.count("sd") > 0.8 * len(modes)


def test_nodes_are_judged_by_themselves() -> None:
    chooser = ModeChooser()
    write(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 60, "planner")
    write(chooser, {"sd": 0.1, "lr+sd": 0.4, "off": 0.2}, 60, "executor")
    assert chooser.choose("planner", MODES).mode == "lr+sd"
    assert chooser.choose("executor", MODES).mode == "sd"


def test_a_draft_that_would_read_far_more_than_its_tokens_pay_for_is_left_out() -> None:
    chooser = ModeChooser()

    def alone(node: str, read: float, replies: int) -> bool:
        for _ in range(replies):
            chooser.learn_tokens(node, int(read), 10)
        chosen = chooser.without_draft(node)
        return chosen is not None and chosen.mode == "off"

    much = 1.2 * READ_FOR_TOKEN * 10
    assert not alone("router", much, 3), "the first replies read what a node's conversations share"
    assert alone("router", much, 1)
    assert not alone("writer", 0.9 * READ_FOR_TOKEN * 10, 20)
    assert alone("router", 0.7 * READ_FOR_TOKEN * 10, 20), "a small difference changes nothing"
    assert not alone("router", 0.4 * READ_FOR_TOKEN * 10, 20)


def test_under_load_no_steps_run_beside_those_who_wait() -> None:
    chooser = ModeChooser()
    write(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 100)
    assert chooser.choose("planner", MODES, waiting=8).mode == "sd"
    assert "8 requests" in chooser.choose("planner", MODES, waiting=8).reason
    assert chooser.choose("planner", MODES, waiting=8, busy="off").mode == "off"
    assert chooser.choose("planner", ("lr", "lr+sd"), waiting=8, busy="off").mode == "lr", "which it does not offer"


def test_the_reason_names_the_figures() -> None:
    chooser = ModeChooser()
    assert chooser.choose("planner", MODES).reason == "expected to be fastest here"
    write(chooser, {"sd": 0.1, "lr+sd": 0.2, "off": 0.2}, TRY_AFTER - 1)
    assert "sd 100" in chooser.choose("planner", MODES).reason
    chooser.learn("planner", "sd", 0.1)
    assert chooser.choose("planner", MODES).reason == "tried again"


class Crowded:
    """An engine whose every token takes longer, the more requests there are: what a reply is, follows its prompt."""

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


def seconds_of_a_reply(mode: Mode, *, draft_is_right: bool) -> float:
    """What a reply of ten steps takes in virtual time: written by the decoder, with draft steps or without."""

    async def write() -> float:
        tokenizer = ScriptedTokenizer()
        steps = [f"step {number} says so and so\n\n" for number in range(10)]
        wrong = [step.replace("and so", "and thus") for step in steps]
        texts = "".join(steps), "".join(steps if draft_is_right else wrong)
        ids = [[*tokenizer.encode(text), ScriptedTokenizer.EOS] for text in texts]
        target, draft = Crowded(tokenizer, ids[0], 0.1), Crowded(tokenizer, ids[1], 0.03)
        verifier = ExactVerifier() if mode == "lr+sd" else None
        started = asyncio.get_running_loop().time()
        reply = await lookahead(ReplyRequest((1,), Sampling(max_tokens=500)), target, draft, verifier)
        assert reply.token_ids == tuple(ids[0])
        return (asyncio.get_running_loop().time() - started) / len(reply.token_ids)

    return run_in_virtual_time(write())


def test_steps_go_off_when_acceptance_collapses_and_on_again_when_it_is_back() -> None:
    both: tuple[Mode, Mode] = ("sd", "lr+sd")
    took = {(mode, right): seconds_of_a_reply(mode, draft_is_right=right) for mode in both for right in (True, False)}
    assert took["lr+sd", True] < 0.8 * took["sd", True]
    assert took["lr+sd", False] > took["sd", False], "what is refused was in the way"
    modes, used = ModeChooser(), []
    for number in range(120):
        mode = modes.choose("planner", both).mode
        modes.learn("planner", mode, took[mode, not 40 <= number < 80])
        used.append(mode)
    late = [used[end - 15 : end] for end in (40, 80, 120)]
    assert late[0].count("lr+sd") >= 12
    assert late[1].count("lr+sd") <= 3
    assert late[2].count("lr+sd") >= 12
