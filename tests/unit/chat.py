"""A ChatLookahead on scripted engines."""

from lookahead_agent.engines.scripted import reply_script
from lookahead_agent.testing import EqualTextEmbedder, scripted_chat, scripted_engines

__all__ = ["EqualTextEmbedder", "is_for_a_planner", "reply_script", "scripted_chat", "scripted_engines"]


def is_for_a_planner(prompt: str) -> bool:
    """Whether plan_execute's planner is asked: one that thinks, or one that writes nothing but calculations."""
    return "You are a planner" in prompt or "You plan how to solve" in prompt
