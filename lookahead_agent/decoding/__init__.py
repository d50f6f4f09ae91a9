"""The algorithm of Lookahead Reasoning: knows no vLLM, no LangChain and no HTTP."""

from lookahead_agent.decoding.accounting import ReplyReport as ReplyReport
from lookahead_agent.decoding.accounting import TokenCounts as TokenCounts
from lookahead_agent.decoding.accounting import acceptance_rate as acceptance_rate
from lookahead_agent.decoding.loop import lookahead as lookahead
from lookahead_agent.decoding.request import DecodingSettings as DecodingSettings
from lookahead_agent.decoding.request import OnStep as OnStep
from lookahead_agent.decoding.request import Regions as Regions
from lookahead_agent.decoding.request import Reply as Reply
from lookahead_agent.decoding.request import ReplyRequest as ReplyRequest
from lookahead_agent.decoding.request import StepEvent as StepEvent
from lookahead_agent.decoding.scheduler import LookaheadScheduler as LookaheadScheduler
from lookahead_agent.decoding.step import Step as Step
from lookahead_agent.decoding.step import StepEnd as StepEnd
