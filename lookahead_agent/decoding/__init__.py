"""The algorithm of Lookahead Reasoning: knows no vLLM, no LangChain and no HTTP."""

from lookahead_agent.decoding.accounting import ReplyReport, TokenCounts
from lookahead_agent.decoding.driver import lookahead
from lookahead_agent.decoding.request import DecodingSettings, Reply, ReplyRequest
from lookahead_agent.decoding.scheduler import LookaheadScheduler
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.step_events import OnStep, StepEvent

__all__ = [
    "DecodingSettings",
    "LookaheadScheduler",
    "OnStep",
    "Reply",
    "ReplyReport",
    "ReplyRequest",
    "Step",
    "StepEnd",
    "StepEvent",
    "TokenCounts",
    "lookahead",
]
