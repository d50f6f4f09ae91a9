"""Regions of a reply that only the target writes: answers after thinking, tool calls, structured output."""

from __future__ import annotations

import re

import pytest

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.decoding.request import Regions
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.chat_template import ThinkingTags
from tests.unit.scripts import ScriptedVerifier
from tests.virtual_time import run_in_virtual_time

ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)
TARGET_ANSWER = Regions(thinking=ThinkingTags(), answer_from_target=True)
DRAFT_ANSWER = Regions(thinking=ThinkingTags())
TARGET = "I think.\n\nI think more.</think>\n\nIt is 4.\n\nReally."
DRAFT = "I guess.\n\nI guess more.</think>\n\nIt is 5.\n\nTruly."


def steps(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=\n\n)|(?<=think>)|(?<=tool_call>)", text) if part]


def generate(prompt: str, regions: Regions, target: str = TARGET, draft: str = DRAFT, seconds: float = 1.0) -> Reply:
    tokenizer = ScriptedTokenizer()
    ids = tokenizer.encode(prompt)

    def engine(text: str, pace: float) -> ScriptedEngine:
        """Create an engine that continues a text after as many steps as the reply has."""

        def script(_: str, reply: str) -> list[ScriptedStep]:
            return [ScriptedStep(part, pace) for part in steps(text)[len(steps(reply)) :]]

        return ScriptedEngine(tokenizer, script, len(ids))

    request = ReplyRequest(tuple(ids), Sampling(max_tokens=1000), regions=regions)
    reply = run_in_virtual_time(
        lookahead(request, engine(target, 3 * seconds), engine(draft, seconds), ACCEPT_ALL, DecodingSettings())
    )
    return reply


def test_target_writes_the_final_answer_if_the_template_opens_thinking() -> None:
    reply = generate("q<think>\n", TARGET_ANSWER)
    thinking, _, answer = reply.text.partition("</think>")
    assert thinking == "I guess.\n\nI think more.", "the target also writes the step with the closing tag"
    assert answer == "\n\nIt is 4.\n\nReally."


def test_answer_is_speculated_on_without_answer_from_target() -> None:
    reply = generate("q<think>\n", DRAFT_ANSWER)
    assert "5" in reply.text
    assert reply.report.accepted == reply.report.steps


def test_steps_end_at_the_closing_tag() -> None:
    reply = generate("q<think>\n", DRAFT_ANSWER, target="a</think>b", draft="a</think>b")
    assert reply.report.steps == 2


def test_target_writes_the_final_answer_if_the_model_opens_thinking() -> None:
    reply = generate("q", TARGET_ANSWER, target="<think>" + TARGET, draft="<think>" + DRAFT)
    assert reply.text.startswith("<think>I guess.")
    assert reply.text.endswith("It is 4.\n\nReally.")
    assert 0 < reply.report.accepted < reply.report.steps


@pytest.mark.parametrize("prompt", ["q", "q<think>\n\n</think>\n\n"])
def test_target_writes_a_reply_without_thinking(prompt: str) -> None:
    text = "It is 4.\n\nReally.\n\nYes."
    reply = generate(prompt, TARGET_ANSWER, target=text, draft=text)
    assert reply.text == text
    assert reply.report.draft_tokens.total == 0


def test_speculation_stays_off_after_a_tool_call_starts() -> None:
    call = 'Look.\n\n<tool_call>{"x": "<think>"}\n\nand\n\nmore'
    regions = Regions(("<tool_call>",), ThinkingTags(), answer_from_target=True)
    reply = generate("q<think>\n", regions, target=call, draft=call)
    assert reply.text == call
    assert reply.report.accepted == 1


def test_target_writes_structured_output_without_the_draft() -> None:
    tokenizer = ScriptedTokenizer()
    prompt = tokenizer.encode("q")
    steps = [ScriptedStep("{}\n\n", 1), ScriptedStep("{}", 1)]
    target, draft = (ScriptedEngine(tokenizer, steps, len(prompt)) for _ in range(2))
    request = ReplyRequest(tuple(prompt), Sampling(max_tokens=100, structured={"json": {}}))
    reply = run_in_virtual_time(lookahead(request, target, draft, ACCEPT_ALL))
    assert reply.report.accepted == 0
    assert not draft.requests
    assert target.requests[0][1].structured == {"json": {}}
