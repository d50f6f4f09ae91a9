"""What only the target may write."""

from __future__ import annotations

import re

import pytest

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.decoding.request import Regions
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from tests.unit.scripts import ScriptedVerifier
from tests.virtual_time import run_in_virtual_time

ALL = ScriptedVerifier(lambda draft, target: True)
THINK = Regions(thinking=ThinkingTags(), answer_from_target=True)
FREE = Regions(thinking=ThinkingTags())
TARGET = "I think.\n\nI think more.</think>\n\nIt is 4.\n\nReally."
DRAFT = "I guess.\n\nI guess more.</think>\n\nIt is 5.\n\nTruly."


def steps(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=\n\n)|(?<=think>)|(?<=tool_call>)", text) if part]


def write(prompt: str, regions: Regions, target: str = TARGET, draft: str = DRAFT, seconds: float = 1.0) -> Reply:
    tokenizer = ScriptedTokenizer()
    ids = tokenizer.encode(prompt)

    def engine(text: str, pace: float) -> ScriptedEngine:
        """Writes the text step by step: what follows as many steps as there are."""

        def script(_: str, reply: str) -> list[ScriptedStep]:
            return [ScriptedStep(part, pace) for part in steps(text)[len(steps(reply)) :]]

        return ScriptedEngine(tokenizer, script, len(ids))

    request = ReplyRequest(tuple(ids), Sampling(max_tokens=1000), regions=regions)
    reply = run_in_virtual_time(
        lookahead(request, engine(target, 3 * seconds), engine(draft, seconds), ALL, DecodingSettings())
    )
    return reply


def test_the_final_answer_is_the_targets_where_the_template_opened_the_thinking() -> None:
    reply = write("q<think>\n", THINK)
    thinking, _, answer = reply.text.partition("</think>")
    assert thinking == "I guess.\n\nI think more.", "the step with the closing tag is the target's already"
    assert answer == "\n\nIt is 4.\n\nReally."


def test_without_that_rule_the_answer_is_speculated_on() -> None:
    reply = write("q<think>\n", FREE)
    assert "5" in reply.text
    assert reply.report.accepted == reply.report.steps


def test_a_step_never_goes_over_the_closing_tag() -> None:
    reply = write("q<think>\n", FREE, target="a</think>b", draft="a</think>b")
    assert reply.report.steps == 2


def test_a_model_that_opens_its_thinking_itself() -> None:
    reply = write("q", THINK, target="<think>" + TARGET, draft="<think>" + DRAFT)
    assert reply.text.startswith("<think>I guess.")
    assert reply.text.endswith("It is 4.\n\nReally.")
    assert 0 < reply.report.accepted < reply.report.steps


@pytest.mark.parametrize("prompt", ["q", "q<think>\n\n</think>\n\n"])
def test_a_reply_without_thinking_is_the_targets(prompt: str) -> None:
    text = "It is 4.\n\nReally.\n\nYes."
    reply = write(prompt, THINK, target=text, draft=text)
    assert reply.text == text
    assert reply.report.draft_tokens.generated == 0


def test_a_tool_call_ends_the_speculation_for_good() -> None:
    call = 'Look.\n\n<tool_call>{"x": "<think>"}\n\nand\n\nmore'
    regions = Regions(("<tool_call>",), ThinkingTags(), answer_from_target=True)
    reply = write("q<think>\n", regions, target=call, draft=call)
    assert reply.text == call
    assert reply.report.accepted == 1


def test_structured_output_is_the_targets_alone() -> None:
    tokenizer = ScriptedTokenizer()
    prompt = tokenizer.encode("q")
    steps = [ScriptedStep("{}\n\n", 1), ScriptedStep("{}", 1)]
    target, draft = (ScriptedEngine(tokenizer, steps, len(prompt)) for _ in range(2))
    request = ReplyRequest(tuple(prompt), Sampling(max_tokens=100, structured={"json": {}}))
    reply = run_in_virtual_time(lookahead(request, target, draft, ALL))
    assert reply.report.accepted == 0
    assert not draft.requests
    assert target.requests[0][1].structured == {"json": {}}
