"""Install the project into this interpreter's environment: `python .ci/install.py cpu|gpu TORCH_CPU_INDEX`.

uv installs: pip computes for five minutes on two cores, and uv for half a minute. It takes pip's configuration.

On a CPU machine vLLM needs the `+cpu` build of torch. Where the configured package index has none, it comes from
PyTorch's own index for CPU wheels. What vLLM then pulls in besides (torchvision, torchaudio, torchcodec) are CUDA
builds that break transformers beside a CPU torch; they are removed, and only then.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

CUDA_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

# pip's settings that uv has as options; a setting may hold several values.
OPTIONS = {
    "index-url": "--index-url",
    "extra-index-url": "--extra-index-url",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}


def pip_settings() -> dict[str, str]:
    """The settings of pip's configuration files and environment variables, which have the last word."""
    listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True, check=True).stdout
    places = ("global", "install", ":env:")
    found: dict[str, dict[str, str]] = {place: {} for place in places}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        place, _, setting = name.rpartition(".")
        if place in places:
            found[place][setting] = str(ast.literal_eval(value))
    return {setting: value for place in places for setting, value in found[place].items()}


def uv(*arguments: str, check: bool = True) -> int:
    """Run `uv pip` on this environment and return its status; a failure that is checked ends the program."""
    settings = pip_settings()
    # pip chooses the best version of all its indexes; uv by default takes those of the first index with the name.
    options = ["--python", sys.executable, "--quiet"]
    if arguments[0] == "install":
        options += ["--index-strategy", "unsafe-best-match"] + (["--no-index"] if "no-index" in settings else [])
        options += [
            word
            for name, option in OPTIONS.items()
            for value in settings.get(name, "").split()
            for word in (option, value)
        ]
    environment = os.environ | ({"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {})
    quiet = None if check else subprocess.DEVNULL
    command = [sys.executable, "-m", "uv", "pip", *arguments, *options]
    status = subprocess.run(command, env=environment, stderr=quiet, check=False).returncode
    if status and check:
        sys.exit(f"uv pip {arguments[0]} failed")
    return status


def main(extra: str, torch_index: str) -> None:
    """Install with the extra `cpu` or `gpu`."""
    subprocess.run([*PIP, "install", "-qq", "uv>=0.9"], check=True)
    project = ["--editable", f".[{extra},bench,dev]"]
    if extra == "cpu" and uv("install", *project, check=False):
        print("Taking torch from PyTorch's index for CPU wheels")
        uv("install", *project, "--extra-index-url", torch_index)
    elif extra != "cpu":
        uv("install", *project)
    try:
        cpu_torch = version("torch").endswith("+cpu")
    except PackageNotFoundError:
        sys.exit("torch was not installed: vLLM should have brought it")
    if cpu_torch:
        uv("uninstall", *CUDA_COMPANIONS)


if __name__ == "__main__":
    main(*sys.argv[1:])
