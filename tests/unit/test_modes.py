"""Each node's replies are written in whatever way was fastest there."""

from __future__ import annotations

from lookahead_agent.modes import TRY_AFTER, Mode, ModeChooser

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


def test_under_load_no_steps_run_beside_those_who_wait() -> None:
    chooser = ModeChooser()
    write(chooser, {"sd": 0.1, "lr+sd": 0.05, "off": 0.2}, 100)
    assert chooser.choose("planner", MODES, waiting=8).mode == "sd"
    assert "8 requests" in chooser.choose("planner", MODES, waiting=8).reason


def test_the_reason_names_the_figures() -> None:
    chooser = ModeChooser()
    assert chooser.choose("planner", MODES).reason == "expected to be fastest here"
    write(chooser, {"sd": 0.1, "lr+sd": 0.2, "off": 0.2}, TRY_AFTER - 1)
    assert "sd 100" in chooser.choose("planner", MODES).reason
    chooser.learn("planner", "sd", 0.1)
    assert chooser.choose("planner", MODES).reason == "tried again"
