"""Tokenizers of damaged and hostile model folders, and streams that begin within a character."""

from __future__ import annotations

import json
import resource
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lookahead_agent.engines import tokenizer as module
from lookahead_agent.engines.chat_template import TemplateLimitError, within
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError, IntegrityError, ModelNotFoundError
from lookahead_agent.models import conversion
from tests.unit.fake_vllm import tokenizer_in

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    tokenizer_in(folder)
    (folder / "chat_template.jinja").write_text(PLAIN)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "model"))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 9 ** 9 ** 9 }}", "without a bound"),
        ("{% set n = 9 %}{{ n**n }}", "without a bound"),
        ("{{ 'x' * 1000000000 }}", "without a bound"),
        ("{{ 1000000000 * 'x' }}", "without a bound"),
        ("{% set n = 99999 %}{{ 'x' * n * n }}", "without a bound"),
        ("{% set n = 99999 %}{{ (['x'] * n * n) | length }}", "without a bound"),
        ("{% set n = 99999 %}{{ n * n * n }}", "without a bound"),
        ("{{ 'x'.ljust(1000000000) }}", "without a bound"),
        ("{% for a in range(10000000) %}{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be read"),
        ("{% for %}", "cannot be read"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_hostile_template_is_one_error(folder: Path, template: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigurationError, match=message):
        HFTokenizer(folder).chat_prompt([{"role": "user", "content": "a"}])


def test_template_without_an_end_times_out_and_others_do_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_RENDER_SECONDS", 0.2)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(endless)
    tokenizer = HFTokenizer(folder)
    for _ in range(2):
        with pytest.raises(TemplateLimitError, match=r"ran for 0\.2 s"):
            tokenizer.chat_prompt([{"role": "user", "content": "a"}])
    assert within(30.0, lambda: "text") == "text"
    with pytest.raises(ZeroDivisionError):
        within(30.0, lambda: str(1 / 0))


@pytest.mark.parametrize("growth", ["ns.x ~ ns.x", "ns.x * 2", "[ns.x, ns.x] | join"])
def test_template_that_doubles_a_text_ends_before_it_fills_the_memory(folder: Path, growth: str) -> None:
    doubling = "{% set ns = namespace(x='a') %}{% for _ in range(60) %}{% set ns.x = " + growth + " %}{% endfor %}"
    (folder / "chat_template.jinja").write_text(doubling)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigurationError, match=r"MiB and was ended|without a bound"):
        HFTokenizer(folder).chat_prompt([{"role": "user", "content": "a"}])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20, "in KiB"


def test_code_of_a_folder_never_runs_and_nobody_is_asked(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "evil.py").write_text(f"open({str(folder / 'RAN')!r}, 'w')\nclass T: pass\n")
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"auto_map": {"AutoTokenizer": [None, "evil.T"]}, "tokenizer_class": "T"}
    file.write_text(json.dumps(config))
    auto_map = {"AutoConfig": "evil.T", "AutoModelForCausalLM": "evil.T"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto_map}))
    with suppress(ModelNotFoundError):
        HFTokenizer(folder)
    for name in ("model.safetensors", conversion.GGUF):
        (folder / name).touch()
        with pytest.raises(ValueError, match="custom code"):
            conversion._load(folder)
    assert not (folder / "RAN").exists()
    assert "[y/N]" not in capfd.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        '{"eos_token_id": "x"}',
        '{"eos_token_id": [[1]]}',
        '{"eos_token_id": 1.5}',
        "x",
        '{"eos_token_id": -1}',
        '{"eos_token_id": true}',
        '{"eos_token_id": 99999999999}',
        "[1]",
        "[" * 100_000,
        "\xff",
    ],
)
def test_damaged_generation_config_is_one_error(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(IntegrityError, match=r"generation_config\.json"):
        HFTokenizer(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    assert HFTokenizer(folder).eos_ids == {0, 3}


def test_damaged_tokenizer_is_one_error(folder: Path) -> None:
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "."}, "content": "x" * 1000}
    multiplied = whole | {"normalizer": {"type": "Sequence", "normalizers": [replace] * 4}}
    for content in ("", "[" * 200_000, "[]", json.dumps(multiplied)):
        file.write_text(content)
        with pytest.raises(ModelNotFoundError, match="no usable tokenizer"):
            HFTokenizer(folder)


@pytest.mark.parametrize(
    "text",
    [
        *("\N{BIRD}", "a\N{BIRD}b", "\N{WOMAN}\u200d\N{GIRL}", "\u00e9\N{BIRD}\u00e9"),
        *("\ufffda", "\ufffd\ufffd", "a\ufffd\ufffdb", "\ufffd\ufffd\N{BIRD}", "\N{BIRD}\ufffd"),
    ],
)
def test_stream_that_begins_within_a_character_has_the_whole_character_once(tmp_path: Path, text: str) -> None:
    letters = [f"<0x{number:02X}>" for number in range(256)]
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(tmp_path)
    tokenizer = HFTokenizer(tmp_path)
    ids = [*text.encode()]
    for before in ("", "Observation.", "\N{BIRD}", "x\ufffd", "\ufffd\ufffd", 4 * "\ufffd"):
        for cut in range(len(ids) + 1):
            stream = tokenizer.stream([*before.encode(), *ids[:cut]])
            streamed = "".join(map(stream.push, ids[cut:])) + stream.flush()
            complete = text.encode()[:cut].decode(errors="ignore")
            assert streamed == text.removeprefix(complete), (before, cut)
