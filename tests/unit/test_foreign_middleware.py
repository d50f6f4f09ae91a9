"""A user's middleware that raises: only its own run ends. `test_tool_use.py` has others that block or ask a model."""

from __future__ import annotations

from collections.abc import Callable
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
