"""The templates' whole control flow, on a model that follows a script."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import aclosing
from typing import Any

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from graphs.react import build_react
from graphs.reflection import build_reflection
from graphs.rewoo import build_rewoo
from graphs.self_consistency import answer_of, build_self_consistency, is_decided
from graphs.supervisor import build_supervisor
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.metrics import Budget, Usage, add_usage
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import scripted_chat
from tests.waiting import becomes
from tools.calculator import calculator

Script = dict[str, list[str] | str]


def model(script: Script, **fields: Any) -> ChatLookahead:
    return scripted_chat(scripted_replies(**script), **fields)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def calculation(expression: str) -> str:
    return call("calculator", expression=expression)


notes: list[str] = []


@tool
def write_note(text: str) -> str:
    """Write a note."""
    notes.append(text)
    return "written"


@tool
def flaky(text: str) -> str:
    """Look something up."""
    notes.append(text)
    if len(notes) == 1:
        raise ConnectionError("lost")
    return "found"


@pytest.fixture(autouse=True)
def _no_notes() -> None:
    notes.clear()


THOUGHT = "I know the prices.\n\nI add them next."


def test_react_thinks_acts_and_looks() -> None:
    llm = model(
        {"You think about": THOUGHT, "You solve a problem": [calculation("2+3"), calculation("5*2"), "It is 10."]},
        policies={"thinker": "exact", "actor": "off"},
    )
    graph = build_react(llm, [calculator])
    llm.check_policies(graph)
    state = graph.invoke({"question": "How much?"})
    assert state["answer"] == "It is 10."
    assert [message.text for message in state["messages"] if isinstance(message, ToolMessage)] == ["5", "10"]
    assert state["usage"]["steps"] == 8
    assert state["usage"]["tokens"] > 0
    assert "stopped" not in state


def test_react_tells_the_model_what_went_wrong() -> None:
    wrong = [call("oracle"), calculation("1/0"), call("calculator", sum="1"), "I do not know."]
    state = build_react(model({"You think": THOUGHT, "You solve": wrong}), [calculator]).invoke({"question": "?"})
    observed = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    assert [message.status for message in observed] == ["error"] * 3
    assert "there is no tool oracle; there are calculator" in observed[0].text
    assert "divides by zero" in observed[1].text
    assert "wrong arguments" in observed[2].text


def test_react_ends_with_what_it_has_at_a_limit() -> None:
    llm = model({"You think": THOUGHT, "You solve": calculation("2+3"), "You answer": "It is at least 5."})
    state = build_react(llm, [calculator], budget=Budget(steps=6)).invoke({"question": "How much?"})
    assert state["answer"] == "It is at least 5."
    assert state["stopped"] == "the limit of 6 steps is reached"


def test_react_carries_out_a_thought_that_is_a_calculation_as_it_stands() -> None:
    thoughts = ["Pens: 2 * 3", "Half: 6 / 0", "I should ask.", "Less: 6 - 10 = -4", "Done."]
    llm = model({"You think": thoughts, "You solve": calculation("3+3"), "You answer": "It is -4."}, policy="off")
    graph = build_react(llm, [calculator])
    state = graph.invoke({"question": "How much?"})
    observed = [message for message in state["messages"] if isinstance(message, ToolMessage)]
    assert [message.text for message in observed if message.status == "success"] == ["6", "6", "-4"]
    assert "divides by zero" in observed[1].text
    assert state["answer"] == "It is -4."
    assert not state.get("stopped")
    assert state["usage"]["steps"] == 11, "five thoughts, four calls, and the replies of actor and finisher"


def test_react_answers_from_the_results_once_the_thinker_is_done() -> None:
    """Whoever is asked to act after the word "Done." says "Done." again."""
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        if "You think" in prompt:
            return "Done." if "6" in prompt.rsplit("How much?", 1)[-1] else "Pens: 2 * 3"
        return "They cost 6."

    state = build_react(scripted_chat(reply, policy="off"), [calculator]).invoke({"question": "How much?"})
    assert state["answer"] == "They cost 6."
    assert len(asked) == 3
    assert "1. Pens: 2 * 3\n   2 * 3 = 6" in asked[-1]
    assert "Done" not in asked[-1]
    silly = build_react(model({"You think": "Done.", "You solve": "It is 4."}, policy="off"), [calculator])
    assert silly.invoke({"question": "How much?"})["answer"] == "It is 4.", "done with nothing: the actor is asked"


def test_react_carries_out_a_question_that_is_a_calculation_as_it_stands() -> None:
    script: Script = {"You think": ["Pens: 10 / 2", "Done."], "You answer": "It is so."}
    graph = build_react(model(script, policy="off"), [calculator], InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    state = graph.invoke({"question": "(10 * 2) + 5"}, config)
    assert [message.text for message in state["messages"] if isinstance(message, ToolMessage)] == ["25"]
    assert state["usage"]["steps"] == 2, "the call and the answer"
    state = graph.invoke({"question": "10 / 0"}, config)
    observed = [message.text for message in state["messages"] if isinstance(message, ToolMessage)]
    assert observed[0] == "25"
    assert "divides by zero" in observed[1], "whose result is none: it thinks"
    assert observed[2:] == ["5"]
    assert not state["stopped"]


def test_react_with_other_tools_is_done_when_the_thinker_says_so() -> None:
    thoughts = ["Look up tea.", "Done."]
    llm = model({"You think": thoughts, "You solve": call("flaky", text="tea"), "You answer": "Found."}, policy="off")
    notes.append("not the first")
    state = build_react(llm, [flaky]).invoke({"question": "Is there tea?"})
    assert (state["answer"], state["usage"]["steps"]) == ("Found.", 5)


def test_react_thinks_anew_about_the_next_question_of_a_thread() -> None:
    """How the question before ended is in the thread's checkpoint."""
    llm = model(
        {"You think": ["Pens: 2 * 3", "Done.", "Books: 4 * 5", "Done."], "You answer": "It is so."}, policy="off"
    )
    graph = build_react(llm, [calculator], InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    graph.invoke({"question": "How much are the pens?"}, config)
    state = graph.invoke({"question": "And the books?"}, config)
    assert [message.text for message in state["messages"] if isinstance(message, ToolMessage)] == ["6", "20"]


def test_react_that_calculates_in_circles_ends() -> None:
    thoughts = ["Pens: 2 * 3", "Half: 6 / 2", "Pens: 2 * 3", "Half: 6 / 2"]
    llm = model({"You think": thoughts, "You answer a problem": "Half of it is 3."}, policy="off")
    state = build_react(llm, [calculator]).invoke({"question": "How much?"})
    assert state["stopped"] == "the thinker repeats itself"
    assert state["answer"] == "Half of it is 3."
    assert state["usage"]["steps"] == 6, "three thoughts, two calls, and the finisher"


def test_react_asks_the_actor_where_calculations_are_no_matter_of_course() -> None:
    script: Script = {"You think": "Pens: 2 * 3", "You solve": [calculation("7"), "It is 7."]}
    for more in ({"calculate": False}, {"ask_before": ["calculator"], "checkpointer": InMemorySaver()}):
        graph = build_react(model(script), [calculator], **more)  # type: ignore[arg-type]
        config: Any = {"configurable": {"thread_id": "1"}}
        state = graph.invoke({"question": "How much?"}, config)
        if "__interrupt__" in state:
            assert state["__interrupt__"][0].value["arguments"] == {"expression": "7"}
            state = graph.invoke(Command(resume=True), config)
        assert [message.text for message in state["messages"] if isinstance(message, ToolMessage)] == ["7"]


def test_react_asks_before_a_tool_that_writes() -> None:
    script: Script = {"You think": THOUGHT, "You solve": [call("write_note", text="tea"), "Done.", "Done."]}
    for decision, written in ((True, ["tea"]), ("not now", []), (False, [])):
        notes.clear()
        graph = build_react(model(script), [write_note], InMemorySaver(), ask_before=["write_note"])
        config: Any = {"configurable": {"thread_id": "1"}}
        waiting = graph.invoke({"question": "Note it."}, config)
        (question,) = waiting["__interrupt__"]
        assert question.value == {
            "tool": "write_note",
            "arguments": {"text": "tea"},
            "question": "May this call be made?",
        }
        assert notes == []
        state = graph.invoke(Command(resume=decision), config)
        assert notes == written
        assert state["answer"] == "Done."
        if decision == "not now":
            assert any("not carried out: not now" in message.text for message in state["messages"])
    for arguments in ({"ask_before": ["oracle"]}, {"ask_before": ["write_note"]}):
        with pytest.raises(ValueError, match=r"there are not|checkpointer"):
            build_react(model(script), [write_note], **arguments)  # type: ignore[arg-type]


def test_a_tool_that_is_interrupted_is_tried_again() -> None:
    llm = model({"You think": THOUGHT, "You solve": [call("flaky", text="x"), "Done."]})
    state = build_react(llm, [flaky]).invoke({"question": "?"})
    assert notes == ["x", "x"]
    assert state["answer"] == "Done."


def calls(*made: tuple[str, dict[str, Any]]) -> str:
    return json.dumps({"calls": [{"tool": name, "arguments": arguments} for name, arguments in made]})


def test_rewoo_plans_once_and_calls_at_once() -> None:
    planned = calls(
        ("calculator", {"expression": "2*3"}),
        ("calculator", {"expression": "4*5"}),
        ("calculator", {"expression": "#E1 + #E2"}),
    )
    llm = model({"You plan how": THOUGHT, "You put a plan": planned, "You answer": "It is 26."})
    graph = build_rewoo(llm, [calculator])
    rounds = [sorted(update) for update in graph.stream({"question": "How much?"}, stream_mode="updates")]
    assert rounds.count(["worker"]) == 3
    state = graph.invoke({"question": "How much?"})
    assert [entry["output"] for entry in state["evidence"]] == ["6", "20", "26"]
    assert state["evidence"][2]["call"]["arguments"] == {"expression": "6 + 20"}
    assert state["answer"] == "It is 26."
    assert state["usage"]["steps"] == 6


@pytest.mark.parametrize(
    "planned",
    [
        calls(("calculator", {"expression": "#E" + "9" * 5_000})),
        calls(("calculator", {"expression": "#E\u0663"})),
        '{"calls": [{"tool": "calculator", "arguments": "1+1"}, {"tool": "calculator", "arguments": ["a"]}, 7, null]}',
    ],
    ids=["a number that is none", "other digits", "arguments that are none"],
)
def test_rewoo_goes_on_after_plans_that_cannot_be_read(planned: str) -> None:
    llm = model({"You plan": THOUGHT, "You put": planned, "You answer": "I do not know."})
    assert build_rewoo(llm, [calculator]).invoke({"question": "?"})["answer"] == "I do not know."


def test_rewoo_goes_on_without_what_failed() -> None:
    planned = calls(
        ("calculator", {"expression": "1/0"}),
        ("calculator", {"expression": "#E1 + 1"}),
        ("calculator", {"expression": "#E9 + 1"}),
        ("oracle", {}),
        ("calculator", {"sum": 1}),
    )
    llm = model({"You plan": THOUGHT, "You put": planned, "You answer": "I do not know."})
    state = build_rewoo(llm, [calculator]).invoke({"question": "?"})
    outputs = {entry["call"]["number"]: entry["output"] for entry in state["evidence"]}
    assert set(outputs) == {1, 4, 5}, "calls that need what failed, or what there is not, are not made"
    assert "divides by zero" in outputs[1]
    assert "no tool oracle" in outputs[4]
    assert "wrong arguments" in outputs[5]
    assert state["answer"] == "I do not know."


def test_rewoo_without_a_plan_and_at_a_limit() -> None:
    llm = model({"You plan": THOUGHT, "You put": "no json", "You answer": "I do not know."})
    assert build_rewoo(llm, [calculator]).invoke({"question": "?"})["plan"] == []
    cut = calls(("calculator", {"expression": "2 * 3"}), ("calculator", {"expression": "6 * 712"}))[:-6]
    llm = model({"You plan": THOUGHT, "You put": cut, "You answer": "I do not know."})
    state = build_rewoo(llm, [calculator]).invoke({"question": "?"})
    assert (state["plan"], state.get("evidence", [])) == ([], []), "half a number would be another number"
    unlike = json.dumps({"calls": [{}, {"tool": "calculator", "arguments": {"expression": "2 * 3"}}]})
    llm = model({"You plan": THOUGHT, "You put": unlike, "You answer": "I do not know."})
    assert [call["number"] for call in build_rewoo(llm, [calculator]).invoke({"question": "?"})["plan"]] == [2]
    planned = calls(*[("calculator", {"expression": f"#E{n} + 1" if n else "1"}) for n in range(9)])
    llm = model({"You plan": THOUGHT, "You put": planned, "You answer": "About 2."})
    state = build_rewoo(llm, [calculator], budget=Budget(steps=4)).invoke({"question": "?"})
    assert len(state["evidence"]) == 2
    assert state["stopped"] == "the limit of 4 steps is reached"
    assert state["answer"] == "About 2."


def test_rewoo_reads_a_plan_of_calculations_as_it_stands() -> None:
    plan = "1. Pens: 2 * 3\n2. Less: 4 - 10\n\n3. All: pens + 5 = 11\n4. Squared: result 2 ^ 2"
    llm = model({"You plan": plan, "You put": "The caller is not asked.", "You answer": "It is 36."})
    state = build_rewoo(llm, [calculator]).invoke({"question": "?"})
    assert [entry["call"]["arguments"]["expression"] for entry in by_number(state)] == [
        "2 * 3", "4 - 10", "6 + 5", "(-6) ^ 2",
    ]  # fmt: skip
    assert [entry["output"] for entry in by_number(state)] == ["6", "-6", "11", "36"]
    assert state["usage"]["steps"] == 6, "two replies and four calls"


@pytest.mark.parametrize(
    ("plan", "more"),
    [
        ("I add them.\n1. Pens: 2 * 3", {}),
        ("1. Pens: 2 * 3\n2. All: the sum", {}),
        ("2. Pens: 2 * 3", {}),
        ("1. Pens: result 1 * 3", {}),
        ("1. Pens: 2 * 3", {"calculate": False}),
    ],
)
def test_rewoo_asks_the_caller_about_any_other_plan(plan: str, more: dict[str, bool]) -> None:
    planned = calls(("calculator", {"expression": "7"}))
    llm = model({"You plan": plan, "You put": planned, "You answer": "It is 7."})
    state = build_rewoo(llm, [calculator], **more).invoke({"question": "?"})
    assert [entry["output"] for entry in state["evidence"]] == ["7"]


def by_number(state: Any) -> list[Any]:
    return sorted(state["evidence"], key=lambda entry: entry["call"]["number"])


def verdict(word: str) -> str:
    return json.dumps({"verdict": word})


def test_reflection_revises_until_it_is_good() -> None:
    llm = model(
        {
            "You carry out": "A poem.",
            "strict but fair": ["The rhyme is missing.", "Nothing has to change."],
            "You read what": [verdict("revise"), verdict("good")],
            "You improve": "A better poem.",
        },
        policies={"critic": "exact", "writer": "off", "reviser": "off"},
    )
    graph = build_reflection(llm)
    llm.check_policies(graph)
    state = graph.invoke({"task": "Write a poem."})
    assert (state["answer"], state["revisions"], state["good"], state["stopped"]) == ("A better poem.", 1, True, "")


def test_reflection_keeps_to_its_budget() -> None:
    script: Script = {
        "You carry out": "A poem.",
        "strict but fair": "The rhyme is missing.",
        "You read what": "no json",
        "You improve": ["Better.", "Best.", "Never."],
    }
    state = build_reflection(model(script), max_revisions=2).invoke({"task": "Write."})
    assert (state["answer"], state["revisions"]) == ("Best.", 2)
    assert state["stopped"] == "the limit of 2 revisions is reached"
    state = build_reflection(model(script), budget=Budget(steps=3)).invoke({"task": "Write."})
    assert (state["answer"], state["stopped"]) == ("A poem.", "the limit of 3 steps is reached")
    assert build_reflection(model(script), max_revisions=0).invoke({"task": "Write."})["answer"] == "A poem."


@pytest.mark.parametrize("revised", ["A poem.", " "])
def test_reflection_ends_when_a_revision_changes_nothing(revised: str) -> None:
    llm = model(
        {
            "You carry out": "A poem.",
            "strict but fair": "The rhyme is missing.",
            "You read what": verdict("revise"),
            "You improve": revised,
        }
    )
    state = build_reflection(llm, max_revisions=5).invoke({"task": "Write."})
    assert (state["answer"], state["revisions"], state["good"]) == ("A poem.", 1, False)
    assert state["stopped"] == "a revision changed nothing"
    assert state["usage"]["steps"] == 4


def test_reflections_decider_goes_by_the_critique_alone() -> None:
    asked: list[str] = []
    answers = scripted_replies(
        **{
            "You carry out": "A poem.",
            "strict but fair": "Nothing has to change.",
            "You read what": verdict("good"),
        }
    )

    def hear(prompt: str) -> str:
        asked.append(prompt)
        return answers(prompt)

    assert build_reflection(scripted_chat(hear)).invoke({"task": "Write."})["good"]
    assert "Nothing has to change." in asked[-1]
    assert "A poem." not in asked[-1]


def test_a_supervisor_has_its_specialists_work_at_once() -> None:
    tasks = json.dumps({"counter": "What is 2 + 3?", "writer_of_notes": "Note the tea."})
    llm = model(
        {
            "You give work": tasks,
            "You think": THOUGHT,
            "You solve a problem with tools, one call at a time": "It is done.",
            "You answer a question from what": "Both are done.",
        },
        policies={"*:thinker": "exact", "*:actor": "off", "writer": "strict"},
    )
    graph = build_supervisor(llm, {"counter": [calculator], "writer_of_notes": [write_note]})
    llm.check_policies(graph)
    state = graph.invoke({"question": "Add and note."})
    assert {finding["specialist"] for finding in state["findings"]} == {"counter", "writer_of_notes"}
    assert state["answer"] == "Both are done."
    assert state["usage"]["steps"] == 6
    figures: Counter[tuple[str, str]] = Counter()
    for _, (message, _) in graph.stream({"question": "?"}, stream_mode="messages", subgraphs=True):
        if found := message.response_metadata.get("lookahead"):
            figures[found["path"], found["policy"]] += 1
    assert figures[("counter:thinker", "exact")] == 1
    assert figures[("writer_of_notes:actor", "off")] == 1


def test_a_router_that_chooses_nobody() -> None:
    llm = model({"You give work": "{}", "You think": THOUGHT, "You solve": "It is 4.", "You answer": "It is 4."})
    state = build_supervisor(llm, {"counter": [calculator]}).invoke({"question": "2 + 2?"})
    assert state["tasks"] == {"counter": "2 + 2?"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So.\n\nAnswer: 42", "42"),
        ("**Answer:** $1,234.50.", "1234.5"),
        ("answer = 7 apples", "7"),
        ("Answer: Paris.", "paris"),
        ("Answer: 1\nAnswer: 2.00", "2"),
        ("I do not know.", None),
    ],
)
def test_answers_in_one_form(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_when_a_vote_is_decided() -> None:
    assert is_decided(Counter({"a": 3, "b": 1}), 1)
    assert not is_decided(Counter({"a": 2, "b": 1}), 1)
    assert is_decided(Counter({"a": 1}), 0)
    assert not is_decided(Counter(), 3)


def voting(replies: dict[int, tuple[str, float]]) -> ChatLookahead:
    """A model whose replies depend on the seed, each after some seconds."""
    tokenizer = ScriptedTokenizer()

    class BySeed(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: Any) -> Any:  # type: ignore[override]
            number = len(self.requests) % len(replies)
            text, seconds = list(replies.values())[number]
            self._script = lambda *_: [ScriptedStep(text, seconds)]
            async with aclosing(super().generate(prompt_ids, sampling)) as deltas:
                async for delta in deltas:
                    yield delta

    return ChatLookahead(engines=EngineSet(BySeed(tokenizer, [])), policy="off", temperature=0.7)


async def test_self_consistency_stops_when_the_vote_is_decided() -> None:
    llm = voting({n: (f"So.\n\nAnswer: {4 if n < 3 else 5}", 0.01 if n < 3 else 60.0) for n in range(5)})
    state = await build_self_consistency(llm).ainvoke({"question": "2 + 2?"})
    assert (state["answer"], state["votes"], state["stopped"]) == ("4", {"4": 3}, "the vote is decided")
    assert llm.engines is not None
    target = llm.engines.target
    await becomes(lambda: target.in_flight == 0)  # the others are stopped


def test_self_consistency_without_an_event_loop() -> None:
    llm = voting({n: (f"Answer: {n // 2}", 0.01) for n in range(3)})
    state = build_self_consistency(llm, samples=3).invoke({"question": "?"})
    assert (state["answer"], state["votes"]["0"]) == ("0", 2)
    slow = voting({0: ("Answer: 1", 60.0)})
    state = build_self_consistency(slow, samples=2, budget=Budget(seconds=0.3)).invoke({"question": "?"})
    assert (state["answer"], state["stopped"]) == ("", "the limit of 0.3 seconds is reached")


async def test_self_consistency_inside_an_event_loop() -> None:
    llm = voting(dict.fromkeys(range(3), ("Answer: 1", 0.01)))
    assert build_self_consistency(llm, samples=3).invoke({"question": "?"})["answer"] == "1"


def test_limits() -> None:
    assert Budget(steps=2).reached(Usage(steps=1)) is None
    assert Budget(tokens=10).reached(Usage(tokens=10)) == "the limit of 10 tokens is reached"
    assert Budget(seconds=1).reached(Usage(seconds=2.0)) == "the limit of 1 seconds is reached"
    assert add_usage(Usage(steps=1), Usage(steps=2, seconds=1.0)) == {"steps": 3, "tokens": 0, "seconds": 1.0}
    with pytest.raises(ValueError, match="above 0"):
        Budget(steps=0)


@pytest.mark.parametrize("build", [build_react, build_rewoo])
def test_templates_need_tools(build: Any) -> None:
    with pytest.raises(ValueError, match="at least one tool"):
        build(scripted_chat("x"), [])


@pytest.mark.parametrize("build", [build_reflection, build_self_consistency])
def test_templates_that_use_none_say_so(build: Any) -> None:
    with pytest.raises(ValueError, match="uses no tools"):
        build(scripted_chat("x"), [calculator])
