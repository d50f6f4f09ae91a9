"""The time of a run by node, and the seconds that each lever would save."""

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
from lookahead_agent.bench.summary import measure_levers, spans_of_samples
from lookahead_agent.trace.node_times import BEFORE, BETWEEN, Span, levers, node_times, spans_of
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


def reply_span(node: str, start: float, **fields: Any) -> Span:
    return Span(node, start, start + 5.0, **{"prompt": 2.0, "writing": 3.0, **fields})


def tool_span(start: float, end: float, step: int | None = 2) -> Span:
    return Span("tools", start, end, is_tool=True, step=step)


def saved(*spans: Span, name: str) -> float:
    return levers(spans)[name]


def test_times_of_the_nodes_add_up_to_the_time_of_the_run() -> None:
    spans = [
        reply_span("model", 0.0, prompt_tokens=100, cached_tokens=0, idle=0.5),
        tool_span(5.5, 6.5),
        reply_span("model", 7.0, prompt_tokens=120, cached_tokens=96),
    ]
    model, tools, between = node_times(spans)
    assert (model.node, model.replies, model.prompt, model.writing, model.waiting) == ("model", 2, 4.0, 5.5, 0.5)
    assert (model.prompt_tokens, model.cached_tokens) == (220, 96)
    assert (tools.node, tools.tools, tools.replies) == ("tools", 1.0, 0)
    assert (between.node, between.waiting) == (BETWEEN, 1.0)
    seconds = [each.prompt + each.writing + each.tools + each.waiting for each in (model, tools, between)]
    assert sum(seconds) == pytest.approx(12.0)
    assert node_times([]) == []


def test_spans_at_the_same_time_share_it_and_gaps_have_rows_of_their_own() -> None:
    spans = [reply_span("a", 3.0), reply_span("b", 3.0), tool_span(6.0, 9.0), reply_span("c", 12.0)]
    times = {each.node: each for each in node_times(spans, seconds=20.0, before=3.0)}
    assert list(times) == ["a", "b", "tools", "c", BEFORE, BETWEEN]
    assert times["a"].seconds == times["b"].seconds == pytest.approx(3 / 2 + 2 / 3)
    assert times["a"].prompt / times["a"].seconds == pytest.approx(2 / 5)
    assert times["tools"].seconds == times["tools"].tools == pytest.approx(2 / 3 + 1)
    assert times["c"].seconds == 5
    assert times[BEFORE].waiting == 3
    assert times[BETWEEN].waiting == pytest.approx(20 - 3 - 6 - 5)
    assert sum(each.seconds for each in times.values()) == pytest.approx(20)
    assert [each.node for each in node_times(spans)] == ["a", "b", "tools", "c", BETWEEN]


def test_queueing_time_of_a_reply_counts_as_waiting() -> None:
    (model, _) = node_times([Span("model", 0, 9, prompt=2, writing=3)])
    assert (model.prompt, model.writing, model.waiting) == (2, 3, 4)


def test_sum_of_cached_tokens_is_unknown_if_one_reply_does_not_report_them() -> None:
    spans = [reply_span("model", 0.0, cached_tokens=5), reply_span("model", 9.0, cached_tokens=None)]
    assert node_times(spans)[0].cached_tokens is None


def test_warm_prefix_saves_the_prefill_of_uncached_earlier_messages() -> None:
    cold = reply_span("model", 0.0, prompt_tokens=100, cached_tokens=0, new_share=0.1)
    assert saved(cold, name="warm prefix") == pytest.approx(2.0 * 0.9)
    warm = reply_span("model", 0.0, prompt_tokens=100, cached_tokens=90, new_share=0.1)
    assert saved(warm, name="warm prefix") == 0
    assert saved(reply_span("model", 0.0, prompt_tokens=0), name="warm prefix") == 0


def test_parallel_tools_save_all_but_the_longest_call_of_a_step() -> None:
    sequential = [tool_span(0, 1), tool_span(1, 4), tool_span(4, 6)]
    assert saved(*sequential, name="tools at once") == 3
    assert saved(tool_span(0, 3), tool_span(0, 2), name="tools at once") == 0, "they ran in parallel already"
    assert saved(tool_span(0, 1, 2), tool_span(1, 4, 4), name="tools at once") == 0, "the second may need the first"
    assert saved(tool_span(0, 1, None), tool_span(1, 4, None), name="tools at once") == 0


def test_draft_tokens_save_less_if_the_run_had_some_already() -> None:
    no_drafts = reply_span("model", 0.0, output_tokens=100, passes=100, lookup_passes=0.5)
    some_drafts = reply_span("model", 0.0, output_tokens=100, passes=60, lookup_passes=0.5)
    many_drafts = reply_span("model", 0.0, output_tokens=100, passes=30, lookup_passes=0.5)
    for name in ("shared draft", "prompt lookup"):
        assert saved(no_drafts, name=name) > saved(some_drafts, name=name) > saved(many_drafts, name=name) == 0
    assert saved(reply_span("model", 0.0, output_tokens=9, passes=9, lookup_passes=1.0), name="prompt lookup") == 0


def test_prompt_lookup_needs_fewer_passes_for_repeated_text() -> None:
    prompt = "The table customers has the columns id, name and country."
    assert lookup_passes(prompt, "The table customers has the columns id, name and country.") < 0.4
    assert lookup_passes(prompt, "Nothing of this was ever said by anybody else") == 1
    assert lookup_passes("", "one two " * 20) < 0.5, "the reply repeats itself"
    assert lookup_passes(prompt, "") == 1


def test_new_share_of_a_prompt_is_its_last_message() -> None:
    call = AIMessage("", tool_calls=[{"name": "look", "args": {"place": "here"}, "id": "1"}])
    text, share = shape_of_prompt([SystemMessage("a" * 60), call, HumanMessage("b" * 20)], [{"name": "look"}])
    assert '"place": "here"' in text
    assert 0.15 < share < 0.25
    assert shape_of_prompt([])[1] == 1.0


def record_trace(path: Path | None = None, place: str = "here") -> TraceRecorder:
    call = CALL.replace("here", place)
    engines = scripted_engines(lambda prompt: "I see a cat." if "tool: " in prompt else call, prefix_cache=True)
    llm = ChatLookahead(engines=engines, policy="off", temperature=0)
    look.handle_tool_error = True
    with TraceRecorder(path) as recorder:
        create_agent(llm, [look]).invoke({"messages": [("user", "What is here?")]}, {"callbacks": [recorder]})
    return recorder


def test_trace_of_an_agent_contains_the_times_of_its_model_and_tool(tmp_path: Path) -> None:
    record_trace(tmp_path / "run.jsonl")
    rows = read_trace(tmp_path / "run.jsonl")
    (run,) = [row for row in rows if row["type"] == "tool"]
    assert (run["path"], run["name"], run["arguments"], run["failed"]) == ("tools", "look", '{"place": "here"}', False)
    model, tools, _ = node_times(spans_of(rows))
    assert (model.node, model.replies) == ("model", 2)
    assert model.prompt > 0
    assert model.writing > 0
    assert 0 < (model.cached_tokens or 0) < model.prompt_tokens, "the second prompt begins with the first one"
    assert tools.tools > 0
    write_page(timeline(rows), tmp_path / "run.html", rows)
    page = (tmp_path / "run.html").read_text()
    assert '"warm prefix"' in page
    assert '"result": "a cat"' in page
    assert '"question": "What is here?", "answer": "I see a cat."' in page


def test_rows_of_an_older_trace_without_times_are_skipped() -> None:
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


def test_report_shows_predicted_and_measured_savings() -> None:
    samples = [
        sample("off", 4.0),
        sample("off", 4.0, "2"),
        sample("shared_draft", 3.0),
        sample("shared_draft", 3.0, "2"),
    ]
    assert measure_levers(samples) == {"shared draft": 1.0}
    assert measure_levers([sample("off", 4.0), sample("sd", 3.5, token_speculation="ngram")]) == {"prompt lookup": 0.5}
    assert measure_levers([sample("off", 4.0), sample("sd", 3.5, token_speculation="draft_model")]) == {}
    times, savings = Report(samples).tables("t")[-2:]
    assert times[0][:2] == ["configuration", "node"]
    assert times[1][0] == ["off", "model", "off", "1", "10", "", "1.0", "4.0", "0.0", "0.0", "50", "16"]
    assert times[1][2][:2] == ["off", BETWEEN]
    assert float(times[1][2][9]) == pytest.approx(0.5, abs=0.06)
    assert [row[0] for row in savings[1]] == ["shared draft", "prompt lookup", "warm prefix", "tools at once"]
    assert savings[1][0][2] == "1.0"
    assert savings[1][1][2] == ""


def test_tools_of_two_samples_do_not_count_as_one_step() -> None:
    spans = spans_of_samples([sample("off", 4.0), sample("off", 4.0, "2")])
    assert saved(*spans, name="tools at once") == 0
