"""The catalogue of models, and how their files get onto this machine."""

from lookahead_agent.models.catalogue import CATALOGUE, ModelFacts, ModelSet
from lookahead_agent.models.resolve import choose_models, fetch, fetch_tokenizer, has_draft, locate

__all__ = ["CATALOGUE", "ModelFacts", "ModelSet", "choose_models", "fetch", "fetch_tokenizer", "has_draft", "locate"]
