"""The algorithm of Lookahead Reasoning: knows no vLLM, no LangChain and no HTTP."""

from lookahead_agent.decoding.accounting import ReplyReport, TokenFates
from lookahead_agent.decoding.driver import lookahead
from lookahead_agent.decoding.machine import LookaheadMachine
from lookahead_agent.decoding.request import DecodingSettings, Reply, ReplyRequest
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.step_events import OnStep, StepEvent

__all__ = [
    "DecodingSettings",
    "LookaheadMachine",
    "OnStep",
    "Reply",
    "ReplyReport",
    "ReplyRequest",
    "Step",
    "StepEnd",
    "StepEvent",
    "TokenFates",
    "lookahead",
]
