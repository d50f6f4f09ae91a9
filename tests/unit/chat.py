"""Helpers that create a `ChatLookahead` on scripted engines."""

from lookahead_agent.engines.scripted import reply_script
from lookahead_agent.testing import EqualTextEmbedder, scripted_chat, scripted_engines

__all__ = ["EqualTextEmbedder", "reply_script", "scripted_chat", "scripted_engines"]
