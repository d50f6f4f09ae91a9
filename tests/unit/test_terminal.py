"""Untrusted text on the terminal and in logs."""

from __future__ import annotations

import io
import itertools
import json
import logging
import os
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessageChunk
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from lookahead_agent.cli.agent_run import LiveSteps, RunView
from lookahead_agent.cli.app import app
from lookahead_agent.cli.terminal import LogFormatter, ProgressBars, Terminal, WordWrap
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.system.plain_text import PlainTextStream, plain
from lookahead_agent.testing import scripted_chat
from lookahead_agent.trace.recorder import TraceRecorder
from tests.unit.test_cli import run

HOSTILE = {
    "a\x1b]52;c;aGVsbG8=\x07b": "ab",  # writes to the clipboard
    "a\x1b]0;title\x1b\\b": "ab",
    "a\x9d0;title\x9cb": "ab",
    "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\": "here",
    "a\x1b[2J\x1b[Hb\x9b31mc": "abc",
    "\x1bPq#0;2;0;0;0\x1b\\x": "x",
    "\x1bcx": "cx",
    "\x1b]52;c;aGVsbG8=": "]52;c;aGVsbG8=",  # an unterminated sequence
    "safe\rgone\x08\x07\x00": "safegone",
    "one\r\ntwo\tthree": "one\ntwo\tthree",
    "\u202egnp.exe\u2066": "gnp.exe",
    "\ud83d and \udc80": "\\ud83d and \\udc80",
    "[/bold] a[i] = b [red]x[/] :smile: \\[x]": "[/bold] a[i] = b [red]x[/] :smile: \\[x]",
    "\u2028 \x85|\x0b\x0c\x1c|": "\u2028 ||",
}

FRAGMENTS = st.sampled_from(
    ["\x1b", "]", "[", "52;c;", "0", "m", "J", "\x07", "\\", "\x9b", "\x9d", "\x9c", "\x90", "P", "a", " ", "\n", "\r"]
)
TEXTS = st.one_of(st.text(), st.lists(FRAGMENTS, max_size=12).map("".join))


def controls(text: str) -> list[str]:
    return [char for char in text if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t"]


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_plain_removes_terminal_sequences(text: str, shown: str) -> None:
    assert plain(text) == shown


@settings(max_examples=500)
@given(TEXTS)
def test_plain_removes_every_control_character_and_keeps_visible_text(text: str) -> None:
    shown = plain(text)
    assert controls(shown) == []
    assert plain(shown) == shown
    if "\x1b" not in text and not re.search(r"[\x90-\x9f]", text):  # without sequences, whose letters are removed
        visible = "".join(char for char in text if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cs"))
        assert shown == re.sub(r"[\u202a-\u202e\u2066-\u2069]", "", visible)


@settings(max_examples=500)
@given(st.lists(TEXTS, max_size=6))
@example(["\x1b", "]52;c;aG", "k=", "\x07", "x"])
@example(["\x1b]" + "a" * 4095, "aa", "\x07"])
def test_streamed_fragments_give_the_same_text_as_the_whole(fragments: list[str]) -> None:
    stream = PlainTextStream()
    assert "".join([*map(stream.feed, fragments), stream.end()]) == plain("".join(fragments))


def test_unterminated_sequences_are_parsed_in_linear_time() -> None:
    # A parser that scans the rest of the text from each introducer would take hours.
    assert plain("\x9d" * 1_000_000 + "\x1b]" * 500_000) == "]" * 500_000


def rendered(*renderables: Any, **options: Any) -> str:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=400)
    terminal.print(*renderables, **options)
    return str(terminal.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_terminal_shows_hostile_text_without_markup_or_control_characters(text: str, shown: str) -> None:
    expected = shown.expandtabs(8)
    assert rendered(text, soft_wrap=True) == expected + "\n"
    assert controls(rendered(Text(text), Text("\x1b"), soft_wrap=True)) == []  # Rich strips terminators from `Text`
    for renderable in (Panel(text, title="from a model"), _table(text)):
        output = rendered(renderable)
        assert controls(output) == []
        assert all(word in output for word in shown.split())


def _table(text: str) -> Table:
    table = Table(text, title=text)
    table.add_row(text)
    return table


@given(TEXTS)
@settings(max_examples=100)
def test_terminal_prints_any_text_as_plain_text(text: str) -> None:
    shown = rendered(text, soft_wrap=True)  # tabs become spaces up to the next tab stop
    assert re.sub(r"[ \t]+", " ", shown) == re.sub(r"[ \t]+", " ", plain(text)) + "\n"
    assert controls(shown) == []


def test_terminal_keeps_the_librarys_own_styles() -> None:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard")
    terminal.error("no \x1b[31mred\x07")
    assert terminal.file.getvalue() == "\x1b[31mError:\x1b[0m no red\n"  # type: ignore[attr-defined]


LINES = "Forty columns have room for these words.\n\n    An indented line, and " + "x" * 50 + " y.\tEnd "


@settings(max_examples=200)
@given(st.lists(st.integers(0, len(LINES)), max_size=20))
def test_streamed_lines_break_between_words_only(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(LINES)]
    wrap = WordWrap(24)
    shown = "".join(wrap.feed(LINES[start:end]) for start, end in itertools.pairwise(places)) + wrap.end()
    assert shown.split() == LINES.split()
    assert shown.split("\n") == [
        "Forty columns have room", "for these words.", "", "    An indented line,", "and", "x" * 50, "y.\tEnd",
    ]  # fmt: skip
    unlimited = WordWrap(None)
    assert unlimited.feed(LINES) + unlimited.end() == LINES


def test_texts_of_a_terminal_break_between_words() -> None:
    file = io.StringIO()
    terminal = Terminal(file=file, force_terminal=True, color_system=None)
    terminal.width = 24
    terminal.text(" one two three four five six", label="Answer:")
    terminal.error("one two three four five six")
    view = RunView(terminal)
    view.piece(AIMessageChunk("one two three fo", id="a"))
    view.piece(AIMessageChunk("ur five six seven", id="a", chunk_position="last"))
    assert [line.rstrip(" ─") for line in file.getvalue().splitlines()] == [
        "Answer: one two three", "four five six", "Error: one two three", "four five six",
        "model", "one two three four five", "six seven",
    ]  # fmt: skip
    assert view.last_text == "one two three four five six seven"


ANSWER = "It is [/bold] a[i] = b. \x1b]52;c;aGVsbG8=\x07:smile: \x9b2Jdone\rover"
SHOWN = "It is [/bold] a[i] = b. :smile: doneover"


def saying(text: str) -> Callable[..., Any]:
    # Each token is one character, so the stream splits every terminal sequence.
    return lambda **fields: scripted_chat(text, **_scripted_fields(fields))


def _scripted_fields(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name in ("policy", "policies", "max_tokens", "return_token_ids")
    }


def test_ask_prints_model_text_as_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ask", "How?", chat_class=saying(ANSWER)) == 0
    captured = capsys.readouterr()
    assert captured.out == SHOWN + "\n"
    assert controls(captured.err) == []


def test_agent_prints_model_text_as_plain_text_and_a_usage_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = f"1. Cost: 2 * 3\n{ANSWER}"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for options in ((), ("--live",)):
        assert run("agent", "[/red] How\x1b[2J?", *options, chat_class=saying(plan)) == 0
        captured = capsys.readouterr()
        assert "[/red] How?" in captured.out.split("\n")
        assert captured.out.count("Answer: 1. Cost: 2 * 3\n") == len(options), "a streamed answer is not repeated"
        assert SHOWN in captured.out
        assert controls(captured.out + captured.err) == []
        table = captured.out.rpartition("\n\n")[2].split("\n")
        assert " ".join(table[0].split()) == "node policy calls steps tokens a pass cached prompt total"
        policies = {"planner": "balanced", "executor": "off", "finisher": "strict"}
        assert dict(line.split()[:2] for line in table[1:4]) == policies
        assert max(map(len, table)) <= 80


def test_json_output_is_one_ascii_line_with_the_unchanged_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ask", "How?", "--json", chat_class=saying(ANSWER + "\u2028\ud800")) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out)["text"].startswith(ANSWER)


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "x", "--policy", "\x1b]0;x\x07[/bold]"],
        ["ask", "x", "--model", "\x1b[2J[/bold]/x", "--draft", "\x9b[/red]"],
        ["ask", "x", "\x1b]0;x\x07[/bold]"],
        ["ask", "x", "--no\x1b[2Jsuch"],
        ["no[/bold]\x1b[2J"],
        ["ask", "x", "--depth", "\x1b[2J[/bold]"],
        ["agent", "x", "--trace", "\x1b]0;x\x07[/bold].txt"],
        ["trace", "no[/bold]\x1b[2J.jsonl"],
        ["new", "\x1b[2J[/bold]"],
        ["bench", "--dataset", "[/bold]\x1b[2J"],
        ["bench", "report", "[/bold]\x1b[2J"],
        ["models", "path", "[/bold]\x1b[2J"],
        ["ask", "\udcff"],
        ["ask", "x", "--system", "\udcff"],
        ["agent", "\udcff"],
        ["agent", "x", "--thread", "\udcff"],
    ],
)
def test_argument_errors_contain_no_control_characters(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert controls(captured.err) == []
    assert captured.err


def test_trace_prints_a_path_with_markup_unchanged(tmp_path: Path) -> None:
    recorded = tmp_path / "[bold]run.jsonl"
    with TraceRecorder(recorded):
        pass
    done = CliRunner().invoke(app, ["trace", str(recorded)])
    assert done.stdout.strip() == str(recorded.with_suffix(".html"))


def test_progress_bars_show_plain_labels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBars().task("Loading [/bold]\x1b]0;x\x07"):
        pass
    assert capsys.readouterr().err == "Loading [/bold] …\n"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with ProgressBars().task("Loading [/bold]\x1b]0;x\x07"):
        pass
    shown = capsys.readouterr().err
    assert "Loading [/bold]" in shown
    assert "\x07" not in shown


def test_live_steps_show_model_text_as_plain_text() -> None:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    step = {"kind": "accepted", "path": "[/bold]\x1b]0;x\x07", "source": "draft", "position": 0, "verdict": "\x1b[2J"}
    step |= {"started": 0.0, "ended": 1.0, "text": "a\nb\x07"}
    LiveSteps(terminal).on_custom_event(STEP_EVENT, step)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert controls(shown.removesuffix("\n")) == []
    assert "[/bold]" in shown
    assert "a b" in shown


def test_log_record_cannot_forge_a_line_or_send_terminal_sequences() -> None:
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "%s failed", ("a\x1b[2J\nError: forged",), None)
    assert LogFormatter("%(levelname)s %(message)s").format(record) == "WARNING a\n    Error: forged failed"
    try:
        raise ValueError("\x1b]0;x\x07[/bold]")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: [/bold]" in LogFormatter("%(message)s").format(record)


def test_internal_error_prints_its_traceback_as_plain_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("[/bold]\x1b[2J")

    assert run("ask", "x", chat_class=broken) == 1
    assert "RuntimeError: [/bold]\n" in capsys.readouterr().err


def test_bench_report_escapes_task_names(tmp_path: Path) -> None:
    from lookahead_agent.bench.report import Report
    from lookahead_agent.bench.samples import read_results
    from lookahead_agent.system.jsonl import RowFile

    rows = RowFile(Path("docs/measurements/templates-own-6.jsonl.xz")).rows
    hostile_name = "../$x^{$<script>|[/bold]\x1b[2J\ud800"
    report = Report(read_results({**row, "task": hostile_name} for row in rows if row.get("task") == "react"))
    path = tmp_path / "in" / "report"
    report.write(path.with_suffix(".md"))
    markdown = path.with_suffix(".md").read_text(encoding="utf-8")
    assert r"## ../$x^{$\<script>\|\[/bold\]\\ud800" in markdown


# The command line in its own process, on scripted engines.
PROGRAM = """
from lookahead_agent.cli.app import main
from tests.unit.test_terminal import saying
main(saying("1. Cost: 2 * 3\\n\\u2192 \\xe9 \\u2028 etc."))
"""


def command_line(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE, **options)


@pytest.mark.parametrize("arguments", [["ask", "x"], ["ask", "x", "--json"], ["agent", "x", "--live"]])
def test_closed_stdout_exits_silently_and_a_full_disk_prints_an_error(arguments: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    process = command_line(*arguments, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(timeout=120)
    assert (process.returncode, [line for line in stderr.split(b"\n") if b"rror" in line]) == (1, [])
    with open("/dev/full", "wb") as full:
        process = command_line(*arguments, stdout=full, env=environment)
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 1
    assert stderr.endswith(b"Error: the output cannot be written: No space left on device\n")
    assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    ("arguments", "locale"),
    [
        (["ask", "x"], {"PYTHONIOENCODING": "ascii"}),
        (["agent", "x", "--live"], {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
        (["ask", "--help"], {"PYTHONIOENCODING": "ascii"}),
    ],
)
def test_output_escapes_unencodable_characters(arguments: list[str], locale: dict[str, str], tmp_path: Path) -> None:
    environment = os.environ | locale | {"XDG_STATE_HOME": str(tmp_path)}
    process = command_line(*arguments, stdout=subprocess.PIPE, env=environment)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.isascii()
    if "--help" not in arguments:
        assert rb"\u2192 \xe9 \u2028" in stdout
