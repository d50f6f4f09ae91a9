"""The live display of a run's steps on the terminal."""

from __future__ import annotations

import io

from langchain_core.runnables import RunnableLambda

from lookahead_agent import ChatLookahead
from lookahead_agent.cli.agent_run import LiveSteps
from lookahead_agent.cli.terminal import Terminal
from tests.unit.chat import scripted_engines


def test_live_steps_show_each_verdict_and_commit() -> None:
    engines = scripted_engines(
        lambda _: "First this.\n\nThen that.\n\nIt is 4.", lambda _: "First this.\n\nThen 5.\n\nIt is 4."
    )
    llm = ChatLookahead(engines=engines, policy="exact:depth=2")
    terminal = Terminal(file=io.StringIO(), force_terminal=True, width=100)
    RunnableLambda(llm.invoke).invoke("?", {"callbacks": [LiveSteps(terminal)]})
    lines = terminal.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("step 1: draft accepted" in line and "First this." in line for line in lines)
    assert any("step 2: draft rejected" in line for line in lines)
    assert any("step 2: target committed" in line and "Then that." in line for line in lines)
    assert any("step 3: verifier judged" in line for line in lines)
