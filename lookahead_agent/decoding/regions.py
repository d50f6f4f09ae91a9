"""Where a reply may be speculated on: thoughts may, actions may not (see the README)."""

from __future__ import annotations

from dataclasses import dataclass

from lookahead_agent.models.thinking_tags import ThinkingTags

PROMPT_TAIL = 32
"""Tokens at a prompt's end in which a chat template may have opened the thinking."""


@dataclass(frozen=True)
class Regions:
    """What in a reply only the target may write.

    Attributes:
        action_markers: Texts that open an action region, such as a tool call.
        thinking: The model's thinking tags; None for models that do not think apart. A step never goes over the
            closing tag.
        answer_from_target: Whether what follows the thinking is the target's alone. A reply without thinking is then
            all the target's.
    """

    action_markers: tuple[str, ...] = ()
    thinking: ThinkingTags | None = None
    answer_from_target: bool = False

    def begins_outside_thinking(self, prompt: str) -> bool:
        """Whether a reply to this prompt begins where only the target may write."""
        if self.thinking is None or not self.answer_from_target:
            return False
        return not self.thinking.opened_by(prompt)
