"""Which models there are and how they get onto this machine."""

from lookahead_agent.models.catalogue import CATALOGUE, DEFAULT_SET, ModelFacts, ModelSet
from lookahead_agent.models.resolve import (
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
    "choose_models",
    "configured",
    "fetch",
    "fetch_tokenizer",
    "has_draft",
    "locate",
]
