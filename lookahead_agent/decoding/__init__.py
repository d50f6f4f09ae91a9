"""The algorithm of Lookahead Reasoning: knows no vLLM, no LangChain and no HTTP."""

from lookahead_agent.decoding.accounting import ReplyReport, TokenCounts, acceptance_rate
from lookahead_agent.decoding.loop import lookahead
from lookahead_agent.decoding.request import DecodingSettings, OnStep, Regions, Reply, ReplyRequest, StepEvent
from lookahead_agent.decoding.scheduler import LookaheadScheduler
from lookahead_agent.decoding.step import Step, StepEnd

__all__ = [
    "DecodingSettings",
    "LookaheadScheduler",
    "OnStep",
    "Regions",
    "Reply",
    "ReplyReport",
    "ReplyRequest",
    "Step",
    "StepEnd",
    "StepEvent",
    "TokenCounts",
    "acceptance_rate",
    "lookahead",
]
