"""Graphs continue after any exception of a tool, and this library's tools return their errors."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import json
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt
from pydantic import BaseModel, Field, field_validator

from lookahead_agent.agents import templates
from lookahead_agent.agents.tool_use import MAX_RESULT_LENGTH, error_text, make_tool, truncate, with_sync_call
from lookahead_agent.errors import ConfigurationError, ForeignCodeError
from lookahead_agent.testing import scripted_chat, scripted_replies
from tools.calculator import calculator
from tools.files import make_file_tools


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("nor can this")


ERRORS: list[BaseException] = [
    RuntimeError("broken"),
    OSError(5, "Input/output error"),
    ValueError(),
    KeyError("key"),
    TypeError("\ud800"),
    MemoryError(),
    RecursionError("deep"),
    StopIteration(),
    StopAsyncIteration(),
    AssertionError(),
    TimeoutError("late"),
    NotImplementedError("none"),
    ConnectionResetError("lost"),
    concurrent.futures.CancelledError(),
    asyncio.CancelledError("a scope of the tool's own"),
    ExceptionGroup("several", [ValueError("a"), OSError("b")]),
    ToolException("refused"),
    Unprintable(),
    RuntimeError("x" * 5_000_000),
]
ERRORS_IN_GRAPHS = [error for error in ERRORS if type(error) in (OSError, StopIteration, NotImplementedError, KeyError)]
ERRORS_IN_GRAPHS += [error for error in ERRORS if type(error) in (asyncio.CancelledError, Unprintable, ToolException)]


def failing_tool(error: BaseException, *, coroutine: bool) -> BaseTool:
    def fail(text: str) -> str:
        raise error

    async def afail(text: str) -> str:
        raise error

    return StructuredTool.from_function(
        None if coroutine else fail, afail if coroutine else None, name="look_up", description="Look something up."
    )


noted: list[str] = []


@tool
def note(text: str) -> str:
    """Note something."""
    noted.append(text)
    return f"noted {text}"


def call_text(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


READY = '{"name": "ready_to_answer", "arguments": {}}'
ALL_CALLS = [call_text("look_up", text="a"), call_text("note", text="b"), READY]
# The model rewrites the failed call, which fails again.
PLANS: dict[str, Any] = {
    "You_solve": 'Plan:\n1. look_up("a")\n2. note("b")',
    "Write_a_call": '{"name": "look_up", "arguments": {"text": "c"}}',
    "You_answer": "It is b.",
}
SCRIPTS: dict[str, dict[str, Any]] = {
    "react": {"You_think": "I look it up.", "You_carry_out": ALL_CALLS, "You_answer": "It is b."},
    "rewoo": PLANS,
    "llm_compiler": PLANS,
    "plan_execute": PLANS,
    "supervisor": {
        "You_lead": ['{"name": "searcher", "arguments": {"task": "Look a up"}}', READY],
        "You_think": "I look it up.",
        "You_carry_out": ALL_CALLS,
        "You_answer": "It is b.",
    },
}


def graph_of(name: str, look_up: BaseTool) -> Any:
    noted.clear()
    llm = scripted_chat(scripted_replies(**SCRIPTS[name]), policy="off")
    tools: Any = {"searcher": [look_up, note]} if name == "supervisor" else [look_up, note]
    options: dict[str, Any] = {"max_plans": 1} if name in ("plan_execute", "llm_compiler") else {}
    return getattr(templates, f"build_{name}")(llm, tools, InMemorySaver(), **options)


INPUT: Any = {"messages": [("human", "?")]}


def tool_results(state: dict[str, Any]) -> list[tuple[str, bool]]:
    """The text of each tool message, and whether it is an error."""
    return [
        (message.text, message.status == "error") for message in state["messages"] if isinstance(message, ToolMessage)
    ]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("error", ERRORS_IN_GRAPHS, ids=lambda error: type(error).__name__)
async def test_graph_continues_after_any_exception_of_a_tool(name: str, error: BaseException) -> None:
    config: Any = {"configurable": {"thread_id": "1"}}
    if isinstance(error, Exception):
        state = graph_of(name, failing_tool(error, coroutine=False)).invoke(INPUT, config)
        check_final_state(name, state, type(error).__name__)
        state = await graph_of(name, failing_tool(error, coroutine=False)).ainvoke(INPUT, config)
        check_final_state(name, state, type(error).__name__)
    state = await graph_of(name, failing_tool(error, coroutine=True)).ainvoke(INPUT, config)
    check_final_state(name, state, type(error).__name__)


def check_final_state(name: str, state: dict[str, Any], error: str) -> None:
    assert state["messages"][-1].text == "It is b."
    results = tool_results(state)
    if name == "supervisor":  # its specialist is a react graph, which keeps its messages to itself
        assert (results, noted) == ([("It is b.", False)], ["b"]), f"a call after one that raised {error} runs"
        return
    failed = [text for text, is_failed in results if is_failed]
    assert failed
    assert all(0 < len(text) <= 2 * MAX_RESULT_LENGTH for text in failed)
    if name != "plan_execute":  # it plans again after a failed step
        assert ("noted b", False) in results, f"a call after one that raised {error} runs"


@pytest.mark.parametrize("name", SCRIPTS)
def test_keyboard_interrupt_in_a_tool_ends_the_run(name: str) -> None:
    def fail(text: str) -> str:
        raise KeyboardInterrupt

    look_up = StructuredTool.from_function(fail, name="look_up", description="Look something up.")
    with pytest.raises(KeyboardInterrupt):
        graph_of(name, look_up).invoke(INPUT, {"configurable": {"thread_id": "1"}})


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "supervisor"])
@pytest.mark.parametrize(
    "returned", ["\ud800", None, b"\xff", {"a": {1}}, object(), ["x"]], ids=lambda returned: type(returned).__name__
)
async def test_any_return_value_of_a_tool_becomes_encodable_text(name: str, returned: Any) -> None:
    look_up = StructuredTool.from_function(lambda text: returned, name="look_up", description="Look something up.")
    config: Any = {"configurable": {"thread_id": "1"}}
    for state in (graph_of(name, look_up).invoke(INPUT, config), await graph_of(name, look_up).ainvoke(INPUT, config)):
        assert state["messages"][-1].text == "It is b."
        for text, _ in tool_results(state):
            text.encode()


# --- tools alone, and in graphs of LangChain and LangGraph ---


def make_failing_tool(error: Exception) -> BaseTool:
    @make_tool(rest="ask for less")
    def look_up(text: str, number: int = 1) -> str:
        """Look something up."""
        raise error

    return look_up


def tool_call(name: str, arguments: Any) -> dict[str, Any]:
    return {"name": name, "args": arguments, "id": "1", "type": "tool_call"}


@pytest.mark.parametrize(
    "error", [error for error in ERRORS if isinstance(error, Exception)], ids=lambda error: type(error).__name__
)
async def test_tool_returns_exceptions_as_error_messages(error: Exception) -> None:
    failing = make_failing_tool(error)
    for message in (
        failing.invoke(tool_call("look_up", {"text": "a"})),
        await failing.ainvoke(tool_call("look_up", {"text": "a"})),
        failing.invoke(tool_call("look_up", {"other": "a"})),
    ):
        assert message.status == "error"
        assert 0 < len(message.text) <= MAX_RESULT_LENGTH
        message.text.encode()


Kind = Literal["red", "green"]


class Box(BaseModel):
    """A box."""

    size: int


@make_tool(rest="ask for less")
def paint(kind: Kind, box: Box, more: list[int] | None = None) -> str:
    """Paint a box."""
    return f"{kind} {box.size} {more}"


@make_tool(rest="ask for less", description="Paint a box, in time.")
async def paint_in_time(kind: Kind, box: Box) -> str:
    await asyncio.sleep(0)
    if box.size < 0:
        raise OSError(5, "no such size")
    return kind * box.size


async def test_make_tool_supports_typed_arguments_and_coroutines() -> None:
    arguments = {"kind": "red", "box": {"size": 3}}
    assert paint.invoke(arguments) == "red 3 None"
    assert "kind: Input should be 'red' or 'green'" in paint.invoke({**arguments, "kind": "blue"})
    assert paint_in_time.description == "Paint a box, in time."
    assert await paint_in_time.ainvoke(arguments) == "redredred"
    assert len(await paint_in_time.ainvoke({**arguments, "box": {"size": 1_000_000}})) <= MAX_RESULT_LENGTH
    message = await paint_in_time.ainvoke(tool_call("paint_in_time", {**arguments, "box": {"size": -1}}))
    assert (message.text, message.status) == ("OSError: [Errno 5] no such size", "error")


def test_make_tool_supports_interrupts() -> None:
    @make_tool(rest="ask for less")
    def look_up(text: str) -> str:
        """Look something up."""
        return str(interrupt(text))

    decisions = ['{"name": "look_up", "arguments": {"text": "Which?"}}', READY]
    script = {"You_think": "I ask.", "You_carry_out": decisions, "You_answer": "It is b."}
    llm = scripted_chat(scripted_replies(**script), policy="off")
    graph: Any = templates.build_react(llm, [look_up], InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert graph.invoke({"messages": [("human", "?")]}, config)["__interrupt__"][0].value == "Which?"
    state = graph.invoke(Command(resume="b"), config)
    assert [message.text for message in state["messages"] if isinstance(message, ToolMessage)] == ["b"]


def test_make_tool_takes_name_description_and_schema_from_the_function() -> None:
    failing = make_failing_tool(ValueError("x"))
    assert (failing.name, failing.description) == ("look_up", "Look something up.")
    assert failing.args == {
        "text": {"title": "Text", "type": "string"},
        "number": {"default": 1, "title": "Number", "type": "integer"},
    }


def test_keyboard_interrupt_passes_through_a_tool() -> None:
    @make_tool(rest="ask for less")
    def look_up(text: str) -> str:
        """Look something up."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look_up.invoke({"text": "a"})


async def test_tool_node_and_create_agent_continue_after_tool_errors(tmp_path: Path) -> None:
    """Both raise a tool's exception, unless the tool returns it as an error."""
    folder = tmp_path / "gone"
    folder.mkdir()
    read, write = make_file_tools(folder)
    folder.rmdir()
    calls: list[Any] = [
        tool_call("calculator", {"expression": "1e" + "9" * 21}),
        tool_call("calculator", {"sum": 1}),
        tool_call("read_file", {"name": "a"}) | {"id": "2"},
        tool_call("write_file", {"name": "\ud800", "text": "\ud800"}) | {"id": "3"},
    ]
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([calculator, read, write]))
    builder.add_edge(START, "tools")
    builder.add_edge("tools", END)
    graph = builder.compile()
    question = {"messages": [HumanMessage("?"), AIMessage("", tool_calls=calls)]}
    for state in (graph.invoke(question), await graph.ainvoke(question)):
        results = [message for message in state["messages"] if isinstance(message, ToolMessage)]
        assert [message.status for message in results] == ["error"] * 4
    replies = [
        call_text("calculator", expression="1e" + "9" * 21) + "\n" + call_text("read_file", name="a"),
        "It cannot be done.",
    ]
    agent: Any = create_agent(
        scripted_chat(scripted_replies(You=replies), policy="off"), [calculator, read], system_prompt="You act."
    )
    state = agent.invoke({"messages": [HumanMessage("How much?")]})
    assert [message.status for message in state["messages"] if isinstance(message, ToolMessage)] == ["error"] * 2
    assert state["messages"][-1].text == "It cannot be done."


# --- the limit on results ---


@given(st.text(), st.integers(0, 300), st.integers(0, 60_000), st.text(max_size=30))
def test_long_text_is_truncated_at_the_limit_with_a_note(text: str, repeats: int, limit: int, rest: str) -> None:
    text = text * repeats * 20
    result = truncate(text, rest, limit)
    if len(text) <= min(limit, MAX_RESULT_LENGTH):
        assert result == text
        return
    assert len(result) <= MAX_RESULT_LENGTH
    shown, note = result.rsplit("\n… (cut: ", 1)
    assert text.startswith(shown)
    assert len(shown) <= limit
    assert note.startswith(f"{len(shown):,} of {len(text):,} characters; ")


@pytest.mark.parametrize("length", [MAX_RESULT_LENGTH, MAX_RESULT_LENGTH + 1, 1_000_000])
def test_long_text_fills_the_limit(length: int) -> None:
    result = truncate("x" * length, "ask for less")
    assert MAX_RESULT_LENGTH - 10 < len(result) <= MAX_RESULT_LENGTH


def test_errors_without_a_message_show_their_type() -> None:
    assert error_text(ValueError("wrong")) == "wrong"
    assert error_text(KeyError("x")) == "KeyError: 'x'"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(Unprintable()) == "Unprintable"
    assert (
        error_text(OSError(2, "No such file or directory")) == "FileNotFoundError: [Errno 2] No such file or directory"
    )


# --- tools and middleware that block, end programs, ask models or never return ---


ENDINGS: list[type[BaseException]] = [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError]
helper = scripted_chat("Lisbon.", policy="off")


def plan_of(name: str, tools: list[BaseTool], **options: Any) -> Any:
    script = {"You_solve": 'Plan:\n1. look_up("a")', "Write_a_call": call_text("look_up", text="b"), "You_": "Done."}
    llm = scripted_chat(scripted_replies(**script), policy="off")
    return getattr(templates, f"build_{name}")(llm, tools, **options)


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("ending", ENDINGS)
async def test_tool_that_ends_programs_is_a_failed_call(ending: Any, coroutine: bool, read_only: bool) -> None:
    """A `KeyboardInterrupt` in a synchronous tool of `invoke` is Ctrl-C, which passes."""
    tool = failing_tool(ending("bye"), coroutine=coroutine)
    tool.metadata = {"readOnlyHint": read_only}
    graph = plan_of("llm_compiler", [tool], max_plans=1)
    states = [await graph.ainvoke(INPUT)]
    if coroutine or ending is not KeyboardInterrupt:
        states.append(await asyncio.to_thread(graph.invoke, INPUT))
    for state in states:
        assert state["messages"][-1].text == "Done."
        assert [ending.__name__ in text for text, is_failed in tool_results(state)][:2] == [True, True]
    assert helper.invoke("?").text == "Lisbon."


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize("ending", [RuntimeError, *ENDINGS])
async def test_call_beside_one_that_raises_anything_runs_to_its_end(ending: Any, coroutine: bool) -> None:
    raised, noted = threading.Event(), threading.Event()

    def end(text: str) -> str:
        raised.set()
        raise ending("bye")

    def wait_and_note(text: str) -> str:
        assert raised.wait(30)
        noted.set()
        return "noted"

    async def aend(text: str) -> str:
        return end(text)

    async def await_and_note(text: str) -> str:
        return await asyncio.to_thread(wait_and_note, text)

    functions = {"look_up": (end, aend), "note": (wait_and_note, await_and_note)}
    tools: list[BaseTool] = [
        StructuredTool.from_function(
            None if coroutine else function, acall if coroutine else None, name=name, description="Act."
        )
        for name, (function, acall) in functions.items()
    ]
    both = call_text("look_up", text="a") + "\n" + call_text("note", text="b")
    script = {"You_think": "I act.", "You_carry_out": [both, READY], "You_": "Done."}
    for asynchronous in (False, True):
        if ending is KeyboardInterrupt and not asynchronous and not coroutine:
            continue  # Ctrl-C
        raised.clear()
        noted.clear()
        graph = templates.build_react(scripted_chat(scripted_replies(**script), policy="off"), tools)
        state = await (graph.ainvoke(INPUT) if asynchronous else asyncio.to_thread(graph.invoke, INPUT))
        (_, failed), (text, noted_failed) = tool_results(state)[:2]
        assert (failed, text, noted_failed, noted.is_set()) == (True, "noted", False, True)
        assert state["messages"][-1].text == "Done."


SCHEMA: Any = {"type": "object", "properties": {"text": {"type": "string"}, "count": {"type": "integer"}}}
SCHEMA |= {"required": ["text", "count"]}


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_call_that_a_json_schema_refuses_is_not_run_and_the_model_reads_why(asynchronous: bool) -> None:
    received: list[dict[str, Any]] = []

    def look(**arguments: Any) -> str:
        received.append(arguments)
        return "found"

    tool = StructuredTool(
        name="look_up",
        description="Look.",
        args_schema=SCHEMA,
        func=look,
    )
    wrong: list[dict[str, Any]] = [{"text": "a", "count": "two"}, {"text": 1}]
    calls = [call_text("look_up", **arguments) for arguments in [*wrong, {"text": "a", "count": 2}]]
    script = {"You_think": "I look.", "You_carry_out": [*calls, READY], "You_": "Done."}
    graph = templates.build_react(scripted_chat(scripted_replies(**script), policy="off"), [tool])
    state = await graph.ainvoke(INPUT) if asynchronous else graph.invoke(INPUT)
    texts, failed = zip(*tool_results(state)[:3], strict=True)
    assert failed == (True, True, False)
    assert "wrong arguments: count: 'two' is not of type 'integer'" in texts[0]
    assert "'count' is a required property" in texts[1]
    assert "text: 1 is not of type 'string'" in texts[1]
    assert received == [{"text": "a", "count": 2}]


@pytest.mark.parametrize("name", ["react", "rewoo", "llm_compiler", "plan_execute", "supervisor"])
@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {f"a{at}": {"anyOf": [{"$ref": f"#/$defs/a{at + 1}"}] * 9} for at in range(20)} | {"a20": {}}},
        {"properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}},
        {"properties": {"a": {"enum": ["x" * 100_000]}}},
    ],
)
def test_schema_bomb_of_a_users_tool_is_one_error(name: str, schema: Any) -> None:
    root = {"properties": {"a": {"$ref": "#/$defs/a0"}}} | schema
    tool = StructuredTool(name="bomb", description="Bomb.", args_schema=root, func=lambda: "")
    tools: Any = {"searcher": [tool]} if name == "supervisor" else [tool]
    with pytest.raises(ConfigurationError, match="'bomb' cannot be used"):
        getattr(templates, f"build_{name}")(helper, tools)


class OwnTool(BaseTool):
    """A user's class of tools, which counts its calls."""

    name: str = "look_up"
    description: str = "Act."
    action: Any
    calls: list[str] = Field(default_factory=list)

    def _run(self, text: str, run_manager: Any = None) -> str:
        self.calls.append(text)
        return str(self.action())


class OwnAsyncTool(OwnTool):
    """A user's class of tools that have a coroutine only."""

    def _run(self, text: str, run_manager: Any = None) -> str:
        raise NotImplementedError

    async def _arun(self, text: str) -> str:
        self.calls.append(text)
        return str(self.action())


@pytest.mark.parametrize("kind", [OwnTool, OwnAsyncTool])
@pytest.mark.parametrize("read_only", [False, True])
async def test_tool_of_a_users_own_class_is_contained_as_others_are(kind: type[OwnTool], read_only: bool) -> None:
    def end() -> None:
        raise ending("bye")

    for ending in ENDINGS:
        tool = kind(action=end, metadata={"readOnlyHint": read_only}, calls=[])
        graph = plan_of("llm_compiler", [tool], max_plans=1)
        states = [await graph.ainvoke(INPUT)]
        if kind is OwnAsyncTool or ending is not KeyboardInterrupt:
            states.append(await asyncio.to_thread(graph.invoke, INPUT))
        for state in states:
            assert [ending.__name__ in text for text, is_failed in tool_results(state)][:2] == [True, True]
        assert tool.calls.count("a") == len(states)
    asking = plan_of("rewoo", [kind(action=lambda: helper.invoke("?").text)])
    release, started = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        release.wait(60)

    blocking = plan_of("rewoo", [kind(action=block)])
    run = asyncio.create_task(blocking.ainvoke(INPUT) if kind is OwnTool else asyncio.to_thread(blocking.invoke, INPUT))
    try:
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(started.wait, 30)
            assert tool_results(await asking.ainvoke(INPUT)) == [("Lisbon.", False)]
            assert tool_results(await asyncio.to_thread(asking.invoke, INPUT)) == [("Lisbon.", False)]
    finally:
        release.set()
        await run


class OwnCallTool(OwnTool):
    """A user's class of tools that overrides LangChain's own methods."""

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        self.action()
        return super().invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        self.action()
        return await super().ainvoke(input, config, **kwargs)


class OwnCallStructuredTool(StructuredTool):
    """A user's class of functions, whose `ainvoke` is LangChain's, which calls `invoke`."""

    action: Any

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        self.action()
        return super().invoke(input, config, **kwargs)


def own_calls(action: Any, **fields: Any) -> list[BaseTool]:
    """Tools of both classes, and tools whose validators and handlers of errors are functions of the user."""

    def look_up(text: str) -> str:
        raise ToolException("refused")

    class Checked(BaseModel):
        text: str

        @field_validator("text")
        @classmethod
        def check(cls, text: str) -> str:
            action()
            return text

    about: dict[str, Any] = {"name": "look_up", "description": "Look up.", **fields}
    function = StructuredTool.from_function(look_up, **about)
    return [
        OwnCallTool(action=lambda: "b", **fields).model_copy(update={"action": action}),
        OwnCallStructuredTool(action=action, func=lambda text: "b", args_schema=function.args_schema, **about),
        function.model_copy(update={"handle_tool_error": lambda _: str(action())}),
        StructuredTool.from_function(lambda text: "b", args_schema=Checked, **about),
    ]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_methods_validators_and_handlers_of_a_users_tool_are_contained(ending: Any) -> None:
    def end() -> None:
        raise ending("bye")

    for own in own_calls(end, metadata={"readOnlyHint": True}):
        graph = plan_of("llm_compiler", [own], max_plans=1)
        states = [await graph.ainvoke(INPUT)]
        if ending is not KeyboardInterrupt:
            states.append(await asyncio.to_thread(graph.invoke, INPUT))
        for state in states:
            assert [ending.__name__ in text for text, is_failed in tool_results(state)][:2] == [True, True]
    assert helper.invoke("?").text == "Lisbon."


async def test_methods_of_a_users_tool_are_called_once_and_may_ask_a_model() -> None:
    answers: list[str] = []

    def ask() -> str:
        answers.append(helper.invoke("?").text)
        return answers[-1]

    tools = own_calls(ask)
    # The first class overrides a method that calls the other; the executor writes a call that failed anew.
    expected = [("Lisbon.", 2), ("b", 1), ("Lisbon.", 2), ("b", 1)]
    for run in (lambda graph: graph.ainvoke(INPUT), lambda graph: asyncio.to_thread(graph.invoke, INPUT)):
        for own, (text, count) in zip(tools, expected, strict=True):
            answers.clear()
            state = await run(plan_of("rewoo", [own]))
            assert tool_results(state)[0][0].startswith(text)
            assert len(answers) == count


def test_method_that_is_not_implemented_further_down_is_an_error() -> None:
    def fail() -> None:
        raise NotImplementedError("later")

    class Both(OwnTool):
        async def _arun(self, text: str) -> str:
            raise AssertionError

    with pytest.raises(NotImplementedError, match="later"):
        with_sync_call(Both(action=fail)).invoke({"text": "a"})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("coroutine", [False, True])
async def test_tool_may_ask_a_model(asynchronous: bool, coroutine: bool) -> None:
    async def aask(text: str) -> str:
        return helper.invoke(text).text + (await helper.ainvoke(text)).text

    def ask(text: str) -> str:
        return helper.invoke(text).text * 2

    tool = StructuredTool.from_function(
        None if coroutine else ask, aask if coroutine else None, name="look_up", description="Ask."
    )
    graph = plan_of("rewoo", [tool])
    async with asyncio.timeout(30):
        state = await (graph.ainvoke(INPUT) if asynchronous else asyncio.to_thread(graph.invoke, INPUT))
    assert tool_results(state) == [("Lisbon.Lisbon.", False)]


@pytest.mark.parametrize("coroutine", [False, True])
async def test_tool_that_never_returns_holds_up_only_its_own_run(coroutine: bool) -> None:
    """More calls hang than the event loop has threads."""
    release, hanging = threading.Event(), threading.Semaphore(0)

    async def ahang(text: str) -> str:
        return hang(text)

    def hang(text: str) -> str:
        if text == "a":
            hanging.release()
            release.wait(60)
        return text

    tool = StructuredTool.from_function(
        None if coroutine else hang, ahang if coroutine else None, name="look_up", description="Hang."
    )
    graph = plan_of("rewoo", [tool])
    # A coroutine that blocks would block the test's own event loop: its graphs are invoked in threads.
    count = 1 if coroutine else 40
    runs = [
        asyncio.create_task(asyncio.to_thread(graph.invoke, INPUT) if coroutine else graph.ainvoke(INPUT))
        for _ in range(count)
    ]
    try:
        async with asyncio.timeout(60):
            for _ in range(count):
                while not hanging.acquire(blocking=False):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert helper.invoke("?").text == "Lisbon."
            assert (await helper.ainvoke("?")).text == "Lisbon."
            other = StructuredTool.from_function(lambda text: "b", name="look_up", description="Other.")
            assert tool_results(await plan_of("rewoo", [other]).ainvoke(INPUT)) == [("b", False)]
            blocked = with_sync_call(tool)
            assert await asyncio.to_thread(blocked.invoke, {"text": "later"}) == "later"
    finally:
        release.set()
        await asyncio.gather(*runs)


class Misbehaving(AgentMiddleware[Any, Any, Any]):
    """Middleware that does something in each of its hooks."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self._action = action

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self._action()
        return handler(request)

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        self._action()
        return await handler(request)


class MisbehavingEarly(AgentMiddleware[Any, Any, Any]):
    """Middleware that does something in a hook that is a node of the graph."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self._action = action

    def before_model(self, state: Any, runtime: Any) -> None:
        self._action()


@pytest.mark.parametrize("kind", [Misbehaving, MisbehavingEarly])
@pytest.mark.parametrize("ending", ENDINGS)
def test_middleware_that_ends_programs_ends_its_own_run_with_an_error(ending: Any, kind: Any) -> None:
    def end() -> None:
        raise ending("bye")

    graph = plan_of("rewoo", [note], middleware=[kind(end)])
    with pytest.raises(ForeignCodeError, match=ending.__name__):
        asyncio.run(graph.ainvoke(INPUT))
    with pytest.raises(KeyboardInterrupt if ending is KeyboardInterrupt else ForeignCodeError):
        graph.invoke(INPUT)
    assert helper.invoke("?").text == "Lisbon."


def test_middleware_that_asks_a_model_or_never_returns_holds_up_only_its_own_run() -> None:
    look_up = StructuredTool.from_function(lambda text: "b", name="look_up", description="Look up.")
    asking = plan_of("rewoo", [look_up], middleware=[Misbehaving(lambda: helper.invoke("?"))])
    assert asking.invoke(INPUT)["messages"][-1].text == "Done."
    release, started = threading.Event(), threading.Event()

    def hang() -> None:
        started.set()
        release.wait(60)

    hanging = plan_of("rewoo", [look_up], middleware=[Misbehaving(hang)])
    thread = threading.Thread(target=hanging.invoke, args=(INPUT,), daemon=True)
    thread.start()
    assert started.wait(60)
    assert asking.invoke(INPUT)["messages"][-1].text == "Done."
    release.set()
    thread.join(60)
    assert not thread.is_alive()


def test_event_loop_of_a_tool_ends_with_the_tool() -> None:
    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.endswith("tool-passing")]

    async def passing(text: str) -> str:
        """Pass."""
        return text

    tool = with_sync_call(StructuredTool.from_function(coroutine=passing))
    assert tool.invoke({"text": "a"}) == "a"
    (thread,) = [thread for thread in threading.enumerate() if thread.name.endswith("tool-passing")]
    del tool, passing
    gc.collect()
    thread.join(30)
    assert threads() == []
