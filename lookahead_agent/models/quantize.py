"""A model's weights as 8-bit integers, written once beside the model in a child process.

The format is compressed-tensors' W8A8: weights symmetric per output channel, activations dynamic per token, `lm_head`
and embeddings as they were. vLLM reads it on CPUs (through oneDNN) and on GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lookahead_agent.models.cache import cache_dir, made_once, require_disk_space
from lookahead_agent.models.child import run_in_child
from lookahead_agent.models.tokenizer_files import copy_beside_weights
from lookahead_agent.progress import Progress

_SCHEME = "W8A8"
# bf16 is loaded and written at half its size; tied embeddings may be written twice.
_DISK_FACTOR = 0.8


def int8_folder(model: Path) -> Path:
    """Folder in which a model's int8 weights are (or will be) kept: one for each state of the model's own files."""
    return cache_dir() / "models" / f"{model.resolve().name}-int8-{_state(model)}"


def quantized(model: Path, progress: Progress) -> Path:
    """Return a folder with a model's weights in int8, writing it if it is not in the cache.

    A model that is quantized already, in whatever way, is returned as it is.

    Args:
        model: Folder of the model, in safetensors.
        progress: Told what is done.

    Raises:
        DiskSpaceError: The cache's disk is too full.
        ConversionError: The conversion failed; the message ends with the child's last words.
    """
    if is_quantized(model):
        return model

    def write(unfinished: Path) -> None:
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        require_disk_space(unfinished.parent, int(size * _DISK_FACTOR), f"Writing {model.name} as int8")
        command = [sys.executable, "-m", "lookahead_agent.models.quantize", str(model), str(unfinished)]
        run_in_child(command, f"Writing {model.name} as int8", progress)

    return made_once(int8_folder(model), write)


def is_quantized(model: Path) -> bool:
    """Whether the model's own configuration says that its weights are quantized."""
    import json

    return "quantization_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))


def kept_precisions(model: Path) -> list[str]:
    """In which precisions a model's weights are on this machine, its own first."""
    import json

    written = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in written:
        return [str(written["quantization_config"].get("quant_method", "quantized"))]
    names = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    own = str(written.get("dtype") or written.get("torch_dtype") or "float32")
    return [names.get(own, own), *(["int8"] if int8_folder(model).is_dir() else [])]


def _state(model: Path) -> str:
    """Changes when the model's weights or configuration do; a digest of gigabytes at every start would take seconds."""
    import hashlib

    digest = hashlib.sha256(str(model.resolve()).encode())
    for file in sorted([*model.glob("*.safetensors"), model / "config.json"]):
        about = file.stat()
        digest.update(f"{file.name}:{about.st_size}:{about.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def _quantize(model_folder: Path, folder: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
    scheme = preset_name_to_scheme(_SCHEME, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    with torch.no_grad():
        for module in model.modules():
            chosen = getattr(module, "quantization_scheme", None)
            if chosen is None or chosen.weights is None:
                continue
            low, high = module.weight.float().aminmax(dim=1, keepdim=True)
            scale, zero_point = calculate_qparams(low, high, chosen.weights)
            module.weight_scale.data = scale.to(module.weight_scale.dtype)
            if hasattr(module, "weight_zero_point"):
                module.weight_zero_point.data = zero_point.to(module.weight_zero_point.dtype)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    copy_beside_weights(model_folder, folder)


if __name__ == "__main__":
    _quantize(Path(sys.argv[1]), Path(sys.argv[2]))
