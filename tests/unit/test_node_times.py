"""How the time of a run divides by node, and what levers would win of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.report import Report
from lookahead_agent.bench.samples import CallRecord, Sample, ToolRecord
from lookahead_agent.bench.summary import measured_levers, spans_of_samples
from lookahead_agent.trace.node_times import BETWEEN, Span, levers, node_times, spans_of
from lookahead_agent.trace.recorder import TraceRecorder, lookup_passes, read_trace, shape_of_prompt
from lookahead_agent.trace.timeline import timeline, write_page
from tests.unit.chat import scripted_engines

CALL = '<tool_call>{"name": "look", "arguments": {"place": "here"}}</tool_call>'


@tool
def look(place: str) -> str:
    """Look."""
    if place == "nowhere":
        raise ValueError("there is nothing")
    return "a cat"


def reply(node: str, start: float, **more: Any) -> Span:
    return Span(node, start, start + 5.0, **{"prompt": 2.0, "writing": 3.0, **more})


def run_of_tool(start: float, end: float, step: int | None = 2) -> Span:
    return Span("tools", start, end, is_tool=True, step=step)


def won(*spans: Span, name: str) -> float:
    return levers(spans)[name]


def test_the_time_of_a_run_divides_without_a_rest() -> None:
    spans = [
        reply("model", 0.0, prompt_tokens=100, cached_tokens=0, idle=0.5),
        run_of_tool(5.5, 6.5),
        reply("model", 7.0, prompt_tokens=120, cached_tokens=96),
    ]
    model, tools, between = node_times(spans)
    assert (model.node, model.replies, model.prompt, model.writing, model.waiting) == ("model", 2, 4.0, 5.5, 0.5)
    assert (model.prompt_tokens, model.cached_tokens) == (220, 96)
    assert (tools.node, tools.tools, tools.replies) == ("tools", 1.0, 0)
    assert (between.node, between.waiting) == (BETWEEN, 1.0)
    whole = [each.prompt + each.writing + each.tools + each.waiting for each in (model, tools, between)]
    assert sum(whole) == pytest.approx(12.0)
    assert node_times([]) == []


def test_a_reply_that_stood_in_a_queue_waited() -> None:
    (model, _) = node_times([Span("model", 0, 9, prompt=2, writing=3)])
    assert (model.prompt, model.writing, model.waiting) == (2, 3, 4)


def test_one_server_that_does_not_tell_leaves_the_sum_unknown() -> None:
    spans = [reply("model", 0.0, cached_tokens=5), reply("model", 9.0, cached_tokens=None)]
    assert node_times(spans)[0].cached_tokens is None


def test_a_warm_prefix_wins_the_time_of_what_could_be_known_before_and_was_not_in_the_cache() -> None:
    cold = reply("model", 0.0, prompt_tokens=100, cached_tokens=0, new_share=0.1)
    assert won(cold, name="warm prefix") == pytest.approx(2.0 * 0.9)
    warm = reply("model", 0.0, prompt_tokens=100, cached_tokens=90, new_share=0.1)
    assert won(warm, name="warm prefix") == 0
    assert won(reply("model", 0.0, prompt_tokens=0), name="warm prefix") == 0


def test_tools_at_once_win_all_but_the_longest_of_a_step() -> None:
    in_turn = [run_of_tool(0, 1), run_of_tool(1, 4), run_of_tool(4, 6)]
    assert won(*in_turn, name="tools at once") == 3
    assert won(run_of_tool(0, 3), run_of_tool(0, 2), name="tools at once") == 0, "they ran at once"
    assert won(run_of_tool(0, 1, 2), run_of_tool(1, 4, 4), name="tools at once") == 0, "the second may need the first"
    assert won(run_of_tool(0, 1, None), run_of_tool(1, 4, None), name="tools at once") == 0


def test_draft_tokens_win_less_where_there_are_some_already() -> None:
    alone = reply("model", 0.0, output_tokens=100, passes=100, lookup_passes=0.5)
    drafted = reply("model", 0.0, output_tokens=100, passes=60, lookup_passes=0.5)
    enough = reply("model", 0.0, output_tokens=100, passes=30, lookup_passes=0.5)
    for name in ("shared draft", "prompt lookup"):
        assert won(alone, name=name) > won(drafted, name=name) > won(enough, name=name) == 0
    assert won(reply("model", 0.0, output_tokens=9, passes=9, lookup_passes=1.0), name="prompt lookup") == 0


def test_what_is_repeated_can_be_looked_up() -> None:
    prompt = "The table customers has the columns id, name and country."
    assert lookup_passes(prompt, "The table customers has the columns id, name and country.") < 0.4
    assert lookup_passes(prompt, "Nothing of this was ever said by anybody else") == 1
    assert lookup_passes("", "one two " * 20) < 0.5, "in the reply itself"
    assert lookup_passes(prompt, "") == 1


def test_the_new_part_of_a_prompt_is_its_last_message() -> None:
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"place": "here"}, "id": "1"}])
    text, share = shape_of_prompt([SystemMessage("a" * 60), call, HumanMessage("b" * 20)], [{"name": "look"}])
    assert '"place": "here"' in text
    assert 0.15 < share < 0.25
    assert shape_of_prompt([])[1] == 1.0


def traced(path: Path | None = None, place: str = "here") -> TraceRecorder:
    answer = CALL.replace("here", place)
    engines = scripted_engines(lambda prompt: "I see a cat." if "tool: " in prompt else answer, prefix_cache=True)
    llm = ChatLookahead(engines=engines, policy="off", temperature=0)
    look.handle_tool_error = True
    with TraceRecorder(path) as recorder:
        create_agent(llm, [look]).invoke({"messages": [("user", "What is here?")]}, {"callbacks": [recorder]})
    return recorder


def test_a_traced_run_of_an_agent_has_the_times_of_its_model_and_its_tool(tmp_path: Path) -> None:
    traced(tmp_path / "run.jsonl")
    rows = read_trace(tmp_path / "run.jsonl")
    (run,) = [row for row in rows if row["type"] == "tool"]
    assert (run["path"], run["name"], run["arguments"], run["failed"]) == ("tools", "look", '{"place": "here"}', False)
    model, tools, _ = node_times(spans_of(rows))
    assert (model.node, model.replies) == ("model", 2)
    assert model.prompt > 0
    assert model.writing > 0
    assert 0 < (model.cached_tokens or 0) < model.prompt_tokens, "the second prompt begins as the first"
    assert tools.tools > 0
    write_page(timeline(rows), tmp_path / "run.html", spans_of(rows))
    page = (tmp_path / "run.html").read_text()
    assert '"prompt, s"' in page
    assert '"warm prefix"' in page


def test_rows_of_an_older_trace_have_no_times() -> None:
    assert spans_of([{"type": "trace"}, {"type": "reply", "seconds": {"total": 1.0, "first": 0.5}}]) == []


def sample(configuration: str, writing: float, problem: str = "1", **settings: Any) -> Sample:
    call = CallRecord(
        node="model", path="model", step=1, policy="off", seconds=writing + 1, output_tokens=10, passes=10, steps=1,
        accepted=0, tokens={}, busy={"prompt": 1.0, "writing": writing}, prompt_tokens=50, cached_tokens=16,
    )  # fmt: skip
    run = ToolRecord(path="tools", step=2, name="look", arguments="{}", started=writing + 1, seconds=0.5)
    return Sample(
        task="t", problem=problem, mode=configuration, configuration=configuration, seconds=writing + 2, correct=True,
        calls=[call], tools=[run], settings=settings,
    )  # fmt: skip


def test_a_report_shows_what_was_predicted_beside_what_was_measured() -> None:
    samples = [
        sample("off", 4.0),
        sample("off", 4.0, "2"),
        sample("shared_draft", 3.0),
        sample("shared_draft", 3.0, "2"),
    ]
    assert measured_levers(samples) == {"shared draft": 1.0}
    assert measured_levers([sample("off", 4.0), sample("sd", 3.5, token_speculation="ngram")]) == {"prompt lookup": 0.5}
    assert measured_levers([sample("off", 4.0), sample("sd", 3.5, token_speculation="draft_model")]) == {}
    times, won_by = Report(samples).tables("t")[-2:]
    assert times[0][:2] == ["configuration", "node"]
    assert times[1][0] == ["off", "model", "off", "1", "10", "", "1.0", "4.0", "0.0", "0.0", "50", "16"]
    assert times[1][2][:2] == ["off", BETWEEN]
    assert float(times[1][2][9]) == pytest.approx(0.5, abs=0.06)
    assert [row[0] for row in won_by[1]] == ["shared draft", "prompt lookup", "warm prefix", "tools at once"]
    assert won_by[1][0][2] == "1.0"
    assert won_by[1][1][2] == ""


def test_tools_of_two_samples_are_not_of_one_step() -> None:
    spans = spans_of_samples([sample("off", 4.0), sample("off", 4.0, "2")])
    assert won(*spans, name="tools at once") == 0
