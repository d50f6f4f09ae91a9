"""A scripted `ChatLookahead` for tests of agents, without a model and in milliseconds.

    from lookahead_agent.testing import scripted_chat

    llm = scripted_chat(lambda prompt: "It is 4." if "2 + 2" in prompt else "I do not know.")
    graph = build_react(llm, [calculator])

Everything but the tokens is real: steps, policies, tool calls, structured output, metadata.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedTokenizer, reply_script
from lookahead_agent.runtime.engine_set import EngineSet

ReplyFunction = Callable[[str], str]
"""Maps a prompt to the whole reply. It is called again for each step and must return the same reply."""


class EqualTextEmbedder:
    """Rates equal texts as similar and all others as different."""

    async def similarity(self, first: str, second: str) -> float:
        """Return 1 for equal texts, else 0."""
        return 1.0 if first == second else 0.0


def scripted_engines(target: ReplyFunction | str, draft: ReplyFunction | None = None, **options: Any) -> EngineSet:
    """Create scripted engines: a target with a delay, and a draft with the same replies or its own."""
    tokenizer = ScriptedTokenizer()
    return EngineSet(
        ScriptedEngine(tokenizer, reply_script(target, seconds=0.02), **options),
        ScriptedEngine(tokenizer, reply_script(draft or target)),
        EqualTextEmbedder(),
    )


def scripted_chat(target: ReplyFunction | str, draft: ReplyFunction | None = None, **fields: Any) -> ChatLookahead:
    """Create a chat model with scripted replies.

    Args:
        target: Maps a prompt to the target's reply; a text is the reply to every prompt.
        draft: Maps a prompt to the draft's reply; None: the target's replies.
        fields: Other fields of `ChatLookahead`.
    """

    return ChatLookahead(engines=scripted_engines(target, draft), **fields)


def scripted_replies(**replies: str | Sequence[str]) -> ReplyFunction:
    """Create a script with replies for each kind of prompt.

    Args:
        replies: By name, the replies to prompts that contain the name (with spaces for underscores). Each new prompt
            takes the next reply of the first such name; the last reply repeats.
    """
    remaining = {
        name.replace("_", " "): [texts] if isinstance(texts, str) else list(texts) for name, texts in replies.items()
    }
    reply_to: dict[str, str] = {}

    def reply(prompt: str) -> str:
        if prompt not in reply_to:
            key = next((text for text in remaining if text in prompt), None)
            if key is None:
                raise KeyError(f"no reply is given for a prompt like {prompt[:200]!r}")
            reply_to[prompt] = remaining[key].pop(0) if len(remaining[key]) > 1 else remaining[key][0]
        return reply_to[prompt]

    return reply
