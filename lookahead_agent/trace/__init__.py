"""What happened in a run, recorded as it happens and shown as a page."""

from lookahead_agent.trace.page import write_page
from lookahead_agent.trace.recorder import TraceRecorder, read_trace
from lookahead_agent.trace.timeline import Bar, Call, timeline

__all__ = ["Bar", "Call", "TraceRecorder", "read_trace", "timeline", "write_page"]
