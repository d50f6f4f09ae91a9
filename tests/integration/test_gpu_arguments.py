"""Engine arguments of the GPU path, held against vLLM's configuration classes: no device is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ALONE = {"policy": "off", "token_speculation": "none"}
CHAT_MODELS: dict[str, dict[str, Any]] = {
    "steps": {"depth": 4},
    "draft_model": {"policy": "off", "token_speculation": "draft_model", "precision": "bf16"},
    "ngram": {"policy": "off", "token_speculation": "ngram"},
    "alone": ALONE,
    "given": ALONE | {"engine_args": {"gpu_memory_utilization": 0.5, "dtype": "float16"}},
}

Configured = dict[str, list[dict[str, Any]]]
"""What vLLM is configured as for each chat model, the target first."""


@pytest.fixture(scope="module")
def configured(tiny_pair: tuple[Path, Path]) -> Configured:
    models = {"model": str(tiny_pair[0]), "draft_model": str(tiny_pair[1]), "use_daemon": False}
    asked = json.dumps([models | fields for fields in CHAT_MODELS.values()])
    command = [sys.executable, "-m", "tests.integration.cuda_platform", asked]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[dict[str, Any]]] = json.loads(done.stdout.strip().splitlines()[-1])
    for config in (config for configs in found for config in configs):
        assert config["device"] == "cuda"
        assert config["prefix_caching"]
        assert not config["eager"], "CUDA graphs are vLLM's own choice"
    ordered = [sorted(configs, key=lambda config: config["model"] != str(tiny_pair[0])) for configs in found]
    return dict(zip(CHAT_MODELS, ordered, strict=True))


def test_a_shared_draft_pair_shares_the_gpu(configured: Configured) -> None:
    target, draft = configured["steps"]
    assert (target["method"], draft["method"]) == ("custom_class", None)
    assert (target["share"], draft["share"]) == (0.68, 0.2)
    assert target["guesses"] > 0


def test_methods_of_token_speculation(configured: Configured) -> None:
    for name, method in {"draft_model": "draft_model", "ngram": "ngram", "alone": None}.items():
        (target,) = configured[name]
        assert target["method"] == method
        assert target["share"] > 0.8, "there is no second engine"
    assert configured["draft_model"][0]["dtype"] == "torch.bfloat16"


def test_what_a_user_gives_goes_before(configured: Configured) -> None:
    (target,) = configured["given"]
    assert (target["share"], target["dtype"]) == (0.5, "torch.float16")
