"""Decide whether a draft step may stand for the target's."""

from lookahead_agent.verifiers.cascade import CascadeVerifier
from lookahead_agent.verifiers.embedding import Embedder, EmbeddingVerifier, SentenceEmbedder
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.judge import JudgeVerifier
from lookahead_agent.verifiers.numbers_first import NumbersFirst
from lookahead_agent.verifiers.protocol import EarlyVerifier, StepPair, Verdict, Verifier, Writing

__all__ = [
    "CascadeVerifier",
    "EarlyVerifier",
    "Embedder",
    "EmbeddingVerifier",
    "ExactVerifier",
    "JudgeVerifier",
    "NumbersFirst",
    "SentenceEmbedder",
    "StepPair",
    "Verdict",
    "Verifier",
    "Writing",
]
