"""Models whose files are damaged, and caches that cannot be written: one clear error, or made anew."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent import ChatLookahead
from lookahead_agent.errors import (
    ConfigurationError,
    ConversionError,
    DiskSpaceError,
    IntegrityError,
    ModelError,
    ModelNotFoundError,
)
from lookahead_agent.hardware.diagnostics import diagnose
from lookahead_agent.hardware.reply_speeds import ReplySpeeds
from lookahead_agent.models.cache import CACHE_VARIABLE, cache_dir, create_once, damage
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.conversion import run_child
from lookahead_agent.models.resolve import choose_models, fetch, fetch_tokenizer
from lookahead_agent.progress import LogProgress
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


def cut(name: str, to: int) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, to)


def zeroed(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(bytes((folder / name).stat().st_size))  # type: ignore[return-value]


def longer(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"x")


def link_to_nothing(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "blob")


def sharded_with_one_missing(folder: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (folder / "model.safetensors").rename(folder / "model-1-of-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut("model.safetensors", 500), "model.safetensors is no whole safetensors file"),
    (cut("model.safetensors", 5), "model.safetensors is no whole safetensors file"),
    (cut("model.safetensors", 0), "model.safetensors is no whole safetensors file"),
    (zeroed("model.safetensors"), "model.safetensors is no whole safetensors file"),
    (longer, "model.safetensors is no whole safetensors file"),
    (link_to_nothing, "model.safetensors is no whole safetensors file"),
    (sharded_with_one_missing, "model-2-of-2.safetensors"),
    (cut("config.json", 1), "config.json cannot be read"),
    (zeroed("config.json"), "config.json cannot be read"),
    (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    (lambda folder: (folder / "config.json").write_text("[]"), "config.json is no JSON object"),  # type: ignore[list-item, return-value]
    (lambda folder: (folder / "config.json").write_bytes(b"\xff{}"), "config.json cannot be read"),  # type: ignore[list-item, return-value]
    (cut("tokenizer_config.json", 20), "tokenizer_config.json cannot be read"),
]


def test_a_whole_model(model: Path) -> None:
    (model / "notes.json").write_text("no JSON, and no part of the model")
    assert damage(model) is None


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_a_damaged_model_is_one_clear_error_before_anything_loads(
    model: Path, harm: Callable[[Path], None], said: str
) -> None:
    harm(model)
    assert said in (damage(model) or "")
    with pytest.raises(IntegrityError, match=r"is damaged: .*Copy it there again"):
        fetch(ModelFacts(str(model)))


def test_a_damaged_target_is_told_of_when_its_chat_model_is_made_and_a_damaged_draft_is_done_without(
    model: Path, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(("harm", "said"), DAMAGES)
def test_a_damaged_model_that_was_made_here_is_made_anew(
    model: Path, harm: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(write_model(folder))

    assert create_once(model, make) == model
    assert not made
    harm(model)
    assert create_once(model, make) == model
    assert len(made) == 1
    assert damage(model, weights="wanted") is None
    assert said in caplog.text


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
def test_every_cut_shows_and_nothing_that_stands_in_a_file_is_an_exception(
    tmp_path_factory: pytest.TempPathFactory, length: int, noise: bytes, at: int
) -> None:
    folder = write_model(tmp_path_factory.getbasetemp() / "noisy")
    whole = weights(1000)
    (folder / "model.safetensors").write_bytes(whole[:length])
    assert damage(folder) is not None
    (folder / "model.safetensors").write_bytes(whole[:at] + noise + whole[at + len(noise) :])
    assert damage(folder) is None or isinstance(damage(folder), str)
    for name in ("config.json", "tokenizer_config.json", "model.safetensors.index.json"):
        write_model(folder)
        (folder / name).write_bytes(noise)
        assert (damage(folder) is None) == is_json_object(noise)
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)


def test_a_tokenizer_is_fetched_without_the_weights_that_its_folder_names(model: Path) -> None:
    sharded_with_one_missing(model)
    facts = ModelFacts(str(model))
    assert fetch_tokenizer(facts) == model
    os.truncate(model / "tokenizer_config.json", 20)
    with pytest.raises(IntegrityError, match=r"tokenizer_config\.json cannot be read"):
        fetch_tokenizer(facts)


def test_an_empty_folder_of_the_cache_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    create_once(tmp_path / "model", fill)
    assert (tmp_path / "model" / "config.json").is_file()


def test_a_damaged_model_of_the_hub_says_what_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# A cache that cannot be written: tests may run as root, whom permissions do not stop, so files stand in the way.


def in_the_way(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("a file")
    return tmp_path / "cache" / "models" / "model"


@pytest.mark.parametrize("name", ["cache", "cache/models", "cache/models/model"])
def test_a_file_in_the_caches_place_is_one_clear_error(tmp_path: Path, name: str) -> None:
    folder = in_the_way(tmp_path, name)
    with pytest.raises(ConfigurationError, match=CACHE_VARIABLE):
        create_once(folder, fill)


def test_a_disk_that_is_full_is_one_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        write_model(folder)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(DiskSpaceError, match="is full"):
        create_once(tmp_path / "model", make)
    assert [path.name for path in tmp_path.iterdir()] == ["model.lock"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("OSError: [Errno 28] No space left on device", DiskSpaceError),
        ("SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)", DiskSpaceError),
        ("ValueError: something else", ConversionError),
    ],
)
def test_a_child_that_found_the_disk_full_says_so(words: str, kind: type[ModelError]) -> None:
    with pytest.raises(kind, match="riting it"):
        run_child([sys.executable, "-c", f"import sys; sys.exit({words!r})"], "Writing it", LogProgress())


def test_what_replies_showed_is_not_kept_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way(tmp_path, "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    speeds = ReplySpeeds(["model"])
    speeds.add("none", 0.1)
    assert speeds.paces() == {}


def test_a_user_without_a_home_is_asked_for_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # as for a user's number that is in no list
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
def test_a_folder_of_a_user_that_there_is_not_is_no_model(name: str) -> None:
    with pytest.raises((ModelNotFoundError, ConfigurationError)):
        choose_models(name, draft_wanted=False)


def test_the_agent_without_a_home_is_told_what_to_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert run("agent", "How many?", chat_class=partial(scripted_chat, lambda _: "36")) != 0
    assert "--checkpoints" in capsys.readouterr().err
