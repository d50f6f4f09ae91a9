"""LangChain's own standard suite on the real packaged pair."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from lookahead_agent import ChatLookahead


class TestRealPair(ChatModelIntegrationTests):
    @pytest.fixture(autouse=True)
    def _engines(self, real: ChatLookahead) -> None:
        """Models of one configuration share their engines, which this one keeps running."""

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLookahead

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # A reply that its limit cuts is no whole JSON, and how long the jokes are depends on the machine's rounding.
        return {"temperature": 0, "max_tokens": 400, "depth": 4, "token_speculation": "guided"}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True
