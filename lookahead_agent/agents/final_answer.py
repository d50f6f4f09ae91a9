"""Middleware that ends an agent's run with an answer."""

from collections.abc import Sequence
from typing import Any

from langchain.agents.middleware import AgentState, ModelRequest, ModelResponse, hook_config
from langchain_core.messages import AIMessage, AnyMessage, SystemMessage, ToolMessage

from lookahead_agent.agents.prompts import (
    REPEATED,
    conversation_with_results,
    lookahead_settings,
    result_blocks,
    this_question,
)
from lookahead_agent.agents.turns import Asked, Turn, TurnMiddleware, has_failed, is_repetition, named_call, turns_of

MODEL_CALLS = 12
"""Turns of the model on one question."""
RETRIES = 2
"""How often the model may try again after calls that failed."""


FINISHER = """You answer a question from the results of tools that were called. Say in one or two short sentences what \
the results say, and what is missing, if something is. Add nothing that the results do not say."""


class FinalAnswerMiddleware(TurnMiddleware):
    """Ends a run with an answer in place of a loop, a limit or nothing.

    The model gets a last turn, without tools, in which it says what the results say and what is missing, if

    - it has used all but one of its turns,
    - it makes the same calls as in the turn before, or calls that failed before (which are not made again),
    - its calls failed in several turns in a row, or
    - it neither called a tool nor answered.

    All of that is read from the messages since the last question, so that a thread's next question begins anew.

    Args:
        model_calls: Turns of the model on one question, the last included.
        retries: Turns in a row that may fail after a first one.
        node: Name of the model's turns; None: that of LangGraph's node.
        finisher: Name of the last turn.
        prompt: System prompt of the last turn.

    Raises:
        ValueError: No turn, or a negative number of retries.
    """

    def __init__(
        self,
        *,
        model_calls: int = MODEL_CALLS,
        retries: int = RETRIES,
        node: str | None = None,
        finisher: str = "finisher",
        prompt: str = FINISHER,
    ) -> None:
        super().__init__()
        if model_calls < 1 or retries < 0:
            raise ValueError("model_calls is at least 1 and retries at least 0")
        self._model_calls = model_calls
        self._retries = retries
        self._node = node
        self._finisher = finisher
        self._prompt = prompt

    def turn(self, request: ModelRequest[Any]) -> Turn:
        """Let the model take its turn, or its last one."""
        if not self._is_last(request.state["messages"]):
            return (yield Asked(self._with_name(request)))
        asked = [SystemMessage(self._prompt), *conversation_with_results(request.messages, "Results")]
        reply = (yield Asked(request, named_call(request, self._finisher), asked)).result[0]
        if not reply.text.strip():
            results = result_blocks(this_question(request.messages))
            reply = reply.model_copy(update={"content": f"The model wrote no answer. Results:\n\n{results}"})
        return ModelResponse(result=[reply.model_copy(update={"tool_calls": [], "invalid_tool_calls": []})])

    @hook_config(can_jump_to=["model"])
    def after_model(self, state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        """Have a last turn after the same calls, which are not made again, and after an empty reply."""
        turns = turns_of(state["messages"])
        reply = turns[-1][0]
        if is_repetition(turns):
            told = [
                ToolMessage(
                    "Not called again: the same call was made before.",
                    tool_call_id=call["id"] or "",
                    name=call["name"],
                    status="error",
                    additional_kwargs={REPEATED: True},
                )
                for call in reply.tool_calls
            ]
            return {"messages": told, "jump_to": "model"}
        return {"jump_to": "model"} if _is_empty(reply) else None

    def _with_name(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        if self._node is None:
            return request
        settings = lookahead_settings(request.model, node=self._node)
        return request.override(model_settings={**settings, **request.model_settings})

    def _is_last(self, messages: Sequence[AnyMessage]) -> bool:
        turns = turns_of(messages)
        if len(turns) >= self._model_calls - 1 or not turns:
            return len(turns) >= self._model_calls - 1
        if _is_empty(turns[-1][0]) or is_repetition(turns):
            return True
        failed = [has_failed(results) for _, results in turns]
        return len(failed) > self._retries and all(failed[-self._retries - 1 :])


def _is_empty(reply: AIMessage) -> bool:
    return not (reply.tool_calls or reply.invalid_tool_calls or reply.text.strip())
