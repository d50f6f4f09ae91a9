"""Embeddings from an OpenAI-compatible server."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lookahead_agent.engines.servers import RemoteModel, Servers
from lookahead_agent.errors import EngineError
from lookahead_agent.verifiers.embedding import BatchingEmbedder, Pair


class RemoteEmbedder(BatchingEmbedder):
    """An embedding model behind an OpenAI-compatible `/embeddings`.

    Args:
        servers: Where it is.
        model: Its name there.

    It is used from one event loop.
    """

    def __init__(self, servers: Servers, model: str) -> None:
        super().__init__()
        self._servers = servers
        self._model = model

    async def compare(self, pairs: Sequence[Pair]) -> list[float]:
        """Cosine similarities of pairs of texts.

        Raises:
            EngineError: The server failed, or cannot be reached.
        """
        texts = [text for pair in pairs for text in pair]
        answer = await self._servers.post("/embeddings", {"model": self._model, "input": texts})
        try:
            vectors = [entry["embedding"] for entry in sorted(answer["data"], key=lambda entry: entry["index"])]
            return [_cosine(vectors[index], vectors[index + 1]) for index in range(0, len(texts), 2)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError("the embedding model's server does not answer like OpenAI's /embeddings") from error

    async def aclose(self) -> None:
        """Close the connections."""
        await self._servers.aclose()


def remote_embedder(remote: RemoteModel) -> RemoteEmbedder:
    """The embedder of these servers, whose model must be named."""
    assert remote.model is not None
    return RemoteEmbedder(Servers(remote, "embedding model"), remote.model)


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    norms = math.hypot(*first) * math.hypot(*second)
    return sum(a * b for a, b in zip(first, second, strict=True)) / norms if norms else 0.0
