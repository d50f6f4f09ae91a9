"""Cosine similarity of sentence embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from lookahead_agent.errors import MissingExtraError, ModelError
from lookahead_agent.verifiers.protocol import StepPair, Verdict


class Embedder(Protocol):
    """Measures how close texts are."""

    async def similarity(self, first: str, second: str) -> float:
        """Cosine similarity of two texts, in [-1, 1]."""
        ...


class SentenceEmbedder:
    """A sentence-transformers model on the CPU, in a thread so that the event loop goes on.

    Pairs that are asked about while it is busy wait and are computed together in one batch.

    Args:
        folder: Folder of the model.

    Raises:
        MissingExtraError: sentence-transformers is not installed.
        ModelError: The folder has no model that it can read.

    It is used from one event loop.
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
        try:
            self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} is not a sentence-transformers model: {error}") from error
        self._waiting: list[tuple[tuple[str, str], asyncio.Future[float]]] = []
        self._worker: asyncio.Task[None] | None = None
        self.batches = 0
        """Batches computed so far."""

    async def similarity(self, first: str, second: str) -> float:
        """Cosine similarity of two texts."""
        answer: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(((first, second), answer))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                values = await asyncio.to_thread(self._similarities, [pair for pair, _ in batch])
            except Exception as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error)
                continue
            for (_, answer), value in zip(batch, values, strict=True):
                if not answer.done():  # nobody waits for one that was cancelled
                    answer.set_result(value)

    def _similarities(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        import torch

        # The cores belong to the engines: embeddings of short texts must not take all of them.
        torch.set_num_threads(1)
        texts = [text for pair in pairs for text in pair]
        vectors = self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        self.batches += 1
        return [float(vectors[index] @ vectors[index + 1]) for index in range(0, len(texts), 2)]


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
