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


def test_none_is_no_configuration() -> None:
    check_token_speculation("none", {"speculative_config": {"method": "ngram"}})
    assert speculative_config("none", DRAFT, on_cpu=True) is None


def test_what_a_name_stands_for() -> None:
    config = speculative_config("draft_model", DRAFT, on_cpu=True)
    assert config == {"method": "draft_model", "model": "draft", "num_speculative_tokens": 4}
    assert (speculative_config("ngram", None, on_cpu=True) or {})["method"] == "ngram"


def test_a_mapping_goes_before_what_its_method_stands_for() -> None:
    config = speculative_config({"method": "ngram", "num_speculative_tokens": 2}, None, on_cpu=True)
    assert config is not None
    assert config["num_speculative_tokens"] == 2
    assert config["prompt_lookup_max"] > 0
    eagle = {"method": "eagle3", "model": "a/b", "num_speculative_tokens": 3}
    check_token_speculation(eagle, {})
    assert speculative_config(eagle, DRAFT, on_cpu=False) == eagle
    own = {"method": "draft_model", "model": "other"}
    assert (speculative_config(own, DRAFT, on_cpu=True) or {})["model"] == "other"


@pytest.mark.parametrize(
    ("method", "engine_args", "message"),
    [
        ("guess", {}, "choose one of auto, none, shared_draft, draft_model"),
        ("eagle3", {}, "needs its own model|no token-level speculation"),
        ({"method": "eagle3"}, {}, "needs its own model"),
        ("ngram", {"speculative_config": {}}, "give only one"),
    ],
)
def test_what_cannot_work_is_refused(method: Any, engine_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_token_speculation(method, engine_args)
    with pytest.raises(ConfigurationError, match=message):
        ChatLookahead(token_speculation=method, engine_args=engine_args)


def test_a_shared_draft_asks_a_class_of_ours() -> None:
    config = speculative_config("shared_draft", None, on_cpu=True)
    assert config is not None
    assert config["method"] == "custom_class"
    module, _, name = config["model"].rpartition(".")
    assert hasattr(import_module(module), name)
    assert vllm_config.uses_shared_draft(config)
    assert not vllm_config.uses_shared_draft({"method": "ngram"})
    assert not vllm_config.uses_shared_draft(None)


def test_what_does_not_run_on_a_cpu_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="does not run on a CPU"):
        speculative_config({"method": "medusa", "model": "a/b"}, None, on_cpu=True)
    assert speculative_config({"method": "medusa", "model": "a/b"}, None, on_cpu=False) is not None


def test_a_method_whose_package_is_missing_is_refused() -> None:
    with pytest.raises(MissingExtraError, match="pip install"):
        check_token_speculation("suffix", {})


def test_a_draft_model_is_needed_for_draft_model() -> None:
    with pytest.raises(ConfigurationError, match="needs a draft model"):
        speculative_config("draft_model", None, on_cpu=True)
