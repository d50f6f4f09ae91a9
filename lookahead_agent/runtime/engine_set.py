"""Engines that work together, and their verifiers."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

from lookahead_agent.certificates.certificate import Certificate, CertificateMatch, find_certificate
from lookahead_agent.certificates.drift_monitor import DISPUTED_BELOW, DriftMonitor
from lookahead_agent.decoding import ReplyReport
from lookahead_agent.decoding.verifier import DraftVerifier, Verifier
from lookahead_agent.engines.protocol import Engine, SupportsSharedDraft
from lookahead_agent.modes.chooser import BUSY, ModeChoice, ModeChooser
from lookahead_agent.modes.record import CPUTime, Quantity
from lookahead_agent.modes.table import Mode
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_selection import EngineSetup
from lookahead_agent.runtime.prefix_warmer import PrefixWarmer
from lookahead_agent.system.passes import acceptance_rate_of
from lookahead_agent.verifiers.embedding import Embedder, EmbeddingVerifier
from lookahead_agent.verifiers.judge import EngineJudge, JudgeModel, JudgeVerifier
from lookahead_agent.verifiers.model_free import ExactVerifier, RandomVerifier
from lookahead_agent.verifiers.results import PrefilterVerifier
from lookahead_agent.verifiers.scores import LikelihoodVerifier, ScoreVerifier

logger = logging.getLogger(__name__)

NO_DRAFT = "a model is missing: the draft"
_ABSENT = {
    "draft": NO_DRAFT,
    "judge": "a model is missing: the judge",
    "embedding": "a model is missing: the embedding model",
}
_RETRY_AFTER = 60.0  # seconds until a silent draft or verifier is tried again
_MAX_CERTIFICATES = 256  # cached searches: a server's clients may choose risks and delimiters
_MAX_VERIFIERS = 32  # likewise
_MIN_TOKENS = 24  # tokens from which a reply measures the seconds of one
_MIN_READ_TOKENS = 256  # prompt tokens without a prefix cache hit from which a reply measures the prefill of one
_MIN_PASSES = 12  # forward passes from which a reply measures the acceptance rate of draft tokens
_MAX_OTHERS_SHARE = 0.1  # CPU share of other programs from which a measurement is not kept for later runs


_TOKENS: Mapping[bool, Mode] = {True: "sd", False: "off"}  # modes without draft steps, by `speculates_on_tokens`
_BOTH: Mapping[bool, Mode] = {True: "lr+sd", False: "lr"}  # modes with draft steps, likewise


class CertifiedPolicy(NamedTuple):
    """A policy with the verifier that keeps its risk on some models."""

    policy: VerifierPolicy
    certificate: Certificate | None = None  # None: `reason` says why; a policy without a risk has neither
    reason: str | None = None


class MeasurementStart(NamedTuple):
    """The engines at the beginning of a reply whose speed is measured."""

    number: int  # number of the reply
    beside: int  # other replies, or requests in the target's engine
    cpu_time: asyncio.Task[CPUTime] | None  # None: other programs do not slow this machine's engines


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
        self.modes = engine_setup.modes if engine_setup is not None else ModeChooser()
        self.warmer = PrefixWarmer(lambda: not self.replies_at_once)  # reads prompts ahead while no reply is written
        self.problems: dict[str, str] = {}  # why a requested draft, judge or embedding model is missing, by role
        self.clock = time.monotonic  # measures the time until a silent draft or verifier is tried again
        # Time of the next attempt, the reason, and the silent object: while it is kept, no other one has its identity.
        self._silences: dict[tuple[str, object], tuple[float, str, object]] = {}

    def remember_silence(self, part: str, policy: VerifierPolicy, reason: str) -> None:
        """Leave a silent draft, or this policy's verifier, out of the replies of the next minute."""
        now, silent = self.clock(), self.draft if part == "draft" else policy.own_verifier
        self._silences = {key: entry for key, entry in self._silences.items() if now < entry[0]}
        self._silences[self._silence_key(part, policy)] = now + _RETRY_AFTER, reason, silent

    def silence(self, policy: VerifierPolicy) -> str | None:
        """Why the draft or the policy's verifier is left out of replies for now; None if neither is."""
        if not self._silences:
            return None
        for part in ("draft", "verifier"):
            until, reason, _ = self._silences.get(self._silence_key(part, policy), (-math.inf, "", None))
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
        if not policy.speculates:
            return None
        for role, absent in (
            ("draft", self.draft is None),
            ("judge", self.judge is None and policy.asks_judge),
            ("embedding", self.embedder is None and policy.embeds),
        ):
            if absent:
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

    @property
    def _beside(self) -> int:
        """Replies beside the one that asks, or requests in the target's engine."""
        return max(self.target.in_flight, self.replies_at_once - 1)

    def choose_mode(self, node: str, policy: VerifierPolicy, *, verifies: bool, missing: str | None) -> ModeChoice:
        """Choose the mode of a node's next reply: the one that the policy forces, else what the chooser says.

        Without a verifier there are no draft steps; `missing` is the reason if the policy has one.
        """
        setup, tokens = self.engine_setup, _TOKENS[self.speculates_on_tokens]
        if not verifies:
            optional: tuple[Mode, ...] = (tokens, "off") if setup is not None and setup.draft_is_optional else (tokens,)
            choice = self.modes.choose_mode(node, optional, tries=False)
            return ModeChoice(tokens, missing or "the policy allows no draft step") if choice.mode == tokens else choice
        both = _BOTH[self.speculates_on_tokens]
        if policy.forces_speculation:
            return ModeChoice(both, "the policy says how steps are speculated on")
        if setup is None:
            return ModeChoice(both, "engines were given")
        modes: tuple[Mode, ...] = ("sd", "lr+sd", "off") if self.shared_draft else (tokens, both)
        busy: Mode = "off" if setup.alone_when_busy else "sd"
        beside = max(self.target.in_flight, self.replies_at_once)
        return self.modes.choose_mode(node, modes, beside, busy=busy)

    def begin_measurement(self) -> MeasurementStart:
        """Begin to measure the speed of a reply, which counts among `replies_at_once`."""
        self.replies += 1
        kept = self.modes.record is not None and self._beside < BUSY
        measures = kept and self.engine_setup is not None and self.engine_setup.on_cpu
        cpu_time = asyncio.create_task(asyncio.to_thread(self.cpu_time)) if measures else None
        if cpu_time is not None:  # a reply that fails never asks for its error
            cpu_time.add_done_callback(lambda task: task.cancelled() or task.exception())
        return MeasurementStart(self.replies, self._beside, cpu_time)

    async def learn(
        self, node: str, mode: Mode, report: ReplyReport, tokens: int, start: MeasurementStart | None
    ) -> None:
        """Learn from a finished reply of so many tokens how fast a mode is in a node, if the load stayed the same.

        Without a `start`, its speed is not typical, and only the lengths of prompt and reply count.
        """
        try:
            await self._learn(node, mode, report, tokens, start)
        except Exception as error:  # the reply is finished
            logger.warning("nothing is learned from the speed of a reply: %s", error)

    async def _learn(
        self, node: str, mode: Mode, report: ReplyReport, tokens: int, start: MeasurementStart | None
    ) -> None:
        prompt, passes, found = report.target_prompt, report.target_forward_passes, dict[Quantity, float]()
        read = prompt.total - prompt.cached if prompt.cached is not None else 0
        if prompt.cached is not None and tokens:
            self.modes.learn_tokens(node, read, tokens)
        if start is None or not self._has_kept_load(start):
            return
        if tokens >= _MIN_TOKENS:
            found["writing"] = report.pace(tokens)
            if mode == "sd" and passes >= _MIN_PASSES and self.engine_setup and self.engine_setup.draft_tokens:
                length = self.engine_setup.draft_tokens
                per_pass = (tokens - 1) / (passes - 1)
                if report.proposed_tokens:
                    per_pass = 1 + length * report.accepted_tokens / report.proposed_tokens
                found["acceptance"] = acceptance_rate_of(per_pass, length)
        if read >= _MIN_READ_TOKENS:
            found["prefill"] = report.seconds["prompt"] / read
        if not found:
            return
        measured = self.modes.learn(node, mode, found, start.beside)
        if start.cpu_time is not None:
            others_share = (await asyncio.to_thread(self.cpu_time)).share_of_others(await start.cpu_time)
            if others_share >= _MAX_OTHERS_SHARE:
                logger.debug("other programs had %.0f %% of the cores: a reply's pace is not kept", 100 * others_share)
                return
        if self.modes.record is not None:
            await asyncio.to_thread(self.modes.keep, measured)

    def _has_kept_load(self, start: MeasurementStart) -> bool:
        """Whether a reply ran alone from beginning to end, or beside a few others at both."""
        if start.beside == 0:
            return self.replies == start.number and self.target.in_flight == 0
        return max(start.beside, self._beside) < BUSY and self._beside > 0

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
