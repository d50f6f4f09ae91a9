"""GGUF weights to safetensors, in a child process so that its memory is returned and Ctrl-C ends it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from lookahead_agent.errors import ConversionError
from lookahead_agent.progress import Progress

_PERCENT = re.compile(rb"(\d+)%\|")


def convert_gguf(gguf: Path, folder: Path, name: str, progress: Progress) -> None:
    """Write the model in `gguf` as bf16 safetensors, with its tokenizer and chat template, into `folder`.

    Raises:
        ConversionError: The conversion failed; the message ends with the child's last words.
    """
    command = [sys.executable, "-m", "lookahead_agent.models.convert", str(gguf), str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with progress.task(f"Converting {name}", 100) as task:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)
        assert process.stderr is not None
        tail = b""
        try:
            while chunk := os.read(process.stderr.fileno(), 4096):
                tail = (tail + chunk)[-4000:]
                if seen := _PERCENT.findall(chunk):
                    task.advance(float(seen[-1]))
            process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stderr.close()
    if process.returncode:
        words = tail.decode(errors="replace").strip().splitlines() or ["no message"]
        hint = " (not enough memory?)" if process.returncode in (-9, 137) else ""
        raise ConversionError(
            f"converting {name} failed with exit code {process.returncode}{hint}: {words[-1]}. "
            "The download is kept: run again to convert it."
        )


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
