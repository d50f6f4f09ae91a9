"""Verifiers, which decide whether a draft step is accepted."""

from lookahead_agent.decoding.verifier import DraftStep as DraftStep
from lookahead_agent.decoding.verifier import DraftVerifier as DraftVerifier
from lookahead_agent.decoding.verifier import EarlyVerifier as EarlyVerifier
from lookahead_agent.decoding.verifier import PartialStep as PartialStep
from lookahead_agent.decoding.verifier import StepPair as StepPair
from lookahead_agent.decoding.verifier import Verdict as Verdict
from lookahead_agent.decoding.verifier import Verifier as Verifier
from lookahead_agent.verifiers.embedding import Embedder as Embedder
from lookahead_agent.verifiers.embedding import EmbeddingVerifier as EmbeddingVerifier
from lookahead_agent.verifiers.embedding import RemoteEmbedder as RemoteEmbedder
from lookahead_agent.verifiers.embedding import SentenceEmbedder as SentenceEmbedder
from lookahead_agent.verifiers.judge import EngineJudge as EngineJudge
from lookahead_agent.verifiers.judge import JudgeModel as JudgeModel
from lookahead_agent.verifiers.judge import JudgeVerifier as JudgeVerifier
from lookahead_agent.verifiers.judge import RemoteJudge as RemoteJudge
from lookahead_agent.verifiers.model_free import ExactVerifier as ExactVerifier
from lookahead_agent.verifiers.model_free import RandomVerifier as RandomVerifier
from lookahead_agent.verifiers.results import PrefilterVerifier as PrefilterVerifier
from lookahead_agent.verifiers.scores import LikelihoodVerifier as LikelihoodVerifier
from lookahead_agent.verifiers.scores import ScoreVerifier as ScoreVerifier
