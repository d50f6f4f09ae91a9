"""Tool calls that begin while their plan is still being written (LLMCompiler, arXiv 2312.04511, section 3.2)."""

import asyncio
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, closing, suppress
from contextvars import copy_context
from typing import Any, cast

from langchain.agents.middleware import ModelResponse, ToolCallRequest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp

from lookahead_agent.agents.planning import PlanMiddleware
from lookahead_agent.agents.plans import plan_call, read_plan
from lookahead_agent.agents.prompts import lookahead_settings
from lookahead_agent.agents.tool_results import ToolResultMiddleware
from lookahead_agent.agents.turns import Asked, AsyncHandler, Handler

MOST_CALLS = 8  # Early calls that run at the same time


class EarlyCallMiddleware(PlanMiddleware):
    """`PlanMiddleware` that streams the planner's reply and starts calls as soon as their lines are complete.

    Early calls go to the tools themselves, past the agent's tool node and the caller's `wrap_tool_call` middleware.
    The tool node makes a call again that fails so, or that asks a person. Tools named in `later` never start early.
    """

    def __init__(self, tools: Sequence[BaseTool], *, later: Collection[str] = (), **more: Any) -> None:
        super().__init__(tools, **more)
        self.early = {
            name: tool
            for name, tool in self.by_name.items()
            if name not in later and (tool.metadata or {}).get("readOnlyHint") is not False and not _is_injected(tool)
        }

    def ask(self, asked: Asked, handler: Handler) -> ModelResponse[Any]:
        """Ask the model; a plan's calls run meanwhile, and their messages follow the plan."""
        if asked.plan is None:
            return super().ask(asked, handler)
        early, running = _EarlyCalls(self, asked), set[Future[None]]()

        def start(*, complete: bool = False) -> None:
            for one in early.ready(complete=complete):
                # With the context of the node: tools are traced where they belong.
                running.add(threads.submit(copy_context().run, make, one))

        def call(made: ToolCallRequest) -> Any:
            return cast(BaseTool, made.tool).invoke(made.tool_call)

        def make(one: ToolCallRequest) -> None:
            with suppress(GraphBubbleUp):  # it asks a person: the tool node's part
                early.record(early.readable.wrap_tool_call(one, call))
            start()

        stream: Any = asked.request.model.stream(early.prompt, **asked.request.model_settings)
        with ThreadPoolExecutor(MOST_CALLS, thread_name_prefix="early-call") as threads, closing(stream) as chunks:
            for chunk in chunks:
                early.read(chunk)
                if "\n" in chunk.text:  # a line is complete
                    start()
            start(complete=True)
            while any(not future.done() for future in list(running)):
                wait(list(running))
        return ModelResponse(result=early.messages())

    async def aask(self, asked: Asked, handler: AsyncHandler) -> ModelResponse[Any]:
        """`ask` in an event loop."""
        if asked.plan is None:
            return await super().aask(asked, handler)
        early, running = _EarlyCalls(self, asked), set[asyncio.Task[None]]()

        def start(*, complete: bool = False) -> None:
            for one in early.ready(complete=complete):
                running.add(asyncio.create_task(make(one)))

        async def call(made: ToolCallRequest) -> Any:
            return await cast(BaseTool, made.tool).ainvoke(made.tool_call)

        async def make(one: ToolCallRequest) -> None:
            with suppress(GraphBubbleUp):
                early.record(await early.readable.awrap_tool_call(one, call))
            start()

        stream: Any = asked.request.model.astream(early.prompt, **asked.request.model_settings)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    early.read(chunk)
                    if "\n" in chunk.text:
                        start()
            start(complete=True)
            while any(not task.done() for task in list(running)):
                await asyncio.wait(list(running))
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return ModelResponse(result=early.messages())


class _EarlyCalls:
    """Which calls of a plan can start, and the results of those that went well."""

    def __init__(self, middleware: EarlyCallMiddleware, asked: Asked) -> None:
        assert asked.plan is not None
        self._middleware = middleware
        self._plan, self._request = asked.plan, (request := asked.request)
        self.prompt = [*([request.system_message] if request.system_message is not None else []), *request.messages]
        exact = bool(lookahead_settings(request.model, node="planner"))
        self.readable = ToolResultMiddleware(request.model, exact=exact)
        self._reply = AIMessageChunk(content="")
        self._calls: dict[int, ToolCall] = {}
        self._results: dict[int, ToolMessage] = {}
        self._lock = threading.Lock()

    def read(self, chunk: AIMessageChunk) -> None:
        with self._lock:
            self._reply += chunk

    def record(self, result: Any) -> None:
        """Keep a result; a call that failed is left to the tool node."""
        if isinstance(result, ToolMessage) and result.status != "error":
            with self._lock:
                numbers = {call["id"]: number for number, call in self._calls.items()}
                self._results[numbers[result.tool_call_id]] = result

    def messages(self) -> list[BaseMessage]:
        """The reply, and the calls that went well with their results."""
        reply = AIMessage(**self._reply.model_dump(exclude={"type", "tool_call_chunks", "chunk_position"}))
        made = sorted(self._results)
        if not made:
            return [reply]
        calls = AIMessage("", name="executor", tool_calls=[self._calls[number] for number in made])
        return [reply, calls, *(self._results[number] for number in made)]

    def ready(self, *, complete: bool) -> list[ToolCallRequest]:
        """The calls that can start now, each once; the last line of a reply that is not complete may go on."""
        with self._lock:
            text = str(self._reply.text)
            lines = read_plan(text if complete else text[: text.rfind("\n") + 1], self._middleware.by_name)
            results = {number: message.text for number, message in self._results.items()}
            found: list[ToolCallRequest] = []
            for line in lines:
                tool = self._middleware.early.get(line.tool or "")
                if tool is None:
                    break  # what stands behind a line that may write waits for it
                if line.number in self._calls or not line.references <= results.keys():
                    continue
                if (arguments := line.filled(results)) is not None:
                    call = plan_call(self._plan, line.number, tool.name, arguments)
                    self._calls[line.number] = call
                    given = ToolCallRequest(call, tool, self._request.state, self._request.runtime)  # type: ignore[arg-type]
                    found.append(given)
            return found


def _is_injected(tool: BaseTool) -> bool:
    """Whether the tool takes arguments that only the agent's tool node can give, such as its runtime."""
    return bool(set(getattr(tool.get_input_schema(), "model_fields", ())) - set(tool.args))
