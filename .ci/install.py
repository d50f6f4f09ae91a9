"""Install the project into this interpreter's environment: `python .ci/install.py cpu|gpu TORCH_CPU_INDEX`.

On a CPU machine vLLM needs the `+cpu` build of torch. Where the configured package index has none, it comes from
PyTorch's own index for CPU wheels. What vLLM then pulls in besides (torchvision, torchaudio, torchcodec) are CUDA
builds that break transformers beside a CPU torch; they are removed, and only then.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def pip(*arguments: str, check: bool = True) -> int:
    """Run pip, quietly but for errors."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode and check:
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr]
        sys.exit("\n".join(errors))
    return result.returncode


def main(extra: str, torch_index: str) -> None:
    """Install with the extra `cpu` or `gpu`."""
    project = ["--editable", f".[{extra},bench,dev]"]
    install = ["install", "--quiet", "--progress-bar=off"]
    if extra == "cpu" and pip(*install, *project, check=False):
        print("Taking torch from PyTorch's index for CPU wheels")
        pip(*install, *project, "--extra-index-url", torch_index)
    elif extra != "cpu":
        pip(*install, *project)
    try:
        cpu_torch = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        sys.exit("torch was not installed: vLLM should have brought it")
    if cpu_torch:
        pip("uninstall", "--yes", "--quiet", *CUDA_COMPANIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
