"""Tool calls that start while the planner still writes the plan (LLMCompiler, arXiv 2312.04511, section 3.2)."""

import asyncio
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import aclosing, closing, suppress
from contextvars import copy_context
from inspect import Parameter, signature
from typing import Any, cast

from langchain.agents.middleware import ModelResponse, ToolCallRequest
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool
from langgraph.errors import GraphBubbleUp

from lookahead_agent.agents.planning import PlanMiddleware
from lookahead_agent.agents.plans import parse_plan, results_of
from lookahead_agent.agents.tool_results import ToolResultMiddleware
from lookahead_agent.agents.tool_use import contain_tool, error_text, is_read_only
from lookahead_agent.agents.turns import AsyncHandler, Handler, ModelCall, lookahead_settings, plan_call

MAX_CALLS = 8  # Maximum number of concurrent early calls


class EarlyCallMiddleware(PlanMiddleware):
    """`PlanMiddleware` that streams the planner's reply and starts calls as soon as their lines are complete.

    Only tools that say `metadata={"readOnlyHint": True}` start early, and none in `later`. Early calls run the tools
    directly, past the agent's tool node and the caller's `wrap_tool_call` middleware. A failure is the call's result.
    The tool node repeats an early call that interrupts to ask a person.
    """

    def __init__(self, tools: Sequence[BaseTool], *, later: Collection[str] = (), **more: Any) -> None:
        super().__init__(tools, **more)
        self.early = {
            name: tool
            for name, tool in self.by_name.items()
            # The tool node ends the run after a tool with `return_direct`.
            if is_read_only(tool) and name not in later and not tool.return_direct and not _is_injected(tool)
        }

    def ask(self, model_call: ModelCall, handler: Handler) -> ModelResponse[Any]:
        """Call the model; a plan's tool calls run meanwhile, and their messages follow the plan."""
        if model_call.plan is None:
            return super().ask(model_call, handler)
        futures = set[Future[None]]()

        def start(request: ToolCallRequest) -> None:
            # The node's context lets tracing attribute tools to the node.
            futures.add(threads.submit(copy_context().run, run, request))

        def run(request: ToolCallRequest) -> None:
            with suppress(GraphBubbleUp):  # the tool asks a person: the tool node repeats the call
                early.record(early.tool_results.wrap_tool_call(request, _invoke))

        early = _PlanCalls(self, model_call, start)
        stream: Any = model_call.request.model.stream(early.prompt, **model_call.request.model_settings)
        with ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="early-call") as threads, closing(stream) as chunks:
            for chunk in chunks:
                early.read(chunk)
            early.end_reply()
            while any(not future.done() for future in list(futures)):
                wait(list(futures))
            for future in futures:
                future.result()  # raises what is not a failure of the tool
        return ModelResponse(result=early.messages())

    async def aask(self, model_call: ModelCall, handler: AsyncHandler) -> ModelResponse[Any]:
        """Run `ask` in an event loop."""
        if model_call.plan is None:
            return await super().aask(model_call, handler)
        tasks, slots = set[asyncio.Task[None]](), asyncio.Semaphore(MAX_CALLS)

        def start(request: ToolCallRequest) -> None:
            tasks.add(asyncio.create_task(run(request)))

        async def run(request: ToolCallRequest) -> None:
            with suppress(GraphBubbleUp):
                async with slots:
                    result = await early.tool_results.awrap_tool_call(request, _ainvoke)
                early.record(result)

        early = _PlanCalls(self, model_call, start)
        stream: Any = model_call.request.model.astream(early.prompt, **model_call.request.model_settings)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    early.read(chunk)
            early.end_reply()
            while any(not task.done() for task in list(tasks)):
                await asyncio.wait(list(tasks))
            for task in tasks:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return ModelResponse(result=early.messages())


def _invoke(request: ToolCallRequest) -> Any:
    try:
        return contain_tool(cast(BaseTool, request.tool), asynchronous=False).invoke(request.tool_call)
    except GraphBubbleUp:
        raise
    except Exception as error:
        return _failure(request, error)


async def _ainvoke(request: ToolCallRequest) -> Any:
    try:
        return await contain_tool(cast(BaseTool, request.tool), asynchronous=True).ainvoke(request.tool_call)
    except GraphBubbleUp:
        raise
    except Exception as error:
        return _failure(request, error)


def _failure(request: ToolCallRequest, error: Exception) -> ToolMessage:
    call = request.tool_call
    return ToolMessage(error_text(error), tool_call_id=call["id"], name=call["name"], status="error")


class _PlanCalls:
    """The flow of a plan with early calls: reads the reply, starts calls that can run, and stores their results.

    `start` runs a call, in a thread or a task, and gives its result to `record`.
    """

    def __init__(
        self, middleware: EarlyCallMiddleware, model_call: ModelCall, start: Callable[[ToolCallRequest], None]
    ) -> None:
        assert model_call.plan is not None
        self._middleware, self._start = middleware, start
        self._earlier, self._known = model_call.earlier, results_of(model_call.earlier)
        self._plan, self._request = model_call.plan, (request := model_call.request)
        self.prompt = [*([request.system_message] if request.system_message is not None else []), *request.messages]
        exact = bool(lookahead_settings(request.model, node="planner"))
        self.tool_results = ToolResultMiddleware(request.model, exact=exact)
        self._reply = AIMessageChunk(content="")
        self._calls: dict[int, ToolCall] = {}
        self._results: dict[int, ToolMessage] = {}
        self._is_complete = False  # whether the reply is
        self._lock = threading.Lock()

    def read(self, chunk: AIMessageChunk) -> None:
        """Append a chunk of the reply; a complete line may be a call that can start."""
        with self._lock:
            self._reply += chunk
        if "\n" in chunk.text:
            self._start_ready()

    def end_reply(self) -> None:
        """Start the calls of the last lines too."""
        self._is_complete = True
        self._start_ready()

    def record(self, result: Any) -> None:
        """Store a result, also that of a failed call, and start the calls that waited for it."""
        if isinstance(result, ToolMessage):
            with self._lock:
                numbers = {call["id"]: number for number, call in self._calls.items()}
                self._results[numbers[result.tool_call_id]] = result
            self._start_ready()

    def messages(self) -> list[BaseMessage]:
        """Return the reply, and the calls with their results."""
        reply = AIMessage(**self._reply.model_dump(exclude={"type", "tool_call_chunks", "chunk_position"}))
        numbers = sorted(self._results)
        if not numbers:
            return [reply]
        calls = AIMessage("", name="executor", tool_calls=[self._calls[number] for number in numbers])
        return [reply, calls, *(self._results[number] for number in numbers)]

    def _start_ready(self) -> None:
        for request in self._ready():
            self._start(request)

    def _ready(self) -> list[ToolCallRequest]:
        """Return the calls that can start now, each once; the last line of an incomplete reply may go on."""
        with self._lock:
            text, complete = str(self._reply.text), self._is_complete
            written = text if complete else text[: text.rfind("\n") + 1]
            lines = parse_plan(written, self._middleware.plan_tools, len(self._known))
            results = {number: message.text for number, message in self._results.items() if message.status != "error"}
            if lines and lines[0].number > 1:
                results |= {number: message.text for number, (_, message) in enumerate(self._known, 1)}
            requests: list[ToolCallRequest] = []
            for line in lines:
                tool = self._middleware.early.get(line.tool or "")
                if tool is None:
                    break  # later lines wait for a line that may write
                if line.number in self._calls or not line.references <= results.keys():
                    continue
                if not complete and line.highest_reference >= line.number:
                    continue  # the result of a line that is not yet written, or an amount of money
                if (arguments := line.fill(results)) is not None:
                    call = plan_call(self._plan, line.number, tool.name, arguments)
                    if self._middleware.find_repeated_results(self._earlier, [call]):
                        continue
                    self._calls[line.number] = call
                    request = ToolCallRequest(call, tool, self._request.state, self._request.runtime)  # type: ignore[arg-type]
                    requests.append(request)
            return requests


def _is_injected(tool: BaseTool) -> bool:
    """Whether the tool takes arguments that only the agent's tool node injects, such as its runtime."""
    if isinstance(tool.args_schema, dict):  # MCP's tools: only the function says what it takes
        function = getattr(tool, "func", None) or getattr(tool, "coroutine", None) or tool._run
        variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        taken = {name for name, entry in signature(function).parameters.items() if entry.kind not in variadic}
        return bool(taken - {*tool.args, "config", "callbacks", "run_manager"})
    return bool(set(getattr(tool.get_input_schema(), "model_fields", ())) - set(tool.args))
