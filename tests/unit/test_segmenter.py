from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lookahead_agent.decoding.segmenter import PrefixContext, Segmentation, Segmenter
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.thinking import ThinkingBudget, ThinkingState
from lookahead_agent.engines import ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.delimiters import delimiter_finder

ROOM = 64  # characters; more than the longest marker


def segment(text: str, rules: Segmentation, budget: int = 10_000, eos: bool = True) -> list[Step]:
    tokenizer = ScriptedTokenizer()
    ids = tokenizer.encode(text) + ([ScriptedTokenizer.EOS] if eos else [])
    rules = replace(rules, eos_ids=frozenset({ScriptedTokenizer.EOS}))
    steps: list[Step] = []
    stream = tokenizer.stream()
    before = PrefixContext(ROOM)
    segmenter = Segmenter(rules, stream, before, budget)
    for token in ids:
        if (step := segmenter.push(token)) is not None:
            steps.append(step)
            if step.end.ends_reply:
                return steps
            budget -= len(step.token_ids)
            before = before.then(step.text)
            segmenter = Segmenter(rules, stream, before, budget)
    return steps


def test_a_blank_line_ends_a_step() -> None:
    steps = segment("one\n\ntwo\nstill two\n\nthree", Segmentation())
    assert [step.text for step in steps] == ["one\n\n", "two\nstill two\n\n", "three"]
    assert [step.end for step in steps] == [StepEnd.DELIMITER, StepEnd.DELIMITER, StepEnd.EOS]


def test_leading_blank_lines_do_not_end_a_step() -> None:
    assert [step.text for step in segment("\n\n\n\none\n\n\n\ntwo", Segmentation())] == ["\n\n\n\none\n\n", "\n\ntwo"]


def test_a_custom_delimiter_ends_a_step() -> None:
    assert [step.text for step in segment("a; b; c", Segmentation(delimiter=";"))] == ["a;", " b;", " c"]


def test_a_step_is_truncated_at_max_step_tokens() -> None:
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
def test_steps_concatenate_to_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    steps = segment(text, Segmentation(max_step_tokens=7))
    assert "".join(step.text for step in steps) == text
    assert all(step.token_ids for step in steps)


class TokenTexts:
    """A detokenizer stream in which token `n` decodes to the text with index `n`."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


def split(pieces: list[str], rules: Segmentation | None = None) -> list[str]:
    """Texts of the complete steps, then of the incomplete one."""
    stream, texts = TokenTexts(*pieces), [""]
    rules = rules or Segmentation()
    before = PrefixContext(ROOM)
    segmenter = Segmenter(rules, stream, before, 1000)
    for token in range(len(pieces)):
        step = segmenter.push(token)
        texts[-1] = segmenter.text
        if step is not None:
            before = before.then(step.text)
            segmenter = Segmenter(rules, stream, before, 1000)
            texts.append("")
    return texts


@pytest.mark.parametrize(
    ("pieces", "steps"),
    [
        (["So", ".", "\n", "\n", "Then"], ["So.\n\n", "Then"]),
        (["So", ".\n", "\nThen"], ["So.\n\nThen", ""]),
        (["So", ".\n\n", "Then"], ["So.\n\n", "Then"]),
        (["So", ".", "\n\n\n", "Then"], ["So.\n\n\n", "Then"]),
        (["So.\n", "", "\n", "Then"], ["So.\n\n", "Then"]),
    ],
)
def test_delimiters_split_over_tokens_or_merged_into_one_are_found(pieces: list[str], steps: list[str]) -> None:
    assert split(pieces) == steps


@pytest.mark.parametrize(
    "block",
    [
        "```python\nx = 1\n\ny = 2\n```",
        "~~~\nx\n\ny\n~~~",
        "````\n```\n\n```\n````",
        "\\[\nx = 1\n\ny = 2\n\\]",
        "$$\nx\n\ny\n$$",
        "\\begin{align*}\nx\n\n&= y\n\\end{align*}",
        "\\begin{align}\n\\begin{array}a\\end{array}\n\nb\\end{align}",
    ],
)
def test_blank_lines_inside_code_and_display_math_end_no_step(block: str) -> None:
    assert [step.text for step in segment(f"See:\n{block}\n\nSo it is.", Segmentation())] == [
        f"See:\n{block}\n\n",
        "So it is.",
    ]


def test_a_block_stays_open_after_a_step_truncated_inside_it() -> None:
    steps = segment("a\n```\nb c\n\nd e\n\nf\n```\n\ng", Segmentation(max_step_tokens=7))
    assert [step.end for step in steps[:-2]] == [StepEnd.LIMIT] * (len(steps) - 2)
    assert steps[-2].end is StepEnd.DELIMITER
    assert steps[-1].text == "g"


def test_a_regular_expression_works_as_delimiter() -> None:
    sentences = Segmentation(delimiter=re.compile(r"(?<=[.!?])\s"))
    pieces = ["It", " is", " 1", ".", "5", ".", " ", "Is", " it", "? ", "Yes", "!", "\n", "So"]
    assert split(pieces, sentences) == ["It is 1.5. ", "Is it? ", "Yes!\n", "So"]


def test_the_closing_thinking_tag_ends_a_step_even_in_a_code_block() -> None:
    rules = Segmentation(boundary="</think>")
    assert split(["So", "</", "think", ">", "The", " answer"], rules) == ["So</think>", "The answer"]
    assert split(["```\n", "x", "</think>", "The"], rules) == ["```\nx</think>", "The"]


def test_the_opening_thinking_tag_ends_a_step() -> None:
    rules = Segmentation(thinking_marker="<think>")
    stream = TokenTexts("<think>", "\n")
    step = Segmenter(rules, stream, PrefixContext(ROOM), 10).push(0)
    assert step is not None
    assert step.end is StepEnd.THINKING


def test_a_marker_before_the_step_does_not_end_the_step_that_closes_the_thinking() -> None:
    tags = ThinkingTags(separator="\n\n")
    before = PrefixContext(ROOM).then("<think>Plan: ")
    budget = ThinkingBudget(1, ThinkingState(tags, inside=True))
    rules, stream = Segmentation(action_markers=("Plan:",)), TokenTexts("hm", "</think>", "\n\n")
    step = Segmenter(rules, stream, before, 10, budget, lambda _: [1, 2]).push(0)
    assert step is not None
    assert (step.text, step.end) == ("hm</think>\n\n", StepEnd.DELIMITER)


def test_a_marker_split_by_the_step_limit_is_still_found() -> None:
    rules = Segmentation(action_markers=("<tool_call>",), max_step_tokens=2)
    stream = TokenTexts("I", " call <tool", "_call>", "{}")
    first = Segmenter(rules, stream, PrefixContext(ROOM), 10)
    assert first.push(0) is None
    step = first.push(1)
    assert step is not None
    assert step.end is StepEnd.LIMIT
    step = Segmenter(rules, stream, PrefixContext(ROOM).then(step.text), 8).push(2)
    assert step is not None
    assert step.end is StepEnd.ACTION


def test_an_empty_step_can_end_a_reply() -> None:
    assert [(step.text, step.end) for step in segment("one\n\n", Segmentation())] == [
        ("one\n\n", StepEnd.DELIMITER),
        ("", StepEnd.EOS),
    ]


_PIECES = ["a", "\n", "``", "```", "~~~", "\\", "[", "\\]", "$", "$$", "\\begin{a}", "\\end{a}", " ", "```\n"]


@given(st.lists(st.sampled_from(_PIECES), max_size=30), st.integers(0, 30), st.integers(0, 7))
def test_prefix_context_does_not_depend_on_how_the_text_is_split(pieces: list[str], position: int, room: int) -> None:
    first, second = "".join(pieces[:position]), "".join(pieces[position:])
    assert PrefixContext(room).then(first).then(second) == PrefixContext(room).then(first + second)


@given(st.text("ab.:\n \u00a0\u2028X", max_size=60))
@pytest.mark.parametrize(
    "pattern",
    [
        re.compile(r"\n+"),
        re.compile(r":|\n+"),
        re.compile(r"(?<=[.!?])\s"),
        re.compile(r"^x", re.IGNORECASE | re.MULTILINE),
        re.compile(r"a.b", re.DOTALL),
        re.compile(r"\s\w", re.ASCII),
        re.compile(r"(a) (?# a comment) \1", re.VERBOSE),
    ],
)
def test_delimiter_finder_matches_where_re_does(pattern: re.Pattern[str], text: str) -> None:
    found = [match.span() for match in delimiter_finder(pattern)(text, 1)]
    assert found == [match.span() for match in pattern.finditer(text, 1)]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(?:[a-z. ]+)+[^a-z. ]",
        r"(?:[a-z]|[a-z. ])+(?:.|[a-z. ])+[^a-z. ]",
        r"((?:[a-z. ]+)+)(?:[a-z. ]+)+\1[^a-z. ]",
    ],
)
@pytest.mark.timeout(60)
def test_a_catastrophic_pattern_raises_at_its_timeout(pattern: str) -> None:
    """Each pattern takes exponential time."""
    with pytest.raises(ConfigurationError, match=r"longer than 0\.02 s"):
        segment("more words and more. " * 90, Segmentation(delimiter=re.compile(pattern), max_step_tokens=1000))


@pytest.mark.parametrize("pattern", [r"(?:.+)+\x00", r"(?:\w+\s?)+[^\w\s.]", r"(?=(?:[a-z. ]+)+[^a-z. ])x"])
@pytest.mark.timeout(60)
def test_a_catastrophic_pattern_of_re_matches_in_time_or_raises(pattern: str) -> None:
    """The `regex` module matches each in time, unless the machine is slow."""
    text = "more words and more. " * 90
    try:
        steps = segment(text, Segmentation(delimiter=re.compile(pattern), max_step_tokens=1000))
        outcome = "".join(step.text for step in steps)
    except ConfigurationError as error:
        outcome = str(error)
    assert outcome == text or "longer than 0.02 s" in outcome


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (r"(?:a?){1000000000}", "too large"),
        (r"(?:(?:a?){1000}){2}b", "too large"),
        (r"(?:a?){1000000,}b", "too large"),
        (r"(?:a?){,1000000}b", "too large"),
        ("x" * 1001, "too large"),
        (r"x*", "matches the empty text"),
        (r"b|", "matches the empty text"),
    ],
)
def test_oversized_and_empty_matching_patterns_are_rejected(pattern: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        delimiter_finder(re.compile(pattern))
