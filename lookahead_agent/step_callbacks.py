"""What happens to each step, told to LangChain's callbacks and to LangGraph's custom stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManager,
    AsyncCallbackManagerForLLMRun,
    CallbackManager,
    CallbackManagerForLLMRun,
)
from langchain_core.runnables.config import ensure_config

from lookahead_agent.chat_call import ChatRequest
from lookahead_agent.decoding import StepEvent

STEP_EVENT = "lookahead_step"
"""Name of the custom events, whose data are the fields of `StepEvent`, and `call`, `path` and `policy` of the reply."""


class StepEvents:
    """Passes step events on.

    Args:
        request: The call whose steps they are.
        to_stream: Whether LangGraph's custom stream gets them too.
        run: Whose callbacks get them; None, as where LangChain streams: those of what calls the model.
    """

    def __init__(
        self,
        request: ChatRequest,
        to_stream: bool,
        run: CallbackManagerForLLMRun | AsyncCallbackManagerForLLMRun | None,
    ) -> None:
        self._call = {"call": request.id, "path": str(request.path) or None, "policy": request.policy.name}
        self._write = _stream_writer() if to_stream else None
        self._callbacks = None if run is not None else ensure_config().get("callbacks")
        self._run = run

    def send(self, event: StepEvent) -> None:
        """Tell callers that wait for it."""
        if self._run is not None:
            manager = CallbackManager(self._run.handlers, parent_run_id=self._run.run_id)
        else:
            manager = CallbackManager.configure(self._callbacks)
        manager.on_custom_event(STEP_EVENT, self._data(event), run_id=manager.parent_run_id)
        self._tell_stream(event)

    async def asend(self, event: StepEvent) -> None:
        """`send` for callers in an event loop."""
        if self._run is not None:
            manager = AsyncCallbackManager(self._run.handlers, parent_run_id=self._run.run_id)
        else:
            manager = AsyncCallbackManager.configure(self._callbacks)
        await manager.on_custom_event(STEP_EVENT, self._data(event), run_id=manager.parent_run_id)
        self._tell_stream(event)

    def _tell_stream(self, event: StepEvent) -> None:
        if self._write is not None:
            self._write({STEP_EVENT: self._data(event)})

    def _data(self, event: StepEvent) -> dict[str, Any]:
        return asdict(event) | self._call


def _stream_writer() -> Callable[[Any], None] | None:
    """LangGraph's writer of the graph that is running; None outside a graph."""
    from langgraph.config import get_stream_writer

    try:
        return get_stream_writer()
    except RuntimeError:
        return None
