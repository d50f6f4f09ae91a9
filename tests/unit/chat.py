"""A ChatLookahead on scripted engines."""

from lookahead_agent.testing import SameText, replying, scripted_chat, scripted_engines

__all__ = ["SameText", "replying", "scripted_chat", "scripted_engines"]
