"""Graphs go on after whatever a tool raises, and tools of this library raise nothing themselves."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool, ToolException, tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, interrupt
from pydantic import BaseModel

from lookahead_agent.agents import templates
from lookahead_agent.agents.tool_use import MAX_RESULT_LENGTH, cut, error_text, make_tool
from lookahead_agent.testing import scripted_chat, scripted_replies
from tools.calculator import calculator
from tools.files import make_file_tools


class Unprintable(Exception):
    """An error that cannot even be printed."""

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
IN_GRAPHS = [error for error in ERRORS if type(error) in (OSError, StopIteration, NotImplementedError, KeyError)]
IN_GRAPHS += [error for error in ERRORS if type(error) in (asyncio.CancelledError, Unprintable, ToolException)]


def broken(error: BaseException, *, coroutine: bool) -> BaseTool:
    """A tool that raises it, and next to it one that works."""

    def fail(text: str) -> str:
        raise error

    async def afail(text: str) -> str:
        raise error

    return StructuredTool.from_function(
        None if coroutine else fail, afail if coroutine else None, name="look_up", description="Look something up."
    )


@tool
def note(text: str) -> str:
    """Note something."""
    return f"noted {text}"


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


BOTH = '[{"name": "look_up", "arguments": {"text": "a"}}, {"name": "note", "arguments": {"text": "b"}}]'
READY = '{"name": "ready_to_answer", "arguments": {}}'
# The call that failed is written anew, and fails again.
PLANS: dict[str, Any] = {
    "You_solve": 'Plan:\n1. look_up("a")\n2. note("b")',
    "Write_a_call": '{"name": "look_up", "arguments": {"text": "c"}}',
    "You_answer": "It is b.",
}
SCRIPTS: dict[str, dict[str, Any]] = {
    "react": {"You_think": "I look it up.", "You_carry_out": [BOTH, READY], "You_answer": "It is b."},
    "rewoo": PLANS,
    "llm_compiler": PLANS,
    "plan_execute": PLANS,
    "supervisor": {
        "You_lead": ['{"name": "searcher", "arguments": {"task": "Look a up"}}', READY],
        "You_think": "I look it up.",
        "You_carry_out": [BOTH, READY],
        "You_answer": "It is b.",
    },
}


def graph_of(name: str, look_up: BaseTool) -> Any:
    llm = scripted_chat(scripted_replies(**SCRIPTS[name]), policy="off")
    tools: Any = {"searcher": [look_up, note]} if name == "supervisor" else [look_up, note]
    more: dict[str, Any] = {"max_plans": 1} if name in ("plan_execute", "llm_compiler") else {}
    return getattr(templates, f"build_{name}")(llm, tools, InMemorySaver(), **more)


ASKED: Any = {"messages": [("human", "?")]}


def outcomes(state: dict[str, Any]) -> list[tuple[str, bool]]:
    """What became of the calls."""
    return [
        (message.text, message.status == "error") for message in state["messages"] if isinstance(message, ToolMessage)
    ]


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("error", IN_GRAPHS, ids=lambda error: type(error).__name__)
async def test_a_graph_goes_on_after_whatever_a_tool_raises(name: str, error: BaseException) -> None:
    config: Any = {"configurable": {"thread_id": "1"}}
    if isinstance(error, Exception):
        done = graph_of(name, broken(error, coroutine=False)).invoke(ASKED, config)
        check(name, done, type(error).__name__)
        done = await graph_of(name, broken(error, coroutine=False)).ainvoke(ASKED, config)
        check(name, done, type(error).__name__)
    done = await graph_of(name, broken(error, coroutine=True)).ainvoke(ASKED, config)
    check(name, done, type(error).__name__)


def check(name: str, state: dict[str, Any], error: str) -> None:
    assert state["messages"][-1].text == "It is b."
    if name == "supervisor":
        return  # its specialist is a react graph, whose messages are its own
    made = outcomes(state)
    failed = [text for text, is_failed in made if is_failed]
    assert failed
    assert all(0 < len(text) <= 2 * MAX_RESULT_LENGTH for text in failed)
    if name != "plan_execute":  # which plans anew after a step that failed
        assert ("noted b", False) in made, f"a call beside one that raised {error} is made"


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_ends_the_program_ends_the_run(name: str) -> None:
    def fail(text: str) -> str:
        raise KeyboardInterrupt

    look_up = StructuredTool.from_function(fail, name="look_up", description="Look something up.")
    with pytest.raises(KeyboardInterrupt):
        graph_of(name, look_up).invoke(ASKED, {"configurable": {"thread_id": "1"}})


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "supervisor"])
@pytest.mark.parametrize(
    "returned", ["\ud800", None, b"\xff", {"a": {1}}, object(), ["x"]], ids=lambda returned: type(returned).__name__
)
async def test_whatever_a_tool_returns_is_a_text_that_can_be_saved(name: str, returned: Any) -> None:
    look_up = StructuredTool.from_function(lambda text: returned, name="look_up", description="Look something up.")
    config: Any = {"configurable": {"thread_id": "1"}}
    for state in (graph_of(name, look_up).invoke(ASKED, config), await graph_of(name, look_up).ainvoke(ASKED, config)):
        assert state["messages"][-1].text == "It is b."
        for text, _ in outcomes(state):
            text.encode()


# --- tools by themselves, in graphs of LangChain and LangGraph ---


def raising(error: Exception) -> BaseTool:
    @make_tool(rest="ask for less")
    def look_up(text: str, number: int = 1) -> str:
        """Look something up."""
        raise error

    return look_up


def request(name: str, arguments: Any) -> dict[str, Any]:
    return {"name": name, "args": arguments, "id": "1", "type": "tool_call"}


@pytest.mark.parametrize(
    "error", [error for error in ERRORS if isinstance(error, Exception)], ids=lambda error: type(error).__name__
)
async def test_a_tool_returns_its_errors(error: Exception) -> None:
    made = raising(error)
    for message in (
        made.invoke(request("look_up", {"text": "a"})),
        await made.ainvoke(request("look_up", {"text": "a"})),
        made.invoke(request("look_up", {"other": "a"})),
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


async def test_tools_of_ones_own_may_have_any_types_and_be_coroutines() -> None:
    given = {"kind": "red", "box": {"size": 3}}
    assert paint.invoke(given) == "red 3 None"
    assert "kind: Input should be 'red' or 'green'" in paint.invoke({**given, "kind": "blue"})
    assert paint_in_time.description == "Paint a box, in time."
    assert await paint_in_time.ainvoke(given) == "redredred"
    assert len(await paint_in_time.ainvoke({**given, "box": {"size": 1_000_000}})) <= MAX_RESULT_LENGTH
    message = await paint_in_time.ainvoke(request("paint_in_time", {**given, "box": {"size": -1}}))
    assert (message.text, message.status) == ("OSError: [Errno 5] no such size", "error")


def test_a_made_tool_may_ask_somebody() -> None:
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


def test_a_made_tool_is_described_as_its_function_is() -> None:
    made = raising(ValueError("x"))
    assert (made.name, made.description) == ("look_up", "Look something up.")
    assert made.args == {
        "text": {"title": "Text", "type": "string"},
        "number": {"default": 1, "title": "Number", "type": "integer"},
    }


def test_what_ends_the_program_passes_a_tool() -> None:
    @make_tool(rest="ask for less")
    def look_up(text: str) -> str:
        """Look something up."""
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        look_up.invoke({"text": "a"})


async def test_langgraphs_own_tool_node_and_langchains_agents_go_on(tmp_path: Path) -> None:
    """They raise what a tool raises, unless the tool returns it."""
    folder = tmp_path / "gone"
    folder.mkdir()
    read, write = make_file_tools(folder)
    folder.rmdir()
    calls: list[Any] = [
        request("calculator", {"expression": "1e" + "9" * 21}),
        request("calculator", {"sum": 1}),
        request("read_file", {"name": "a"}) | {"id": "2"},
        request("write_file", {"name": "\ud800", "text": "\ud800"}) | {"id": "3"},
    ]
    builder = StateGraph(MessagesState)
    builder.add_node("tools", ToolNode([calculator, read, write]))
    builder.add_edge(START, "tools")
    builder.add_edge("tools", END)
    graph = builder.compile()
    asked = {"messages": [HumanMessage("?"), AIMessage("", tool_calls=calls)]}
    for state in (graph.invoke(asked), await graph.ainvoke(asked)):
        observed = [message for message in state["messages"] if isinstance(message, ToolMessage)]
        assert [message.status for message in observed] == ["error"] * 4
    replies = [
        call("calculator", expression="1e" + "9" * 21) + "\n" + call("read_file", name="a"),
        "It cannot be done.",
    ]
    agent: Any = create_agent(
        scripted_chat(scripted_replies(You=replies), policy="off"), [calculator, read], system_prompt="You act."
    )
    state = agent.invoke({"messages": [HumanMessage("How much?")]})
    assert [message.status for message in state["messages"] if isinstance(message, ToolMessage)] == ["error"] * 2
    assert state["messages"][-1].text == "It cannot be done."


# --- the bound ---


@given(st.text(), st.integers(0, 300), st.integers(0, 60_000), st.text(max_size=30))
def test_a_text_is_cut_at_its_bound_and_says_so(text: str, times: int, most: int, rest: str) -> None:
    text = text * times * 20
    said = cut(text, rest, most)
    if len(text) <= min(most, MAX_RESULT_LENGTH):
        assert said == text
        return
    assert len(said) <= MAX_RESULT_LENGTH
    shown, line = said.rsplit("\n… (cut: ", 1)
    assert text.startswith(shown)
    assert len(shown) <= most
    assert line.startswith(f"{len(shown):,} of {len(text):,} characters; ")


@pytest.mark.parametrize("length", [MAX_RESULT_LENGTH, MAX_RESULT_LENGTH + 1, 1_000_000])
def test_as_much_is_shown_as_may_be(length: int) -> None:
    said = cut("x" * length, "ask for less")
    assert MAX_RESULT_LENGTH - 10 < len(said) <= MAX_RESULT_LENGTH


def test_an_error_has_words() -> None:
    assert error_text(ValueError("wrong")) == "wrong"
    assert error_text(KeyError("x")) == "KeyError: 'x'"
    assert error_text(ValueError()) == "ValueError"
    assert error_text(Unprintable()) == "Unprintable"
    assert (
        error_text(OSError(2, "No such file or directory")) == "FileNotFoundError: [Errno 2] No such file or directory"
    )
