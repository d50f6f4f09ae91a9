"""Cosine similarity of sentence embeddings, from a model in this process or from a server."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import httpx

from lookahead_agent.decoding.foreign import call_part
from lookahead_agent.decoding.verifier import StepPair, Verdict, Verifier
from lookahead_agent.engines.servers import RemoteModel, Server
from lookahead_agent.errors import EngineError, ModelError, extra_imports
from lookahead_agent.system.background import describe, is_cancelled


class Embedder(Protocol):
    """Measures how similar two texts are."""

    async def similarity(self, first: str, second: str) -> float:
        """Return the cosine similarity of two texts, in [-1, 1]."""


@dataclass(frozen=True)
class EmbeddingVerifier:
    """Accepts a draft step whose embedding is close to the target step's; a judge may decide less similar pairs.

    Put `PrefilterVerifier` in front of it: embeddings hardly distinguish numbers.
    """

    embedder: Embedder
    threshold: float  # least cosine similarity of a pair that is accepted without the judge, in [-1, 1]
    judge: Verifier | None = None  # the second stage of a cascade, for pairs below the threshold; None rejects them
    judge_from: float = -1.0  # least similarity of a pair that is passed to the judge

    async def verify(self, pair: StepPair) -> Verdict:
        """Judge one pair."""
        draft, target, judge = pair.draft.text.strip(), pair.target.text.strip(), self.judge
        similarity = await call_part(self.embedder, lambda: self.embedder.similarity(draft, target))
        if judge is not None and self.judge_from <= similarity < self.threshold:
            return await call_part(judge, lambda: judge.verify(pair))
        return Verdict(similarity >= self.threshold, "similarity", similarity)


class _BatchingEmbedder(ABC):
    """Compares pairs in batches: pairs that arrive during one comparison form the next batch.

    It works in one event loop only.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[tuple[str, str], asyncio.Future[float]]] = []
        self._worker: asyncio.Task[None] | None = None
        self.batches = 0  # batches compared so far

    @abstractmethod
    async def compare(self, texts: Sequence[str]) -> list[float]:
        """Return the cosine similarities of texts 0 and 1, 2 and 3, and so on."""

    async def similarity(self, first: str, second: str) -> float:
        """Return the cosine similarity of two texts, in [-1, 1]."""
        result: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append(((first, second), result))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await result

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                values = await self.compare([text for pair, _ in batch for text in pair])
                if len(values) != len(batch):
                    raise EngineError(f"the embedding model compared {len(values)} of {len(batch)} pairs")
            except BaseException as error:  # whatever a model's library raises, each caller gets an answer
                for _, result in batch:
                    if not result.done():
                        result.set_exception(error if isinstance(error, Exception) else EngineError(describe(error)))
                if is_cancelled():
                    raise
                continue
            self.batches += 1
            for (_, result), value in zip(batch, values, strict=True):
                if not result.done():  # its caller was cancelled
                    result.set_result(value)


class SentenceEmbedder(_BatchingEmbedder):
    """A sentence-transformers model on the CPU, in a thread so that it does not block the event loop."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        needed = "the embedding verifier needs sentence-transformers: pip install 'lookahead-agent[cpu]' or '[gpu]'"
        with extra_imports(needed):
            from sentence_transformers import SentenceTransformer
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        try:
            self._model: Any = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{folder} is not a sentence-transformers model: {error}") from error

    async def compare(self, texts: Sequence[str]) -> list[float]:
        """See `_BatchingEmbedder`."""
        return await asyncio.to_thread(self._compare, texts)

    def _compare(self, texts: Sequence[str]) -> list[float]:
        import torch

        # The cores belong to the engines: embeddings of short texts must not occupy all of them.
        torch.set_num_threads(1)
        vectors = self._model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
        return [float(vectors[index] @ vectors[index + 1]) for index in range(0, len(texts), 2)]


class RemoteEmbedder(_BatchingEmbedder):
    """An embedding model behind an OpenAI-compatible `/embeddings`; a `transport` replaces the network."""

    def __init__(self, remote: RemoteModel, transport: httpx.AsyncBaseTransport | None = None) -> None:
        super().__init__()
        self.server = Server(remote, "embedding model", transport)
        self._model = remote.model

    async def compare(self, texts: Sequence[str]) -> list[float]:
        """See `_BatchingEmbedder`."""
        answer = await self.server.ask("/embeddings", {"model": self._model, "input": list(texts)})
        try:
            vectors = [entry["embedding"] for entry in sorted(answer["data"], key=lambda entry: entry["index"])]
            return [_cosine(vectors[index], vectors[index + 1]) for index in range(0, len(texts), 2)]
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise EngineError("the embedding model's server does not answer like OpenAI's /embeddings") from error


def _cosine(first: Sequence[float], second: Sequence[float]) -> float:
    norms = math.hypot(*first) * math.hypot(*second)
    return sum(a * b for a, b in zip(first, second, strict=True)) / norms if norms else 0.0
