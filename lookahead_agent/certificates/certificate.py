"""Certificates: the models, the data and the bound with which a threshold keeps a risk."""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from lookahead_agent.certificates.risk import level_of_each, p_value, upper_bound
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.system.files import cache_dir, writable, write_atomically
from lookahead_agent.system.jsonl import read_content

logger = logging.getLogger(__name__)

PACKAGED = Path(__file__).parent / "packaged"  # certificates of the default pair, shipped with the package


class Certificate(BaseModel):
    """The evidence that a policy keeps a risk, for one pair of models."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    risk: float  # largest share of accepted steps that change the outcome
    # Names of the models by role: "target", "draft", and "embedding" or "judge" (None: the target) if used
    models: dict[str, str | None]
    precision: dict[str, str]  # weight precision of target and draft, by role
    delimiter: str = "\n\n"  # delimiter of the calibration's steps
    verifier: str  # name of the calibration candidate
    policy: dict[str, Any]  # the policy's fields, the threshold among them
    threshold: float  # least score of an accepted pair
    level: float  # probability δ with which the risk may be larger
    tests: int  # number of verifiers of which this was the best
    pairs: int  # pairs in the calibration
    accepted: int  # pairs that the policy accepts
    errors: int  # accepted pairs whose draft step changes the outcome
    bound: float  # upper bound on the share of errors, from these counts
    disputed: int | None = None  # accepted pairs that the target disputes as a judge; None: not measured
    rule: dict[str, float]  # parameters of the `OutcomeRule` that labelled the pairs
    data: str  # name and digest of the file of pairs
    date: str  # date of the calibration
    environment: dict[str, Any] = {}  # versions and hardware

    def __hash__(self) -> int:
        return hash((self.risk, self.threshold, self.data))

    def problem(self) -> str | None:
        """Why the certificate's counts, or its policy, do not show what it claims; None if they do."""
        if not (0 < self.risk < 1 and 0 < self.level < 1 and self.tests >= 1):
            return "its risk or level is not a probability, or it has no tests"
        if (
            not 0 <= self.errors <= self.accepted <= self.pairs <= _MAX_PAIRS
            or not 0 <= (self.disputed or 0) <= self.accepted
        ):
            return "its counts of pairs contradict each other"
        level = level_of_each(self.level / self.tests)
        if self.errors and p_value(self.accepted, self.errors, self.risk) > level:
            return f"{self.errors} errors of {self.accepted} accepted pairs do not show a risk of {self.risk:g}"
        if upper_bound(self.accepted, self.errors, level) > min(self.risk, self.bound) + _ROUNDING:
            return f"{self.accepted} accepted pairs do not show a risk of {self.risk:g}, or the stated bound"
        if (form := FORMS.get(self.verifier)) is None:
            return f"it is of an unknown verifier {self.verifier!r}"
        if self.policy != {**form.fields, form.measure: self.threshold} or not 0 <= self.threshold <= 1:
            return f"its policy is not that of the verifier {self.verifier!r} with a threshold in 0 to 1"
        try:
            VerifierPolicy.model_validate(self.policy)
        except ValidationError as error:
            return f"its policy is none: {validation_message(error)}"
        if missing := sorted({"target", "draft", *form.roles} - self.models.keys()):
            return f"it names no {' and no '.join(missing)}"
        return None

    def describe(self) -> str:
        """Describe the certificate in one line."""
        return (
            f"risk {self.risk:g}: {self.verifier} ≥ {self.threshold:g}, {self.errors} errors of {self.accepted} "
            f"accepted of {self.pairs} pairs, bound {self.bound:.3f} at level {self.level:g} ({self.date})"
        )

    def is_for(self, models: Mapping[str, str], precision: Mapping[str, str]) -> bool:
        """Whether the certificate is for these models in these precisions, by role."""
        return self.precision == dict(precision) and all(models.get(role) == name for role, name in self.models.items())


_ROUNDING = 1e-9
_MAX_PAIRS = 10**6  # more were never collected, and their test would take long
_CASCADE = {"verifier": "cascade", "similarity": 0.95, "ask_judge_from": 0.65, "both_orders": True}


class VerifierForm(NamedTuple):
    """The policy of a verifier for which a calibration finds a threshold."""

    measure: Literal["similarity", "p_aligned"]  # the policy's field of the threshold
    roles: tuple[str, ...]  # roles of the models that it asks
    fields: Mapping[str, Any]  # the policy's other fields


FORMS: Mapping[str, VerifierForm] = {
    "embedding": VerifierForm("similarity", ("embedding",), {"verifier": "embedding"}),
    "embedding+results": VerifierForm("similarity", ("embedding",), {"verifier": "embedding", "same_numbers": True}),
    "judge": VerifierForm("p_aligned", ("judge",), {"verifier": "judge", "same_numbers": False}),
    "judge+results": VerifierForm("p_aligned", ("judge",), {"verifier": "judge", "same_numbers": True}),
    "both orders": VerifierForm("p_aligned", ("judge",), {"verifier": "judge", "both_orders": True}),
    "cascade": VerifierForm("p_aligned", ("embedding", "judge"), _CASCADE),
}
"""Verifiers by name; "+results" compares numbers, units and equations first, and so do "both orders" and "cascade"."""
_CERTIFICATES = TypeAdapter(list[Any])


def certificates(models: Mapping[str, str]) -> list[Certificate]:
    """The certificates of a pair of models in any precision, local ones before packaged ones."""
    return [certificate for file in _files(models) for certificate in _read(file)[0]]


def keep(new: Sequence[Certificate]) -> Path:
    """Save certificates of one pair of models in the cache folder and return their file.

    They replace certificates of the same precision and delimiter.
    """
    first = new[0]
    file, _ = _files(first.models)
    kind = (first.precision, first.delimiter)
    kept = [entry for entry in _read(file)[0] if (entry.precision, entry.delimiter) != kind]
    rows = [certificate.model_dump(mode="json") for certificate in (*kept, *new)]
    with writable(file):
        write_atomically(file, json.dumps(rows, indent=1) + "\n")
    return file


def digest(file: Path) -> str:
    """The name and the beginning of the sha256 of a file; compression does not change them."""
    name = file.name.removesuffix(".xz")
    return f"{name} {hashlib.sha256(read_content(file)).hexdigest()[:16]}"


class CertificateMatch(NamedTuple):
    """A certificate of a risk, or the reason why there is none."""

    certificate: Certificate | None  # certificate of the verifier that accepts most
    description: str  # description of the certificate, or the reason
    revoked: bool  # whether a revoked certificate would have kept the risk


def find_certificate(
    risk: float,
    models: Mapping[str, str],
    precision: Mapping[str, str],
    revoked: Collection[Certificate] = (),
    delimiter: str = "\n\n",
) -> CertificateMatch:
    """Find the certificate of the verifier that accepts most at a stated risk, for these models by role.

    Certificates in `revoked` are revoked. A certificate does not cover steps with another delimiter.
    """
    read = [_read(file) for file in _files(models)]
    of_pair = [certificate for entries, _ in read for certificate in entries]
    problems = [problem for _, found in read for problem in found]
    of_precision = [certificate for certificate in of_pair if certificate.is_for(models, precision)]
    sufficient = [entry for entry in of_precision if entry.delimiter == delimiter and entry.risk <= risk]
    valid = [certificate for certificate in sufficient if certificate not in revoked]
    tightened = len(valid) < len(sufficient)
    reason = f"no threshold keeps a risk of {risk:g} by the pairs that were collected"
    disputed = "accepted steps are disputed more often than in the calibration"
    if valid:
        # Local certificates come first, and the largest risk accepts most.
        chosen = max(valid, key=lambda certificate: certificate.risk)
        return CertificateMatch(chosen, chosen.describe() + (f", since {disputed}" if tightened else ""), tightened)
    if tightened:
        reason = disputed
    elif not of_pair:
        pair = f"{models.get('target', 'this target')} with {models.get('draft', 'this draft')}"
        reason = f"no certificate is of {pair}: make one with `lookahead-agent calibrate`"
    elif not of_precision:
        shown = " / ".join(f"{role} {kind}" for role, kind in sorted(precision.items())) or "as their folders have it"
        reason = (
            f"no certificate is of this precision and verifier ({shown}): make one with `lookahead-agent calibrate`"
        )
    elif not any(certificate.delimiter == delimiter for certificate in of_precision):
        ends = " or ".join(sorted({repr(certificate.delimiter) for certificate in of_precision}))
        reason = (
            f"the certificates are of steps that end at {ends}: make one of others with `lookahead-agent calibrate`"
        )
    return CertificateMatch(None, "; ".join([reason, *problems[:2]]), tightened)


def _files(models: Mapping[str, str | None]) -> list[Path]:
    """The file of local certificates, and the packaged one."""
    names = (models.get(role) or "unnamed" for role in ("target", "draft"))
    name = "+".join(re.sub(r"[^\w.-]+", "--", name) for name in names) + ".json"
    return [cache_dir() / "certificates" / name, PACKAGED / name]


def _read(file: Path) -> tuple[list[Certificate], list[str]]:
    """Read the certificates of a file; those that do not show what they claim are left out, with the reasons.

    A missing file has none. Raises ConfigurationError if it cannot be read.
    """
    try:
        if not file.is_file():
            return [], []
        entries = _CERTIFICATES.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        reason = validation_message(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigurationError(f"{file} has no certificates: delete it, or calibrate again ({reason})") from error
    found: list[Certificate] = []
    problems: list[str] = []
    for number, entry in enumerate(entries, 1):
        try:
            certificate = Certificate.model_validate(entry)
            problem = certificate.problem()
        except ValidationError as error:
            problem = validation_message(error)
        except (TypeError, ValueError, OverflowError) as error:
            problem = str(error)
        if problem is None:
            found.append(certificate)
        else:
            problems.append(f"certificate {number} of {file.name} is ignored: {problem}")
            logger.warning("%s", problems[-1])
    return found, problems
