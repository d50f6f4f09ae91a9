"""A `ChatLookahead` that follows a script: for tests of agents, without a model and in milliseconds.

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

Reply = Callable[[str], str]
"""Given the prompt, the whole reply. It is asked again for each step, and has to say the same again."""


class EqualTextEmbedder:
    """Finds equal texts similar and others not."""

    async def similarity(self, first: str, second: str) -> float:
        """1 for equal texts, else 0."""
        return 1.0 if first == second else 0.0


def scripted_engines(target: Reply | str, draft: Reply | None = None, **options: Any) -> EngineSet:
    """Engines that follow a script: a target that takes its time, and a draft that says the same, or something else."""
    tokenizer = ScriptedTokenizer()
    return EngineSet(
        ScriptedEngine(tokenizer, reply_script(target, seconds=0.02), **options),
        ScriptedEngine(tokenizer, reply_script(draft or target)),
        EqualTextEmbedder(),
    )


def scripted_chat(target: Reply | str, draft: Reply | None = None, **fields: Any) -> ChatLookahead:
    """A chat model that follows a script.

    Args:
        target: What the target replies to a prompt; a text: to every one.
        draft: What the draft would; None: the same.
        fields: Of `ChatLookahead`.
    """

    return ChatLookahead(engines=scripted_engines(target, draft), **fields)


def scripted_replies(**replies: str | Sequence[str]) -> Reply:
    """A reply for each kind of prompt.

    Args:
        replies: For the first name whose text (underscores are spaces) the prompt has, the next of its replies; the
            last for ever.
    """
    left = {
        name.replace("_", " "): [given] if isinstance(given, str) else list(given) for name, given in replies.items()
    }
    said: dict[str, str] = {}

    def reply(prompt: str) -> str:
        if prompt not in said:
            kind = next((text for text in left if text in prompt), None)
            if kind is None:
                raise KeyError(f"no reply is given for a prompt like {prompt[:200]!r}")
            said[prompt] = left[kind].pop(0) if len(left[kind]) > 1 else left[kind][0]
        return said[prompt]

    return reply
