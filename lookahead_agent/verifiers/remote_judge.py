"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lookahead_agent.engines.servers import RemoteModel, Servers
from lookahead_agent.errors import EngineError
from lookahead_agent.verifiers.judge_model import Messages


class RemoteJudge:
    """A judge behind an OpenAI-compatible `/chat/completions`.

    Args:
        servers: Where it is.
        model: Its name there.
    """

    def __init__(self, servers: Servers, model: str) -> None:
        self._servers = servers
        self._model = model

    async def first_words(self, messages: Messages) -> Mapping[str, float]:
        """Probabilities of the likeliest first tokens, of which servers give up to 20."""
        body = {
            "model": self._model,
            "messages": list(messages),
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 20,
        }
        answer = await self._servers.post("/chat/completions", body)
        try:
            likeliest_words: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            words: dict[str, float] = {}
            for entry in likeliest_words:
                words[entry["token"]] = words.get(entry["token"], 0.0) + math.exp(entry["logprob"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError("the judge's server gave no log-probabilities") from error
        return words

    async def aclose(self) -> None:
        """Close the connections."""
        await self._servers.aclose()


def remote_judge(remote: RemoteModel) -> RemoteJudge:
    """The judge of these servers, whose model must be named."""
    assert remote.model is not None
    return RemoteJudge(Servers(remote, "judge"), remote.model)
