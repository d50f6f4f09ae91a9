"""The events of a run, recorded as they happen and shown as a page."""

from lookahead_agent.trace.node_times import spans_of
from lookahead_agent.trace.recorder import TraceRecorder, read_trace
from lookahead_agent.trace.timeline import LANES, Bar, Call, concurrency, lane_of, timeline, write_page

__all__ = [
    "LANES",
    "Bar",
    "Call",
    "TraceRecorder",
    "concurrency",
    "lane_of",
    "read_trace",
    "spans_of",
    "timeline",
    "write_page",
]
