"""Engines that work together, and their verifiers."""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from lookahead_agent.certificates.certificate import Certificate, CertificateMatch, find_certificate
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW, DriftMonitor
from lookahead_agent.decoding.verifier import DraftVerifier, Verifier
from lookahead_agent.engines.protocol import Engine, SupportsSharedDraft
from lookahead_agent.modes.chooser import ModeChooser
from lookahead_agent.modes.record import CPUTime
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import EngineSetup
from lookahead_agent.runtime.prefix_warmer import PrefixWarmer
from lookahead_agent.verifiers.embedding import Embedder, EmbeddingVerifier
from lookahead_agent.verifiers.judge import EngineJudge, JudgeModel, JudgeVerifier
from lookahead_agent.verifiers.model_free import ExactVerifier, RandomVerifier
from lookahead_agent.verifiers.prefilter import PrefilterVerifier
from lookahead_agent.verifiers.scores import LikelihoodVerifier, ScoreVerifier

NO_DRAFT = "a model is missing: the draft"
_ABSENT = {
    "draft": NO_DRAFT,
    "judge": "a model is missing: the judge",
    "embedding": "a model is missing: the embedding model",
}
_RETRY_AFTER = 60.0  # seconds until a silent draft or verifier is tried again
_MAX_CERTIFICATES = 256  # cached searches: a server's clients may choose risks and delimiters
_MAX_VERIFIERS = 32  # likewise


class CertifiedPolicy(NamedTuple):
    """A policy with the verifier that keeps its risk on some models."""

    policy: VerifierPolicy
    certificate: Certificate | None = None  # None: `reason` says why; a policy without a risk has neither
    reason: str | None = None


class EngineSet:
    """A target with its draft, embedder and judge; without a draft it writes alone, without a judge it also judges.

    `engine_setup` is the selection of the engines, None if the caller selected them; `names` are the models', by role.
    """

    def __init__(
        self,
        target: Engine,
        draft: Engine | None = None,
        embedder: Embedder | None = None,
        judge: JudgeModel | None = None,
        *,
        engine_setup: EngineSetup | None = None,
        names: Mapping[str, str] | None = None,
        cpu_time: Callable[[], CPUTime] = CPUTime.now,
    ) -> None:
        self.target = target
        self.draft = draft
        self.embedder = embedder
        self.judge: JudgeModel | None = judge or EngineJudge(target)  # None: the requested judge did not start
        self.engine_setup = engine_setup
        self.names = dict(names or {})
        self.cpu_time = cpu_time  # reads the CPU time that programs have used
        self._cached_certificate = lru_cache(_MAX_CERTIFICATES)(self._find_certificate)
        # Replies share a verifier, so that one tells whether it serves others; by policy, with the models that it asks.
        self._verifiers: dict[VerifierPolicy, tuple[list[object], Verifier | DraftVerifier]] = {}
        self._revoked: set[Certificate] = set()
        self.drift_monitor = DriftMonitor(target, JudgeVerifier(EngineJudge(target), DISPUTED_BELOW), self._revoke)
        """Judges steps again that were accepted under a certificate."""
        self.replies = self.replies_at_once = 0  # replies started, and replies being written
        self.modes = ModeChooser()  # chooses the mode of each node's replies, unless it is forced
        self.warmer = PrefixWarmer(lambda: not self.replies_at_once)  # reads prompts ahead while no reply is written
        self.problems: dict[str, str] = {}  # why a requested draft, judge or embedding model is missing, by role
        self.clock = time.monotonic  # for the time until a silent draft or verifier is tried again
        self._silences: dict[tuple[str, object], tuple[float, str]] = {}

    def remember_silence(self, part: str, policy: VerifierPolicy, reason: str) -> None:
        """Leave a silent draft, or this policy's verifier, out of the replies of the next minute."""
        self._silences[self._silence_key(part, policy)] = self.clock() + _RETRY_AFTER, reason

    def silence(self, policy: VerifierPolicy) -> str | None:
        """Why the draft or the policy's verifier is left out of replies for now; None if neither is."""
        for part in ("draft", "verifier"):
            until, reason = self._silences.get(self._silence_key(part, policy), (0.0, ""))
            if self.clock() < until:
                return f"{reason} in an earlier reply"
        return None

    def _silence_key(self, part: str, policy: VerifierPolicy) -> tuple[str, object]:
        # A draft that was started again is another one.
        if part == "draft":
            return part, id(self.draft)
        return part, policy.verifier if policy.own_verifier is None else id(policy.own_verifier)

    def explain_missing(self, policy: VerifierPolicy) -> str | None:
        """Why the policy has no verifier on these engines, by the model that is missing; None if none is."""
        for role, absent in (
            ("draft", self.draft is None),
            ("judge", policy.asks_judge and self.judge is None),
            ("embedding", policy.embeds and self.embedder is None),
        ):
            if policy.speculates and absent:
                problem = self.problems.get(role)
                return _ABSENT[role] if problem is None else f"{_ABSENT[role]} ({problem})"
        return None

    @property
    def problem(self) -> str | None:
        """Why requested models are missing; None if none is."""
        return "; ".join(self.problems.values()) or None

    @property
    def precision(self) -> dict[str, str]:
        """The precision of each model's weights, by role; models with the precision of their folder are left out."""
        return dict(self.engine_setup.precision) if self.engine_setup is not None else {}

    @property
    def speculates_on_tokens(self) -> bool:
        """Whether the target has token speculation, by any method."""
        if self.engine_setup is not None:
            return self.engine_setup.speculation_method != "none"
        return self.shared_draft

    @property
    def shared_draft(self) -> bool:
        """Whether the target takes draft tokens from a shared draft, which a reply may skip."""
        return self.draft is not None and isinstance(self.target, SupportsSharedDraft) and self.target.shared_draft

    def resolve_certificate(self, policy: VerifierPolicy) -> CertifiedPolicy:
        """Return a policy with the verifier that keeps its risk on these models."""
        if policy.risk is None:
            return CertifiedPolicy(policy)
        found = self._cached_certificate(policy.risk, str(policy.delimiter))
        if found.certificate is not None:
            certified = policy.with_verifier(found.certificate.policy)
            return CertifiedPolicy(certified, found.certificate, found.description)
        if policy.verifier == "certified" or found.revoked:
            exact = policy.with_verifier({"verifier": "exact"})
            return CertifiedPolicy(exact, reason=f"exact, since {found.description}")
        return CertifiedPolicy(policy, reason=f"not certified, since {found.description}")

    def _find_certificate(self, risk: float, delimiter: str) -> CertificateMatch:
        return find_certificate(risk, self.names, self.precision, frozenset(self._revoked), delimiter)

    def _revoke(self, certificate: Certificate) -> None:
        self._revoked.add(certificate)
        self._cached_certificate.cache_clear()

    def verifier(self, policy: VerifierPolicy) -> Verifier | DraftVerifier | None:
        """The policy's verifier on these engines; None if the policy has none or its models are missing."""
        if not policy.speculates or self.explain_missing(policy) is not None:
            return None
        if policy.own_verifier is not None:
            own: Verifier | DraftVerifier = policy.own_verifier
            return own
        asked: list[object] = [self.target, self.judge, self.embedder]
        known, verifier = self._verifiers.get(policy, (asked, None))
        if verifier is None or any(old is not new for old, new in zip(known, asked, strict=True)):
            verifier = self._create_verifier(policy)
            if len(self._verifiers) >= _MAX_VERIFIERS:
                self._verifiers.clear()
            self._verifiers[policy] = asked, verifier
        return verifier

    def _create_verifier(self, policy: VerifierPolicy) -> Verifier | DraftVerifier:
        match policy.verifier:
            case "exact":
                return ExactVerifier()
            case "score":
                return ScoreVerifier(self.target, policy.score)
            case "likelihood":
                return LikelihoodVerifier(self.target, policy.likelihood)
            case "random":
                return RandomVerifier(policy.probability)
        semantic: Verifier | None = None
        if policy.asks_judge and self.judge is not None:
            semantic = JudgeVerifier(self.judge, policy.p_aligned, both_orders=policy.both_orders)
        if policy.verifier != "judge" and self.embedder is not None:
            judge_from = -1.0 if policy.ask_judge_from is None else policy.ask_judge_from
            semantic = EmbeddingVerifier(self.embedder, policy.similarity, semantic, judge_from)
        assert semantic is not None
        return PrefilterVerifier(semantic, same_results=policy.compares_results)
