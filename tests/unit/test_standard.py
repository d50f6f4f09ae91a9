"""LangChain's standard tests, for engines in this process and behind servers."""

from __future__ import annotations

from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_tests.unit_tests import ChatModelUnitTests

from lookahead_agent import ChatLookahead


class TestBehindServers(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLookahead

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "qwen2.5-coder-1.5b",
            "base_url": "http://127.0.0.1:8000/v1",
            "draft_url": "http://127.0.0.1:8001/v1",
        }

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"LOOKAHEAD_API_KEY": "secret"}, self.chat_model_params, {"api_key": "secret"}

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestInThisProcess(TestBehindServers):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": "qwen2.5-coder-1.5b", "policies": {"planner": "strict"}}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        # Only servers take an API key.
        params = super().standard_chat_model_params
        del params["api_key"]
        return params
