"""Converts a model's weights to the precision that runs, once, in a child process whose exit frees the memory.

"int8" is for engines on CPUs, which read its packed weights (`int8_folder`); "w8a8" is compressed-tensors' W8A8, which
vLLM loads on GPUs. Both have the same symmetric weights per output channel, and dynamic activations per token; only
"int8" has an int8 output layer. GGUF weights are converted to int8 directly, or to "bf16" on request.
"""

import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from lookahead_agent.cpu import LAYOUT
from lookahead_agent.engines.model_files import read_config
from lookahead_agent.errors import ConversionError, DiskSpaceError
from lookahead_agent.models.cache import GGUF, create_once, damage, require_disk_space
from lookahead_agent.system.files import cache_dir
from lookahead_agent.system.progress import Progress

WeightForm = Literal["bf16", "int8", "w8a8"]
_SCHEME = "W8A8"
# Size of the result relative to its source: tied embeddings may be written twice.
_DISK_FACTOR = {
    ("safetensors", "int8"): 0.8,
    ("safetensors", "w8a8"): 0.8,
    ("gguf", "int8"): 1.8,
    ("gguf", "w8a8"): 2.2,
    ("gguf", "bf16"): 3.3,
}
_NOT_COPIED = ("config.json", "model.safetensors.index.json")
_PERCENT = re.compile(rb"(\d+)%\|")
_CHILD = (sys.executable, "-m", "lookahead_agent.models.conversion")


def folder_of_form(model: Path, form: WeightForm) -> Path:
    """The folder of a model's weights in a form, where "bf16" is any floating point: its own without a conversion."""
    if is_quantized(model) or (form == "bf16" and not (model / GGUF).is_file()):
        return model
    return cache_dir() / "models" / f"{model.resolve().name}-{form}-{_fingerprint(model)}"


def ensure_form(model: Path, form: WeightForm, progress: Progress) -> Path:
    """Return the `folder_of_form`, and write it if it is missing; raises DiskSpaceError or ConversionError."""
    if (folder := folder_of_form(model, form)) == model:
        return model

    def write(unfinished: Path) -> None:
        kind = "gguf" if (model / GGUF).is_file() else "safetensors"
        size = sum(file.stat().st_size for file in model.glob(f"*.{kind}"))
        title = f"Writing {model.name} as {form}"
        require_disk_space(unfinished.parent, int(size * _DISK_FACTOR[kind, form]), title)
        run_child([*_CHILD, form, str(model), str(unfinished)], title, progress)

    return create_once(folder, write, partial(damage_to, form=form))


def damage_to(folder: Path, form: WeightForm) -> str | None:
    """The damage to a converted folder; a layout of another version counts, as `int8` weights would be misread."""
    if (problem := damage(folder, weights="wanted")) is not None or form != "int8":
        return problem
    config = read_config(folder).get("quantization_config")
    layout = config.get("layout") if isinstance(config, dict) else None
    return None if layout == LAYOUT else "another version of this library wrote its weights in another layout"


def write_metadata(gguf: Path, folder: Path, name: str, progress: Progress) -> None:
    """Write the configuration and tokenizer of a GGUF file to a folder; raises ConversionError if that fails."""
    run_child([*_CHILD, "metadata", str(gguf), str(folder)], f"Reading the tokenizer of {name}", progress)


def is_quantized(model: Path) -> bool:
    """Whether the model's configuration declares quantized weights."""
    return "quantization_config" in read_config(model)


def _fingerprint(model: Path) -> str:
    """A digest of a model's path and its files' sizes and times: hashing gigabytes at every start takes seconds."""
    digest = hashlib.sha256(str(model.resolve()).encode())
    for file in sorted([*model.glob("*.safetensors"), *model.glob(GGUF), model / "config.json"]):
        status = file.stat()
        digest.update(f"{file.name}:{status.st_size}:{status.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def run_child(command: Sequence[str], title: str, progress: Progress) -> None:
    """Run a command and report its progress bars' percentages; `title` begins the progress line and the errors.

    If it fails, raises DiskSpaceError for a full disk, else ConversionError with the last line of its error output.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    start = partial(subprocess.Popen, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
    with progress.task(title, 100) as advance, start(command) as process:
        assert process.stderr is not None
        tail = b""
        try:
            while chunk := os.read(process.stderr.fileno(), 4096):
                tail = (tail + chunk)[-4000:]
                if percentages := _PERCENT.findall(chunk):
                    advance(float(percentages[-1]))
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        lines = tail.decode(errors="replace").strip().splitlines() or ["no message"]
        action = f"{title[0].lower()}{title[1:]}"
        if os.strerror(errno.ENOSPC).encode() in tail:
            raise DiskSpaceError(f"the disk is full: {action} failed. Free some space and run again.")
        hint = " (not enough memory?)" if process.returncode in (-9, 137) else ""
        raise ConversionError(
            f"{action} failed with exit code {process.returncode}{hint}: {lines[-1]}. "
            "Its source is kept: run again to try once more."
        )


# Functions of the child process


def _write_metadata(file: Path, folder: Path) -> None:
    import gguf
    import numpy as np
    from transformers import AutoConfig, AutoTokenizer

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if self.byte_order != "I":
                return super()._get(offset, dtype, count, override_order)
            # A slice of numpy's mapped array takes five times as long, and a vocabulary is a million slices.
            return np.frombuffer(self.data, dtype, int(count), int(offset))

    # transformers reads the file for the configuration and again for the tokenizer, each time for seconds.
    gguf.GGUFReader = cache(Reader)  # type: ignore[assignment,misc]
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
        "trust_remote_code": False,
    }
    config = AutoConfig.from_pretrained(**source)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source, config=config).save_pretrained(folder)


def _write_bf16(source: Path, folder: Path) -> None:
    _load(source).save_pretrained(folder)
    _copy_tokenizer(source, folder)


def _write_int8(source: Path, folder: Path) -> None:
    from lookahead_agent.models.int8_folder import write_int8_folder

    write_int8_folder(source, folder, _load)
    _copy_tokenizer(source, folder)


def _write_w8a8(source: Path, folder: Path) -> None:
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = _load(source)
    scheme = preset_name_to_scheme(_SCHEME, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    with torch.no_grad():
        for module in model.modules():
            layer_scheme = getattr(module, "quantization_scheme", None)
            if layer_scheme is None or layer_scheme.weights is None:
                continue
            low, high = module.weight.float().aminmax(dim=1, keepdim=True)
            scale, zero_point = calculate_qparams(low, high, layer_scheme.weights)
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
        return AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=False)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, config=config, dtype=torch.bfloat16, trust_remote_code=False
    )
    # The loaded model is still marked as quantized: saving it would call a quantizer that cannot save.
    for owner, name in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
    return model


def _copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy a model's files besides its weights: tokenizer, chat template, generation settings."""
    for pattern in ("*.json", "*.jinja", "*.model", "*.txt"):
        for file in source.glob(pattern):
            if file.name not in _NOT_COPIED:
                shutil.copyfile(file, folder / file.name)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    import gc

    gc.disable()  # reading a GGUF file's metadata creates a million long-lived objects
    writers = {"metadata": _write_metadata, "bf16": _write_bf16, "int8": _write_int8, "w8a8": _write_w8a8}
    writers[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
