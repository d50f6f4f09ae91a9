"""Tokenizers of damaged and hostile model folders, and streams that begin within a character."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from lookahead_agent.engines import tokenizer as module
from lookahead_agent.engines.chat_template import TemplateLimitError, within
from lookahead_agent.engines.counting_tokenizer import load_counting_tokenizer
from lookahead_agent.engines.template_sandbox import BoundedEnvironment
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError, EngineError, IntegrityError, ModelNotFoundError
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
        ("{% set a = 1 %}" * 9999, "149985 characters"),
    ],
)
def test_hostile_template_is_one_error(folder: Path, template: str, message: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigurationError, match=message):
        HFTokenizer(folder).chat_prompt([{"role": "user", "content": "a"}])


NESTED = "{% set ns = namespace(x=[1]) %}{% for _ in range(40) %}{% set ns.x = VALUE %}{% endfor %}{{ ns.x ~ 'a' }}"
TEXTS = (
    "{% macro show(a) %}" + "{{ a }}" * 99 + "{% endmacro %}{% set ns = namespace(x='<' * 9999) %}"
    "{% for _ in range(40) %}{% set ns.x = VALUE %}{% endfor %}"
)
UNBOUNDED = [
    *(f"{{{{ ('%' ~ '9999999' ~ '99d') {use} }}}}" for use in ("% 1", "| format(1)", "| replace('%', '%1') % 1")),
    *(f"{{{{ ('{{:' ~ '9999999' ~ '99}}'){use} }}}}" for use in (".format(1)", ".format_map({})")),
    "{{ '{:{w}}'.format(1, w='9' * 9) }}",
    *(f"{{{{ 'x'.{name}(('9999999' ~ '99') | int) }}}}" for name in ("ljust", "rjust", "center", "zfill")),
    *(f"{{{{ 'x\t' {use} }}}}" for use in (".expandtabs(99999999)", "| center(99999999)", "| indent(99999999)")),
    "{{ [1] | batch(99999999) | list }}",
    "{{ [1] | slice(99999999) | list }}",
    "{{ [1] | tojson(indent=99999999) }}",
    "{{ 5 | round(-99999999) }}",
    "{{ (1).to_bytes(99999999) }}",
    "{{ ('f' * 999999) | int(0, 16) }}",
    "{% set a = 'x' * 99999 %}{{ a.replace('x', a) }}",
    "{% set a = 'x' * 99999 %}{{ a | replace('x', a) }}",
    "{% set a = 'x' * 99999 %}{{ a.join(a) }}",
    "{% set a = 'x' * 99999 %}{{ a | join(a) }}",
    "{{ ('x' * 99999).translate({120: 'x' * 99999}) }}",
    "{% set a = ['x' * 99999] * 9999 %}{{ a | join }}",
    "{% set a = [[1] * 99] * 99 %}{{ a | sum(start=[]) | length }}",
    *(NESTED.replace("VALUE", "[ns.x, ns.x]").replace("ns.x ~ 'a'", f"ns.x{use}") for use in ("", "|tojson", "==1")),
    *(NESTED.replace("VALUE", value) for value in ("(ns.x, ns.x)", "{1: ns.x, 2: ns.x}", "dict(a=ns.x, b=ns.x)")),
    *(TEXTS.replace("VALUE", value) for value in ("ns.x ~ ns.x", " ~ ".join(["ns.x"] * 99), "show(ns.x)")),
    TEXTS.replace("VALUE", "(ns.x ~ ns.x) | forceescape"),
    "{% set x = 'a' * 999999 %}{% set y %}" + "{{ x }}" * 99 + "{% endset %}{{ y | length }}",
    "{% set x = 'a' * 999999 %}" + "{{ x }}" * 99,
    *(
        f"{{{{ ('{width}' * 9999){use} }}}}"
        for width, use in (("{:99999}", ".format(1)"), ("%(a)9999d", " % {'a': 1}"))
    ),
    "{{ strftime_now('%c' * 9999) }}",
    *(NESTED.replace("VALUE", value) for value in ("[ns.x] + [ns.x]", "[ns.x] * 2", "namespace(a=ns.x, b=ns.x)")),
]


@pytest.mark.parametrize("template", UNBOUNDED)
def test_no_single_operation_of_a_template_is_without_a_bound(template: str) -> None:
    environment = BoundedEnvironment()
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **options)

    def strftime_now(form: str) -> str:
        return form

    environment.globals["strftime_now"] = strftime_now
    with pytest.raises(SecurityError, match="without a bound"):
        environment.from_string(template).render()


def test_bounds_change_no_template_within_them() -> None:
    template = (
        "{% macro show(n) %}<{{ n }}>{% endmacro %}{% set ns = namespace(all=[]) %}"
        "{% for a, b in [(1, 'x'), (12345678901, [3, {'k': none}])] %}{% set c, d = a, (b, b) %}"
        "{{ show(a) }}{{ a | string | length }}{{ d }}{{ '%s-%02d' | format(b, 3) }}{{ {'a': c}.get('a') }}"
        "{{ 'abc'.replace('b', 'xx') ~ ','.join(['1', '2']) ~ '{} {:>4}'.format(a, 'z') ~ 'a\nb' | indent(2) }}"
        "{% set ns.all = ns.all + [a] %}{{ 'z' * 3 + 'a' if 7 % 4 == 3 }}{{ ('y%s' % a).split('y')[1:] }}"
        "{% endfor %}{{ ns.all | map('string') | join('+') }}{{ m | selectattr('role', 'equalto', 'user') | list }}"
        "{{ m | map(attribute='content') | join('\n') | trim | replace('a', 'b') }}{{ {'k': 2, 'j': 1} | dictsort }}"
    )
    messages = [{"role": "user", "content": "a" * 9999}] * 200
    texts = [each().from_string(template).render(m=messages) for each in (BoundedEnvironment, SandboxedEnvironment)]
    assert texts[0] == texts[1]


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


def with_pattern(folder: Path, pattern: str) -> None:
    whole = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps(whole | {"pre_tokenizer": split}))


@pytest.mark.parametrize("pattern", [r"(\w+\s?)*$", r"([\u4e00-\u9fff]+)+$", r"(.*)*\d", r"(é|[é])+$", "(a+)+$"])
def test_pattern_of_exponential_time_is_refused_when_the_folder_loads(folder: Path, pattern: str) -> None:
    with_pattern(folder, pattern)
    with pytest.raises(ModelNotFoundError, match="no usable tokenizer"):
        HFTokenizer(folder)


def test_panic_of_a_pattern_is_an_error_of_the_library(folder: Path) -> None:
    with_pattern(folder, r"(\p{Thai}+)+$")
    tokenizer = HFTokenizer(folder)
    assert tokenizer.encode("abc")
    with pytest.raises(EngineError, match=r"tokenizer\.json fails on a text"):
        tokenizer.encode("\N{THAI CHARACTER KO KAI}" * 40 + "!")
    with pytest.raises(EngineError, match=r"tokenizer\.json fails on a text"):
        tokenizer.encode("\N{THAI CHARACTER KO KAI}" * 400 + "!", longest=10)


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


CHAT = """{{ bos_token }}{% for m in messages %}
{% if m.role == 'tool' %}{% continue %}{% endif %}
<|im_start|>{{ m.role }}
{% generation %}{{ m.content }}{{ m.tool_calls | tojson(indent=1) if m.tool_calls }}{% endgeneration %}<|im_end|>
{% endfor %}{{ tools | tojson if tools }}{{ strftime_now('%Y') }}{% if add_generation_prompt %}<|im_start|>{% endif %}
{% if messages[0].content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"""

CHATS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "l\u00fcck o\u0308 'tis <|im_end|> \u00e9"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b<c>"}],  # which the reply continues
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "\u00e4", "arguments": {"b": 1}}}]},
        {"role": "tool", "content": "c"},
    ],
)


def qwen(folder: Path, **config: object) -> Path:
    """Save a tokenizer as Qwen's models have it."""
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a", "\u00c3", "\u00bc", "\u00b6", "\u00a9"]
    vocabulary = {letter: number for number, letter in enumerate([*letters, "im", "st", "<|endoftext|>"])}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[("i", "m"), ("s", "t")], eos_token="<|im_end|>")
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True)])
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHAT)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


@pytest.mark.parametrize("kind", ["qwen", "plain"])
def test_counting_tokenizer_has_the_ids_of_transformers_without_its_import(
    good: Path, tmp_path: Path, kind: str
) -> None:
    folder = qwen(tmp_path) if kind == "qwen" else good
    (tmp_path / "chats.json").write_text(json.dumps(CHATS))
    program = f"""if True:
        import json, pathlib, sys
        from lookahead_agent.engines.counting_tokenizer import load_counting_tokenizer
        tokenizer = load_counting_tokenizer(pathlib.Path({str(folder)!r}))
        ids = tokenizer.encode("in 'tis l\u00fcck"), tokenizer.chat_prompt([{{"role": "user", "content": "a?"}}])
        assert "transformers" not in sys.modules and "torch" not in sys.modules
        chats = json.loads(pathlib.Path({str(tmp_path / "chats.json")!r}).read_text())
        print(json.dumps([*ids, *(tokenizer.chat_prompt(chat, [{{"name": "\u00e4"}}]) for chat in chats)]))
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    other = HFTokenizer(folder)
    assert json.loads(done.stdout) == [
        other.backend.encode("in 'tis l\u00fcck", add_special_tokens=False),
        AutoTokenizer.from_pretrained(folder).encode(
            other.chat_prompt([{"role": "user", "content": "a?"}]).text or "", add_special_tokens=False
        ),
        *(other.chat_prompt(chat, [{"name": "\u00e4"}]) for chat in CHATS),
    ]
    counting = load_counting_tokenizer(folder)
    assert (counting.eos_ids, counting.size, counting.thinking) == (other.eos_ids, other.size, other.thinking)
    if kind == "qwen":
        with pytest.raises(ConfigurationError, match="refuses these messages: no"):
            counting.chat_prompt([{"role": "user", "content": "refuse"}])


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer_class": "LlamaTokenizer"},
        {"chat_template": [{"name": "default", "template": "a"}]},
        {"auto_map": {}},
        {"added_tokens_decoder": {"500": {"content": "<new>", "special": True}}},
        {"add_prefix_space": True},
    ],
)
def test_folders_that_transformers_changes_are_read_by_transformers(tmp_path: Path, changed: dict[str, object]) -> None:
    assert type(load_counting_tokenizer(qwen(tmp_path / "a")).backend).__name__ == "_FileBackend"
    assert type(load_counting_tokenizer(qwen(tmp_path / "b", **changed)).backend).__name__ != "_FileBackend"


def test_template_is_rendered_once_per_prompt_of_a_known_form(folder: Path) -> None:
    """The first prompt of a form is rendered with marks too, to see what the template leaves out."""
    rendered: list[Any] = []

    class Rendering(HFTokenizer):
        def _render(self, *arguments: Any) -> str:
            rendered.append(arguments)
            return super()._render(*arguments)

    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = Rendering(folder)
    for question, times in (("a", 2), ("b", 1), ("", 2), ("c", 1)):
        rendered.clear()
        tokenizer.chat_prompt([{"role": "user", "content": question}], whole=True)
        assert len(rendered) == times
    rendered.clear()
    tokenizer.chat_prompt([{"role": "user", "content": "a"}], [{"name": "tool"}], whole=True)
    assert len(rendered) == 2, "tools change what a template writes"
    for _ in range(2):
        messages = [{"role": role, "content": "a"} for role in ("user", "system")]
        with pytest.raises(ConfigurationError, match="leaves out message 2"):
            tokenizer.chat_prompt(messages, whole=True)
