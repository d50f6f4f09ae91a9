"""An OpenAI-compatible server in front of `ChatLookahead`."""

from lookahead_agent.server.settings import ServerSettings

__all__ = ["ServerSettings"]
