"""Install the project into this interpreter's environment: `python .ci/install.py cpu|gpu TORCH_CPU_INDEX`.

On a CPU machine vLLM needs the `+cpu` build of torch. Where the configured package index has none, it comes from
PyTorch's own index for CPU wheels. What vLLM then pulls in besides (torchvision, torchaudio, torchcodec) are CUDA
builds that break transformers beside a CPU torch; they are removed, and only then.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


_STAGE = re.compile(
    r"\s*(Collecting|Processing|Downloading|Using cached|Building|Installing collected packages:)\s+(\S.*)"
)


def pip(*arguments: str, check: bool = True) -> int:
    """Run pip and return its status; a terminal gets one progress line, and a failure prints pip's errors."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    bar = _Line()
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            lines.append(line.rstrip())
            if stage := _STAGE.match(line):
                bar.show(stage[1], stage[2])
    bar.clear()
    if running.returncode and check:
        sys.exit("\n".join([line for line in lines if line.startswith("ERROR")] or lines[-20:]))
    return running.returncode


class _Line:
    """One line of the terminal that shows pip's progress."""

    def __init__(self) -> None:
        self._found = 0

    def show(self, stage: str, what: str) -> None:
        if not sys.stderr.isatty():
            return
        if stage in ("Collecting", "Processing"):
            self._found += 1
        if stage.startswith("Installing"):
            text = f"Installing {what.count(',') + 1} packages"
        else:
            text = f"{self._found} packages found; {stage.lower()} {what.split('/')[-1]}"
        sys.stderr.write(f"\r\033[K{text[:100]}")
        sys.stderr.flush()

    def clear(self) -> None:
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()


def main(extra: str, torch_index: str) -> None:
    """Install with the extra `cpu` or `gpu`."""
    project = ["--editable", f".[{extra},bench,dev]"]
    install = ["install", "--progress-bar=off"]
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
        pip("uninstall", "--yes", *CUDA_COMPANIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
