"""A judge behind an OpenAI-compatible server."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import httpx

from lookahead_agent.errors import ContextLengthError, EngineError
from lookahead_agent.verifiers.judge_model import Messages


class RemoteJudge:
    """A judge behind an OpenAI-compatible `/chat/completions`.

    Args:
        url: Address up to and with `/v1`.
        model: The model's name there.
        api_key: Sent as a bearer token; None: none.
        timeout: Seconds for one answer.
        transport: Replaces the network, for tests.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str | None = None,
        timeout: float = 30.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/") + "/chat/completions"
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, transport=transport)

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
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the judge at {self._url} cannot be reached: {error or type(error).__name__}") from error
        if response.is_error:
            message = f"the judge at {self._url} answered {response.status_code}: {response.text[:200]}"
            too_long = response.status_code == httpx.codes.BAD_REQUEST and "context" in response.text
            raise ContextLengthError(message) if too_long else EngineError(message)
        try:
            likeliest_words: list[dict[str, Any]] = response.json()["choices"][0]["logprobs"]["content"][0][
                "top_logprobs"
            ]
            words: dict[str, float] = {}
            for entry in likeliest_words:
                words[entry["token"]] = words.get(entry["token"], 0.0) + math.exp(entry["logprob"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise EngineError(f"the judge at {self._url} gave no log-probabilities") from error
        return words

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
