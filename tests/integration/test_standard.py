"""LangChain's standard suite: on the packaged pair where the model's text or tools matter, else on tiny models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests

from lookahead_agent import ChatLookahead
from tests.integration.conftest import TINY_ENGINE

# Tests whose assertions depend on what the model writes, or that need a chat template for tools.
NEED_A_REAL_MODEL = frozenset(
    {
        "test_agent_loop",
        "test_anthropic_inputs",
        "test_bind_runnables_as_tools",
        "test_json_mode",
        "test_structured_few_shot_examples",
        "test_tool_calling",
        "test_tool_calling_async",
        "test_tool_calling_with_no_arguments",
        "test_tool_choice",
        "test_tool_message_error_status",
        "test_tool_message_histories_list_content",
        "test_tool_message_histories_string_content",
        "test_unicode_tool_call_integration",
    }
)

# Tests in which a grammar writes all but the strings of a joke.
NEED_ENDING_STRINGS = frozenset(
    {
        "test_structured_output",
        "test_structured_output_async",
        "test_structured_output_optional_param",
        "test_structured_output_pydantic_2_v1",
    }
)


class StandardTests(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatLookahead

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

    @staticmethod
    def runs(name: str) -> bool:
        """Whether a test of the suite runs on this model."""
        raise NotImplementedError


class TestRealPair(StandardTests):
    @pytest.fixture(autouse=True)
    def _engines(self, default_llm: ChatLookahead) -> None:
        """Keep the engines running that all models of this configuration share."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 400}

    @staticmethod
    def runs(name: str) -> bool:
        return name in NEED_A_REAL_MODEL


class TestTinyPair(StandardTests):
    pair: tuple[Path, Path]

    @pytest.fixture(autouse=True)
    def _engines(self, tiny: ChatLookahead, tiny_pair: tuple[Path, Path]) -> None:
        """Keep the engines running that all models of this configuration share."""
        self.pair = tiny_pair

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": str(self.pair[0]),
            "draft_model": str(self.pair[1]),
            "policy": "exact",
            "depth": 4,
            "token_speculation": "none",
            "temperature": 0,
            "max_tokens": 60,
            "engine_args": TINY_ENGINE,
            "draft_engine_args": TINY_ENGINE,
        }

    @staticmethod
    def runs(name: str) -> bool:
        return name not in NEED_A_REAL_MODEL | NEED_ENDING_STRINGS


class TestEndingStrings(StandardTests):
    """On a tiny target that soon closes a string, alone."""

    folder: Path

    @pytest.fixture(scope="class")
    def ending(self, tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
        """The tiny target with a likely quotation mark, and its running engine."""
        from safetensors.torch import load_file, save_file

        folder = Path(shutil.copytree(tiny_pair[0], tmp_path_factory.mktemp("ending") / "target"))
        weights = load_file(folder / "model.safetensors")
        quote = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]['"']
        # At temperature 1 about every second token of a string is a quotation mark: its logit is large, of either sign.
        weights["lm_head.weight"][quote] *= 4.0
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        with ChatLookahead.model_validate(self.params_of(folder)) as llm:
            llm.start()
            yield folder

    @pytest.fixture(autouse=True)
    def _engine(self, ending: Path) -> None:
        """Keep the engine running that all models of this configuration share."""
        self.folder = ending

    @staticmethod
    def params_of(folder: Path) -> dict[str, Any]:
        return {
            "model": str(folder),
            "policy": "off",
            "token_speculation": "none",
            "temperature": 1,
            "seed": 1,
            "max_tokens": 400,
            "engine_args": TINY_ENGINE,
        }

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return self.params_of(self.folder)

    @staticmethod
    def runs(name: str) -> bool:
        return name in NEED_ENDING_STRINGS
