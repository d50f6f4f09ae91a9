from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.decoding.segmenter import Segmentation, Segmenter
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.step import Step, StepEnd


def segment(text: str, rules: Segmentation, budget: int = 10_000, eos: bool = True) -> list[Step]:
    tokenizer = ScriptedTokenizer()
    ids = tokenizer.encode(text) + ([ScriptedTokenizer.EOS] if eos else [])
    rules = Segmentation(
        rules.delimiter, rules.max_step_tokens, rules.action_markers, rules.stop, frozenset({ScriptedTokenizer.EOS})
    )
    steps: list[Step] = []
    stream = tokenizer.stream()
    segmenter = Segmenter(rules, stream, "", budget)
    for token in ids:
        if (step := segmenter.push(token)) is not None:
            steps.append(step)
            if step.end.ends_reply:
                return steps
            budget -= len(step.token_ids)
            segmenter = Segmenter(rules, stream, "".join(s.text for s in steps), budget)
    return steps


def test_a_blank_line_ends_a_step() -> None:
    steps = segment("one\n\ntwo\nstill two\n\nthree", Segmentation())
    assert [step.text for step in steps] == ["one\n\n", "two\nstill two\n\n", "three"]
    assert [step.end for step in steps] == [StepEnd.DELIMITER, StepEnd.DELIMITER, StepEnd.EOS]


def test_blank_lines_before_any_text_do_not_end_a_step() -> None:
    assert [step.text for step in segment("\n\n\n\none\n\n\n\ntwo", Segmentation())] == ["\n\n\n\none\n\n", "\n\ntwo"]


def test_another_delimiter() -> None:
    assert [step.text for step in segment("a; b; c", Segmentation(delimiter=";"))] == ["a;", " b;", " c"]


def test_a_long_step_is_cut() -> None:
    steps = segment("one two three four", Segmentation(max_step_tokens=3))
    assert [step.end for step in steps] == [StepEnd.LIMIT, StepEnd.EOS]


def test_the_budget_ends_the_reply_inside_a_step() -> None:
    assert segment("one two\n\nthree four", Segmentation(), budget=4)[-1].end is StepEnd.BUDGET


def test_a_delimiter_as_the_budgets_last_token_ends_the_reply() -> None:
    assert [step.end for step in segment("one\n\ntwo", Segmentation(), budget=2)] == [StepEnd.BUDGET]


@pytest.mark.parametrize("stop", ["two", "one\n\ntwo", "\n\nt"])
def test_stop_strings_are_found_across_steps(stop: str) -> None:
    steps = segment("one\n\ntwo\n\nthree", Segmentation(stop=(stop,)))
    assert steps[-1].end is StepEnd.STOP
    assert stop in "".join(step.text for step in steps)


def test_an_action_marker_ends_a_step() -> None:
    steps = segment("I look it up: <tool_call>{}</tool_call>", Segmentation(action_markers=("<tool_call>",)))
    assert [step.end for step in steps] == [StepEnd.ACTION, StepEnd.EOS]
    assert steps[0].text.endswith("<tool_call>")


@given(st.lists(st.sampled_from(["a", " b", "\n", "\n\n", ".", "é", "x y"]), max_size=40))
def test_steps_put_together_are_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    steps = segment(text, Segmentation(max_step_tokens=7))
    assert "".join(step.text for step in steps) == text
    assert all(step.token_ids for step in steps)
