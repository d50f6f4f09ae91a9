from __future__ import annotations

from pathlib import Path

import pytest

from lookahead_agent.engines.cores import available_cores, binding, share_cores
from lookahead_agent.engines.vllm_engine import runs_on_cpu
from lookahead_agent.models import choose_models
from lookahead_agent.runtime import Runtime, RuntimeSpec

MODELS = choose_models("qwen2.5-coder-1.5b")
FOLDER = Path("model")


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_cores_are_divided_between_target_and_draft() -> None:
    runtime = Runtime(RuntimeSpec(MODELS), expects_draft=True)
    target, draft = share_cores(available_cores(), with_draft=True)
    assert runtime._config("target", FOLDER, {}).cores == binding(target)
    assert runtime._config("draft", FOLDER, {}).cores == binding(draft)


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_a_target_alone_has_all_cores_and_cores_can_be_given() -> None:
    alone = Runtime(RuntimeSpec(MODELS), expects_draft=False)
    assert alone._config("target", FOLDER, {}).cores == binding(available_cores())
    given = Runtime(RuntimeSpec(MODELS, cores=("1", "0")), expects_draft=True)
    assert given._config("target", FOLDER, {}).cores == "1"
    assert given._config("draft", FOLDER, {}).cores == "0"


def test_engine_arguments_go_to_their_engine() -> None:
    spec = RuntimeSpec(MODELS, {"dtype": "float32"}, {"max_num_seqs": 4})
    runtime = Runtime(spec, expects_draft=True)
    target, draft = (dict(runtime._config(role, FOLDER, {}).arguments) for role in ("target", "draft"))
    assert target["dtype"] == "float32"
    assert "dtype" not in draft
    assert draft["max_num_seqs"] == 4
