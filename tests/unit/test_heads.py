"""What a target brings to draft its own tokens on a GPU: layers among its weights, or a head beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lookahead_agent.engines import ScriptedEngine
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments, brought_speculation, engine_arguments
from lookahead_agent.errors import DownloadError, EngineStartError, IntegrityError
from lookahead_agent.hardware.gpus import kv_cache_bytes_per_token, weight_bytes
from lookahead_agent.models.catalogue import CATALOGUE, ModelFacts
from lookahead_agent.models.resolve import choose_models
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import RuntimeSpec, select_engines
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import Loaders
from lookahead_agent.runtime.runtime import Runtime
from lookahead_agent.system import background
from tests.unit.fake_vllm import tokenizer_in
from tests.unit.test_runtime import SMALL, Pool, engines_of, gpu_loaders


def head_config(kind: str = "eagle3", tokens: int | None = 3, target: str = "Qwen/Qwen3-8B") -> dict[str, Any]:
    """A head's configuration in the format of `speculators`."""
    method = {"proposal_type": "greedy"} | ({"speculative_tokens": tokens} if tokens is not None else {})
    speculators = {"algorithm": kind, "proposal_methods": [method], "verifier": {"name_or_path": target}}
    return {
        "speculators_model_type": kind,
        "speculators_config": speculators,
        "transformer_layer_config": SMALL | {"num_hidden_layers": 1},
    }


def model(folder: Path, config: dict[str, Any], weights: list[str] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        save_file({name: np.zeros(1, np.float32) for name in weights}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        ({"num_nextn_predict_layers": 1, "num_hidden_layers": 2}, ["model.layers.1.x", "model.layers.2.x"]),
        ({"num_nextn_predict_layers": 0, "mtp_num_hidden_layers": 1}, ["mtp.layers.0.x"]),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, ["model.mtp.x"]),
    ],
)
def test_layers_of_the_target_draft_its_tokens(tmp_path: Path, config: dict[str, Any], weights: list[str]) -> None:
    head = model(tmp_path / "head", head_config())
    found = {"method": "mtp", "num_speculative_tokens": 1}
    assert brought_speculation(model(tmp_path / "target", config, weights), head) == found
    index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
    sharded = model(tmp_path / "sharded", config)
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert brought_speculation(sharded, None) == found
    without = model(tmp_path / "without", config, ["model.layers.1.x"])
    assert brought_speculation(without, None) is None, "the file lacks the layers that the configuration names"


def test_head_drafts_the_tokens_as_its_configuration_says(tmp_path: Path) -> None:
    target = model(tmp_path / "target", SMALL)

    def brought(**config: Any) -> dict[str, Any] | None:
        return brought_speculation(target, model(tmp_path / "head", head_config(**config)))

    folder = {"model": str(tmp_path / "head")}
    assert brought() == folder | {"method": "eagle3", "num_speculative_tokens": 3}
    assert brought(kind="dflash2", tokens=8) == folder | {"method": "dflash", "num_speculative_tokens": 8}
    parallel = {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 3}
    assert brought(kind="peagle", tokens=None) == folder | parallel
    assert brought_speculation(target, None) is None
    with pytest.raises(IntegrityError, match="speculative_tokens"):
        brought(tokens=-1)


def test_catalogue_names_heads_and_a_folder_names_its_target(tmp_path: Path) -> None:
    heads = {name: models.head.hub_id for name, models in CATALOGUE.items() if models.head is not None}
    assert heads == {
        "qwen3-32b": "RedHatAI/Qwen3-32B-speculator.eagle3",
        "qwen3-8b": "RedHatAI/Qwen3-8B-speculator.eagle3",
    }
    assert choose_models("Qwen/Qwen3-8B").head == CATALOGUE["qwen3-8b"].head
    folder = model(tmp_path / "own-head", head_config())
    chosen = choose_models(str(folder))
    assert (chosen.target, chosen.head) == (CATALOGUE["qwen3-8b"].target, ModelFacts(str(folder)))
    other = model(tmp_path / "other-head", head_config(target="a/target"))
    assert choose_models(str(other), draft_wanted=False).target == ModelFacts("a/target")


def test_memory_plan_counts_the_head(tmp_path: Path) -> None:
    target = model(tmp_path / "target", SMALL)
    head = model(tmp_path / "head", head_config(), ["fc.weight"])
    with_head = {"speculative_config": brought_speculation(target, head)}
    assert weight_bytes(target, with_head) == weight_bytes(target, {}) + (head / "model.safetensors").stat().st_size
    assert kv_cache_bytes_per_token(target, with_head) == kv_cache_bytes_per_token(target, {}) * 3 // 2


def test_vllm_counts_draft_tokens_where_there_are_some(tmp_path: Path) -> None:
    folder = model(tmp_path, SMALL)
    name = "per_request_spec_decode_metrics"
    assert name not in engine_arguments(VLLMConfig(folder))
    speculative = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
    assert engine_arguments(VLLMConfig(folder, arguments=as_arguments(speculative)))[name] == "summary"
    given = as_arguments(speculative | {name: "detailed"})
    assert engine_arguments(VLLMConfig(folder, arguments=given))[name] == "detailed"


MODELS = CATALOGUE["qwen3-8b"]
TARGET, DRAFT, HEAD = "Qwen3-8B", "Qwen3-0.6B", "Qwen3-8B-speculator.eagle3"


def on_gpus(tmp_path: Path, pool: Pool, gpus: int = 1, absent: str = "") -> Loaders:
    """Loaders of folders with tokenizers, and with a head's configuration where one is asked for."""

    def fetch(facts: ModelFacts, _: object) -> Path:
        if Path(facts.hub_id).name == absent:
            raise DownloadError("it is away")
        folder = model(tmp_path / facts.hub_id, head_config() if facts == MODELS.head else SMALL)
        tokenizer_in(folder)
        (folder / "config.json").write_text(json.dumps(head_config() if facts == MODELS.head else SMALL))
        return folder

    scripted = gpu_loaders(pool, select_engines, gpus=gpus)
    return Loaders(**{**scripted.__dict__, "fetch": fetch, "fetch_config": fetch})


def start(loaders: Loaders, policy: str = "off", **spec: Any) -> tuple[Runtime, EngineSet]:
    forced = as_policy(policy).forces_speculation
    runtime = Runtime(RuntimeSpec(spec.pop("models", MODELS), **spec), expects_draft=forced, loaders=loaders)
    return runtime, background.run(engines_of(runtime, policy))


def methods(pool: Pool) -> dict[str, str | None]:
    """The method of token speculation of each started engine, by its model."""
    return {
        config.model.name: dict(config.arguments).get("speculative_config", {}).get("method") for config in pool.started
    }


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path / "cache"))


def test_automatic_configuration_of_a_gpu_takes_the_head(tmp_path: Path) -> None:
    pool = Pool()
    runtime, engines = start(on_gpus(tmp_path, pool))
    assert methods(pool) == {TARGET: "eagle3"}
    assert engines.speculates_on_tokens
    assert engines.engine_setup is not None
    assert engines.engine_setup.reason == (f"the target's tokens are drafted by {HEAD} (eagle3), which is lossless")
    runtime.close()
    pool = Pool()
    runtime, engines = start(on_gpus(tmp_path, pool), "exact:depth=4")
    assert methods(pool) == {TARGET: "eagle3", DRAFT: None}, "steps come on top of it"
    assert engines.choose_mode("node", as_policy("exact:depth=4"), verifies=True, missing=None).mode == "lr+sd"
    assert engines.choose_mode("node", as_policy("exact"), verifies=True, missing=None).mode == "sd", "it comes first"
    runtime.close()


@pytest.mark.parametrize(
    "spec",
    [
        {"token_speculation": "none"},
        {"target_arguments": {"speculative_config": {"method": "ngram"}}},
    ],
)
def test_head_is_left_out_where_the_user_chooses(tmp_path: Path, spec: dict[str, Any]) -> None:
    pool = Pool()
    runtime, _ = start(on_gpus(tmp_path, pool, absent=HEAD), **spec)
    assert methods(pool) == {TARGET: "ngram" if "target_arguments" in spec else None}
    runtime.close()


def test_target_runs_alone_if_its_head_is_away_or_does_not_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = Pool()
    runtime, engines = start(on_gpus(tmp_path, pool, absent=HEAD))
    assert methods(pool) == {TARGET: None}
    assert "the target runs without its head: it is away" in caplog.text
    runtime.close()

    class RejectingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            if "speculative_config" in dict(config.arguments):
                raise EngineStartError("no such head")
            return super().acquire(config)

    pool = RejectingPool()
    runtime, engines = start(on_gpus(tmp_path, pool))
    assert methods(pool) == {TARGET: None}
    assert not engines.speculates_on_tokens
    assert engines.engine_setup is not None
    assert "without eagle3, because they did not start so: no such head" in engines.engine_setup.reason
    runtime.close()


WITHOUT_HEAD = CATALOGUE["deepseek-r1-distill-qwen-32b"]


def test_draft_takes_a_free_gpu_and_each_node_learns_whether_its_steps_add(tmp_path: Path) -> None:
    pool = Pool()
    runtime, engines = start(on_gpus(tmp_path, pool, gpus=2), "exact", models=WITHOUT_HEAD)
    assert {config.model.name: config.gpus for config in pool.started} == {
        "DeepSeek-R1-Distill-Qwen-32B": None,
        "DeepSeek-R1-Distill-Qwen-1.5B": "1",
    }
    assert set(methods(pool).values()) == {None}
    assert engines.engine_setup is not None
    assert engines.engine_setup.reason.startswith("the target writes alone, and each node learns whether the steps")

    def mode(**changes: Any) -> str:
        return engines.choose_mode("node", as_policy("exact"), verifies=True, missing=None, **changes).mode

    written = []
    for _ in range(40):
        written.append(mode())
        engines.modes.learn("node", written[-1], {"writing": 0.02 if written[-1] == "lr" else 0.03})  # type: ignore[arg-type]
    assert (written[0], written[-1]) == ("off", "lr")
    engines.replies_at_once = 8
    assert mode() == "off", "steps stop beside many requests"
    runtime.close()


@pytest.mark.parametrize(("gpus", "policy"), [(1, "exact"), (2, "off")])
def test_draft_starts_only_on_a_free_gpu_and_for_a_policy_with_steps(tmp_path: Path, gpus: int, policy: str) -> None:
    pool = Pool()
    runtime, engines = start(on_gpus(tmp_path, pool, gpus=gpus), policy, models=WITHOUT_HEAD)
    assert len(pool.started) == 1
    assert engines.draft is None
    runtime.close()
