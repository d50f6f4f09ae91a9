"""`deepagents` on `ChatLookahead`: files, subagents and todo list, by tool calls of a scripted model."""

from __future__ import annotations

import json
from typing import Any

from deepagents import create_deep_agent
from langchain_core.messages import AIMessage, AnyMessage, ToolMessage

from lookahead_agent.testing import scripted_chat

QUESTION = "What is 17 * 23? Write it down."
ANSWER = "It is 391, as the file says."


def call(name: str, **arguments: Any) -> str:
    payload = json.dumps({"name": name, "arguments": arguments})
    return f"First this.\n\nThen that.\n\n<tool_call>\n{payload}\n</tool_call>"


class Script:
    """Replies in order, one per tool result."""

    def __init__(self, *replies: str) -> None:
        self._replies = replies

    def __call__(self, prompt: str) -> str:
        if "system: You multiply." in prompt:
            return "17 * 23 = 391"
        return self._replies[min(prompt.count("tool: "), len(self._replies) - 1)]


def tool_names(messages: list[AnyMessage]) -> list[str]:
    return [call["name"] for message in messages if isinstance(message, AIMessage) for call in message.tool_calls]


def text_of(file: Any) -> str:
    """Return a file's text; some versions of `deepagents` store it as lines."""
    content = file["content"]
    return "\n".join(content) if isinstance(content, list) else str(content)


FILE_SCRIPT = Script(
    call("write_file", file_path="/notes.txt", content="17 * 23 = 390\nDone."),
    call("edit_file", file_path="/notes.txt", old_string="390", new_string="391"),
    call("read_file", file_path="/notes.txt"),
    ANSWER,
)


def check_file_calls(state: dict[str, Any]) -> None:
    messages = state["messages"]
    assert tool_names(messages) == ["write_file", "edit_file", "read_file"]
    assert text_of(state["files"]["/notes.txt"]) == "17 * 23 = 391\nDone."
    results = [message for message in messages if isinstance(message, ToolMessage)]
    assert [result.status for result in results] == ["success"] * 3
    assert "17 * 23 = 391" in str(results[-1].content)
    assert messages[-1].text == ANSWER
    assert all(message.response_metadata["lookahead"] for message in messages if isinstance(message, AIMessage))


def test_deep_agent_writes_edits_and_reads_its_files() -> None:
    agent = create_deep_agent(model=scripted_chat(FILE_SCRIPT, policy="exact:depth=2"))
    check_file_calls(agent.invoke({"messages": [("user", QUESTION)]}))


async def test_deep_agent_streams_its_answer() -> None:
    agent = create_deep_agent(model=scripted_chat(FILE_SCRIPT, policy="exact:depth=2"))
    chunks: list[str] = []
    state: dict[str, Any] = {}
    async for mode, part in agent.astream({"messages": [("user", QUESTION)]}, stream_mode=["messages", "values"]):
        if mode == "values":
            state = part
        elif part[0].type == "AIMessageChunk":
            chunks.append(part[0].text)
    check_file_calls(state)
    assert "".join(chunks).endswith(ANSWER)


def test_deep_agent_delegates_to_a_subagent() -> None:
    script = Script(call("task", description="Multiply 17 by 23.", subagent_type="calculator"), ANSWER)
    subagent: Any = {"name": "calculator", "description": "Multiplies.", "system_prompt": "You multiply."}
    agent = create_deep_agent(model=scripted_chat(script, policy="exact:depth=2"), subagents=[subagent])
    messages = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    assert tool_names(messages) == ["task"]
    assert [message.text for message in messages if isinstance(message, ToolMessage)] == ["17 * 23 = 391"]
    assert messages[-1].text == ANSWER


def test_deep_agent_stores_its_todo_list() -> None:
    from langchain.agents.middleware import TodoListMiddleware

    todos = [{"content": "Multiply", "status": "completed"}, {"content": "Write it down", "status": "in_progress"}]
    script = Script(call("write_todos", todos=todos), ANSWER)
    llm = scripted_chat(script, policy="exact:depth=2")
    agent = create_deep_agent(model=llm)
    if "write_todos" not in str(agent.nodes["tools"].bound.tools_by_name):  # type: ignore[attr-defined]
        agent = create_deep_agent(model=llm, middleware=[TodoListMiddleware()])
    assert agent.invoke({"messages": [("user", QUESTION)]})["todos"] == todos


def test_invalid_tool_calls_return_errors_and_the_agent_continues() -> None:
    script = Script(call("write_file", path="/notes.txt"), call("remove_all"), ANSWER)
    messages = create_deep_agent(model=scripted_chat(script, policy="off")).invoke({"messages": [("user", QUESTION)]})[
        "messages"
    ]
    assert [message.status for message in messages if isinstance(message, ToolMessage)] == ["error", "error"]
    assert messages[-1].text == ANSWER
