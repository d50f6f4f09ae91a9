"""Decide whether a draft step may replace the target's."""

from lookahead_agent.decoding.verifier import (
    DraftStep,
    DraftVerifier,
    EarlyVerifier,
    PartialStep,
    StepPair,
    Verdict,
    Verifier,
)
from lookahead_agent.verifiers.embedding import Embedder, EmbeddingVerifier, RemoteEmbedder, SentenceEmbedder
from lookahead_agent.verifiers.exact import ExactVerifier
from lookahead_agent.verifiers.judge import EngineJudge, JudgeModel, JudgeVerifier, RemoteJudge
from lookahead_agent.verifiers.likelihood import LikelihoodVerifier
from lookahead_agent.verifiers.prefilter import PrefilterVerifier
from lookahead_agent.verifiers.random_accept import RandomVerifier
from lookahead_agent.verifiers.score import ScoreVerifier

__all__ = [
    "DraftStep",
    "DraftVerifier",
    "EarlyVerifier",
    "Embedder",
    "EmbeddingVerifier",
    "EngineJudge",
    "ExactVerifier",
    "JudgeModel",
    "JudgeVerifier",
    "LikelihoodVerifier",
    "PartialStep",
    "PrefilterVerifier",
    "RandomVerifier",
    "RemoteEmbedder",
    "RemoteJudge",
    "ScoreVerifier",
    "SentenceEmbedder",
    "StepPair",
    "Verdict",
    "Verifier",
]
