"""`react` and `supervisor` on a scripted model: calls, failures, approvals, limits, threads, streams."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from langchain.agents.middleware import TodoListMiddleware
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from graphs.react import POLICIES, build_react
from graphs.supervisor import build_supervisor
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.testing import scripted_chat, scripted_replies

THREAD: Any = {"configurable": {"thread_id": "1"}}
METHODS = ["invoke", "ainvoke"]
FINISHER = "You answer a question from the results"
executed: list[str] = []
unblocked = threading.Event()


@tool
def look_up(word: str) -> str:
    """Look a word up in the dictionary."""
    executed.append(f"look_up {word}")
    if word == "nothing":
        raise ValueError("there is no such word")
    return f"{word} is a drink"


@tool
def write_note(text: str) -> str:
    """Write a note."""
    executed.append(f"write_note {text}")
    return "written"


@tool
def wait_for(word: str) -> str:
    """Look a word up once the other call is through."""
    executed.append(f"wait_for {word}")
    if not unblocked.is_set():
        raise KeyboardInterrupt  # simulates the end of the process
    return f"{word} was waited for"


@pytest.fixture(autouse=True)
def _reset_tools() -> Iterator[None]:
    executed.clear()
    unblocked.clear()
    yield
    unblocked.clear()


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def calls(*texts: str) -> str:
    return f"[{', '.join(texts)}]"


READY = call("ready_to_answer")
READY_DESCRIPTION = "The results say all that was asked for, and nothing is left to do: answer now."


def model(decisions: str | Sequence[str], answer: str | Sequence[str] = "So it is.", **fields: Any) -> ChatLookahead:
    script = {"You think for": "I look it up.", "You carry out a task": decisions, FINISHER: answer}
    return scripted_chat(scripted_replies(**script), **{"policies": POLICIES, **fields})


async def run(graph: Any, turn: Any = "What is tea?", method: str = "invoke", config: Any = THREAD) -> list[AnyMessage]:
    turn = {"messages": [("human", turn)]} if isinstance(turn, str) else turn
    state = await graph.ainvoke(turn, config) if method == "ainvoke" else graph.invoke(turn, config)
    messages: list[AnyMessage] = state["messages"]
    return messages


def results(messages: Sequence[AnyMessage]) -> list[ToolMessage]:
    return [message for message in messages if isinstance(message, ToolMessage)]


@pytest.mark.parametrize("method", METHODS)
async def test_react_thinks_calls_a_tool_and_answers(method: str) -> None:
    llm = model([call("look_up", word="tea"), READY], "Tea is a drink.")
    graph = build_react(llm, [look_up], think_each_turn=True)
    messages = await run(graph, method=method)
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
    _, thought, result, answer = messages
    assert isinstance(thought, AIMessage)
    assert (thought.text, thought.tool_calls[0]["args"]) == ("I look it up.", {"word": "tea"})
    assert (result.text, results(messages)[0].status) == ("tea is a drink", "success")
    assert (answer.text, answer.additional_kwargs["reasoning_content"]) == ("Tea is a drink.", "I look it up.")
    assert answer.response_metadata["lookahead"]["node"] == "finisher"


async def test_each_model_call_uses_the_policy_of_its_node() -> None:
    llm = model([call("look_up", word="tea"), READY], policies={"thinker": "exact", "actor": "off", "finisher": "fast"})
    found: list[tuple[str, str]] = []
    async for message, _ in build_react(llm, [look_up], think_each_turn=True, name="reader").astream(
        {"messages": [("human", "What is tea?")]}, stream_mode="messages"
    ):
        if metadata := message.response_metadata.get("lookahead"):
            found.append((metadata["path"], metadata["policy"]))
    thinker, actor, finisher = ("reader:thinker", "exact"), ("reader:actor", "off"), ("reader:finisher", "fast")
    assert found == [thinker, actor, thinker, actor, finisher]


async def test_react_thinks_only_in_the_first_turn_and_only_with_several_tools() -> None:
    for tools, thoughts in (([look_up], ["", ""]), ([look_up, write_note], ["I look it up.", ""])):
        graph = build_react(model([call("look_up", word="tea"), call("look_up", word="milk"), READY]), tools)
        replies = [message for message in await run(graph) if isinstance(message, AIMessage)]
        assert [reply.text for reply in replies] == [*thoughts, "So it is."]
        assert "reasoning_content" not in replies[-1].additional_kwargs


async def test_tool_arguments_never_come_from_the_draft() -> None:
    """Even under a policy that accepts every draft step."""
    target = scripted_replies(
        **{
            "You think": "I look it up.",
            "You carry out": [call("look_up", word="tea"), READY],
            FINISHER: "Tea is a drink.",
        }
    )

    def wrong_draft(prompt: str) -> str:
        return call("look_up", word="poison") if "You carry out" in prompt else target(prompt)

    graph = build_react(scripted_chat(target, wrong_draft, policy="random:probability=1"), [look_up])
    assert (await run(graph))[-1].text == "Tea is a drink."
    assert executed == ["look_up tea"]


@pytest.mark.parametrize("method", METHODS)
async def test_failed_calls_return_the_signature_of_the_tool_and_are_retried(method: str) -> None:
    decisions = [call("look_up", word="nothing"), call("oracle"), call("look_up", word="tea"), READY]
    messages = await run(build_react(model(decisions, "Tea."), [look_up]), method=method)
    assert [result.status for result in results(messages)] == ["error", "error", "success"]
    assert "there is no such word" in results(messages)[0].text
    assert "look_up(word: string): Look a word up in the dictionary." in results(messages)[0].text
    assert "oracle is not a valid tool" in results(messages)[1].text
    assert messages[-1].text == "Tea."


@pytest.mark.parametrize("method", METHODS)
async def test_a_failed_parallel_call_does_not_affect_the_other_one(method: str) -> None:
    both = calls(call("look_up", word="nothing"), call("look_up", word="tea"))
    messages = await run(build_react(model([both, READY], "Tea is, the other is not."), [look_up]), method=method)
    assert [result.status for result in results(messages)] == ["error", "success"]
    assert messages[-1].text == "Tea is, the other is not."


@pytest.mark.parametrize("method", METHODS)
async def test_malformed_calls_return_errors_and_the_third_one_ends_the_loop(method: str) -> None:
    broken = '{"name": "look_up", "arguments": {"word": "a" "b"}}'
    messages = await run(
        build_react(model([broken, call("look_up", word="tea"), READY], "Tea."), [look_up]), method=method
    )
    assert [result.status for result in results(messages)] == ["error", "success"]
    assert "could not be read" in results(messages)[0].text
    messages = await run(build_react(model(broken, "It is unknown."), [look_up]), method=method)
    assert [result.status for result in results(messages)] == ["error"] * 3
    assert messages[-1].text == "It is unknown."
    assert executed == ["look_up tea"]


@pytest.mark.parametrize("method", METHODS)
async def test_a_repeated_call_is_not_executed_and_ends_the_loop(method: str) -> None:
    messages = await run(build_react(model(call("look_up", word="tea"), "Tea is a drink."), [look_up]), method=method)
    assert executed == ["look_up tea"]
    assert messages[-1].text == "Tea is a drink."


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("word", ["nothing", "tea"])
async def test_a_repeated_call_withdraws_its_tool_and_another_tool_is_used(method: str, word: str) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if "You think for" in prompt:
            return "I try it."
        if FINISHER in prompt:
            return "It is noted."
        if "write_note" in prompt.rsplit("Results so far", 1)[-1]:
            return READY
        assert READY_DESCRIPTION in prompt
        return call("look_up", word=word) if '"look_up"' in prompt.split("user:")[0] else call("write_note", text="tea")

    messages = await run(build_react(scripted_chat(reply, policy="off"), [look_up, write_note]), method=method)
    assert executed == [f"look_up {word}", "write_note tea"]
    assert [result.status for result in results(messages)] == ["error" if word == "nothing" else "success", "success"]
    assert messages[-1].text == "It is noted."
    assert any("Why did the last call fail" in prompt for prompt in prompts) == (word == "nothing")
    # Without another tool, the loop ends.
    executed.clear()
    messages = await run(build_react(model(call("look_up", word=word), "Unknown."), [look_up]), method=method)
    assert executed == [f"look_up {word}"]
    assert messages[-1].text == "Unknown."


@pytest.mark.parametrize("method", METHODS)
async def test_alternating_repeated_calls_end_the_loop(method: str) -> None:
    """The model alternates between two tools and repeats their arguments."""

    def reply(prompt: str) -> str:
        if "You think for" in prompt:
            return "I try it."
        if FINISHER in prompt:
            return "It is noted."
        tools, history = prompt.split("user:")[0], prompt.rsplit("Results so far", 1)[-1]
        first, second = call("look_up", word="tea"), call("write_note", text="tea")
        last_is_note = history.rfind("write_note") > history.rfind("look_up")
        if '"look_up"' not in tools or (last_is_note and '"write_note"' in tools):
            return second
        return first

    messages = await run(build_react(scripted_chat(reply, policy="off"), [look_up, write_note]), method=method)
    assert executed == ["look_up tea", "write_note tea"]
    assert messages[-1].text == "It is noted."


@pytest.mark.parametrize("method", METHODS)
async def test_the_model_call_limit_ends_the_loop_with_an_answer(method: str) -> None:
    words = [call("look_up", word=word) for word in "abcdef"]
    messages = await run(build_react(model(words, "A and b are drinks."), [look_up], model_calls=3), method=method)
    assert executed == ["look_up a", "look_up b"]
    assert messages[-1].text == "A and b are drinks."


@pytest.mark.parametrize("method", METHODS)
async def test_a_question_that_needs_no_tool_is_answered_without_calls(method: str) -> None:
    llm = scripted_chat(
        lambda prompt: "I greet." if "You think" in prompt else READY if "You carry out" in prompt else "Hello."
    )
    messages = await run(build_react(llm, [look_up]), "Hi!", method)
    assert [message.text for message in messages] == ["Hi!", "Hello."]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("decision", "writes", "result_text"),
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
async def test_ask_before_interrupts_until_a_person_decides(
    decision: dict[str, Any], writes: list[str], result_text: str, method: str
) -> None:
    both = calls(call("write_note", text="tea"), call("look_up", word="tea"))
    tools = [write_note, look_up]
    graph = build_react(model([both, READY], "Done."), tools, InMemorySaver(), ask_before=["write_note"])
    inputs = {"messages": [("human", "Note it.")]}
    state = await graph.ainvoke(inputs, THREAD) if method == "ainvoke" else graph.invoke(inputs, THREAD)
    (interrupt,) = state["__interrupt__"]
    assert [action["name"] for action in interrupt.value["action_requests"]] == ["write_note"]
    assert interrupt.value["action_requests"][0]["args"] == {"text": "tea"}
    assert executed == []
    messages = await run(graph, Command(resume={"decisions": [decision]}), method)
    assert [entry for entry in executed if entry.startswith("write")] == writes
    assert "look_up tea" in executed
    assert any(result_text in result.text for result in results(messages) if result.name == "write_note")
    assert messages[-1].text == "Done."


async def test_a_resumed_run_repeats_only_the_unfinished_parallel_call(tmp_path: Path) -> None:
    both = calls(call("look_up", word="tea"), call("wait_for", word="milk"))
    llm = model([both, READY], "Both are drinks.")
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        graph = build_react(llm, [look_up, wait_for], saver)
        with pytest.raises(KeyboardInterrupt):
            graph.invoke({"messages": [("human", "What are they?")]}, THREAD)
        assert sorted(executed) == ["look_up tea", "wait_for milk"]
    unblocked.set()
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:  # simulates a new process: only the file is shared
        messages = await run(build_react(llm, [look_up, wait_for], saver), None)
    assert sorted(executed) == ["look_up tea", "wait_for milk", "wait_for milk"]
    assert sorted(result.text for result in results(messages)) == ["milk was waited for", "tea is a drink"]
    assert messages[-1].text == "Both are drinks."


@pytest.mark.parametrize("method", METHODS)
async def test_second_question_resets_the_turn_state(method: str) -> None:
    prompts: list[str] = []
    scripted = scripted_replies(
        **{
            "You think": "I look it up.",
            "You carry out": [call("look_up", word="tea"), READY, call("look_up", word="milk"), READY],
            FINISHER: ["Tea is a drink.", "Milk is one."],
        }
    )

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return scripted(prompt)

    graph = build_react(scripted_chat(reply, policy="off"), [look_up], InMemorySaver(), model_calls=3)
    assert (await run(graph, "What is tea?", method))[-1].text == "Tea is a drink."
    assert (await run(graph, "And milk?", method))[-1].text == "Milk is one."
    assert executed == ["look_up tea", "look_up milk"]
    last_prompt = [prompt for prompt in prompts if FINISHER in prompt][-1]
    assert "Tea is a drink." in last_prompt, "the conversation is kept"
    assert "tea is a drink" not in last_prompt, "results of the first question are dropped"


async def test_thoughts_and_answers_are_streamed() -> None:
    llm = model([call("look_up", word="tea"), READY], "Tea is a drink.\n\nSo said the dictionary.")
    graph = build_react(llm, [look_up], think_each_turn=True)
    streamed: dict[str | None, list[str]] = {}
    async for message, _ in graph.astream({"messages": [("human", "What is tea?")]}, stream_mode="messages"):
        if isinstance(message, AIMessageChunk) and message.text:
            streamed.setdefault(message.id, []).append(message.text)
    thought, answer = ["I look it up."], ["Tea is a drink.\n\n", "So said the dictionary."]
    assert list(streamed.values()) == [thought, thought, answer]
    final = graph.invoke({"messages": [("human", "What is tea?")]})["messages"][-1]
    assert final.text == "".join(answer)


async def test_react_runs_langchains_middleware() -> None:
    plan = call("write_todos", todos=[{"content": "look tea up", "status": "in_progress"}])
    llm = model([plan, call("look_up", word="tea"), READY], "Tea.")
    state = build_react(llm, [look_up], middleware=[TodoListMiddleware()]).invoke({"messages": [("human", "Tea?")]})
    assert [todo["content"] for todo in state["todos"]] == ["look tea up"]
    assert state["messages"][-1].text == "Tea."


def test_builders_reject_invalid_arguments() -> None:
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


def supervised(tasks: str | Sequence[str], prompts: list[str] | None = None, **replies: Any) -> ChatLookahead:
    """A model of specialists with one call per task, and of a supervisor that assigns `tasks`."""
    script = {"You lead specialists": tasks, "You answer a question from what specialists": "Both are done.", **replies}
    scripted = scripted_replies(**script)

    def reply(prompt: str) -> str:
        if prompts is not None:
            prompts.append(prompt)
        if "You think" in prompt:
            return "I do my task."
        if "You carry out" in prompt:
            if "[1] " in prompt.rsplit("Results so far", 1)[-1]:
                return READY
            note = "Your task: Note" in prompt
            return call("write_note", text="tea") if note else call("look_up", word="tea")
        if FINISHER in prompt:
            return "The note is written." if "Your task: Note" in prompt else "Tea is a drink."
        return scripted(prompt)

    return scripted_chat(reply, policy="off")


SPECIALISTS = {"reader": [look_up], "writer_of_notes": [write_note]}
TASKS = [call("reader", task="What is tea?"), call("writer_of_notes", task="Note it."), READY]


@pytest.mark.parametrize("method", METHODS)
async def test_supervisor_passes_the_findings_of_one_specialist_to_the_next(method: str) -> None:
    prompts: list[str] = []
    messages = await run(build_supervisor(supervised(TASKS, prompts), SPECIALISTS), "What is tea? Note it.", method)
    assert executed == ["look_up tea", "write_note tea"]
    assert [(result.name, result.text) for result in results(messages)] == [
        ("reader", "Tea is a drink."),
        ("writer_of_notes", "The note is written."),
    ]
    assert messages[-1].text == "Both are done."
    second = next(prompt for prompt in prompts if "Your task: Note it." in prompt)
    assert "It is a part of this question: What is tea? Note it." in second
    assert 'Findings so far:\n\n[1] reader(task="What is tea?")\nTea is a drink.' in second
    first = next(prompt for prompt in prompts if "Your task: What is tea?" in prompt)
    assert "Findings so far:\n\nnone" in first
    lead = next(prompt for prompt in prompts if "You lead" in prompt)
    assert "look_up(word: string): Look a word up in the dictionary." in lead


@pytest.mark.parametrize("method", METHODS)
async def test_supervisor_executes_several_tasks_of_one_message(method: str) -> None:
    both = calls(*TASKS[:2])
    messages = await run(build_supervisor(supervised([both, READY]), SPECIALISTS), "Look up and note.", method)
    assert sorted(executed) == ["look_up tea", "write_note tea"]
    assert [result.status for result in results(messages)] == ["success", "success"]
    assert messages[-1].text == "Both are done."


async def test_model_calls_of_a_specialist_have_its_name_in_their_path() -> None:
    llm = supervised(TASKS).model_copy(update={"policies": {"reader:thinker": "exact", "actor": "strict"}})
    specialists = {name: [look_up, write_note] for name in SPECIALISTS}
    found: set[tuple[str, str]] = set()
    stream = build_supervisor(llm, specialists).astream(
        {"messages": [("human", "Look up and note.")]}, stream_mode="messages", subgraphs=True
    )
    async for _, (message, _) in stream:
        if metadata := message.response_metadata.get("lookahead"):
            found.add((metadata["path"], metadata["policy"]))
    assert {("reader:thinker", "exact"), ("reader:actor", "strict"), ("writer_of_notes:thinker", "off")} <= found
    assert {("supervisor", "off"), ("writer", "off"), ("writer_of_notes:finisher", "off")} <= found


@pytest.mark.parametrize("method", METHODS)
async def test_ask_before_interrupts_before_the_tool_of_a_specialist(method: str) -> None:
    graph = build_supervisor(supervised(TASKS), SPECIALISTS, InMemorySaver(), ask_before=["write_note"])
    inputs = {"messages": [("human", "Look up and note.")]}
    state = await graph.ainvoke(inputs, THREAD) if method == "ainvoke" else graph.invoke(inputs, THREAD)
    (interrupt,) = state["__interrupt__"]
    assert interrupt.value["action_requests"][0]["name"] == "write_note"
    assert executed == ["look_up tea"]
    messages = await run(graph, Command(resume={"decisions": [{"type": "approve"}]}), method)
    assert executed == ["look_up tea", "write_note tea"]
    assert messages[-1].text == "Both are done."


@pytest.mark.parametrize("method", METHODS)
async def test_an_invalid_task_returns_an_error_and_the_other_task_runs(method: str) -> None:
    llm = supervised([calls(call("reader", job="x"), TASKS[1]), READY])
    messages = await run(build_supervisor(llm, SPECIALISTS), "Look up and note.", method)
    assert sorted(result.status for result in results(messages)) == ["error", "success"]
    assert executed == ["write_note tea"]
    assert messages[-1].text == "Both are done."


async def test_a_resumed_supervisor_does_not_rerun_a_finished_specialist(tmp_path: Path) -> None:
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
        assert "wait_for milk" in executed
    unblocked.set()
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        messages = await run(build_supervisor(llm, specialists, saver), None)
    assert executed.count("look_up tea") == 1
    assert [result.status for result in results(messages)] == ["success", "success"]
    assert messages[-1].text == "Both are done."


@pytest.mark.parametrize("method", METHODS)
async def test_supervisor_ends_at_its_limit_or_on_a_repeated_task(method: str) -> None:
    messages = await run(build_supervisor(supervised(TASKS[0]), SPECIALISTS), "What is tea?", method)
    assert (executed, messages[-1].text) == (["look_up tea"], "Both are done."), "a repeated task"
    executed.clear()
    messages = await run(build_supervisor(supervised(TASKS), SPECIALISTS, model_calls=2), "Look up and note.", method)
    assert (executed, messages[-1].text) == (["look_up tea"], "Both are done.")


async def test_second_question_resets_the_findings_of_the_supervisor() -> None:
    prompts: list[str] = []
    llm = supervised([TASKS[0], READY, TASKS[1], READY], prompts)
    graph = build_supervisor(llm, SPECIALISTS, InMemorySaver())
    await run(graph, "What is tea?")
    await run(graph, "Note that it is a drink.")
    assert executed == ["look_up tea", "write_note tea"]
    second = next(prompt for prompt in prompts if "Your task: Note it." in prompt)
    assert "Findings so far:\n\nnone" in second


async def test_a_cancelled_run_aborts_its_engine_requests() -> None:
    from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
    from lookahead_agent.runtime.engine_set import EngineSet
    from tests.waiting import wait_until

    engine = ScriptedEngine(ScriptedTokenizer(), lambda prompt, reply_prefix: [ScriptedStep("So.", 60.0)])
    llm = ChatLookahead(engines=EngineSet(engine), policy="off")
    for graph in (build_react(llm, [look_up]), build_supervisor(llm, SPECIALISTS)):
        task = asyncio.ensure_future(graph.ainvoke({"messages": [("human", "What is tea?")]}))
        await wait_until(lambda: engine.in_flight == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await wait_until(lambda: engine.in_flight == 0)
