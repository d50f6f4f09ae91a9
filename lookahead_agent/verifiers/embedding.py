"""Cosine similarity of sentence embeddings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lookahead_agent.errors import MissingExtraError
from lookahead_agent.verifiers.protocol import StepPair, Verdict


class Embedder(Protocol):
    """Measures how close texts are."""

    async def similarity(self, first: str, second: str) -> float:
        """Cosine similarity of two texts, in [-1, 1]."""
        ...


class SentenceEmbedder:
    """A sentence-transformers model on the CPU, in a thread of its own so that the event loop goes on.

    Args:
        folder: Folder of the model.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingExtraError(
                "the embedding verifier needs sentence-transformers: pip install 'lookahead-agent[cpu]' or '[gpu]'"
            ) from error
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        self._lock = threading.Lock()

    async def similarity(self, first: str, second: str) -> float:
        """Cosine similarity of two texts."""
        return await asyncio.to_thread(self._similarity, (first, second))

    def _similarity(self, texts: Sequence[str]) -> float:
        import torch

        with self._lock:
            # The cores belong to the engines: an embedding of two short texts must not take all of them.
            torch.set_num_threads(1)
            vectors = self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)
        return float(vectors[0] @ vectors[1])


class EmbeddingVerifier:
    """Accepts a draft step whose embedding is close to the target step's.

    Args:
        embedder: Measures the similarity.
        threshold: Least cosine similarity of an accepted pair, in [-1, 1].
    """

    def __init__(self, embedder: Embedder, threshold: float) -> None:
        self._embedder = embedder
        self._threshold = threshold

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        similarity = await self._embedder.similarity(pair.draft.text.strip(), pair.target.text.strip())
        return Verdict(similarity >= self._threshold, "similarity", similarity)
