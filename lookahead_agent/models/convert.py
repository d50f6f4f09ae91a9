"""GGUF weights to safetensors, in a child process."""

from __future__ import annotations

import sys
from pathlib import Path

from lookahead_agent.models.child import run_in_child
from lookahead_agent.progress import Progress


def convert_gguf(gguf: Path, folder: Path, name: str, progress: Progress) -> None:
    """Write the model in `gguf` as bf16 safetensors, with its tokenizer and chat template, into `folder`.

    Raises:
        ConversionError: The conversion failed; the message ends with the child's last words.
    """
    command = [sys.executable, "-m", "lookahead_agent.models.convert", str(gguf), str(folder)]
    run_in_child(command, f"Converting {name}", progress)


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    # The loaded model still says that it is quantized; saving it would go through a quantizer that cannot save.
    if hasattr(model, "hf_quantizer"):
        del model.hf_quantizer
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    for file in folder.iterdir():
        file.chmod(0o644)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
