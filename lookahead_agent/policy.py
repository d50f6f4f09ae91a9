"""Verifier policies: which draft steps a node accepts, and how far it looks ahead."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from inspect import iscoroutinefunction
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from lookahead_agent.errors import ConfigurationError, PolicyError, validation_message
from lookahead_agent.system.delimiters import delimiter_finder
from lookahead_agent.system.imports import import_object
from lookahead_agent.system.texts import check_encodable

VerifierName = Literal["off", "exact", "certified", "embedding", "judge", "cascade", "score", "likelihood", "random"]

_OWN = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@lru_cache(maxsize=256)
def _import_verifier(text: str) -> Any:
    """Import the verifier that `module:Class` names, once; raises ValueError for another object."""
    module, _, name = text.partition(":")
    try:
        found = import_object(module, name)
        found = found() if isinstance(found, type) else found
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"the verifier {text!r} cannot be imported from this folder or Python's path: {reason}"
        ) from error
    return _check_verifier(found, repr(text))


def _check_verifier(value: Any, name: str) -> Any:
    """Return a verifier of the user's own; raises ValueError for another object."""
    methods = [getattr(value, method, None) for method in ("verify", "verify_draft")]
    if isinstance(value, type):
        raise ValueError(f"{name} is a class: give an instance of it, as in verifier={value.__name__}()")
    if not any(map(iscoroutinefunction, methods)):
        raise ValueError(
            f"{name} is not a verifier: it has neither `async def verify(self, pair)` nor "
            "`async def verify_draft(self, step)`"
        )
    return value


def _read_verifier(value: Any) -> Any:
    if not isinstance(value, str):
        return _check_verifier(value, f"an object of {type(value).__name__}")
    if value not in get_args(VerifierName):
        if _OWN.fullmatch(value) is None:
            names = ", ".join(get_args(VerifierName))
            raise ValueError(f"there is no verifier {value!r}: choose one of {names}, or your own, as in module:Class")
        _import_verifier(value)
    return value


def _write_verifier(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(
            f"a verifier of your own, {type(value).__name__}, is an object of this process: name module:Class"
        )
    return value


AnyVerifier = Annotated[
    Any, BeforeValidator(_read_verifier), PlainSerializer(_write_verifier, return_type=str, when_used="json")
]
"""A verifier's name, the text `module:Class` of a verifier of the user's own, or such a verifier."""

# The fields that each verifier reads: a value for a verifier that ignores it is an error.
_READS: dict[str, frozenset[str]] = {
    "off": frozenset(),
    "exact": frozenset(),
    "certified": frozenset({"risk"}),
    "embedding": frozenset({"risk", "similarity", "same_numbers"}),
    "judge": frozenset({"risk", "p_aligned", "same_numbers", "both_orders"}),
    "cascade": frozenset({"risk", "similarity", "ask_judge_from", "p_aligned", "same_numbers", "both_orders"}),
    "score": frozenset({"score"}),
    "likelihood": frozenset({"likelihood"}),
    "random": frozenset({"probability"}),
}
_VERIFIER_FIELDS = frozenset().union(*_READS.values())
_MAX_TEXT_LENGTH = 2000  # most characters of a policy written as text, and of a pattern
DEFAULT_DEPTH = 4  # steps in flight (γ) when steps are speculated on and no depth is set


_FLAGS = re.I | re.M | re.S | re.X | re.A | re.U  # flags that only change what a pattern matches


def _compile(pattern: str, flags: int = 0) -> re.Pattern[str]:
    """Compile a pattern; raises ValueError if it is invalid or too long."""
    if len(pattern) > _MAX_TEXT_LENGTH:
        raise ValueError(f"a pattern has at most {_MAX_TEXT_LENGTH} characters")
    try:
        return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"/{pattern}/ is not a pattern: {error}") from None


def _pattern_from_json(value: Any) -> Any:
    match value:
        case {"pattern": str() as pattern, "flags": int() as flags, **rest} if not rest:
            return _compile(pattern, flags & _FLAGS)
    return value


Delimiter = Annotated[
    str | re.Pattern[str],
    PlainSerializer(
        lambda text: text if isinstance(text, str) else {"pattern": text.pattern, "flags": text.flags}, when_used="json"
    ),
    BeforeValidator(_pattern_from_json),
]
_PAIRWISE = frozenset({"hedge", "synchronous", "early"})  # fields that matter only if a target step is compared


class VerifierPolicy(BaseModel):
    """A verifier and everything else that a node may choose.

    Attributes:
        name: Name in metadata and reports.
        verifier: "off" runs the target alone. "exact" accepts only the target's own tokens. "embedding" compares
            embeddings, "judge" calls a language model, and "cascade" combines them, cheapest first. "score",
            "likelihood" and "random" are baselines. With "score" (SpecReason), the target scores a draft step from 0 to
            9 and writes only rejected steps. "likelihood" does the same by the step's mean log-probability. A verifier
            of your own is an object with `verify` or `verify_draft`, or the text "module:Class".
        similarity: Least cosine similarity of a pair that is accepted without a judge, in [-1, 1] (embedding, cascade).
        ask_judge_from: Least similarity of a pair below `similarity` that the judge decides; None: no pair (cascade).
        p_aligned: Least probability of "yes" with which the judge accepts, in [0, 1] (judge, cascade).
        both_orders: Whether the judge is asked again with the two steps exchanged, and the lower p(aligned) decides
            (judge, cascade).
        same_numbers: Whether steps with different numbers, units or equations are rejected before any model is called
            (embedding, judge, cascade); by default not for "embedding".
        score: Least score of an accepted step, in [0, 9] (score).
        risk: Share of accepted draft steps that may change the outcome, in (0, 1). A certificate of the loaded models
            selects the verifier that accepts most. Without a certificate, the other fields apply, or "exact" if none is
            set (certified, embedding, judge, cascade).
        likelihood: Least mean log-probability, in nats per token (likelihood).
        probability: Probability of acceptance, in [0, 1] (random).
        depth: Steps in flight at the front (γ); "auto": the library selects the fastest, which may be no step
            speculation.
        width: Draft candidates per position (w); the first accepted one is kept.
        draft_temperature: Sampling temperature of candidates after the first in a greedy reply.
        delimiter: Text, or compiled pattern, that ends a step. A search for a pattern that takes longer than 20 ms ends
            the reply with an error.
        max_step_tokens: Length limit of a step in tokens; a truncated draft step is never accepted.
        hedge: Whether the target continues after its own step during verification.
        synchronous: Whether to work in rounds, as the paper's synchronous variant does; slower.
        early: Whether a draft step is dropped as soon as the verifier is certain to reject it; saves work only.
        answer_from_target: Whether the target writes the final answer alone, after the thinking of a thinking model.
        verifier_timeout: Seconds of one verdict after which speculation is disabled.
        draft_timeout: Seconds without a draft token after which speculation is disabled.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, allow_inf_nan=False)

    name: str = "custom"
    verifier: AnyVerifier = "cascade"
    similarity: float = Field(0.85, ge=-1, le=1)
    ask_judge_from: float | None = Field(0.65, ge=-1, le=1)
    p_aligned: float = Field(0.75, ge=0, le=1)
    both_orders: bool = False
    same_numbers: bool = True
    risk: float | None = Field(None, gt=0, lt=1)
    score: float = Field(7.0, ge=0, le=9)
    likelihood: float = Field(-0.2, le=0)
    probability: float = Field(0.5, ge=0, le=1)
    depth: Literal["auto"] | Annotated[int, Field(ge=1, le=16)] = "auto"
    width: int = Field(1, ge=1, le=8)
    draft_temperature: float = Field(0.7, gt=0)
    delimiter: Delimiter = "\n\n"
    max_step_tokens: int = Field(256, ge=1)
    hedge: bool = True
    synchronous: bool = False
    early: bool = True
    answer_from_target: bool = False
    verifier_timeout: float = Field(60.0, gt=0)
    draft_timeout: float = Field(120.0, gt=0)

    _rule: str | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _default_to_certified(cls, fields: Any) -> Any:
        try:
            check_encodable(fields, "policy")
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        if isinstance(fields, Mapping) and fields.get("risk") is not None:
            return {"verifier": "certified", "name": f"risk={fields['risk']}", **fields}
        return fields

    @model_validator(mode="after")
    def _reject_ignored_fields(self) -> VerifierPolicy:
        fields_set = self.model_fields_set - {"name", "verifier"}
        reads = frozenset() if self.own_verifier is not None else _READS[self.verifier]
        ignored = fields_set & (_VERIFIER_FIELDS - reads)
        if not self.speculates:
            ignored = fields_set
        elif self.draft_first:
            ignored |= fields_set & _PAIRWISE
        if ignored:
            raise ValueError(f"the verifier {self._verifier_name!r} does not use {', '.join(sorted(ignored))}")
        if self.verifier == "certified" and self.risk is None:
            raise ValueError("the verifier 'certified' needs a risk, such as risk=0.02")
        if "draft_temperature" in fields_set and self.width == 1:
            raise ValueError("draft_temperature has no effect with width 1")
        asked_from = self.ask_judge_from if "ask_judge_from" in fields_set else None
        if asked_from is not None and asked_from > self.similarity:
            raise ValueError(
                f"ask_judge_from ({asked_from}) is above similarity ({self.similarity}): the judge would never be asked"
            )
        try:
            delimiter_finder(self.delimiter)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self

    # Pydantic's own hash is of all fields, and a verifier of the user's may have none.
    def __hash__(self) -> int:
        return hash((self.name, self._verifier_name, self.depth, self.width))

    @property
    def own_verifier(self) -> Any:
        """The verifier of the user's own; None: the library has the policy's verifier."""
        if not isinstance(self.verifier, str):
            return self.verifier
        return _import_verifier(self.verifier) if ":" in self.verifier else None

    @property
    def _verifier_name(self) -> str:
        return self.verifier if isinstance(self.verifier, str) else type(self.verifier).__name__

    @property
    def draft_first(self) -> bool:
        """Whether draft steps are judged without a target step; the target writes a step only after a rejection."""
        own = self.own_verifier
        return hasattr(own, "verify_draft") if own is not None else str(self.verifier) in ("score", "likelihood")

    @property
    def asks_judge(self) -> bool:
        """Whether the policy may ask a judge model."""
        asked = self.verifier == "cascade" and self.ask_judge_from is not None
        return self.verifier == "judge" or (asked and (self.ask_judge_from or 0.0) < self.similarity)

    @property
    def embeds(self) -> bool:
        """Whether the policy needs an embedding model, or may need one for a certificate."""
        return self.verifier in ("embedding", "cascade") or self.risk is not None

    @property
    def compares_results(self) -> bool:
        """Whether numbers, units and equations are compared before any model is called."""
        if self.own_verifier is not None:
            return False
        return self.same_numbers and (str(self.verifier) != "embedding" or "same_numbers" in self.model_fields_set)

    @property
    def speculates(self) -> bool:
        """Whether the policy uses a draft model at all."""
        return not isinstance(self.verifier, str) or self.verifier != "off"

    @property
    def forces_speculation(self) -> bool:
        """Whether steps are speculated on even if that is slower: a field says how, or the policy is a baseline."""
        if not self.speculates:
            return False
        specified = self.depth != "auto" or self.synchronous or self.width > 1
        return specified or self.draft_first or self.verifier == "random"

    @property
    def steps_ahead(self) -> int:
        """Steps in flight (γ) when steps are speculated on."""
        return DEFAULT_DEPTH if self.depth == "auto" else self.depth

    def with_depth(self, depth: int | Literal["auto"]) -> VerifierPolicy:
        """Copy the policy with this depth, unless it has its own or does not speculate."""
        if depth == "auto" or not self.speculates or self.depth != "auto":
            return self
        return self.model_copy(update={"depth": depth})

    def with_verifier(self, fields: Mapping[str, Any]) -> VerifierPolicy:
        """Copy the policy with another verifier; raises PolicyError if another field contradicts it."""
        own = self.model_dump(exclude_unset=True, exclude={"verifier", *_VERIFIER_FIELDS})
        policy = _validate({**own, "name": self.name, **fields})
        policy._rule = self._rule
        return policy

    def with_selection_rule(self, rule: str) -> VerifierPolicy:
        """Copy the policy with the rule that selected it."""
        policy = self.model_copy()
        policy._rule = rule
        return policy

    @property
    def rule(self) -> str | None:
        """The rule that selected the policy for a call; None: none has."""
        return self._rule

    def explain(self) -> str:
        """Describe in a sentence what the policy does, and the rule that selected it, if any."""
        return f"{self.name}: {self._behavior()}" + (f" (chosen by {self._rule})" if self._rule else "")

    def _behavior(self) -> str:
        if not self.speculates:
            return "the target alone"
        judged = f"means the same to the judge with p ≥ {self.p_aligned:g}" + " in both orders" * self.both_orders
        similar = f"has a similarity of {self.similarity:g} to the target's"
        conditions = {
            "exact": "has the target's own tokens",
            "embedding": similar,
            "judge": judged,
            "cascade": similar + (f", or of {self.ask_judge_from:g} and {judged}" if self.asks_judge else ""),
            "certified": f"changes the outcome in at most {self.risk or 0:g} of cases, by a certificate",
            "score": f"gets a mark of {self.score:g} from the target",
            "likelihood": f"has a mean log-probability of {self.likelihood:g} under the target",
            "random": f"is drawn with probability {self.probability:g}",
        }
        shape = "steps ahead where that is fastest"
        if self.forces_speculation:
            shape = f"{self.steps_ahead} steps ahead" + f" with {self.width} candidates each" * (self.width > 1)
        condition = f"passes {self._verifier_name}" if self.own_verifier is not None else conditions[self.verifier]
        text = f"{shape}; a draft step is accepted if it {condition}"
        if self.compares_results and self.verifier in ("embedding", "judge", "cascade"):
            text += ", and has the same numbers, units and equations"
        if self.risk is not None and self.verifier != "certified":
            text += f"; where its models have a certificate of a risk of {self.risk:g}, that decides"
        return text + "; the final answer is the target's" * self.answer_from_target


# A test checks that strict, balanced and fast have the thresholds of the packaged certificates. For other models
# without a certificate, the same thresholds apply and are not certified.
POLICIES: dict[str, VerifierPolicy] = {
    policy.name: policy
    for policy in (
        VerifierPolicy(name="off", verifier="off"),
        VerifierPolicy(name="exact", verifier="exact"),
        VerifierPolicy(
            name="strict", risk=0.02, verifier="judge", p_aligned=0.82, same_numbers=True, answer_from_target=True
        ),
        VerifierPolicy(name="balanced", risk=0.05, verifier="embedding", similarity=0.56, same_numbers=True),
        VerifierPolicy(name="fast", risk=0.1, verifier="judge", p_aligned=0.63, same_numbers=False),
        # SpecReason is sequential: the draft waits for the score of each step.
        VerifierPolicy(name="specreason", verifier="score", score=7.0, depth=1),
        VerifierPolicy(name="random", verifier="random", probability=0.5, depth=DEFAULT_DEPTH),
    )
}

PolicyLike = str | VerifierPolicy | Mapping[str, Any]  # a policy's name, a policy, or its fields


def as_policy(policy: PolicyLike) -> VerifierPolicy:
    """Turn a name or fields into a policy.

    Changes may follow a name: "balanced:depth=8:width=2". Slashes enclose a pattern, which may contain a colon:
    "balanced:delimiter=/:|\\n+/". The name of a verifier means a policy with its defaults: "judge:p_aligned=0.8". So
    does "module:Class", a verifier of your own, from the current folder or Python's path.

    Raises:
        PolicyError: No policy has this name, the fields contradict each other, or a verifier cannot be imported.
    """
    if isinstance(policy, VerifierPolicy):
        return policy
    if isinstance(policy, str):
        return _parse(policy)
    return _validate(policy)


_PARTS = re.compile(r"(?:^|:)([^:=]*(?:=/.*?/(?=:|$))?[^:]*)")
"""The parts between colons, except colons within a pattern between slashes."""


def _parse(text: str) -> VerifierPolicy:
    if len(text) > _MAX_TEXT_LENGTH:
        raise PolicyError(f"a policy is written in at most {_MAX_TEXT_LENGTH} characters; this one has {len(text)}")
    name, *changes = _PARTS.findall(text)
    is_known = name in POLICIES or name in get_args(VerifierName)
    if not is_known and changes and _OWN.fullmatch(own := f"{name}:{changes[0]}"):
        name, changes = own, changes[1:]
    if name in POLICIES:
        fields = POLICIES[name].model_dump(exclude_unset=True)
    elif name in get_args(VerifierName) or ":" in name:
        fields = {"name": name, "verifier": name}
    elif name.startswith("risk="):
        fields = {"name": name, "risk": _value(name.removeprefix("risk="))}
    else:
        raise PolicyError(
            f"no policy is called {name!r}: choose one of {', '.join(POLICIES)}, a risk, as risk=0.02, or a verifier "
            "of your own, as module:Class"
        )
    if not changes:
        return POLICIES.get(name) or _validate(fields)
    changed: dict[str, Any] = {}
    for change in changes:
        field, separator, value = change.partition("=")
        if not separator:
            raise PolicyError(f"{change!r} in {text!r} is not FIELD=VALUE")
        changed[field] = _value(value)
    if _VERIFIER_FIELDS & changed.keys():
        fields.pop("risk", None)  # an explicit threshold takes precedence over a certificate's
    fields |= changed
    return _validate(fields | {"name": text})


def _value(text: str) -> Any:
    if len(text) > 2 and text.startswith("/") and text.endswith("/"):
        try:
            return _compile(text[1:-1])
        except ValueError as error:
            raise PolicyError(str(error)) from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _validate(fields: Mapping[str, Any]) -> VerifierPolicy:
    try:
        return VerifierPolicy.model_validate(fields)
    except ValidationError as error:
        raise PolicyError(f"this is not a policy: {validation_message(error)}") from error


def node_path(metadata: Mapping[str, Any]) -> str:
    """The path of the running node ("outer:inner") in LangGraph's metadata; "" outside a node."""
    node = metadata.get("langgraph_node")
    if node is None:
        return ""
    # "outer:id|inner:id"; a part without an id numbers the calls of one node.
    parts = str(metadata.get("langgraph_checkpoint_ns") or "").split("|")
    names = [name for name, separator, _ in (part.rpartition(":") for part in parts) if separator]
    return ":".join(names) if names and names[-1] == node else str(node)
