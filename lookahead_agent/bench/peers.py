"""Chat models of other programs' servers, which a benchmark compares with `ChatLookahead`."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
from langchain_core.language_models import BaseChatModel
from langchain_core.outputs import ChatGenerationChunk

from lookahead_agent.bench.config import BenchConfig, TaskConfig, TaskConfiguration
from lookahead_agent.errors import ConfigurationError, EngineError, extra_imports

with extra_imports("peers need langchain-openai: pip install 'lookahead-agent[bench]'"):
    from langchain_openai import ChatOpenAI
    from openai import APIConnectionError

_TIMEOUT_S = 10.0


class PeerChat(ChatOpenAI):
    """LangChain's chat model for an OpenAI-compatible server; a lost connection ends the benchmark."""

    def _stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatGenerationChunk]:
        try:
            yield from super()._stream(*args, **kwargs)
        except APIConnectionError as error:
            raise EngineError(f"the server {self.openai_api_base} does not answer any more: {error}") from error

    async def _astream(self, *args: Any, **kwargs: Any) -> AsyncIterator[ChatGenerationChunk]:
        # Streams synchronously: OpenAI's async client belongs to one event loop, but each sample has its own.
        async for chunk in BaseChatModel._astream(self, *args, **kwargs):
            yield chunk

    def start(self, progress: object = None) -> None:
        """Do nothing: the user has started the server."""

    def close(self) -> None:
        """Do nothing: the user stops the server."""


def peer_chat(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> PeerChat:
    """Create the chat model for the first model that a server lists.

    Raises:
        ConfigurationError: The server does not list a model.
    """
    name, _, url = configuration.peer.partition("=")
    try:
        listed = httpx.get(f"{url.rstrip('/')}/models", timeout=_TIMEOUT_S).raise_for_status().json()
        model = str(listed["data"][0]["id"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"{name}: no OpenAI-compatible server with a model answers at {url} ({error!r}): start it first"
        ) from error
    sampling = config.model_dump(include={"temperature", "top_p"}, exclude_none=True)
    return PeerChat(
        model=model,
        base_url=url,
        api_key=lambda: "none",
        max_completion_tokens=task.max_tokens,
        streaming=True,
        stream_usage=True,
        max_retries=0,
        extra_body={} if config.top_k is None else {"top_k": config.top_k},
        **sampling,
    )
