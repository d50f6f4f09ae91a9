"""A ChatLookahead on scripted engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from lookahead_agent import ChatLookahead
from lookahead_agent.engine_set import EngineSet
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.engines.scripted import following


class SameText:
    """Finds equal texts similar and others not."""

    async def similarity(self, first: str, second: str) -> float:
        return 1.0 if first == second else 0.0


def replying(reply: Callable[[str], str], seconds: float = 0.0) -> Callable[[str, str], Sequence[ScriptedStep]]:
    """A script from a function of the prompt: the rest of its reply."""

    def script(prompt: str, begun: str) -> Sequence[ScriptedStep]:
        parts = re.findall(r".*?\n\n|.+\Z", reply(prompt), re.DOTALL)
        return following([ScriptedStep(part, seconds) for part in parts])(prompt, begun)

    return script


def scripted_engines(
    target: Callable[[str], str], draft: Callable[[str], str] | None = None, **options: Any
) -> EngineSet:
    tokenizer = ScriptedTokenizer()
    return EngineSet(
        ScriptedEngine(tokenizer, replying(target, seconds=0.2), **options),
        ScriptedEngine(tokenizer, replying(draft or target)),
        SameText(),
    )


def scripted_chat(
    target: Callable[[str], str] | str, draft: Callable[[str], str] | None = None, **fields: Any
) -> ChatLookahead:
    def write(prompt: str) -> str:
        return target if isinstance(target, str) else target(prompt)

    return ChatLookahead(engines=scripted_engines(write, draft), **fields)
