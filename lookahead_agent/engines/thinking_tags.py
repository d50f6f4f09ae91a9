"""How a model marks its thinking."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThinkingTags:
    """How a model marks its thinking.

    Attributes:
        open: Tag that begins the thinking; some chat templates write it, so that the reply begins inside.
        close: Tag that ends it.
        always: Whether the model thinks before each answer unless the prompt says otherwise: text before a closing tag
            that nothing opened is thinking then.
    """

    open: str = "<think>"
    close: str = "</think>"
    always: bool = True

    def opened_by(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins inside the thinking."""
        return prompt.rstrip().endswith(self.open)

    def closed_by(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins after the thinking."""
        return prompt.rstrip().endswith(self.close)
