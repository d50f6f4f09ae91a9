"""The plan templates' whole control flow, on a model that follows a script."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

from graphs.llm_compiler import build_llm_compiler
from graphs.plan_execute import build_plan_execute
from graphs.rewoo import build_rewoo
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.early_calls import MAX_CALLS
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import scripted_chat, scripted_engines

PLAN, NOW, EXECUTE, AGAIN = "You solve problems", "Now write", "Call now", "Write a call without"
REPLAN, ANSWER = "Write another plan", "You answer a question from the results of tool calls"
LIMIT = "You answer a question from the results of tools"
EVERYTHING = VerifierPolicy(verifier="random", probability=1.0, depth=4)
Build = Callable[..., Any]
every_template = pytest.mark.parametrize("build", [build_plan_execute, build_rewoo, build_llm_compiler])
both = pytest.mark.parametrize("asynchronous", [False, True])


class Tools:
    """Two tools, one that reads and one that writes, and what they were called with."""

    def __init__(self, *, hint: bool | None = True) -> None:
        self.called: list[str] = []
        self.failures: dict[str, int] = {}
        metadata = {} if hint is None else {"readOnlyHint": hint}
        self.look_up = StructuredTool.from_function(self._look_up, name="look_up", metadata=metadata)
        self.write = StructuredTool.from_function(self._write, name="write", metadata={"readOnlyHint": False})
        self.all: list[BaseTool] = [self.look_up, self.write]

    def _look_up(self, word: str) -> str:
        """Look a word up."""
        self.called.append(word)
        if self.failures.get(word, 0):
            self.failures[word] -= 1
            raise ValueError(f"there is no {word}")
        return "one\ntwo" if word == "rows" else f"{word}!"

    def _write(self, text: str) -> str:
        """Write a text."""
        self.called.append(f"write {text}")
        return "written"


@pytest.fixture
def tools() -> Tools:
    return Tools()


def chat(replies: dict[str, Any], **more: Any) -> ChatLookahead:
    return scripted_chat(scripted_replies(**replies), **({"policy": "off"} | more))


def calls(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def run(
    graph: Any, asynchronous: bool = False, question: str = "What is tea?", **config: Any
) -> list[AnyMessage]:
    given = {"messages": [HumanMessage(question)]}
    state = await graph.ainvoke(given, config) if asynchronous else graph.invoke(given, config)
    messages: list[AnyMessage] = state["messages"]
    assert isinstance(messages[-1], AIMessage)
    return messages


@every_template
@both
async def test_calls_are_carried_out_as_they_stand(build: Build, asynchronous: bool, tools: Tools) -> None:
    plan = 'I look twice.\n\nPlan:\n1. look_up("tea")\n2. look_up(word="$1 $1")'
    graph = build(chat({PLAN: plan, ANSWER: "It is a drink."}), tools.all)
    messages = await run(graph, asynchronous)
    assert messages[-1].text == "It is a drink."
    assert tools.called == ["tea", "tea! tea!"]
    assert "I look twice." in messages[1].text
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [result.text for result in results] == ["tea!", "tea! tea!!"]
    asked = {call["id"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls}
    assert asked == {result.tool_call_id for result in results}


@every_template
@both
async def test_a_model_writes_what_the_plan_leaves_open(build: Build, asynchronous: bool, tools: Tools) -> None:
    """A reference to several lines inside a text, and a line that is no call."""
    plan = 'Plan:\n1. look_up("rows")\n2. look_up("the $1")\n3. say what it is'
    executed = [calls("look_up", word="two"), calls("look_up", word="three")]
    graph = build(chat({PLAN: plan, EXECUTE: executed, ANSWER: "Done."}), tools.all)
    await run(graph, asynchronous)
    assert tools.called == ["rows", "two", "three"]


@every_template
@pytest.mark.parametrize("now", ['Plan:\n1. look_up("tea")', '1. look_up("tea")'])
async def test_thoughts_without_a_plan_are_followed_by_one(build: Build, tools: Tools, now: str) -> None:
    script = {NOW: now, PLAN: "I think of tea.", ANSWER: "Done."}
    messages = await run(build(chat(script), tools.all))
    assert messages[1].text == 'I think of tea.\n\nPlan:\n1. look_up("tea")'
    assert tools.called == ["tea"]


@every_template
async def test_without_any_plan_a_model_calls_a_tool_for_the_question(build: Build, tools: Tools) -> None:
    script = {NOW: "No.", PLAN: "Hm.", EXECUTE: calls("look_up", word="tea"), ANSWER: "A drink."}
    assert (await run(build(chat(script), tools.all)))[-1].text == "A drink."
    assert tools.called == ["tea"]


@every_template
@both
async def test_a_failed_call_is_written_anew_with_its_error(build: Build, asynchronous: bool, tools: Tools) -> None:
    tools.failures["teh"] = 9
    heard: list[str] = []
    script = scripted_replies(
        **{PLAN: 'Plan:\n1. look_up("teh")', AGAIN: calls("look_up", word="tea"), ANSWER: "A drink."}
    )

    def reply(prompt: str) -> str:
        heard.append(prompt)
        return script(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), tools.all), asynchronous)
    assert messages[-1].text == "A drink."
    assert tools.called[-1] == "tea"
    retry = next(prompt for prompt in heard if AGAIN in prompt)
    assert "there is no teh" in retry
    assert "word" in retry


@every_template
async def test_the_same_failed_call_is_not_made_again(build: Build, tools: Tools) -> None:
    tools.failures["teh"] = 9
    same = calls("look_up", word="teh")
    script = {REPLAN: 'Plan:\n1. look_up("tea")', PLAN: 'Plan:\n1. look_up("teh")', AGAIN: same, ANSWER: "Done."}
    await run(build(chat(script), tools.all))
    # The early call of llm_compiler, which fails, is the tool node's again.
    once = ["teh"] * (2 if build is build_llm_compiler else 1)
    assert tools.called == [*once, *([] if build is build_rewoo else ["tea"])]


@pytest.mark.parametrize("build", [build_plan_execute, build_llm_compiler])
async def test_a_plan_that_failed_is_followed_by_another_with_what_was_tried(build: Build, tools: Tools) -> None:
    tools.failures["teh"] = 9
    heard: list[str] = []
    script = scripted_replies(
        **{
            REPLAN: 'Plan:\n1. look_up("tea")',
            PLAN: 'Plan:\n1. look_up("rows")\n2. look_up("teh")\n3. look_up("$2")',
            AGAIN: [calls("look_up", word="teh teh"), calls("look_up", word="teh teh")],
            ANSWER: "Done.",
        }
    )

    def reply(prompt: str) -> str:
        heard.append(prompt)
        return script(prompt)

    tools.failures["teh teh"] = 9
    await run(build(scripted_chat(reply, policy="off"), tools.all))
    replanned = next(prompt for prompt in heard if REPLAN in prompt)
    assert "one\ntwo" in replanned
    assert "(not carried out)" in replanned
    assert tools.called[-1] == "tea"


async def test_rewoo_plans_once(tools: Tools) -> None:
    tools.failures["teh"] = 9
    same = calls("look_up", word="teh")
    script = {REPLAN: "Plan:\n1. write('no')", PLAN: 'Plan:\n1. look_up("teh")', AGAIN: same, ANSWER: "Unknown."}
    assert (await run(build_rewoo(chat(script), tools.all)))[-1].text == "Unknown."
    assert tools.called == ["teh"]


@every_template
@both
async def test_one_of_several_calls_fails(build: Build, asynchronous: bool, tools: Tools) -> None:
    tools.failures["b"] = 1
    plan = 'Plan:\n1. look_up("a")\n2. look_up("b")\n3. look_up("c")\n4. look_up("$1$2$3")'
    graph = build(chat({PLAN: plan, AGAIN: calls("look_up", word="b2"), ANSWER: "Done."}), tools.all)
    await run(graph, asynchronous)
    if build is build_llm_compiler:
        assert sorted(tools.called[:3]) == ["a", "b", "c"]
        assert tools.called[-1] == "a!b!c!", "the tool node has made the early call that failed again"
    else:
        assert tools.called[-1] == "a!b2!c!"


@every_template
@both
async def test_calls_that_cannot_be_read_end_in_an_answer(build: Build, asynchronous: bool, tools: Tools) -> None:
    """A model that never writes a whole call is asked again within the limits, and no half of a call is made."""
    cut = calls("look_up", word="tea").removesuffix('"}}</tool_call>')
    asked: list[str] = []
    script = scripted_replies(**{NOW: "No.", PLAN: "Plan:\n1. look tea up", EXECUTE: cut, ANSWER: "Unknown."})

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return script(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), tools.all), asynchronous)
    assert messages[-1].text == "Unknown."
    assert tools.called == []
    assert any("(not carried out)" in prompt for prompt in asked if ANSWER in prompt)


def barrier_tool(names: set[str], hint: bool | None) -> BaseTool:
    """A tool whose calls wait for each other."""
    barrier = threading.Barrier(len(names), timeout=20)

    def meet(name: str) -> str:
        """Meet the others."""
        if name in names:
            barrier.wait()
        return name

    return StructuredTool.from_function(meet, name="meet", metadata={} if hint is None else {"readOnlyHint": hint})


@every_template
@both
async def test_calls_that_need_nothing_of_each_other_run_at_once(build: Build, asynchronous: bool) -> None:
    meet = barrier_tool({"a", "b"}, hint=True)
    script = {PLAN: 'Plan:\n1. meet("a")\n2. meet("b")\n3. meet("$1$2")', ANSWER: "Met."}
    messages = await run(build(chat(script), [meet]), asynchronous)
    assert [message.text for message in messages if isinstance(message, ToolMessage)] == ["a", "b", "ab"]


@pytest.mark.parametrize(("build", "hint"), [(build_rewoo, None), (build_llm_compiler, None)])
async def test_tools_that_declare_nothing_run_at_once_where_references_are_the_order(
    build: Build, hint: bool | None
) -> None:
    script = {PLAN: 'Plan:\n1. meet("a")\n2. meet("b")', ANSWER: "Met."}
    assert (await run(build(chat(script), [barrier_tool({"a", "b"}, hint)])))[-1].text == "Met."


@every_template
async def test_tools_that_write_keep_their_place(build: Build, tools: Tools) -> None:
    plan = 'Plan:\n1. look_up("a")\n2. write("x")\n3. look_up("b")\n4. write("y")'
    await run(build(chat({PLAN: plan, ANSWER: "Done."}), tools.all))
    assert tools.called == ["a", "write x", "b", "write y"]


async def test_plan_execute_keeps_the_order_of_tools_that_declare_nothing() -> None:
    tools = Tools(hint=None)
    plan = 'Plan:\n1. look_up("a")\n2. look_up("b")\n3. look_up("c")'
    messages = await run(build_plan_execute(chat({PLAN: plan, ANSWER: "Done."}), tools.all))
    assert tools.called == ["a", "b", "c"]
    most = max(len(message.tool_calls) for message in messages if isinstance(message, AIMessage))
    assert most == 1


async def test_llm_compiler_calls_while_the_plan_is_written(tools: Tools) -> None:
    """The first call has ended before the last line of the plan is there."""
    ended, seen = threading.Event(), []

    def note(word: str) -> str:
        """Note a word."""
        ended.set()
        return word

    def reply(prompt: str) -> str:
        if PLAN not in prompt:
            return "Done."
        if 'note("b")' in prompt:  # the script is asked again for each step of the reply
            seen.append(ended.wait(20))
        return 'Plan:\n\n1. note("a")\n\n2. note("b")\n\n3. note("c")'

    await run(build_llm_compiler(scripted_chat(reply, policy="off"), [StructuredTool.from_function(note)]))
    assert ended.is_set()
    assert all(seen)


@both
async def test_llm_compiler_bounds_the_early_calls_that_run_at_once(asynchronous: bool) -> None:
    calls = 3 * MAX_CALLS
    running, most, lock = 0, 0, threading.Lock()

    def change(by: int) -> None:
        nonlocal running, most
        with lock:
            running += by
            most = max(most, running)

    def work(word: str) -> str:
        change(1)
        time.sleep(0.5)
        change(-1)
        return word

    async def awork(word: str) -> str:
        change(1)
        await asyncio.sleep(0.5)
        change(-1)
        return word

    tool = StructuredTool.from_function(work, awork, name="work", description="Work.")
    plan = "\n".join(f'{number}. work("{number}")' for number in range(1, calls + 1))
    messages = await run(build_llm_compiler(chat({PLAN: f"Plan:\n{plan}", ANSWER: "Done."}), [tool]), asynchronous)
    assert len([message for message in messages if isinstance(message, ToolMessage)]) == calls
    assert 1 < most <= MAX_CALLS


@every_template
@pytest.mark.parametrize("marker", ["Plan:\n\n", None])
def test_a_draft_that_lies_writes_no_argument(build: Build, tools: Tools, marker: str | None) -> None:
    """The policy accepts every draft step, and each of the draft's calls is another; also in a plan without "Plan:"."""
    right, wrong = '1. look_up("tea")\n\n2. look_up("rows")', '1. write("lie")\n\n2. write("lie")'
    target = {NOW: right, PLAN: f"I look.\n\n{marker or ''}{right}", ANSWER: "A drink."}
    lies = {NOW: wrong, PLAN: f"I lie.\n\n{marker or ''}{wrong}", ANSWER: "A lie."}
    policies = {"planner": EVERYTHING, "executor": EVERYTHING, "finisher": "off"}
    llm = scripted_chat(scripted_replies(**target), scripted_replies(**lies), policies=policies)
    messages = build(llm, tools.all).invoke({"messages": [HumanMessage("?")]})["messages"]
    assert "I lie." in messages[1].text, "thoughts are the draft's"
    assert sorted(tools.called) == ["rows", "tea"]
    assert messages[-1].text == "A drink."


@every_template
def test_a_second_question_begins_anew(build: Build, tools: Tools) -> None:
    heard: list[str] = []

    def reply(prompt: str) -> str:
        heard.append(prompt)
        if PLAN in prompt:
            return f'Plan:\n1. look_up("{"coffee" if "coffee" in prompt else "tea"}")'
        return "It is coffee." if "coffee!" in prompt else "It is tea."

    graph = build(scripted_chat(reply, policy="off"), tools.all, InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    graph.invoke({"messages": [HumanMessage("What is tea?")]}, config)
    heard.clear()
    messages = graph.invoke({"messages": [HumanMessage("And coffee?")]}, config)["messages"]
    assert messages[-1].text == "It is coffee."
    assert tools.called == ["tea", "coffee"]
    assert all("tea!" not in prompt for prompt in heard), "results of the first question are not shown"
    assert any("It is tea." in prompt for prompt in heard), "its answer is"


@every_template
def test_a_person_approves_edits_and_rejects(build: Build, tools: Tools) -> None:
    plan = 'Plan:\n1. write("a")\n2. write("b")\n3. write("c")'
    script = {PLAN: plan, AGAIN: calls("look_up", word="tea"), ANSWER: "Done."}
    graph = build(chat(script), tools.all, InMemorySaver(), ask_before=["write"])
    config = {"configurable": {"thread_id": "1"}}
    edited = {"name": "write", "args": {"text": "B"}}
    graph.invoke({"messages": [HumanMessage("Write.")]}, config)
    assert tools.called == []
    graph.invoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
    graph.invoke(Command(resume={"decisions": [{"type": "edit", "edited_action": edited}]}), config)
    assert tools.called == ["write a", "write B"]
    state = graph.invoke(Command(resume={"decisions": [{"type": "reject", "message": "no c"}]}), config)
    assert state["messages"][-1].text == "Done."
    assert tools.called == ["write a", "write B", "tea"], "a rejected call is written anew"


@every_template
def test_limits_end_a_run_with_an_answer(build: Build, tools: Tools) -> None:
    plan = "Plan:\n" + "\n".join(f'{number}. write("{number}")' for number in range(1, 9))
    script = {LIMIT: "As far as I came.", PLAN: plan, ANSWER: "Done."}
    messages = build(chat(script), tools.all, model_calls=4).invoke({"messages": [HumanMessage("?")]})["messages"]
    assert messages[-1].text == "As far as I came."
    assert len(tools.called) == 3


@every_template
def test_langchains_own_middleware_works(build: Build, tools: Tools) -> None:
    plan = 'Plan:\n1. write("a")\n2. write("b")\n3. write("c")'
    limit = ModelCallLimitMiddleware(run_limit=2)
    messages = build(chat({PLAN: plan}), tools.all, middleware=[limit]).invoke({"messages": [HumanMessage("?")]})
    assert "limit" in messages["messages"][-1].text.lower()
    assert tools.called == ["write a", "write b"]


@every_template
def test_a_run_goes_on_in_the_middle_of_a_parallel_stage(build: Build, tools: Tools, tmp_path: Any) -> None:
    """The process ends while two of three calls are made; the third is made once, and the plan is not made again."""
    interrupted = {"now": build is not build_llm_compiler}
    planned: list[str] = []

    def fetch(name: str) -> str:
        """Fetch something."""
        tools.called.append(name)
        if name == "b" and interrupted["now"]:
            raise KeyboardInterrupt
        return name

    fetching = StructuredTool.from_function(fetch, metadata={"readOnlyHint": True})
    script = scripted_replies(**{PLAN: 'Plan:\n1. fetch("a")\n2. fetch("b")\n3. fetch("c")', ANSWER: "Done."})

    def reply(prompt: str) -> str:
        if PLAN in prompt:
            planned.append(prompt)
        return script(prompt)

    config = {"configurable": {"thread_id": "1"}}
    later = {"ask_before": ["fetch"]} if build is build_llm_compiler else {}
    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.sqlite")) as saver:
        graph = build(scripted_chat(reply, policy="off"), [fetching], saver, **later)
        if later:
            graph.invoke({"messages": [HumanMessage("?")]}, config)
        else:
            with pytest.raises(KeyboardInterrupt):
                graph.invoke({"messages": [HumanMessage("?")]}, config)
    interrupted["now"] = False
    before = len(set(planned))
    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.sqlite")) as saver:
        graph = build(scripted_chat(reply, policy="off"), [fetching], saver, **later)
        resume = Command(resume={"decisions": [{"type": "approve"}] * 3}) if later else None
        assert graph.invoke(resume, config)["messages"][-1].text == "Done."
    assert len(set(planned)) == before
    assert tools.called.count("c") >= 1
    assert {"a", "b", "c"} == set(tools.called)


@every_template
async def test_messages_are_streamed(build: Build, tools: Tools) -> None:
    graph = build(chat({PLAN: 'I look.\n\nPlan:\n1. look_up("tea")', ANSWER: "A drink."}), tools.all)
    given = {"messages": [HumanMessage("?")]}
    text = ""
    async for chunk, _ in graph.astream(given, stream_mode="messages"):
        text += chunk.text if chunk.type == "AIMessageChunk" else ""
    assert "I look." in text
    assert "A drink." in text


@every_template
def test_replies_are_labelled_and_have_their_policies(build: Build, tools: Tools) -> None:
    policies = {"planner": "exact", "executor": "off", "finisher": "strict"}
    plan = 'Plan:\n1. look_up("rows")\n2. look_up("a $1")'
    script = {PLAN: plan, EXECUTE: calls("look_up", word="x"), ANSWER: "Done."}
    messages = build(chat(script, policies=policies), tools.all).invoke({"messages": [HumanMessage("?")]})["messages"]
    told = [message.response_metadata["lookahead"] for message in messages if message.response_metadata]
    assert {(said["node"], said["policy"]) for said in told} == {*policies.items()}


@every_template
def test_wrong_arguments_are_refused(build: Build, tools: Tools) -> None:
    llm = chat({PLAN: "?"})
    with pytest.raises(ValueError, match="tool"):
        build(llm, [])
    with pytest.raises(ValueError, match="ask_before"):
        build(llm, tools.all, InMemorySaver(), ask_before=["nothing"])
    if build is not build_rewoo:
        with pytest.raises(ValueError, match="max_plans"):
            build(llm, tools.all, max_plans=0)


@every_template
def test_long_results_fit_into_the_context(build: Build, tools: Tools) -> None:
    """Results that all together are longer than the context: the answer comes all the same."""

    def read(number: int) -> str:
        """Read a part."""
        return f"part {number} " * 3_000

    plan = "Plan:\n" + "\n".join(f"{number}. read({number})" for number in range(1, 9))
    target = scripted_replies(**{PLAN: plan, ANSWER: "Eight parts."})
    llm = ChatLookahead(engines=scripted_engines(target, context_length=4_000), policy="off", max_tokens=200)
    reading = StructuredTool.from_function(read, metadata={"readOnlyHint": True})
    messages = build(llm, [reading]).invoke({"messages": [HumanMessage("How long?")]})["messages"]
    assert messages[-1].text == "Eight parts."
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert len(results) == 8
    assert all("cut:" in result.text for result in results)


@pytest.mark.parametrize("build", [build_plan_execute, build_llm_compiler])
@both
async def test_a_second_plan_of_one_turn_has_its_own_results(build: Build, asynchronous: bool, tools: Tools) -> None:
    """No call of the first plan is ever written, so that the next plan is made in the same turn."""
    asked: list[str] = []
    script = scripted_replies(
        **{REPLAN: 'Plan:\n1. look_up("tea")', PLAN: "Plan:\n1. look tea up", EXECUTE: "No.", ANSWER: "A drink."}
    )

    def reply(prompt: str) -> str:
        asked.append(prompt)
        return script(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), tools.all), asynchronous)
    assert messages[-1].text == "A drink."
    assert tools.called == ["tea"]
    shown = next(prompt for prompt in asked if ANSWER in prompt)
    assert '[1] look tea up\n(not carried out)\n\n[1] look_up(word="tea")\ntea!' in shown
