from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.models.thinking_tags import ThinkingTags
from lookahead_agent.replies.thinking import ThinkingSplitter, held_back

TAGS = ThinkingTags()


def split(text: str, cuts: list[int], *, inside: bool = False, tags: ThinkingTags | None = TAGS) -> tuple[str, str]:
    thinking: list[str] = []
    answer: list[str] = []
    parts = ThinkingSplitter(tags, inside, thinking.append, answer.append)
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        parts.push(text[begin:end])
    parts.finish()
    assert "".join(thinking) == parts.thinking
    assert "".join(answer) == parts.answer
    return parts.thinking, parts.answer


@pytest.mark.parametrize(
    ("text", "inside", "expected"),
    [
        ("<think>\nI think.\n\nSo.\n</think>\n\nIt is 4.\n", False, ("I think.\n\nSo.", "It is 4.\n")),
        ("I think.</think>It is 4.", True, ("I think.", "It is 4.")),
        ("It is <think> 4.", False, ("", "It is <think> 4.")),
        ("<think>\n\n</think>\n\nIt is 4.", False, ("", "It is 4.")),
        ("\n<think>I never end", False, ("I never end", "")),
        ("I never end </thi", True, ("I never end </thi", "")),
        ("<thin air", False, ("", "<thin air")),
        (" so it is", False, ("", " so it is")),
    ],
)
def test_thinking_and_answer_wherever_the_text_is_cut(text: str, inside: bool, expected: tuple[str, str]) -> None:
    assert split(text, [], inside=inside) == expected
    assert split(text, list(range(1, len(text))), inside=inside) == expected


@given(st.text("<think>/ a\n", max_size=30), st.booleans(), st.data())
def test_cuts_change_nothing(text: str, inside: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert split(text, cuts, inside=inside) == split(text, [], inside=inside)


def test_a_model_that_does_not_think_apart() -> None:
    assert split("<think>x</think> y", [3], tags=None) == ("", "<think>x</think> y")


def test_what_is_held_back() -> None:
    assert held_back("a <to", ("<tool_call>",)) == 3
    assert held_back("a b", ("<tool_call>",)) == 0
    assert held_back("a", ()) == 0
