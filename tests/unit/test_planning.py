"""The control flow of the plan templates, on a scripted model."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from langchain.agents.middleware import HumanInTheLoopMiddleware, ModelCallLimitMiddleware, ModelRequest
from langchain.tools import ToolRuntime
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

from graphs.llm_compiler import build_llm_compiler
from graphs.plan_execute import build_plan_execute
from graphs.rewoo import build_rewoo
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.early_calls import MAX_CALLS, EarlyCallMiddleware, _PlanCalls
from lookahead_agent.agents.mcp_tools import _McpTool
from lookahead_agent.agents.turns import ModelCall
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import reply_script, scripted_chat, scripted_engines
from tests.waiting import wait_until

PLAN, PLAN_NOW, EXECUTE, RETRY = "You solve problems", "Now write", "Call now", "Write a call without"
REPLAN, ANSWER = "Write another plan", "You answer a question from the results of tool calls"
ANSWER_AT_LIMIT = "You answer a question from the results of tools"
READ_ONLY = {"readOnlyHint": True}
ACCEPT_ALL = VerifierPolicy(verifier="random", probability=1.0, depth=4)
Build = Callable[..., Any]
every_template = pytest.mark.parametrize("build", [build_plan_execute, build_rewoo, build_llm_compiler])
sync_and_async = pytest.mark.parametrize("asynchronous", [False, True])


class Tools:
    """A tool that reads and a tool that writes; `called` records their arguments."""

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


def chat(replies: dict[str, Any], **fields: Any) -> ChatLookahead:
    return scripted_chat(scripted_replies(**replies), **({"policy": "off"} | fields))


def call_text(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def run(
    graph: Any, asynchronous: bool = False, question: str = "What is tea?", **config: Any
) -> list[AnyMessage]:
    inputs = {"messages": [HumanMessage(question)]}
    state = await graph.ainvoke(inputs, config) if asynchronous else graph.invoke(inputs, config)
    messages: list[AnyMessage] = state["messages"]
    assert isinstance(messages[-1], AIMessage)
    return messages


@every_template
@sync_and_async
async def test_complete_calls_of_a_plan_run_without_rewriting(build: Build, asynchronous: bool, tools: Tools) -> None:
    plan = 'I look twice.\n\nPlan:\n1. look_up("tea")\n2. look_up(word="$1 $1")'
    graph = build(chat({PLAN: plan, ANSWER: "It is a drink."}), tools.all)
    messages = await run(graph, asynchronous)
    assert messages[-1].text == "It is a drink."
    assert tools.called == ["tea", "tea! tea!"]
    assert "I look twice." in messages[1].text
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [result.text for result in results] == ["tea!", "tea! tea!!"]
    call_ids = {call["id"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls}
    assert call_ids == {result.tool_call_id for result in results}


@every_template
@sync_and_async
async def test_executor_writes_incomplete_calls_of_a_plan(build: Build, asynchronous: bool, tools: Tools) -> None:
    """Incomplete: a result of several lines referenced inside a text, and a line without a call."""
    plan = 'Plan:\n1. look_up("rows")\n2. look_up("the $1")\n3. say what it is'
    written_calls = [call_text("look_up", word="two"), call_text("look_up", word="three")]
    graph = build(chat({PLAN: plan, EXECUTE: written_calls, ANSWER: "Done."}), tools.all)
    await run(graph, asynchronous)
    assert tools.called == ["rows", "two", "three"]


@every_template
@pytest.mark.parametrize("call", ['look_up(word="<word with $1>")', 'look_up("... $1 ...")', "look_up()", "look it up"])
async def test_executor_writes_a_copied_or_open_line_and_sees_values_in_place_of_references(
    build: Build, tools: Tools, call: str
) -> None:
    prompts: list[str] = []
    plan = f'Plan:\n1. look_up("tea")\n2. {call}\n\nIt costs 120.'
    script = scripted_replies(**{PLAN: plan, EXECUTE: call_text("look_up", word="milk"), ANSWER: "Done."})

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return script(prompt)

    await run(build(scripted_chat(reply, policy="off"), tools.all))
    assert tools.called == ["tea", "milk"], "no line is left out"
    (written,) = [prompt for prompt in prompts if EXECUTE in prompt]
    assert call.replace("$1", "tea!") in written
    assert "<result" not in written
    assert "120" not in written or "(" not in call, "what follows a call is not part of the line"


@every_template
@pytest.mark.parametrize("plan", ['Plan:\n1. look_up("tea")', '1. look_up("tea")'])
async def test_planner_is_asked_again_if_its_reply_has_no_plan(build: Build, tools: Tools, plan: str) -> None:
    script = {PLAN_NOW: plan, PLAN: "I think of tea.", ANSWER: "Done."}
    messages = await run(build(chat(script), tools.all))
    assert messages[1].text == 'I think of tea.\n\nPlan:\n1. look_up("tea")'
    assert tools.called == ["tea"]


@every_template
async def test_without_a_plan_the_executor_calls_a_tool_for_the_question(build: Build, tools: Tools) -> None:
    script = {PLAN_NOW: "No.", PLAN: "Hm.", EXECUTE: call_text("look_up", word="tea"), ANSWER: "A drink."}
    assert (await run(build(chat(script), tools.all)))[-1].text == "A drink."
    assert tools.called == ["tea"]


@every_template
@sync_and_async
async def test_failed_call_is_rewritten_from_its_error(build: Build, asynchronous: bool, tools: Tools) -> None:
    tools.failures["teh"] = 9
    prompts: list[str] = []
    script = scripted_replies(
        **{PLAN: 'Plan:\n1. look_up("teh")', RETRY: call_text("look_up", word="tea"), ANSWER: "A drink."}
    )

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return script(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), tools.all), asynchronous)
    assert messages[-1].text == "A drink."
    assert tools.called[-1] == "tea"
    retry = next(prompt for prompt in prompts if RETRY in prompt)
    assert "there is no teh" in retry
    assert "word" in retry


@every_template
async def test_rewritten_call_that_equals_the_failed_one_does_not_run(build: Build, tools: Tools) -> None:
    tools.failures["teh"] = 9
    same = call_text("look_up", word="teh")
    script = {REPLAN: 'Plan:\n1. look_up("tea")', PLAN: 'Plan:\n1. look_up("teh")', RETRY: same, ANSWER: "Done."}
    await run(build(chat(script), tools.all))
    assert tools.called == ["teh", *([] if build is build_rewoo else ["tea"])]


@pytest.mark.parametrize("build", [build_plan_execute, build_llm_compiler])
async def test_second_plan_is_written_from_the_results_of_the_failed_one(build: Build, tools: Tools) -> None:
    tools.failures["teh"] = 9
    prompts: list[str] = []
    script = scripted_replies(
        **{
            REPLAN: 'Plan:\n1. look_up("tea")',
            PLAN: 'Plan:\n1. look_up("rows")\n2. look_up("teh")\n3. look_up("$2")',
            RETRY: [call_text("look_up", word="teh teh"), call_text("look_up", word="teh teh")],
            ANSWER: "Done.",
        }
    )

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return script(prompt)

    tools.failures["teh teh"] = 9
    await run(build(scripted_chat(reply, policy="off"), tools.all))
    replanned = next(prompt for prompt in prompts if REPLAN in prompt)
    assert "one\ntwo" in replanned
    assert "(not carried out)" in replanned
    assert tools.called[-1] == "tea"


class Database:
    """A tool that fails as a database does, and one that knows its columns; `called` records the calls."""

    def __init__(self) -> None:
        self.called: list[str] = []
        self.metadata = {"readOnlyHint": False}

        def sql(statement: str) -> str:
            """Ask the database."""
            self.called.append(statement)
            if "CustomerTier" in statement:
                raise ValueError("no such column: CustomerTier")
            return "id | name\n" + "\n".join(f"{row} | customer {row}" for row in range(300))

        def schema(table: str) -> str:
            """Say the columns of a table."""
            self.called.append(table)
            return f"columns of {table}"

        self.tools: list[BaseTool] = [
            StructuredTool.from_function(sql, name="sql", metadata=self.metadata),
            StructuredTool.from_function(schema, name="schema", metadata=READ_ONLY),
        ]


WORDS = "no such column: CustomerTier"
WRONG = 'sql(statement="SELECT CustomerTier FROM t")'


async def planned(build: Build, script: dict[str, Any]) -> tuple[Database, list[str], list[AnyMessage]]:
    """Run a graph on the database; returns it with all prompts and messages."""
    prompts: list[str] = []
    replies, database = scripted_replies(**script), Database()

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return replies(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), database.tools))
    return database, prompts, messages


@pytest.mark.parametrize("hint", [True, False, None])
@pytest.mark.parametrize("build", [build_plan_execute, build_llm_compiler])
async def test_every_prompt_after_a_failure_has_the_tools_own_words_once(build: Build, hint: bool | None) -> None:
    wrong = call_text("sql", statement="SELECT CustomerTier FROM t")
    script = {
        REPLAN: f'Plan:\n1. {WRONG}', PLAN: f'Plan:\n1. schema("t")\n2. {WRONG}', RETRY: wrong, ANSWER: "Unknown.",
    }  # fmt: skip
    prompts: list[str] = []
    replies, database = scripted_replies(**script), Database()
    database.tools[0].metadata = {} if hint is None else {"readOnlyHint": hint}

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return replies(prompt)

    await run(build(scripted_chat(reply, policy="off"), database.tools))
    later = [prompt for prompt in prompts if "The tool is:" in prompt or REPLAN in prompt or ANSWER in prompt]
    assert len(later) == 4, "two rewritten calls, a new plan and the answer"
    assert [prompt.count(WORDS) for prompt in later] == [1, 1, 1, 1]
    assert not any("failed before" in prompt or "(not carried out)" in prompt for prompt in later)
    assert len([call for call in database.called if "CustomerTier" in call]) == 1


@pytest.mark.parametrize("build", [build_plan_execute, build_llm_compiler])
async def test_new_plan_uses_results_of_the_earlier_one(build: Build) -> None:
    """It is numbered after them; one that is not fetches nothing again that is known."""
    wrong = call_text("schema", table="none")
    for replan, called in (
        ('Plan:\n2. schema("$1, of t")', ["t", "columns of t, of t"]),
        ('Plan:\n1. schema("t")\n2. schema("$1 again")', ["t", "columns of t again"]),
        ('Plan:\n1. schema("$1, of t")', ["t", "written"]),  # 1 is the line's own number
    ):
        script = {REPLAN: replan, PLAN: 'Plan:\n1. schema("t")\n2. do it', EXECUTE: "No.", ANSWER: "Done."}
        replies, prompts, tools = scripted_replies(**script), list[str](), Database()

        def reply(prompt: str, replies: Callable[[str], str] = replies, prompts: list[str] = prompts) -> str:
            prompts.append(prompt)
            own = "Call now" in prompt and "<unknown>" in prompt
            return call_text("schema", table="written") if own else replies(prompt)

        await run(build(scripted_chat(reply, policy="off"), [tools.tools[1]]))
        assert tools.called == called
        replanned = next(prompt for prompt in prompts if REPLAN in prompt)
        assert '[1] schema(table="t")\ncolumns of t\n\n- do it\n(not carried out)' in replanned
        assert "Number its calls from 2 on: $1 stands for the results above" in replanned
        answer = next(prompt for prompt in prompts if ANSWER in prompt)
        assert answer.count('[1] schema(table="t")') == 1
        assert "(not carried out)" not in answer
        for prompt in prompts:
            if "<unknown>" in prompt:
                assert '[1] schema(table="t")\ncolumns of t' in prompt, "the executor sees earlier results"
    assert wrong


@every_template
async def test_line_failed_call_and_error_are_last_and_long_results_are_shortened(build: Build) -> None:
    script = {
        PLAN: 'Plan:\n1. sql("SELECT id, name FROM t")\n2. sql("SELECT CustomerTier, $1")', EXECUTE: "No.",
        RETRY: call_text("sql", statement="SELECT 1"), ANSWER: "Done.",
    }  # fmt: skip
    first = call_text("sql", statement="SELECT CustomerTier")
    script[EXECUTE] = first
    _, prompts, _ = await planned(build, script)
    written, retried = (next(prompt for prompt in prompts if words in prompt) for words in (EXECUTE, RETRY))
    assert written.rstrip().endswith(
        'Call now, with values in place of results: sql("SELECT CustomerTier, <result 1>")'
    )
    places = [
        retried.index(part)
        for part in (
            "customer 299", 'Line 2 of the plan: sql("SELECT CustomerTier, <result 1>")',
            'failed: sql(statement="SELECT CustomerTier")', WORDS, "- sql(statement: string)", RETRY,
        )
    ]  # fmt: skip
    assert places == sorted(places)
    for prompt, most in ((written, 4_000), (retried, 1_000)):
        assert "0 | customer 0\n" in prompt
        assert "characters are left out here]\n" in prompt
        assert most * 0.8 < len(prompt.split("Results so far:")[1].split("Call now")[0].split("Line 2")[0]) < most * 1.2


async def test_code_of_a_block_runs_exactly(tools: Tools) -> None:
    code = 'with open("a") as file:\n    for line in file:\n        print(line)  # $2.50\n\n1. no call'
    ran: list[str] = []

    def python(code: str) -> str:
        """Run code."""
        ran.append(code)
        return "ran"

    for indent in ("", "   "):
        block = "\n".join(indent + row for row in ("```python", *code.split("\n"), "```"))
        script = {
            PLAN: f'I do it.\n\nPlan:\n1. look_up("tea")\n2. python()\n{block}\n3. look_up("$2")',
            ANSWER: "Done.",
        }
        for build in (build_plan_execute, build_rewoo, build_llm_compiler):
            await run(build(chat(script), [tools.look_up, StructuredTool.from_function(python)]))
    assert ran == [code] * 6
    assert tools.called == ["tea", "ran"] * 6


async def test_rewoo_plans_once(tools: Tools) -> None:
    tools.failures["teh"] = 9
    same = call_text("look_up", word="teh")
    script = {REPLAN: "Plan:\n1. write('no')", PLAN: 'Plan:\n1. look_up("teh")', RETRY: same, ANSWER: "Unknown."}
    assert (await run(build_rewoo(chat(script), tools.all)))[-1].text == "Unknown."
    assert tools.called == ["teh"]


@every_template
@sync_and_async
async def test_failed_call_among_several_is_retried(build: Build, asynchronous: bool, tools: Tools) -> None:
    tools.failures["b"] = 1
    plan = 'Plan:\n1. look_up("a")\n2. look_up("b")\n3. look_up("c")\n4. look_up("$1$2$3")'
    graph = build(chat({PLAN: plan, RETRY: call_text("look_up", word="b2"), ANSWER: "Done."}), tools.all)
    await run(graph, asynchronous)
    assert sorted(tools.called[:3]) == ["a", "b", "c"]
    assert tools.called[3:] == ["b2", "a!b2!c!"]


@every_template
@sync_and_async
async def test_truncated_calls_do_not_run_and_end_in_an_answer(build: Build, asynchronous: bool, tools: Tools) -> None:
    """A model that only writes truncated calls is asked again within the limits; no truncated call runs."""
    partial = call_text("look_up", word="tea").removesuffix('"}}</tool_call>')
    prompts: list[str] = []
    script = scripted_replies(**{PLAN_NOW: "No.", PLAN: "Plan:\n1. look tea up", EXECUTE: partial, ANSWER: "Unknown."})

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return script(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), tools.all), asynchronous)
    assert messages[-1].text == "Unknown."
    assert tools.called == []
    assert any("(not carried out)" in prompt for prompt in prompts if ANSWER in prompt)


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
@sync_and_async
async def test_independent_calls_run_in_parallel(build: Build, asynchronous: bool) -> None:
    meet = barrier_tool({"a", "b"}, hint=True)
    script = {PLAN: 'Plan:\n1. meet("a")\n2. meet("b")\n3. meet("$1$2")', ANSWER: "Met."}
    messages = await run(build(chat(script), [meet]), asynchronous)
    assert [message.text for message in messages if isinstance(message, ToolMessage)] == ["a", "b", "ab"]


@pytest.mark.parametrize(("build", "hint"), [(build_rewoo, None), (build_llm_compiler, None)])
async def test_tools_without_hints_run_in_parallel_if_references_define_the_order(
    build: Build, hint: bool | None
) -> None:
    script = {PLAN: 'Plan:\n1. meet("a")\n2. meet("b")', ANSWER: "Met."}
    assert (await run(build(chat(script), [barrier_tool({"a", "b"}, hint)])))[-1].text == "Met."


@every_template
async def test_writing_tools_keep_their_place_in_the_plan(build: Build, tools: Tools) -> None:
    plan = 'Plan:\n1. look_up("a")\n2. write("x")\n3. look_up("b")\n4. write("y")'
    await run(build(chat({PLAN: plan, ANSWER: "Done."}), tools.all))
    assert tools.called == ["a", "write x", "b", "write y"]


@every_template
@sync_and_async
@pytest.mark.parametrize("hint", [True, None])
async def test_equal_lines_of_a_plan_run_each(build: Build, asynchronous: bool, hint: bool | None) -> None:
    tools = Tools(hint=hint)
    plan = 'Plan:\n1. write("x")\n2. write("x")\n3. look_up("a")\n4. look_up("a")\n5. look_up("b")'
    messages = await run(build(chat({PLAN: plan, ANSWER: "Done."}), tools.all), asynchronous)
    assert messages[-1].text == "Done."
    assert sorted(tools.called) == ["a", "a", "b", "write x", "write x"]


async def test_plan_execute_runs_tools_without_hints_one_by_one() -> None:
    tools = Tools(hint=None)
    plan = 'Plan:\n1. look_up("a")\n2. look_up("b")\n3. look_up("c")'
    messages = await run(build_plan_execute(chat({PLAN: plan, ANSWER: "Done."}), tools.all))
    assert tools.called == ["a", "b", "c"]
    most_calls = max(len(message.tool_calls) for message in messages if isinstance(message, AIMessage))
    assert most_calls == 1


@sync_and_async
@pytest.mark.parametrize("schema", [None, {"type": "object", "properties": {"word": {"type": "string"}}}])
async def test_llm_compiler_runs_calls_while_the_planner_writes(asynchronous: bool, schema: Any) -> None:
    """The planner writes the second call after the first one has ended; also for tools with a schema, as MCP's."""
    ended = threading.Event()

    def note(word: str) -> str:
        """Note a word."""
        ended.set()
        return word

    class WaitingEngine(ScriptedEngine):
        async def generate(self, *arguments: Any) -> Any:  # type: ignore[override]
            text = ""
            async for delta in super().generate(*arguments):
                text += self.tokenizer.decode(delta.token_ids)
                if 'note("b' in text:
                    await wait_until(ended.is_set)
                yield delta

    tool = StructuredTool.from_function(note, args_schema=schema, metadata=READ_ONLY)
    script = scripted_replies(**{PLAN: 'Plan:\n1. note("a")\n2. note("b")', ANSWER: "Done."})
    llm = ChatLookahead(engines=EngineSet(WaitingEngine(ScriptedTokenizer(), reply_script(script))), policy="off")
    await run(build_llm_compiler(llm, [tool]), asynchronous)
    assert ended.is_set()


@sync_and_async
async def test_llm_compiler_limits_the_number_of_parallel_early_calls(asynchronous: bool) -> None:
    count = 3 * MAX_CALLS
    active, peak, lock = 0, 0, threading.Lock()
    barrier, abarrier = threading.Barrier(MAX_CALLS, timeout=20), asyncio.Barrier(MAX_CALLS)

    def add_active(by: int) -> None:
        nonlocal active, peak
        with lock:
            active += by
            peak = max(peak, active)

    def work(word: str) -> str:
        add_active(1)
        barrier.wait()
        time.sleep(0.05)  # a call above the limit could start now
        add_active(-1)
        return word

    async def awork(word: str) -> str:
        add_active(1)
        async with asyncio.timeout(20):
            await abarrier.wait()
        await asyncio.sleep(0.05)
        add_active(-1)
        return word

    tool = StructuredTool.from_function(work, awork, name="work", description="Work.", metadata=READ_ONLY)
    plan = "\n".join(f'{number}. work("{number}")' for number in range(1, count + 1))
    messages = await run(build_llm_compiler(chat({PLAN: f"Plan:\n{plan}", ANSWER: "Done."}), [tool]), asynchronous)
    assert len([message for message in messages if isinstance(message, ToolMessage)]) == count
    assert peak == MAX_CALLS


@every_template
@pytest.mark.parametrize("marker", ["Plan:\n\n", None])
def test_draft_never_writes_the_calls_of_a_plan(build: Build, tools: Tools, marker: str | None) -> None:
    """The policy accepts every draft step, and all draft calls are wrong; also in a plan without "Plan:"."""
    target_plan, draft_plan = '1. look_up("tea")\n\n2. look_up("rows")', '1. write("lie")\n\n2. write("lie")'
    target_script = {PLAN_NOW: target_plan, PLAN: f"I look.\n\n{marker or ''}{target_plan}", ANSWER: "A drink."}
    draft_script = {PLAN_NOW: draft_plan, PLAN: f"I lie.\n\n{marker or ''}{draft_plan}", ANSWER: "A lie."}
    policies = {"planner": ACCEPT_ALL, "executor": ACCEPT_ALL, "finisher": "off"}
    llm = scripted_chat(scripted_replies(**target_script), scripted_replies(**draft_script), policies=policies)
    messages = build(llm, tools.all).invoke({"messages": [HumanMessage("?")]})["messages"]
    assert "I lie." in messages[1].text, "the draft writes the thoughts"
    assert sorted(tools.called) == ["rows", "tea"]
    assert messages[-1].text == "A drink."


@every_template
def test_second_question_resets_the_turn_state(build: Build, tools: Tools) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        if PLAN in prompt:
            return f'Plan:\n1. look_up("{"coffee" if "coffee" in prompt else "tea"}")'
        return "It is coffee." if "coffee!" in prompt else "It is tea."

    graph = build(scripted_chat(reply, policy="off"), tools.all, InMemorySaver())
    config = {"configurable": {"thread_id": "1"}}
    graph.invoke({"messages": [HumanMessage("What is tea?")]}, config)
    prompts.clear()
    messages = graph.invoke({"messages": [HumanMessage("And coffee?")]}, config)["messages"]
    assert messages[-1].text == "It is coffee."
    assert tools.called == ["tea", "coffee"]
    assert all("tea!" not in prompt for prompt in prompts), "results of the first question are not shown"
    assert any("It is tea." in prompt for prompt in prompts), "the first answer is shown"


@every_template
def test_calls_can_be_approved_edited_and_rejected(build: Build, tools: Tools) -> None:
    plan = 'Plan:\n1. write("a")\n2. write("b")\n3. write("c")'
    script = {PLAN: plan, RETRY: call_text("look_up", word="tea"), ANSWER: "Done."}
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
    assert tools.called == ["write a", "write B", "tea"], "a rejected call is rewritten"


@every_template
@pytest.mark.parametrize("mode", ["batched", "per_call"])
def test_callers_own_approval_precedes_each_call_also_of_a_tool_that_reads(build: Build, mode: Any) -> None:
    tools = Tools()
    asking = HumanInTheLoopMiddleware({"look_up": True}, interrupt_mode=mode)
    script = {PLAN: 'Plan:\n1. look_up("tea")\n2. write("$1")', ANSWER: "Done."}
    graph = build(chat(script), tools.all, InMemorySaver(), middleware=[asking])
    config = {"configurable": {"thread_id": "1"}}
    (interrupted,) = graph.invoke({"messages": [HumanMessage("?")]}, config)["__interrupt__"]
    assert tools.called == []
    edit = {"type": "edit", "edited_action": {"name": "look_up", "args": {"word": "coffee"}}}
    graph.invoke(Command(resume={interrupted.id: edit if mode == "per_call" else {"decisions": [edit]}}), config)
    assert tools.called == ["coffee", "write coffee!"]


@every_template
def test_limit_of_model_calls_ends_a_run_with_an_answer(build: Build, tools: Tools) -> None:
    plan = "Plan:\n" + "\n".join(f'{number}. write("{number}")' for number in range(1, 9))
    script = {ANSWER_AT_LIMIT: "As far as I came.", PLAN: plan, ANSWER: "Done."}
    messages = build(chat(script), tools.all, model_calls=4).invoke({"messages": [HumanMessage("?")]})["messages"]
    assert messages[-1].text == "As far as I came."
    assert len(tools.called) == 3


@every_template
def test_model_call_limit_middleware_of_langchain_ends_the_run(build: Build, tools: Tools) -> None:
    plan = 'Plan:\n1. write("a")\n2. write("b")\n3. write("c")'
    limit = ModelCallLimitMiddleware(run_limit=2)
    messages = build(chat({PLAN: plan}), tools.all, middleware=[limit]).invoke({"messages": [HumanMessage("?")]})
    assert "limit" in messages["messages"][-1].text.lower()
    assert tools.called == ["write a", "write b"]


@every_template
def test_run_resumes_in_the_middle_of_a_parallel_stage(build: Build, tools: Tools, tmp_path: Any) -> None:
    """The run stops within three parallel calls. After a restart, all have run, and the plan is not written again."""
    interrupted = {"now": build is not build_llm_compiler}
    planning_prompts: list[str] = []

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
            planning_prompts.append(prompt)
        return script(prompt)

    config = {"configurable": {"thread_id": "1"}}
    options = {"ask_before": ["fetch"]} if build is build_llm_compiler else {}
    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.sqlite")) as saver:
        graph = build(scripted_chat(reply, policy="off"), [fetching], saver, **options)
        if options:
            graph.invoke({"messages": [HumanMessage("?")]}, config)
        else:
            with pytest.raises(KeyboardInterrupt):
                graph.invoke({"messages": [HumanMessage("?")]}, config)
    interrupted["now"] = False
    plans_before = len(set(planning_prompts))
    with SqliteSaver.from_conn_string(str(tmp_path / "checkpoints.sqlite")) as saver:
        graph = build(scripted_chat(reply, policy="off"), [fetching], saver, **options)
        resume = Command(resume={"decisions": [{"type": "approve"}] * 3}) if options else None
        assert graph.invoke(resume, config)["messages"][-1].text == "Done."
    assert len(set(planning_prompts)) == plans_before
    assert {"a", "b", "c"} == set(tools.called)


@every_template
async def test_thoughts_and_answer_are_streamed(build: Build, tools: Tools) -> None:
    graph = build(chat({PLAN: 'I look.\n\nPlan:\n1. look_up("tea")', ANSWER: "A drink."}), tools.all)
    inputs = {"messages": [HumanMessage("?")]}
    text = ""
    async for chunk, _ in graph.astream(inputs, stream_mode="messages"):
        text += chunk.text if chunk.type == "AIMessageChunk" else ""
    assert "I look." in text
    assert "A drink." in text


@every_template
def test_metadata_of_replies_names_their_node_and_policy(build: Build, tools: Tools) -> None:
    policies = {"planner": "exact", "executor": "off", "finisher": "strict"}
    plan = 'Plan:\n1. look_up("rows")\n2. look_up("a $1")'
    script = {PLAN: plan, EXECUTE: call_text("look_up", word="x"), ANSWER: "Done."}
    messages = build(chat(script, policies=policies), tools.all).invoke({"messages": [HumanMessage("?")]})["messages"]
    metadata = [message.response_metadata["lookahead"] for message in messages if message.response_metadata]
    assert {(entry["node"], entry["policy"]) for entry in metadata} == {*policies.items()}


@every_template
def test_invalid_arguments_raise_value_error(build: Build, tools: Tools) -> None:
    llm = chat({PLAN: "?"})
    with pytest.raises(ValueError, match="tool"):
        build(llm, [])
    with pytest.raises(ValueError, match="ask_before"):
        build(llm, tools.all, InMemorySaver(), ask_before=["nothing"])
    if build is not build_rewoo:
        with pytest.raises(ValueError, match="max_plans"):
            build(llm, tools.all, max_plans=0)


@every_template
def test_long_results_are_truncated_to_fit_the_context(build: Build, tools: Tools) -> None:
    """The results together exceed the context, and the run still ends with an answer."""

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
@sync_and_async
async def test_second_plan_of_one_turn_has_its_own_results(build: Build, asynchronous: bool, tools: Tools) -> None:
    """The model writes no call of the first plan, so the second plan follows in the same turn."""
    prompts: list[str] = []
    script = scripted_replies(
        **{REPLAN: 'Plan:\n1. look_up("tea")', PLAN: "Plan:\n1. look tea up", EXECUTE: "No.", ANSWER: "A drink."}
    )

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return script(prompt)

    messages = await run(build(scripted_chat(reply, policy="off"), tools.all), asynchronous)
    assert messages[-1].text == "A drink."
    assert tools.called == ["tea"]
    answer_prompt = next(prompt for prompt in prompts if ANSWER in prompt)
    assert 'Results:\n\n[1] look_up(word="tea")\ntea!\n\nQuestion' in answer_prompt, (
        "the second plan replaces the first"
    )


def test_only_tools_that_say_that_they_read_start_early() -> None:
    def with_runtime(word: str, runtime: ToolRuntime) -> str:
        """Look a word up."""
        return word

    def plain(word: str) -> str:
        """Look a word up."""
        return word

    schema = {"type": "object", "properties": {"word": {"type": "string"}}}
    mcp = _McpTool(name="mcp", description="", args_schema=schema, begin=lambda arguments: Future(), metadata=READ_ONLY)
    tools = [
        mcp,
        mcp.model_copy(update={"name": "unknown", "metadata": {}}),
        mcp.model_copy(update={"name": "writes", "metadata": {"readOnlyHint": False, "idempotentHint": True}}),
        mcp.model_copy(update={"name": "direct", "return_direct": True}),
        mcp.model_copy(update={"name": "later"}),
        StructuredTool.from_function(plain, metadata=READ_ONLY),
        StructuredTool.from_function(plain, name="no_hint"),
        StructuredTool.from_function(with_runtime, metadata=READ_ONLY),
        StructuredTool(name="schema", description="", args_schema=schema, func=with_runtime, metadata=READ_ONLY),
    ]
    middleware = EarlyCallMiddleware(tools, planner="{tools} {form}", finisher="", later=["later"])
    assert [*middleware.early] == ["mcp", "plain"]


def test_result_after_the_end_of_the_plan_starts_the_call_that_waits_for_it(tools: Tools) -> None:
    """A line refers to an earlier one; the last line may still go on until the reply has ended."""
    middleware = EarlyCallMiddleware(tools.all, planner="{tools} {form}", finisher="")
    request = ModelRequest(model=chat({}), messages=[HumanMessage("What is tea?")])
    started: list[ToolCall] = []
    calls = _PlanCalls(middleware, ModelCall(request, plan=1), lambda request: started.append(request.tool_call))
    calls.read(AIMessageChunk('Plan:\n1. look_up("tea")\n2. look_up("$1'))
    assert [call["args"] for call in started] == [{"word": "tea"}]
    calls.read(AIMessageChunk('")'))
    calls.end_reply()
    assert len(started) == 1
    calls.record(ToolMessage("a drink", tool_call_id=started[0]["id"] or ""))
    assert [call["args"] for call in started] == [{"word": "tea"}, {"word": "a drink"}]
