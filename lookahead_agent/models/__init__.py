"""Which models there are and how they get onto this machine."""

from lookahead_agent.models.catalogue import CATALOGUE, DEFAULT_SET, ModelFacts, ModelSet, model_set
from lookahead_agent.models.resolve import (
    ResolvedSet,
    choose_models,
    configured,
    fetch,
    fetch_tokenizer,
    has_draft,
    locate,
)

__all__ = [
    "CATALOGUE",
    "DEFAULT_SET",
    "ModelFacts",
    "ModelSet",
    "ResolvedSet",
    "choose_models",
    "configured",
    "fetch",
    "fetch_tokenizer",
    "has_draft",
    "locate",
    "model_set",
]
