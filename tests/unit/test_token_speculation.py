from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import vllm_config
from lookahead_agent.engines.vllm_config import check_token_speculation, speculative_config
from lookahead_agent.errors import ConfigurationError, MissingExtraError

DRAFT = Path("draft")


def test_none_gives_no_speculative_config() -> None:
    check_token_speculation("none", {"speculative_config": {"method": "ngram"}})
    assert speculative_config("none", DRAFT, on_cpu=True) is None


def test_method_name_expands_to_a_vllm_config() -> None:
    config = speculative_config("draft_model", DRAFT, on_cpu=True)
    assert config == {"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}
    assert (speculative_config("ngram", None, on_cpu=True) or {})["method"] == "ngram"


def test_mapping_overrides_the_defaults_of_its_method() -> None:
    config = speculative_config({"method": "ngram", "num_speculative_tokens": 2}, None, on_cpu=True)
    assert config is not None
    assert config["num_speculative_tokens"] == 2
    assert config["prompt_lookup_max"] > 0
    eagle = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}
    check_token_speculation(eagle, {})
    assert speculative_config(eagle, DRAFT, on_cpu=False) == eagle
    own_draft = {"method": "draft_model", "model": "other"}
    assert (speculative_config(own_draft, DRAFT, on_cpu=True) or {})["model"] == "other"


@pytest.mark.parametrize(
    ("method", "engine_args", "message"),
    [
        ("guess", {}, "choose one of auto, none, shared_draft, draft_model"),
        ("eagle3", {}, "needs its own model|no token-level speculation"),
        ({"method": "eagle3"}, {}, "needs its own model"),
        ("ngram", {"speculative_config": {}}, "give only one"),
    ],
)
def test_invalid_token_speculation_raises(method: Any, engine_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_token_speculation(method, engine_args)
    with pytest.raises(ConfigurationError, match=message):
        ChatLookahead(token_speculation=method, engine_args=engine_args)


def test_shared_draft_config_names_an_importable_proposer_class() -> None:
    config = speculative_config("shared_draft", None, on_cpu=True)
    assert config is not None
    assert config["method"] == "custom_class"
    module, _, name = config["model"].rpartition(".")
    assert hasattr(import_module(module), name)
    assert vllm_config.uses_shared_draft(config)
    assert not vllm_config.uses_shared_draft({"method": "ngram"})
    assert not vllm_config.uses_shared_draft(None)


def test_method_that_needs_a_gpu_raises_on_a_cpu() -> None:
    with pytest.raises(ConfigurationError, match="does not run on a CPU"):
        speculative_config({"method": "medusa", "model": "a/b"}, None, on_cpu=True)
    assert speculative_config({"method": "medusa", "model": "a/b"}, None, on_cpu=False) is not None


def test_method_without_its_package_raises_missing_extra_error() -> None:
    with pytest.raises(MissingExtraError, match="pip install"):
        check_token_speculation("suffix", {})


def test_draft_model_method_raises_without_a_draft_model() -> None:
    with pytest.raises(ConfigurationError, match="needs a draft model"):
        speculative_config("draft_model", None, on_cpu=True)
