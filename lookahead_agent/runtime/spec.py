"""What determines the engines of a chat model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from typing import Any

from lookahead_agent import __version__
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.hardware.choice import Precision
from lookahead_agent.models import ResolvedSet


@dataclass(frozen=True)
class RuntimeSpec:
    """What determines the engines of a chat model.

    Attributes:
        models: Target, draft, judge and embedding model.
        target_arguments: Arguments of the target's vLLM engine.
        draft_arguments: Arguments of the draft's vLLM engine.
        judge_arguments: Arguments of the judge's vLLM engine.
        remote: The models that are behind servers, by role: "target", "draft", "judge", "embedding".
        token_speculation: Method of token-level speculation inside the target's engine, or "auto".
        precision: Of the target's weights.
        draft_precision: Of the draft's.
        cores: CPU cores as (target, draft) in vLLM's notation; None: chosen. A judge shares the draft's.
    """

    models: ResolvedSet
    target_arguments: Mapping[str, Any] = field(default_factory=dict)
    draft_arguments: Mapping[str, Any] = field(default_factory=dict)
    judge_arguments: Mapping[str, Any] = field(default_factory=dict)
    remote: Mapping[str, RemoteModel] = field(default_factory=dict)
    token_speculation: str | Mapping[str, Any] = "auto"
    precision: Precision = "auto"
    draft_precision: Precision = "auto"
    cores: tuple[str, str] | None = None

    @property
    def key(self) -> str:
        """Text that is equal for equal specifications."""
        return repr(asdict(self))

    @property
    def digest(self) -> str:
        """The key in 64 characters, of this version: by it processes agree on which engines they mean."""
        return sha256(f"{__version__} {self.key}".encode()).hexdigest()

    def runs_here(self, *roles: str) -> bool:
        """Whether these roles' models all run in engines of this process."""
        return self.remote.keys().isdisjoint(roles)

    @property
    def names(self) -> dict[str, str]:
        """The models' names by role; a judge is only named if it has an engine of its own."""
        models = self.models
        facts = {"target": models.target, "draft": models.draft, "judge": models.judge, "embedding": models.embedding}
        found = {role: each.name for role, each in facts.items() if each}
        return found | {role: each.model for role, each in self.remote.items() if each.model is not None}

    @property
    def has_draft(self) -> bool:
        """Whether there is a draft model, here or behind a server."""
        return self.models.draft is not None or not self.runs_here("draft")
