"""A model's weights in the precision that runs, each written once by a child process that returns its memory.

"int8" is compressed-tensors' W8A8, which vLLM reads on CPUs (through oneDNN) and on GPUs: weights symmetric per output
channel, activations dynamic per token, `lm_head` and embeddings as they were. GGUF weights are converted straight to
int8, or to "bf16" where that is asked for.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lookahead_agent.errors import ConversionError, DiskSpaceError
from lookahead_agent.models.cache import GGUF, cache_dir, made_once, require_disk_space
from lookahead_agent.progress import Progress

Form = Literal["bf16", "int8"]
_SCHEME = "W8A8"
# Tied embeddings may be written twice, and stay in bf16.
_DISK_FACTOR = {("safetensors", "int8"): 0.8, ("gguf", "int8"): 2.0, ("gguf", "bf16"): 3.0}
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
_PERCENT = re.compile(rb"(\d+)%\|")
_CHILD = (sys.executable, "-m", "lookahead_agent.models.conversion")


def converted_folder(model: Path, form: Form) -> Path:
    """Folder of a model's weights in int8 or in floating point ("bf16"): its own, if they are so already."""
    if is_quantized(model) or (form == "bf16" and not (model / GGUF).is_file()):
        return model
    return cache_dir() / "models" / f"{model.resolve().name}-{form}-{_state(model)}"


def converted(model: Path, form: Form, progress: Progress) -> Path:
    """Return the `converted_folder`, written if it has to be; raises DiskSpaceError or ConversionError."""
    if (folder := converted_folder(model, form)) == model:
        return model

    def write(unfinished: Path) -> None:
        kind = "gguf" if (model / GGUF).is_file() else "safetensors"
        size = sum(file.stat().st_size for file in model.glob(f"*.{kind}"))
        title = f"Writing {model.name} as {form}"
        require_disk_space(unfinished.parent, int(size * _DISK_FACTOR[kind, form]), title)
        run_child([*_CHILD, form, str(model), str(unfinished)], title, progress)

    return made_once(folder, write)


def write_metadata(gguf: Path, folder: Path, name: str, progress: Progress) -> None:
    """Write configuration and tokenizer of a GGUF file into a folder; raises ConversionError if that fails."""
    run_child([*_CHILD, "metadata", str(gguf), str(folder)], f"Reading the tokenizer of {name}", progress)


def is_quantized(model: Path) -> bool:
    """Whether the model's own configuration says that its weights are quantized."""
    return "quantization_config" in json.loads((model / "config.json").read_text(encoding="utf-8"))


def _state(model: Path) -> str:
    """Changes when the model's weights or configuration do; a digest of gigabytes at every start would take seconds."""
    digest = hashlib.sha256(str(model.resolve()).encode())
    for file in sorted([*model.glob("*.safetensors"), *model.glob(GGUF), model / "config.json"]):
        about = file.stat()
        digest.update(f"{file.name}:{about.st_size}:{about.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def run_child(command: Sequence[str], title: str, progress: Progress) -> None:
    """Run a command, with a title for its progress line and error, and show the percentages of its progress bars.

    Raises DiskSpaceError if the disk is full, else ConversionError with its last words.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    start = partial(subprocess.Popen, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    with progress.task(title, 100) as advance, start(command) as process:
        assert process.stderr is not None
        tail = b""
        try:
            while chunk := os.read(process.stderr.fileno(), 4096):
                tail = (tail + chunk)[-4000:]
                if seen := _PERCENT.findall(chunk):
                    advance(float(seen[-1]))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        words = tail.decode(errors="replace").strip().splitlines() or ["no message"]
        action = f"{title[0].lower()}{title[1:]}"
        if os.strerror(errno.ENOSPC).encode() in tail:
            raise DiskSpaceError(f"the disk is full: {action} failed. Free some space and run again.")
        hint = " (not enough memory?)" if process.returncode in (-9, 137) else ""
        raise ConversionError(
            f"{action} failed with exit code {process.returncode}{hint}: {words[-1]}. "
            "Its source is kept: run again to try once more."
        )


# In the child process


def _write_metadata(gguf: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    source: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source, config=config).save_pretrained(folder)


def _write_bf16(source: Path, folder: Path) -> None:
    _load(source).save_pretrained(folder)
    _copy_tokenizer(source, folder)


def _write_int8(source: Path, folder: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = _load(source)
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
    _copy_tokenizer(source, folder)


def _load(source: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (source / GGUF).is_file():
        return AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    config = AutoConfig.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, config=config, dtype=torch.bfloat16)
    # The loaded model still says that it is quantized; saving it would go through a quantizer that cannot save.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    return model


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what belongs to a model besides its weights: tokenizer, chat template, generation settings."""
    for pattern in ("*.json", "*.jinja", "*.model", "*.txt"):
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, folder / file.name)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    import gc

    gc.disable()  # reading a GGUF file's metadata makes a million objects that stay
    {"metadata": _write_metadata, "bf16": _write_bf16, "int8": _write_int8}[sys.argv[1]](
        Path(sys.argv[2]), Path(sys.argv[3])
    )
