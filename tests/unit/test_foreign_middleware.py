"""A user's middleware that blocks, asks a model, or raises: only its own run waits or ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from langchain.agents.middleware import AgentMiddleware
from langchain_core.tools import tool

from lookahead_agent.agents.templates import build_plan_execute, build_react
from lookahead_agent.errors import ForeignCodeError
from tests.unit.chat import scripted_chat

QUESTION = {"messages": [("human", "Two and two?")]}


@tool
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


class _Stop(BaseException):
    """Ends a run, and is no Exception."""


class Foreign(AgentMiddleware):
    """Calls a function before each of the model's calls."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        self._function()
        return handler(request)


@pytest.mark.parametrize("build", [build_react, build_plan_execute])
def test_middleware_that_blocks_holds_only_its_own_run(build: Any) -> None:
    llm = scripted_chat("Four.", policy="off")
    begun, released = threading.Event(), threading.Event()

    def block() -> None:
        begun.set()
        assert released.wait(60)

    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(build(llm, [add], middleware=[Foreign(block)]).invoke, QUESTION)
        try:
            assert begun.wait(60)
            assert llm.invoke("And three?").text == "Four."
            assert build(llm, [add]).invoke(QUESTION)["messages"][-1].text == "Four."
            assert not run.done()
        finally:
            released.set()
        assert run.result(60)["messages"][-1].text == "Four."


@pytest.mark.parametrize("build", [build_react, build_plan_execute])
def test_middleware_asks_a_model(build: Any) -> None:
    llm, answers = scripted_chat("Four.", policy="off"), list[str]()
    agent = build(llm, [add], middleware=[Foreign(lambda: answers.append(llm.invoke("Before?").text))])
    assert agent.invoke(QUESTION)["messages"][-1].text == "Four."
    assert set(answers) == {"Four."}


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (SystemExit(3), ForeignCodeError),
        (GeneratorExit(), ForeignCodeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (_Stop(), _Stop),
    ],
)
@pytest.mark.parametrize("build", [build_react, build_plan_execute])
def test_middleware_that_raises_ends_only_its_own_run(
    build: Any, error: BaseException, raised: type[BaseException]
) -> None:
    llm = scripted_chat("Four.", policy="off")

    def fail() -> None:
        raise error

    with pytest.raises(raised):
        build(llm, [add], middleware=[Foreign(fail)]).invoke(QUESTION)
    assert llm.invoke("And three?").text == "Four."
    assert build(llm, [add]).invoke(QUESTION)["messages"][-1].text == "Four."
