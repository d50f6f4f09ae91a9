"""Fake OpenAI-compatible servers, without a network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent.engines.openai_http import _PROBE
from lookahead_agent.engines.tokenizer import HFTokenizer

WORDS = ["<eos>", "?", "a", "b", "c", *sorted({*_PROBE} - set("abc"))]


def tokenizer_in(folder: Path, words: Sequence[str] = WORDS) -> HFTokenizer:
    """Save a character-level tokenizer to a folder and load it."""
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return HFTokenizer(folder)


class Events(httpx.AsyncByteStream):
    """Server-sent events that report when the client closes the stream, and may lose the connection first."""

    def __init__(self, events: Sequence[dict[str, Any]], drops: bool, closed: Callable[[], None]) -> None:
        self._events = events
        self._drops = drops
        self._closed = closed

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            yield f"data: {json.dumps(event)}\n\n".encode()
        if self._drops:
            raise httpx.ReadError("connection lost")
        yield b"data: [DONE]\n\n"

    async def aclose(self) -> None:
        self._closed()


class FakeServer:
    """Generates a reply token by token; a prompt that contains its beginning continues it.

    Args:
        tokenizer: The tokenizer of its model.
        reply: The completion of a prompt that ends with "?".
        returns_token_ids: Whether it returns token ids, as vLLM does.
        accepts_token_ids: Whether prompts may be token ids.
    """

    def __init__(
        self, tokenizer: HFTokenizer, reply: str, *, returns_token_ids: bool = True, accepts_token_ids: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        self.reply = reply
        self.returns_token_ids = returns_token_ids
        self.accepts_token_ids = accepts_token_ids
        self.models = [{"id": "model", "max_model_len": 100}]
        self.down = False
        self.answers: list[httpx.Response] = []
        """Responses that it returns before it generates any."""
        self.disconnects_after: int | None = None
        """Number of tokens after which one stream loses its connection."""
        self.attempts = 0
        """Requests so far, with those that fail."""
        self.requests: list[dict[str, Any]] = []
        self.open = 0
        self.counts = 1
        """Tokens that its `usage` counts for one token of its tokenizer."""
        self.cached: int | None = None
        """Cached prompt tokens in its `usage`; None: the field is absent."""

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.attempts += 1
        if self.down:
            raise httpx.ConnectError("connection refused")
        if self.answers:
            return self.answers.pop(0)
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": self.models})
        body = json.loads(request.content)
        self.requests.append(body)
        if not self.accepts_token_ids and not isinstance(body["prompt"], str):
            return httpx.Response(400, json={"error": {"message": "prompt must be a string"}})
        prompt = body["prompt"] if isinstance(body["prompt"], str) else self.tokenizer.decode_all(body["prompt"])
        ids = [*self.tokenizer.encode(self.reply), 0][len(self.tokenizer.encode(prompt.rpartition("?")[2])) :]
        ids = ids[: body["max_tokens"]]
        if not body.get("stream"):
            usage = {"prompt_tokens": len(self.tokenizer.encode(prompt)) * self.counts, **self._details()}
            return httpx.Response(200, json={"choices": [self._choice(ids, "length", body, prompt)], "usage": usage})
        drops = self.disconnects_after is not None and self.disconnects_after < len(ids)
        sent, self.disconnects_after = (
            (ids[: self.disconnects_after] if drops else ids),
            None if drops else self.disconnects_after,
        )
        finish = "stop" if ids and ids[-1] == 0 else "length"
        events = [
            {"choices": [self._choice([token], finish if not drops and n == len(sent) else None, body, prompt)]}
            for n, token in enumerate(sent, 1)
        ]
        if body.get("stream_options", {}).get("include_usage"):
            events.append({"choices": [], "usage": {"prompt_tokens": len(prompt), **self._details()}})
        self.open += 1
        return httpx.Response(200, stream=Events(events, drops, self._close))

    def _details(self) -> dict[str, Any]:
        return {} if self.cached is None else {"prompt_tokens_details": {"cached_tokens": self.cached}}

    def _close(self) -> None:
        self.open -= 1

    def _choice(self, ids: list[int], finish: str | None, body: dict[str, Any], prompt: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": self.tokenizer.decode(ids), "finish_reason": finish}
        if self.returns_token_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": self.tokenizer.encode(prompt)}
        if "logprobs" in body:
            keys = {"token_id:2": -0.1, "token_id:3": -2.0} if self.returns_token_ids else {"a": -0.1, "b": -2.0}
            choice["logprobs"] = {"top_logprobs": [keys]}
        if "prompt_logprobs" in body and self.returns_token_ids:
            prompt_ids = body["prompt"]
            choice["prompt_logprobs"] = [None, *({str(token): {"logprob": -0.5}} for token in prompt_ids[1:])]
        return choice


class Fleet(httpx.AsyncBaseTransport):
    """Routes requests to servers by host name."""

    def __init__(self, **servers: Callable[[httpx.Request], httpx.Response]) -> None:
        self._servers = servers

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self._servers[request.url.host](request)
