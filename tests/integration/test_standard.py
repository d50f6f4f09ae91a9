"""LangChain's own standard suite on the real packaged pair."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from lookahead_agent import ChatLookahead


class TestRealPair(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _engines(self, by_itself: ChatLookahead) -> None:
        """Models of one configuration share their engines, which this one keeps running."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLookahead

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 400}

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        """A 1.5B model that takes the likeliest token may tell one joke for ever, which a JSON string allows it to;
        whether it does depends on the machine's rounding. Where the reply must be whole, it is sampled, repeatably."""
        whole = {"temperature": 0.7, "seed": 1} if "structured_output" in request.node.name else {}
        return ChatLookahead.model_validate(self.chat_model_params | whole)

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @property
    def supports_model_override(self) -> bool:
        """An engine has one model."""
        return False

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True
