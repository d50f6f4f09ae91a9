"""The chooser selects the fastest mode for each node, by the load, and from replies of earlier runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent.decoding import ReplyRequest, lookahead
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.scripted import ScriptedEngine, reply_script
from lookahead_agent.modes.chooser import TRY_AFTER, ModeChoice, ModeChooser
from lookahead_agent.modes.record import PaceRecord, Quantity
from lookahead_agent.modes.table import MAX_PROMPT_TOKENS_PER_REPLY_TOKEN, Mode
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import EngineSetup
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.model_free import ExactVerifier
from tests.virtual_time import run_in_virtual_time

MODES: tuple[Mode, ...] = ("sd", "lr+sd", "off")


def choose_modes(chooser: ModeChooser, seconds: dict[Mode, float], replies: int, node: str = "planner") -> list[Mode]:
    """Choose and learn the modes of consecutive replies; `seconds` is the time per token of each mode."""
    modes: list[Mode] = []
    for _ in range(replies):
        mode = chooser.choose_mode(node, MODES).mode
        chooser.keep(chooser.learn(node, mode, {"writing": seconds[mode]}))
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
    assert chooser.choose_mode("planner", MODES).mode == "lr+sd"
    assert chooser.choose_mode("executor", MODES).mode == "sd"


def test_draft_is_left_out_if_it_would_prefill_far_more_tokens_than_it_saves() -> None:
    chooser = ModeChooser()

    def left_out(node: str, prompt_tokens: float, replies: int) -> bool:
        for _ in range(replies):
            chooser.learn_tokens(node, int(prompt_tokens), 10)
        return chooser.choose_mode(node, ("sd", "off"), tries=False).mode == "off"

    long_prompt = 1.2 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10
    assert not left_out("router", long_prompt, 3), "the first replies also prefill what a node's conversations share"
    assert left_out("router", long_prompt, 1)
    assert not left_out("writer", 0.9 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10, 20)
    assert left_out("router", 0.7 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10, 20), "a small difference changes nothing"
    assert not left_out("router", 0.4 * MAX_PROMPT_TOKENS_PER_REPLY_TOKEN * 10, 20)


def test_load_switches_to_the_busy_mode_if_the_engines_offer_it() -> None:
    chooser = ModeChooser()
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 100)
    assert chooser.choose_mode("planner", MODES, beside=8).mode == "sd"
    assert "8 requests" in chooser.choose_mode("planner", MODES, beside=8).reason
    assert chooser.choose_mode("planner", MODES, beside=8, busy="off").mode == "off"
    assert chooser.choose_mode("planner", ("lr", "lr+sd"), beside=8, busy="off").mode == "lr+sd", "off is not offered"


def test_reason_of_a_choice_includes_measured_times() -> None:
    chooser = ModeChooser()
    assert chooser.choose_mode("planner", MODES).reason == "expected to be fastest here"
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.2, "off": 0.2}, TRY_AFTER - 1)
    assert "sd 100" in chooser.choose_mode("planner", MODES).reason
    chooser.learn("planner", "sd", {"writing": 0.1})
    assert chooser.choose_mode("planner", MODES).reason == "tried again"


def test_a_node_whose_replies_are_slower_with_drafts_goes_back_to_the_target_alone() -> None:
    modes = choose_modes(ModeChooser(), {"sd": 0.1, "lr+sd": 0.12, "off": 0.08}, 120)
    assert modes[-20:].count("off") >= 17


def test_a_restart_begins_with_the_record_of_earlier_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))

    def chooser(configuration: str = "shared_draft") -> ModeChooser:
        return ModeChooser(PaceRecord(["target", "draft"]), configuration=configuration)

    choose_modes(chooser(), {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 30)
    choose_modes(chooser(), {"sd": 0.1, "lr+sd": 0.3, "off": 0.05}, 60, "executor")
    again = chooser()
    assert again.choose_mode("planner", MODES).mode == "lr+sd"
    assert "lr+sd 50" in again.choose_mode("planner", MODES).reason
    assert again.choose_mode("executor", MODES).mode == "off"
    assert chooser("another").choose_mode("planner", MODES) == ModeChoice("sd", "expected to be fastest here")
    assert [line.split()[1:] for line in again.table() if line.startswith("shared_draft  planner")][-1:] == [
        ["planner", "alone", "lr+sd", "1.1", "50.0", "15", "chosen"]
    ]


def test_loads_have_their_own_replies_and_begin_with_those_that_ran_alone() -> None:
    chooser = ModeChooser()
    choose_modes(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 60)
    assert chooser.choose_mode("planner", MODES, beside=2).mode == "lr+sd"
    chooser.learn("planner", "lr+sd", {"writing": 0.4}, beside=2)
    chooser.learn("planner", "sd", {"writing": 0.1}, beside=2)
    assert chooser.choose_mode("planner", MODES, beside=2).mode == "sd"
    assert chooser.choose_mode("planner", MODES).mode == "lr+sd"


def test_prefill_counts_by_the_prompt_tokens_that_a_node_reads_for_each_of_its_own() -> None:
    """With drafts a prompt token takes longer, and a reply's token less."""
    chooser = ModeChooser()

    def settle(node: str, read: int, written: int) -> Mode:
        for _ in range(4 * TRY_AFTER):
            mode = chooser.choose_mode(node, ("sd", "off")).mode
            chooser.learn_tokens(node, read, written)
            found: dict[Quantity, float] = {"prefill": 0.0010 if mode == "sd" else 0.0008}
            if written >= 24:
                found["writing"] = 0.010 if mode == "sd" else 0.014
            chooser.learn(node, mode, found)
        return chooser.choose_mode(node, ("sd", "off")).mode

    assert settle("writer", 1000, 200) == "sd"
    assert settle("summarizer", 8000, 100) == "off"
    assert settle("router", 2000, 4) == "off", "replies that are too short to measure their writing"


def test_replies_that_came_at_once_measure_nothing_and_names_stay_on_their_line() -> None:
    chooser = ModeChooser()
    for _ in range(4):
        assert chooser.learn("planner", "sd", {"writing": 0.0, "prefill": 0.0}) == []
        assert chooser.choose_mode("planner", MODES).mode == "sd"
    assert chooser.table() == []
    chooser.learn("a\n\x1b[2Jb", "sd", {"writing": 0.1})
    assert [line.split()[:2] for line in chooser.table()] == [
        ["engines", "node"],
        ["'a\\n\\x1b[2Jb'", "alone"],
        ["(all)", "alone"],
    ]


def test_a_client_cannot_fill_the_memory_or_the_file_with_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    record = PaceRecord(["target"])
    chooser = ModeChooser(record, configuration="none, target int8")
    kept = [each for number in range(9000) for each in chooser.learn(str(number), "off", {"writing": 0.1})]
    chooser.keep(kept)
    assert len(record.read()) == 768
    assert ModeChooser(record).paces() == {"none, target int8": 0.1}, "what all nodes share is kept"
    assert len(chooser._measured) == 8 * 1024
    assert len(chooser._nodes) == 1024


@settings(max_examples=60, deadline=None)
@given(
    st.booleans(),
    st.sampled_from(["none", "draft_model", "shared_draft"]),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.floats(1e-3, 1.0), st.integers(0, 5000), st.integers(1, 50), st.integers(0, 6)), max_size=30),
)
def test_the_chosen_mode_is_one_that_the_engines_run(
    verifies: bool, method: str, optional: bool, when_busy: bool, replies: list[tuple[float, int, int, int]]
) -> None:
    setup = EngineSetup(
        speculation_method=method, draft_is_optional=optional and method == "draft_model", alone_when_busy=when_busy
    )
    engines = EngineSet(ScriptedEngine(ScriptedTokenizer(), reply_script(lambda _: "yes")), engine_setup=setup)
    for pace, read, written, beside in replies:
        engines.replies_at_once = beside
        choice = engines.choose_mode("node", as_policy("balanced"), verifies=verifies, missing=None)
        assert verifies or not choice.mode.startswith("lr")
        assert method != "none" or "sd" not in choice.mode
        # A draft model in the target's engine drafts for every reply that does not leave it out.
        assert choice.mode != "off" or method == "none" or setup.draft_is_optional
        engines.modes.learn_tokens("node", read, written)
        engines.modes.learn("node", choice.mode, {"writing": pace, "prefill": pace / 10}, min(beside, 3))


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
        mode = chooser.choose_mode("planner", two_modes).mode
        chooser.learn("planner", mode, {"writing": paces[mode, not 40 <= number < 80]})
        used.append(mode)
    last_modes = [used[end - 15 : end] for end in (40, 80, 120)]
    assert last_modes[0].count("lr+sd") >= 12
    assert last_modes[1].count("lr+sd") <= 3
    assert last_modes[2].count("lr+sd") >= 12
