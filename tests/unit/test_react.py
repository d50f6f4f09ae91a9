"""`react` and `supervisor` on a model that follows a script: calls, failures, approvals, limits, threads, streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import TodoListMiddleware
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from graphs.react import POLICIES, build_react
from graphs.supervisor import build_supervisor
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.testing import scripted_chat, scripted_replies

THREAD: Any = {"configurable": {"thread_id": "1"}}
WAYS = ["invoke", "ainvoke"]
FINISHER = "You answer a question from the results"
made: list[str] = []
allowed = threading.Event()


@tool
def look_up(word: str) -> str:
    """Look a word up in the dictionary."""
    made.append(f"look_up {word}")
    if word == "nothing":
        raise ValueError("there is no such word")
    return f"{word} is a drink"


@tool
def write_note(text: str) -> str:
    """Write a note."""
    made.append(f"write_note {text}")
    return "written"


@tool
def wait_for(word: str) -> str:
    """Look a word up once the other call is through."""
    made.append(f"wait_for {word}")
    if not allowed.is_set():
        raise KeyboardInterrupt  # as when the process is ended
    return f"{word} was waited for"


@pytest.fixture(autouse=True)
def _nothing_made() -> Iterator[None]:
    made.clear()
    allowed.clear()
    yield
    allowed.clear()


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def calls(*texts: str) -> str:
    return f"[{', '.join(texts)}]"


READY = call("ready_to_answer")
READY_TOOL = "The results say all that was asked for, and nothing is left to do: answer now."


def model(decisions: str | Sequence[str], answer: str | Sequence[str] = "So it is.", **fields: Any) -> ChatLookahead:
    script = {"You think for": "I look it up.", "You carry out a task": decisions, FINISHER: answer}
    return scripted_chat(scripted_replies(**script), **{"policies": POLICIES, **fields})


async def ask(graph: Any, given: Any = "What is tea?", way: str = "invoke", config: Any = THREAD) -> list[AnyMessage]:
    given = {"messages": [("human", given)]} if isinstance(given, str) else given
    state = await graph.ainvoke(given, config) if way == "ainvoke" else graph.invoke(given, config)
    messages: list[AnyMessage] = state["messages"]
    return messages


def results(messages: Sequence[AnyMessage]) -> list[ToolMessage]:
    return [message for message in messages if isinstance(message, ToolMessage)]


@pytest.mark.parametrize("way", WAYS)
async def test_it_thinks_acts_and_answers(way: str) -> None:
    llm = model([call("look_up", word="tea"), READY], "Tea is a drink.")
    graph = build_react(llm, [look_up], think_each_turn=True)
    messages = await ask(graph, way=way)
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    _, thought, result, answer = messages
    assert isinstance(thought, AIMessage)
    assert (thought.text, thought.tool_calls[0]["args"]) == ("I look it up.", {"word": "tea"})
    assert (result.text, results(messages)[0].status) == ("tea is a drink", "success")
    assert (answer.text, answer.additional_kwargs["reasoning_content"]) == ("Tea is a drink.", "I look it up.")
    assert answer.response_metadata["lookahead"]["node"] == "finisher"


async def test_each_call_of_the_model_has_its_policy() -> None:
    llm = model([call("look_up", word="tea"), READY], policies={"thinker": "exact", "actor": "off", "finisher": "fast"})
    found: list[tuple[str, str]] = []
    async for message, _ in build_react(llm, [look_up], think_each_turn=True, name="reader").astream(
        {"messages": [("human", "What is tea?")]}, stream_mode="messages"
    ):
        if said := message.response_metadata.get("lookahead"):
            found.append((said["path"], said["policy"]))
    thinker, actor, finisher = ("reader:thinker", "exact"), ("reader:actor", "off"), ("reader:finisher", "fast")
    assert found == [thinker, actor, thinker, actor, finisher]


async def test_it_thinks_once_where_there_is_a_choice_of_tools() -> None:
    for tools, thoughts in (([look_up], ["", ""]), ([look_up, write_note], ["I look it up.", ""])):
        graph = build_react(model([call("look_up", word="tea"), call("look_up", word="milk"), READY]), tools)
        replies = [message for message in await ask(graph) if isinstance(message, AIMessage)]
        assert [reply.text for reply in replies] == [*thoughts, "So it is."]
        assert "reasoning_content" not in replies[-1].additional_kwargs


async def test_no_argument_is_a_drafts() -> None:
    """Whatever the draft says in a call, and however lenient the policy is."""

    decide = scripted_replies(
        **{
            "You think": "I look it up.",
            "You carry out": [call("look_up", word="tea"), READY],
            FINISHER: "Tea is a drink.",
        }
    )

    def lies(prompt: str) -> str:
        return call("look_up", word="poison") if "You carry out" in prompt else decide(prompt)

    graph = build_react(scripted_chat(decide, lies, policy="random:probability=1"), [look_up])
    assert (await ask(graph))[-1].text == "Tea is a drink."
    assert made == ["look_up tea"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_failed_call_is_told_with_the_tools_arguments_and_tried_again(way: str) -> None:
    wrong = [call("look_up", word="nothing"), call("oracle"), call("look_up", word="tea"), READY]
    messages = await ask(build_react(model(wrong, "Tea."), [look_up]), way=way)
    assert [result.status for result in results(messages)] == ["error", "error", "success"]
    assert "there is no such word" in results(messages)[0].text
    assert "look_up(word: string): Look a word up in the dictionary." in results(messages)[0].text
    assert "oracle is not a valid tool" in results(messages)[1].text
    assert messages[-1].text == "Tea."


@pytest.mark.parametrize("way", WAYS)
async def test_one_of_several_calls_fails(way: str) -> None:
    both = calls(call("look_up", word="nothing"), call("look_up", word="tea"))
    messages = await ask(build_react(model([both, READY], "Tea is, the other is not."), [look_up]), way=way)
    assert [result.status for result in results(messages)] == ["error", "success"]
    assert messages[-1].text == "Tea is, the other is not."


@pytest.mark.parametrize("way", WAYS)
async def test_calls_that_cannot_be_read_are_told_and_end_with_an_answer(way: str) -> None:
    broken = '{"name": "look_up", "arguments": {"word": "a" "b"}}'
    messages = await ask(build_react(model([broken, call("look_up", word="tea"), READY], "Tea."), [look_up]), way=way)
    assert [result.status for result in results(messages)] == ["error", "success"]
    assert "could not be read" in results(messages)[0].text
    messages = await ask(build_react(model(broken, "It is unknown."), [look_up]), way=way)
    assert [result.status for result in results(messages)] == ["error"] * 3
    assert messages[-1].text == "It is unknown."
    assert made == ["look_up tea"]


@pytest.mark.parametrize("way", WAYS)
async def test_the_same_call_twice_ends_the_loop(way: str) -> None:
    messages = await ask(build_react(model(call("look_up", word="tea"), "Tea is a drink."), [look_up]), way=way)
    assert made == ["look_up tea"]
    assert messages[-1].text == "Tea is a drink."


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("word", ["nothing", "tea"])
async def test_a_call_that_is_repeated_gives_way_to_another_tool(way: str, word: str) -> None:
    asked: list[str] = []

    def reply(prompt: str) -> str:
        asked.append(prompt)
        if "You think for" in prompt:
            return "I try it."
        if FINISHER in prompt:
            return "It is noted."
        if "write_note" in prompt.rsplit("Results so far", 1)[-1]:
            return READY
        assert READY_TOOL in prompt
        return call("look_up", word=word) if '"look_up"' in prompt.split("user:")[0] else call("write_note", text="tea")

    messages = await ask(build_react(scripted_chat(reply, policy="off"), [look_up, write_note]), way=way)
    assert made == [f"look_up {word}", "write_note tea"]
    assert [result.status for result in results(messages)] == ["error" if word == "nothing" else "success", "success"]
    assert messages[-1].text == "It is noted."
    assert any("Why did the last call fail" in prompt for prompt in asked) == (word == "nothing")
    # Without another tool, the loop ends.
    made.clear()
    messages = await ask(build_react(model(call("look_up", word=word), "Unknown."), [look_up]), way=way)
    assert made == [f"look_up {word}"]
    assert messages[-1].text == "Unknown."


@pytest.mark.parametrize("way", WAYS)
async def test_calls_in_turns_end_the_loop(way: str) -> None:
    """The model would call one tool and the other in turns, each as before."""

    def reply(prompt: str) -> str:
        if "You think for" in prompt:
            return "I try it."
        if FINISHER in prompt:
            return "It is noted."
        tools, said = prompt.split("user:")[0], prompt.rsplit("Results so far", 1)[-1]
        first, second = call("look_up", word="tea"), call("write_note", text="tea")
        last_is_note = said.rfind("write_note") > said.rfind("look_up")
        if '"look_up"' not in tools or (last_is_note and '"write_note"' in tools):
            return second
        return first

    messages = await ask(build_react(scripted_chat(reply, policy="off"), [look_up, write_note]), way=way)
    assert made == ["look_up tea", "write_note tea"]
    assert messages[-1].text == "It is noted."


@pytest.mark.parametrize("way", WAYS)
async def test_a_limit_ends_with_what_there_is(way: str) -> None:
    words = [call("look_up", word=word) for word in "abcdef"]
    messages = await ask(build_react(model(words, "A and b are drinks."), [look_up], model_calls=3), way=way)
    assert made == ["look_up a", "look_up b"]
    assert messages[-1].text == "A and b are drinks."


@pytest.mark.parametrize("way", WAYS)
async def test_a_question_that_needs_no_tool(way: str) -> None:
    llm = scripted_chat(
        lambda prompt: "I greet." if "You think" in prompt else READY if "You carry out" in prompt else "Hello."
    )
    messages = await ask(build_react(llm, [look_up]), "Hi!", way)
    assert [message.text for message in messages] == ["Hi!", "Hello."]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("decision", "written", "told"),
    [
        ({"type": "approve"}, ["write_note tea"], "written"),
        ({"type": "reject", "message": "not now"}, [], "not now"),
        (
            {"type": "edit", "edited_action": {"name": "write_note", "args": {"text": "milk"}}},
            ["write_note milk"],
            "written",
        ),
    ],
)
async def test_a_person_is_asked_before_a_tool(
    decision: dict[str, Any], written: list[str], told: str, way: str
) -> None:
    both = calls(call("write_note", text="tea"), call("look_up", word="tea"))
    tools = [write_note, look_up]
    graph = build_react(model([both, READY], "Done."), tools, InMemorySaver(), ask_before=["write_note"])
    given = {"messages": [("human", "Note it.")]}
    state = await graph.ainvoke(given, THREAD) if way == "ainvoke" else graph.invoke(given, THREAD)
    (asked,) = state["__interrupt__"]
    assert [action["name"] for action in asked.value["action_requests"]] == ["write_note"]
    assert asked.value["action_requests"][0]["args"] == {"text": "tea"}
    assert made == []
    messages = await ask(graph, Command(resume={"decisions": [decision]}), way)
    assert [entry for entry in made if entry.startswith("write")] == written
    assert "look_up tea" in made
    assert any(told in result.text for result in results(messages) if result.name == "write_note")
    assert messages[-1].text == "Done."


@pytest.mark.parametrize("way", WAYS)
async def test_a_run_goes_on_in_the_middle_of_calls_at_once(way: str, tmp_path: Path) -> None:
    """What was called before the process ended is not called again."""
    both = calls(call("look_up", word="tea"), call("wait_for", word="milk"))
    llm = model([both, READY], "Both are drinks.")
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        graph = build_react(llm, [look_up, wait_for], saver)
        with pytest.raises(KeyboardInterrupt):
            graph.invoke({"messages": [("human", "What are they?")]}, THREAD)
        assert sorted(made) == ["look_up tea", "wait_for milk"]
    allowed.set()
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:  # another process, as far as the graph can tell
        messages = await ask(build_react(llm, [look_up, wait_for], saver), None)
    assert sorted(made) == ["look_up tea", "wait_for milk", "wait_for milk"]
    assert sorted(result.text for result in results(messages)) == ["milk was waited for", "tea is a drink"]
    assert messages[-1].text == "Both are drinks."


@pytest.mark.parametrize("way", WAYS)
async def test_a_second_question_begins_anew(way: str) -> None:
    asked: list[str] = []
    decide = scripted_replies(
        **{
            "You think": "I look it up.",
            "You carry out": [call("look_up", word="tea"), READY, call("look_up", word="milk"), READY],
            FINISHER: ["Tea is a drink.", "Milk is one."],
        }
    )

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return decide(prompt)

    graph = build_react(scripted_chat(reply, policy="off"), [look_up], InMemorySaver(), model_calls=3)
    assert (await ask(graph, "What is tea?", way))[-1].text == "Tea is a drink."
    assert (await ask(graph, "And milk?", way))[-1].text == "Milk is one."
    assert made == ["look_up tea", "look_up milk"]
    last = [prompt for prompt in asked if FINISHER in prompt][-1]
    assert "Tea is a drink." in last, "the conversation goes on"
    assert "tea is a drink" not in last, "with results of this question alone"


async def test_messages_are_streamed() -> None:
    llm = model([call("look_up", word="tea"), READY], "Tea is a drink, said the dictionary.")
    graph = build_react(llm, [look_up], think_each_turn=True)
    pieces: dict[str | None, str] = {}
    async for message, _ in graph.astream({"messages": [("human", "What is tea?")]}, stream_mode="messages"):
        pieces[message.id] = pieces.get(message.id, "") + message.text
    assert "Tea is a drink, said the dictionary." in pieces.values()
    assert list(pieces.values()).count("I look it up.") >= 2
    final = graph.invoke({"messages": [("human", "What is tea?")]})["messages"][-1]
    assert final.text == "Tea is a drink, said the dictionary."


async def test_langchains_middleware_works_in_it() -> None:
    plan = call("write_todos", todos=[{"content": "look tea up", "status": "in_progress"}])
    llm = model([plan, call("look_up", word="tea"), READY], "Tea.")
    state = build_react(llm, [look_up], middleware=[TodoListMiddleware()]).invoke({"messages": [("human", "Tea?")]})
    assert [todo["content"] for todo in state["todos"]] == ["look tea up"]
    assert state["messages"][-1].text == "Tea."


def test_what_is_built_wrongly_is_refused() -> None:
    llm = scripted_chat("x")
    with pytest.raises(ValueError, match="at least one tool"):
        build_react(llm, [])
    with pytest.raises(ValueError, match="ask_before names tools that there are not: send"):
        build_react(llm, [look_up], InMemorySaver(), ask_before=["send"])
    with pytest.raises(ValueError, match="needs a checkpointer"):
        build_react(llm, [look_up], ask_before=["look_up"])
    with pytest.raises(ValueError, match="at least one specialist"):
        build_supervisor(llm, {})
    with pytest.raises(ValueError, match="at least one tool"):
        build_supervisor(llm, {"reader": []})
    with pytest.raises(ValueError, match="neither specialists nor tools of theirs: send"):
        build_supervisor(llm, {"reader": [look_up]}, InMemorySaver(), ask_before=["send"])
    with pytest.raises(ValueError, match="needs a checkpointer"):
        build_supervisor(llm, {"reader": [look_up]}, ask_before=["look_up"])


def supervised(tasks: str | Sequence[str], asked: list[str] | None = None, **more: Any) -> ChatLookahead:
    """Specialists who make one call for each task, and a supervisor who gives these tasks."""
    script = {"You lead specialists": tasks, "You answer a question from what specialists": "Both are done.", **more}
    follow = scripted_replies(**script)

    def reply(prompt: str) -> str:
        if asked is not None:
            asked.append(prompt)
        if "You think" in prompt:
            return "I do my task."
        if "You carry out" in prompt:
            if "[1] " in prompt.rsplit("Results so far", 1)[-1]:
                return READY
            note = "Your task: Note" in prompt
            return call("write_note", text="tea") if note else call("look_up", word="tea")
        if FINISHER in prompt:
            return "The note is written." if "Your task: Note" in prompt else "Tea is a drink."
        return follow(prompt)

    return scripted_chat(reply, policy="off")


READER = {"reader": [look_up], "writer_of_notes": [write_note]}
TASKS = [call("reader", task="What is tea?"), call("writer_of_notes", task="Note it."), READY]


@pytest.mark.parametrize("way", WAYS)
async def test_a_supervisor_passes_on_what_it_is_told(way: str) -> None:
    asked: list[str] = []
    messages = await ask(build_supervisor(supervised(TASKS, asked), READER), "What is tea? Note it.", way)
    assert made == ["look_up tea", "write_note tea"]
    assert [(result.name, result.text) for result in results(messages)] == [
        ("reader", "Tea is a drink."),
        ("writer_of_notes", "The note is written."),
    ]
    assert messages[-1].text == "Both are done."
    second = next(prompt for prompt in asked if "Your task: Note it." in prompt)
    assert "It is a part of this question: What is tea? Note it." in second
    assert 'Findings so far:\n\n[1] reader(task="What is tea?")\nTea is a drink.' in second
    first = next(prompt for prompt in asked if "Your task: What is tea?" in prompt)
    assert "Findings so far:\n\nnone" in first
    lead = next(prompt for prompt in asked if "You lead" in prompt)
    assert "look_up(word: string): Look a word up in the dictionary." in lead


@pytest.mark.parametrize("way", WAYS)
async def test_specialists_work_at_once(way: str) -> None:
    both = calls(*TASKS[:2])
    messages = await ask(build_supervisor(supervised([both, READY]), READER), "Look up and note.", way)
    assert sorted(made) == ["look_up tea", "write_note tea"]
    assert [result.status for result in results(messages)] == ["success", "success"]
    assert messages[-1].text == "Both are done."


async def test_a_specialists_calls_have_its_name() -> None:
    llm = supervised(TASKS).model_copy(update={"policies": {"reader:thinker": "exact", "actor": "strict"}})
    specialists = {name: [look_up, write_note] for name in READER}
    found: set[tuple[str, str]] = set()
    stream = build_supervisor(llm, specialists).astream(
        {"messages": [("human", "Look up and note.")]}, stream_mode="messages", subgraphs=True
    )
    async for _, (message, _) in stream:
        if said := message.response_metadata.get("lookahead"):
            found.add((said["path"], said["policy"]))
    assert {("reader:thinker", "exact"), ("reader:actor", "strict"), ("writer_of_notes:thinker", "off")} <= found
    assert {("supervisor", "off"), ("writer", "off"), ("writer_of_notes:finisher", "off")} <= found


@pytest.mark.parametrize("way", WAYS)
async def test_a_person_is_asked_before_a_specialists_tool(way: str) -> None:
    graph = build_supervisor(supervised(TASKS), READER, InMemorySaver(), ask_before=["write_note"])
    given = {"messages": [("human", "Look up and note.")]}
    state = await graph.ainvoke(given, THREAD) if way == "ainvoke" else graph.invoke(given, THREAD)
    (waiting,) = state["__interrupt__"]
    assert waiting.value["action_requests"][0]["name"] == "write_note"
    assert made == ["look_up tea"]
    messages = await ask(graph, Command(resume={"decisions": [{"type": "approve"}]}), way)
    assert made == ["look_up tea", "write_note tea"]
    assert messages[-1].text == "Both are done."


@pytest.mark.parametrize("way", WAYS)
async def test_a_specialist_that_fails_is_one_finding_among_others(way: str) -> None:
    llm = supervised([calls(call("reader", job="x"), TASKS[1]), READY])
    messages = await ask(build_supervisor(llm, READER), "Look up and note.", way)
    assert sorted(result.status for result in results(messages)) == ["error", "success"]
    assert made == ["write_note tea"]
    assert messages[-1].text == "Both are done."


async def test_a_supervisor_goes_on_in_the_middle_of_tasks_at_once(tmp_path: Path) -> None:
    """A specialist that was through before the process ended is not asked again."""
    both = calls(call("reader", task="What is tea?"), call("waiter", task="Wait for milk."))

    def reply(prompt: str) -> str:
        if "You lead specialists" in prompt:
            return READY if "[1] " in prompt.rsplit("Results so far", 1)[-1] else both
        if "You carry out" in prompt:
            if "[1] " in prompt.rsplit("Results so far", 1)[-1]:
                return READY
            return call("wait_for", word="milk") if "Your task: Wait" in prompt else call("look_up", word="tea")
        return "Both are done." if "what specialists found" in prompt else "It is a drink."

    llm = scripted_chat(reply, policy="off")
    specialists = {"reader": [look_up], "waiter": [wait_for]}
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        graph = build_supervisor(llm, specialists, saver)
        with pytest.raises(KeyboardInterrupt):
            graph.invoke({"messages": [("human", "What are they?")]}, THREAD)
        assert "wait_for milk" in made
    allowed.set()
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        messages = await ask(build_supervisor(llm, specialists, saver), None)
    assert made.count("look_up tea") == 1
    assert [result.status for result in results(messages)] == ["success", "success"]
    assert messages[-1].text == "Both are done."


@pytest.mark.parametrize("way", WAYS)
async def test_a_supervisor_ends_at_its_limit_and_when_it_gives_a_task_twice(way: str) -> None:
    messages = await ask(build_supervisor(supervised(TASKS[0]), READER), "What is tea?", way)
    assert (made, messages[-1].text) == (["look_up tea"], "Both are done."), "the same task twice"
    made.clear()
    messages = await ask(build_supervisor(supervised(TASKS), READER, model_calls=2), "Look up and note.", way)
    assert (made, messages[-1].text) == (["look_up tea"], "Both are done.")


async def test_a_supervisor_begins_anew_with_a_second_question() -> None:
    asked: list[str] = []
    llm = supervised([TASKS[0], READY, TASKS[1], READY], asked)
    graph = build_supervisor(llm, READER, InMemorySaver())
    await ask(graph, "What is tea?")
    await ask(graph, "Note that it is a drink.")
    assert made == ["look_up tea", "write_note tea"]
    second = next(prompt for prompt in asked if "Your task: Note it." in prompt)
    assert "Findings so far:\n\nnone" in second


async def test_a_cancelled_run_ends_its_requests() -> None:
    from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
    from lookahead_agent.runtime.engine_set import EngineSet
    from tests.waiting import becomes

    engine = ScriptedEngine(ScriptedTokenizer(), lambda prompt, begun: [ScriptedStep("So.", 60.0)])
    llm = ChatLookahead(engines=EngineSet(engine), policy="off")
    for graph in (build_react(llm, [look_up]), build_supervisor(llm, READER)):
        running = asyncio.ensure_future(graph.ainvoke({"messages": [("human", "What is tea?")]}))
        await becomes(lambda: engine.in_flight == 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await becomes(lambda: engine.in_flight == 0)
