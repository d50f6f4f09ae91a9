"""Certificates: for which models, on which data, with which bound a threshold keeps a risk."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import read_content
from lookahead_agent.models.cache import cache_dir, writable, write_whole

PACKAGED = Path(__file__).parent / "packaged"  # certificates of the default pair, which come with the package


class Certificate(BaseModel):
    """The evidence that a policy keeps a risk, for one pair of models."""

    model_config = ConfigDict(frozen=True)

    risk: float  # share of accepted steps that change the outcome, at most
    models: dict[str, str | None]  # by role: "target", "draft", and "embedding" or "judge" (None: the target) if asked
    precision: dict[str, str]  # of the weights of target and draft
    delimiter: str = "\n\n"  # that ends the steps of the calibration
    verifier: str  # the name of the candidate
    policy: dict[str, Any]  # the policy's fields, the threshold among them
    threshold: float  # least score of an accepted pair
    level: float  # probability δ with which the risk may be larger
    tests: int  # verifiers of which this was the best
    pairs: int  # of the calibration
    accepted: int  # pairs that the policy accepts
    errors: int  # accepted pairs whose draft step changes the outcome
    bound: float  # upper bound of the share of errors by the counts
    disputed: int | None = None  # accepted pairs that the target, asked as a judge, disputes; None: not measured
    rule: dict[str, float]  # by which a step changes the outcome
    data: str  # name and digest of the file of pairs
    date: str  # of the calibration
    environment: dict[str, Any] = {}  # versions and hardware

    def __hash__(self) -> int:
        return hash((self.risk, self.threshold, self.data))

    def describe(self) -> str:
        """One line for people."""
        return (
            f"risk {self.risk:g}: {self.verifier} ≥ {self.threshold:g}, {self.errors} errors of {self.accepted} "
            f"accepted of {self.pairs} pairs, bound {self.bound:.3f} at level {self.level:g} ({self.date})"
        )

    def is_for(self, models: Mapping[str, str], precision: Mapping[str, str]) -> bool:
        """Whether it is of these models in these precisions."""
        return self.precision == dict(precision) and all(models.get(role) == name for role, name in self.models.items())


_CERTIFICATES = TypeAdapter(list[Certificate])


def certificates(models: Mapping[str, str]) -> list[Certificate]:
    """Certificates of a pair of models in any precision, those made here before those of the package."""
    return [certificate for file in _files(models) if file.is_file() for certificate in _read(file)]


def keep(found: Sequence[Certificate]) -> Path:
    """Keep certificates of one pair of models beside the models, and return their file.

    They replace those of the same precision and delimiter.
    """
    first = found[0]
    file, _ = _files(first.models)
    kind = (first.precision, first.delimiter)
    others = [each for each in (_read(file) if file.is_file() else ()) if (each.precision, each.delimiter) != kind]
    rows = [each.model_dump(mode="json") for each in (*others, *found)]
    with writable(file):
        write_whole(file, json.dumps(rows, indent=1) + "\n")
    return file


def digest(file: Path) -> str:
    """Name and beginning of the sha256 of a file, the same whether it is compressed or not."""
    name = file.name.removesuffix(".xz")
    return f"{name} {hashlib.sha256(read_content(file)).hexdigest()[:16]}"


class Found(NamedTuple):
    """A certificate of a risk, or the reason why there is none."""

    certificate: Certificate | None  # of the verifier that accepts most
    description: str  # of the certificate, or the reason
    given_up: bool  # whether one that was good enough was given up


def find_certificate(
    risk: float,
    models: Mapping[str, str],
    precision: Mapping[str, str],
    given_up: Collection[Certificate] = (),
    delimiter: str = "\n\n",
) -> Found:
    """The certificate of the verifier that accepts most at a stated risk with these models, by role.

    Certificates that were given up hold no longer. A certificate says nothing of steps with another delimiter.
    """
    of_pair = certificates(models)
    of_these = [each for each in of_pair if each.is_for(models, precision)]
    fitting = [each for each in of_these if each.delimiter == delimiter and each.risk <= risk]
    left = [each for each in fitting if each not in given_up]
    tightened = len(left) < len(fitting)
    reason = f"no threshold keeps a risk of {risk:g} by the pairs that were collected"
    disputed = "accepted steps are disputed more often than in the calibration"
    if left:
        # Those made here come first, and the largest risk accepts most.
        chosen = max(left, key=lambda each: each.risk)
        return Found(chosen, chosen.describe() + (f", since {disputed}" if tightened else ""), tightened)
    if tightened:
        reason = disputed
    elif not of_pair:
        pair = f"{models.get('target', 'this target')} with {models.get('draft', 'this draft')}"
        reason = f"no certificate is of {pair}: make one with `lookahead-agent calibrate`"
    elif not of_these:
        shown = " / ".join(f"{role} {kind}" for role, kind in sorted(precision.items())) or "as their folders have it"
        reason = (
            f"no certificate is of this precision and verifier ({shown}): make one with `lookahead-agent calibrate`"
        )
    elif not any(each.delimiter == delimiter for each in of_these):
        ends = " or ".join(sorted({repr(each.delimiter) for each in of_these}))
        reason = (
            f"the certificates are of steps that end at {ends}: make one of others with `lookahead-agent calibrate`"
        )
    return Found(None, reason, tightened)


def _files(models: Mapping[str, str | None]) -> list[Path]:
    """The file of certificates made here, and that of the package."""
    names = (models.get(role) or "unnamed" for role in ("target", "draft"))
    name = "+".join(re.sub(r"[^\w.-]+", "--", name) for name in names) + ".json"
    return [cache_dir() / "certificates" / name, PACKAGED / name]


def _read(file: Path) -> list[Certificate]:
    try:
        return _CERTIFICATES.validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        raise ConfigurationError(f"{file} has no certificates: delete it, or calibrate again ({error})") from error
