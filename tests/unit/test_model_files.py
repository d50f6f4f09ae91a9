"""Damaged model files are replaced or raise one clear error; so does an unwritable cache."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.model_files import read_weight_names
from lookahead_agent.engines.vllm_config import read_trained_context
from lookahead_agent.errors import (
    ConfigurationError,
    ConversionError,
    DiskSpaceError,
    IntegrityError,
    ModelError,
    ModelNotFoundError,
)
from lookahead_agent.hardware.diagnostics import diagnose
from lookahead_agent.hardware.gpus import kv_cache_bytes_per_token, weight_bytes
from lookahead_agent.models.cache import create_once, damage
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.conversion import run_child
from lookahead_agent.models.resolve import choose_models, fetch, fetch_tokenizer
from lookahead_agent.modes.record import PaceRecord, Series
from lookahead_agent.system.files import CACHE_VARIABLE, cache_dir
from lookahead_agent.system.progress import LogProgress
from lookahead_agent.testing import scripted_chat
from tests.unit.test_cli import run
from tests.unit.weights import weights


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights(1000))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "b" * 400}))
    return folder


def fill(folder: Path) -> None:
    write_model(folder)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def truncate(name: str, length: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, length)


def fill_with_zeros(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size))  # type: ignore[return-value]


def append_byte(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def break_link(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blob")


def remove_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate("model.safetensors", 500), "model.safetensors is not a whole safetensors file"),
    (truncate("model.safetensors", 5), "model.safetensors is not a whole safetensors file"),
    (truncate("model.safetensors", 0), "model.safetensors is not a whole safetensors file"),
    (fill_with_zeros("model.safetensors"), "model.safetensors is not a whole safetensors file"),
    (append_byte, "model.safetensors is not a whole safetensors file"),
    (break_link, "model.safetensors is not a whole safetensors file"),
    (remove_shard, "model-2-of-2.safetensors"),
    (truncate("config.json", 1), "config.json cannot be read"),
    (fill_with_zeros("config.json"), "config.json cannot be read"),
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("[]"), "it is not a JSON object"),  # type: ignore[list-item, return-value]
    (lambda folder: (folder / "config.json").write_bytes(b"\xff{}"), "config.json cannot be read"),  # type: ignore[list-item, return-value]
    (truncate("tokenizer_config.json", 20), "tokenizer_config.json cannot be read"),
]


def test_complete_model_has_no_damage(model: Path) -> None:
    (model / "notes.json").write_text("no JSON, and no part of the model")
    assert damage(model) is None


@pytest.mark.parametrize(("damage_files", "message"), DAMAGES)
def test_damaged_model_raises_integrity_error_before_loading(
    model: Path, damage_files: Callable[[Path], None], message: str
) -> None:
    damage_files(model)
    assert message in (damage(model) or "")
    with pytest.raises(IntegrityError, match=r"is damaged: .*Copy it there again"):
        fetch(ModelFacts(str(model)))


def test_chat_model_rejects_a_damaged_target_and_ignores_a_damaged_draft(model: Path, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft")
    (draft / "config.json").write_text("{")
    chat = ChatLookahead(model=str(model), draft_model=str(draft), policy="exact:depth=2")
    assert chat.profile is not None
    (model / "tokenizer_config.json").write_text('{"chat_template": ')
    for fields in ({"policy": "off"}, {"draft_model": str(draft)}):
        with pytest.raises(IntegrityError, match=r"tokenizer_config\.json cannot be read"):
            ChatLookahead(model=str(model), **fields)
    (model / "tokenizer_config.json").unlink()
    checks = {check.name: check for check in diagnose(choose_models(str(model), str(draft)))}
    assert checks[str(model)].state == "ok"
    assert checks[str(draft)].state == "missing"
    assert "config.json cannot be read" in checks[str(draft)].found


@pytest.mark.parametrize(("damage_files", "message"), DAMAGES)
def test_create_once_replaces_a_damaged_model(
    model: Path, damage_files: Callable[[Path], None], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    created: list[Path] = []

    def make(folder: Path) -> None:
        created.append(write_model(folder))

    assert create_once(model, make) == model
    assert not created
    damage_files(model)
    assert create_once(model, make) == model
    assert len(created) == 1
    assert damage(model, weights="wanted") is None
    assert message in caplog.text


def is_json_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content.decode()), dict)
    except ValueError:
        return False


@given(
    st.integers(0, 999),
    st.one_of(st.binary(max_size=30), st.sampled_from([b"{}", b"[]", b" { } ", b"null"])),
    st.integers(0, 200),
)
@settings(max_examples=200)
def test_damage_detects_every_truncation_and_never_raises(
    tmp_path_factory: pytest.TempPathFactory, length: int, noise: bytes, offset: int
) -> None:
    folder = write_model(tmp_path_factory.getbasetemp() / "noisy")
    complete = weights(1000)
    (folder / "model.safetensors").write_bytes(complete[:length])
    assert damage(folder) is not None
    (folder / "model.safetensors").write_bytes(complete[:offset] + noise + complete[offset + len(noise) :])
    assert damage(folder) is None or isinstance(damage(folder), str)
    for name in ("config.json", "tokenizer_config.json"):
        write_model(folder)
        (folder / name).write_bytes(noise)
        assert (damage(folder) is None) == is_json_object(noise)


INDEX = "model.safetensors.index.json"
HOSTILE: list[tuple[str, bytes, str]] = [
    *(
        (INDEX, json.dumps({"weight_map": weight_map}).encode(), "the weight_map of")
        for weight_map in (
            {"a": "../../passwd"}, {"a": "/etc/passwd"}, {"a": [1]}, {"a": 1}, {"a": None}, {"a": ""}, {"a": ".."},
            {"a": "x\0y"}, None, [], 7, "x",
        )
    ),
    (INDEX, b"{}", "the weight_map of"),
    (INDEX, b'{"a":' * 100_000, "nested too deeply"),
    ("config.json", b"[" * 100_000, "nested too deeply"),
    ("config.json", "{}".encode("utf-16"), "cannot be read"),
    ("config.json", b'{"a": ' + b"9" * 5000 + b"}", "cannot be read"),
    ("model.safetensors", struct.pack("<Q", 2**63) + b"{}", "header is longer"),
    ("model.safetensors", struct.pack("<Q", 10**9) + b"{}", "header is longer"),
    ("model.safetensors", struct.pack("<Q", 200_000) + b"[" * 200_000, "nested too deeply"),
    ("model.safetensors", struct.pack("<Q", 22) + b'{"a": {},  "a": {}}   ', "a name twice"),
    ("model.safetensors", struct.pack("<Q", 2) + b"\xff\xfe", "not a whole safetensors file"),
    ("model.gguf", b"GGUF", "not a whole GGUF file"),
    ("model.gguf", b"GGUF" + b"\xff" * 500, "no valid GGUF header"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), HOSTILE)
def test_hostile_file_is_damage_and_never_another_exception(
    model: Path, name: str, content: bytes, message: str
) -> None:
    (model / name).write_bytes(content)
    assert message in (damage(model) or "")
    with pytest.raises(IntegrityError, match="is damaged"):
        fetch(ModelFacts(str(model)))


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX, "model.safetensors"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_folder_in_place_of_a_file_is_damage(model: Path, name: str, make: Callable[[Path], None]) -> None:
    (model / name).unlink(missing_ok=True)
    make(model / name)
    assert name in (damage(model) or "")


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("max_position_embeddings", read_trained_context),
    *((name, lambda folder: kv_cache_bytes_per_token(folder, {})) for name in ("num_hidden_layers", "head_dim")),
    *((name, lambda folder: weight_bytes(folder, {"load_format": "dummy"})) for name in ("hidden_size", "vocab_size")),
]


@pytest.mark.parametrize(("name", "read"), READERS)
def test_a_configured_number_that_is_no_count_is_one_error(
    model: Path, name: str, read: Callable[[Path], object]
) -> None:
    shape = "num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"
    file = model / "config.json"
    for value in ("x", -1, 0, True, [1], {"a": 1}, 1.5, float("inf"), float("nan"), 1 << 40):
        file.write_text(json.dumps({**dict.fromkeys(shape, 8), name: value}))
        with pytest.raises(IntegrityError, match=rf"{name} in config\.json is not a positive whole number"):
            read(model)
    for content in (b"[1]", b"\xff", b"[" * 100_000, b""):
        file.write_bytes(content)
        with pytest.raises(IntegrityError, match=r"config\.json cannot be read"):
            read(model)


def test_a_held_lock_delays_nothing_that_is_complete_and_times_out(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    create_once(folder, fill)
    lock = tmp_path / "model.lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    with FileLock(lock):
        assert create_once(folder, fill) == folder
        shutil.rmtree(folder)
        with pytest.raises(ModelError, match="without progress"):
            create_once(folder, fill, patience=0.05)
        # Another process completes the folder while this one waits, and keeps its lock.
        checks = iter(["missing", None])

        def check(_: Path) -> str | None:
            folder.mkdir(exist_ok=True)
            return next(checks)

        folder.mkdir()
        assert create_once(folder, fill, check, patience=0.05) == folder
    assert create_once(folder, fill) == folder


def test_fetch_tokenizer_ignores_missing_weights(model: Path) -> None:
    remove_shard(model)
    facts = ModelFacts(str(model))
    assert fetch_tokenizer(facts) == model
    os.truncate(model / "tokenizer_config.json", 20)
    with pytest.raises(IntegrityError, match=r"tokenizer_config\.json cannot be read"):
        fetch_tokenizer(facts)


def test_create_once_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    create_once(tmp_path / "model", fill)
    assert (tmp_path / "model" / "config.json").is_file()


def test_damaged_hub_model_error_names_the_folder_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = tmp_path / "hub" / "models--owner--name"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    write_model(hub / "snapshots" / ("a" * 40))
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("a" * 40)
    assert fetch(ModelFacts("owner/name")).name == "a" * 40
    os.truncate(hub / "snapshots" / ("a" * 40) / "model.safetensors", 500)
    with pytest.raises(IntegrityError, match=rf"owner/name is damaged.*Delete {hub} and run again"):
        fetch(ModelFacts("owner/name"))


# An unwritable cache: root ignores permissions, so a file takes the place of a folder.


def block_folder(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("a file")
    return tmp_path / "cache" / "models" / "model"


@pytest.mark.parametrize("name", ["cache", "cache/models", "cache/models/model"])
def test_file_in_place_of_a_cache_folder_raises_configuration_error(tmp_path: Path, name: str) -> None:
    folder = block_folder(tmp_path, name)
    with pytest.raises(ConfigurationError, match=CACHE_VARIABLE):
        create_once(folder, fill)


def test_full_disk_raises_disk_space_error_and_leaves_no_files(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        write_model(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskSpaceError, match="is full"):
        create_once(tmp_path / "model", make)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("OSError: [Errno 28] No space left on device", DiskSpaceError),
        ("SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", DiskSpaceError),
        ("ValueError: something else", ConversionError),
    ],
)
def test_run_child_distinguishes_a_full_disk_from_other_errors(message: str, error: type[ModelError]) -> None:
    with pytest.raises(error, match="riting it"):
        run_child([sys.executable, "-c", f"import sys; sys.exit({message!r})"], "Writing it", LogProgress())


def test_paces_are_dropped_if_the_cache_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block_folder(tmp_path, "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    record = PaceRecord(["model"])
    record.update(lambda measurements: measurements.update({Series("none", "off"): [0.1]}))
    assert record.read() == {}


def test_missing_home_folder_raises_an_error_that_names_the_cache_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as for a user id without a passwd entry
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=CACHE_VARIABLE):
        cache_dir()
    monkeypatch.setenv(CACHE_VARIABLE, "/somewhere")
    assert cache_dir() == Path("/somewhere")
    monkeypatch.setenv(CACHE_VARIABLE, "~nobody-of-this-name/cache")
    with pytest.raises(ConfigurationError, match=CACHE_VARIABLE):
        cache_dir()


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "~nobody-of-this-name"])
def test_model_folder_of_an_unknown_user_raises_an_error(name: str) -> None:
    with pytest.raises((ModelNotFoundError, ConfigurationError)):
        choose_models(name, draft_wanted=False)


def test_agent_command_without_a_home_folder_advises_the_checkpoints_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert run("agent", "How many?", chat_class=partial(scripted_chat, lambda _: "36")) != 0
    assert "--checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((INDEX, b'{"weight_map": %s}' % value) for value in (b"null", b"3", b'["a"]', b'"a"')),
        (INDEX, b"{}"),
        *(("a.safetensors", struct.pack("<Q", len(head)) + head) for head in (b"3", b"[[]]", b'"ab"', b"[" * 100_000)),
    ],
)
def test_damaged_names_of_weights_are_one_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(IntegrityError, match=r"the names of the weights in .* cannot be read"):
        read_weight_names(tmp_path)
