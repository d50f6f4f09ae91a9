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

from lookahead_agent.decoding import StepEvent
from lookahead_agent.generation.request import ChatRequest

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
        if run is not None:
            self._sync = CallbackManager(run.handlers, parent_run_id=run.run_id)
        else:
            self._sync = CallbackManager.configure(ensure_config().get("callbacks"))
        self._async = AsyncCallbackManager(
            self._sync.handlers,
            parent_run_id=self._sync.parent_run_id,
            tags=self._sync.tags,
            metadata=self._sync.metadata,
        )

    def send(self, event: StepEvent) -> None:
        """Tell callers that wait for it."""
        data = asdict(event) | self._call
        self._sync.on_custom_event(STEP_EVENT, data, run_id=self._sync.parent_run_id)
        self._tell_stream(data)

    async def asend(self, event: StepEvent) -> None:
        """`send` for callers in an event loop."""
        data = asdict(event) | self._call
        await self._async.on_custom_event(STEP_EVENT, data, run_id=self._async.parent_run_id)
        self._tell_stream(data)

    def _tell_stream(self, data: dict[str, Any]) -> None:
        if self._write is not None:
            self._write({STEP_EVENT: data})


def _stream_writer() -> Callable[[Any], None] | None:
    """LangGraph's writer of the graph that is running; None outside a graph."""
    from langgraph.config import get_stream_writer

    try:
        return get_stream_writer()
    except RuntimeError:
        return None
