"""Errors as frames and back."""

from __future__ import annotations

from lookahead_agent import errors
from lookahead_agent.errors import EngineError, LookaheadError
from lookahead_agent.running.frames import Frame


def error_to_frame(error: LookaheadError) -> Frame:
    """Why there is none, to be sent."""
    return {"error": {"type": type(error).__name__, "text": str(error)}}


def error_from_frame(frame: Frame) -> LookaheadError:
    """Why there is none: the same error as in the keeper."""
    kind = getattr(errors, str(frame["error"]["type"]), EngineError)
    known = isinstance(kind, type) and issubclass(kind, LookaheadError)
    return (kind if known else EngineError)(frame["error"]["text"])
