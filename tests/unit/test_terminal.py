"""Texts that the library did not write, on the terminal and in logs."""

from __future__ import annotations

import io
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
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from lookahead_agent.cli.agent_run import LiveSteps
from lookahead_agent.cli.app import app
from lookahead_agent.cli.terminal import LogFormatter, ProgressBars, Terminal
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.plain_text import PlainTextStream, plain
from lookahead_agent.testing import scripted_chat
from lookahead_agent.trace.recorder import TraceRecorder
from tests.unit.test_cli import run

HOSTILE = {
    "a\x1b]52;c;aGVsbG8=\x07b": "ab",  # writes the clipboard
    "a\x1b]0;title\x1b\\b": "ab",
    "a\x9d0;title\x9cb": "ab",
    "\x1b]8;;https://evil.example\x1b\\here\x1b]8;;\x1b\\": "here",
    "a\x1b[2J\x1b[Hb\x9b31mc": "abc",
    "\x1bPq#0;2;0;0;0\x1b\\x": "x",
    "\x1bcx": "cx",
    "\x1b]52;c;aGVsbG8=": "]52;c;aGVsbG8=",  # ends nowhere
    "safe\rgone\x08\x07\x00": "safegone",
    "one\r\ntwo\tthree": "one\ntwo\tthree",
    "\u202egnp.exe\u2066": "gnp.exe",
    "\ud83d and \udc80": "\\ud83d and \\udc80",
    "[/bold] a[i] = b [red]x[/] :smile: \\[x]": "[/bold] a[i] = b [red]x[/] :smile: \\[x]",
    "\u2028 \x85|\x0b\x0c\x1c|": "\u2028 ||",
}

PIECES = st.sampled_from(
    ["\x1b", "]", "[", "52;c;", "0", "m", "J", "\x07", "\\", "\x9b", "\x9d", "\x9c", "\x90", "P", "a", " ", "\n", "\r"]
)
TEXTS = st.one_of(st.text(), st.lists(PIECES, max_size=12).map("".join))


def controls(text: str) -> list[str]:
    return [each for each in text if unicodedata.category(each) in ("Cc", "Cs") and each not in "\n\t"]


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_what_commands_a_terminal_is_taken_out(text: str, shown: str) -> None:
    assert plain(text) == shown


@settings(max_examples=500)
@given(TEXTS)
def test_no_control_is_left_and_every_visible_character_is(text: str) -> None:
    shown = plain(text)
    assert controls(shown) == []
    assert plain(shown) == shown
    if "\x1b" not in text and not re.search(r"[\x90-\x9f]", text):  # no sequence, whose letters nobody sees
        kept = "".join(each for each in text if each in "\n\t" or unicodedata.category(each) not in ("Cc", "Cs"))
        assert shown == re.sub(r"[\u202a-\u202e\u2066-\u2069]", "", kept)


@settings(max_examples=500)
@given(st.lists(TEXTS, max_size=6))
@example(["\x1b", "]52;c;aG", "k=", "\x07", "x"])
@example(["\x1b]" + "a" * 4095, "aa", "\x07"])
def test_pieces_give_what_the_whole_gives(pieces: list[str]) -> None:
    stream = PlainTextStream()
    assert "".join([*map(stream.feed, pieces), stream.end()]) == plain("".join(pieces))


def test_a_long_text_of_beginnings_takes_no_longer_than_another() -> None:
    # With a look at every later character from each, this would take hours.
    assert plain("\x9d" * 1_000_000 + "\x1b]" * 500_000) == "]" * 500_000


def printed(*renderables: Any, **how: Any) -> str:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=400)
    terminal.print(*renderables, **how)
    return str(terminal.file.getvalue())  # type: ignore[attr-defined]


@pytest.mark.parametrize(("text", "shown"), HOSTILE.items())
def test_a_terminal_shows_text_as_text(text: str, shown: str) -> None:
    expected = shown.expandtabs(8)
    assert printed(text, soft_wrap=True) == expected + "\n"
    assert controls(printed(Text(text), Text("\x1b"), soft_wrap=True)) == []  # what `Text` is given is only cut
    for framed in (Panel(text, title="from a model"), _table(text)):
        found = printed(framed)
        assert controls(found) == []
        assert all(part in found for part in shown.split())


def _table(text: str) -> Table:
    table = Table(text, title=text)
    table.add_row(text)
    return table


@given(TEXTS)
@settings(max_examples=100)
def test_any_text_on_a_terminal(text: str) -> None:
    shown = printed(text, soft_wrap=True)  # with spaces for tabs, as many as the columns need
    assert re.sub(r"[ \t]+", " ", shown) == re.sub(r"[ \t]+", " ", plain(text)) + "\n"
    assert controls(shown) == []


def test_styles_of_the_library_stay() -> None:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system="standard")
    terminal.error("no \x1b[31mred\x07")
    assert terminal.file.getvalue() == "\x1b[31mError:\x1b[0m no red\n"  # type: ignore[attr-defined]


ANSWER = "It is [/bold] a[i] = b. \x1b]52;c;aGVsbG8=\x07:smile: \x9b2Jdone\rover"
SHOWN = "It is [/bold] a[i] = b. :smile: doneover"


def saying(text: str) -> Callable[..., Any]:
    # Tokens are characters, so that every sequence comes in pieces.
    return lambda **fields: scripted_chat(text, **_known(fields))


def _known(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in fields.items()
        if name in ("policy", "policies", "max_tokens", "return_token_ids")
    }


def test_ask(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ask", "How?", chat_class=saying(ANSWER)) == 0
    captured = capsys.readouterr()
    assert captured.out == SHOWN + "\n"
    assert controls(captured.err) == []


def test_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = f"1. Cost: 2 * 3\n{ANSWER}"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for more in ((), ("--live",)):
        assert run("agent", "[/red] How\x1b[2J?", *more, chat_class=saying(plan)) == 0
        captured = capsys.readouterr()
        assert "[/red] How?" in captured.out.split("\n")
        assert "Answer: 1. Cost: 2 * 3\n" in captured.out
        assert SHOWN in captured.out
        assert controls(captured.out + captured.err) == []
        table = captured.out.rpartition("\n\n")[2].split("\n")
        assert " ".join(table[0].split()) == "node policy calls steps tokens a pass cached prompt total"
        policies = {"planner": "balanced", "executor": "off", "finisher": "strict"}
        assert dict(line.split()[:2] for line in table[1:4]) == policies
        assert max(map(len, table)) <= 80


def test_json_has_the_texts_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_errors_about_arguments(
    arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert controls(captured.err) == []
    assert captured.err


def test_a_trace_page_of_a_path_with_markup(tmp_path: Path) -> None:
    recorded = tmp_path / "[bold]run.jsonl"
    with TraceRecorder(recorded):
        pass
    done = CliRunner().invoke(app, ["trace", str(recorded)])
    assert done.stdout.strip() == str(recorded.with_suffix(".html"))


def test_progress_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_live() -> None:
    terminal = Terminal(file=io.StringIO(), force_terminal=True, color_system=None, width=100)
    step = {"kind": "accepted", "path": "[/bold]\x1b]0;x\x07", "source": "draft", "position": 0, "verdict": "\x1b[2J"}
    step |= {"started": 0.0, "ended": 1.0, "text": "a\nb\x07"}
    LiveSteps(terminal).on_custom_event(STEP_EVENT, step)
    shown = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert controls(shown.removesuffix("\n")) == []
    assert "[/bold]" in shown
    assert "a b" in shown


def test_a_log_line_is_one_and_commands_nothing() -> None:
    record = logging.LogRecord("x", logging.WARNING, __file__, 1, "%s failed", ("a\x1b[2J\nError: forged",), None)
    assert LogFormatter("%(levelname)s %(message)s").format(record) == "WARNING a\n    Error: forged failed"
    try:
        raise ValueError("\x1b]0;x\x07[/bold]")
    except ValueError:
        record.exc_info = sys.exc_info()
    assert "ValueError: [/bold]" in LogFormatter("%(message)s").format(record)


def test_a_fault_of_the_library_shows_its_traceback_as_text(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("[/bold]\x1b[2J")

    assert run("ask", "x", chat_class=broken) == 1
    assert "RuntimeError: [/bold]\n" in capsys.readouterr().err


def test_reports_take_names_as_text(tmp_path: Path) -> None:
    from lookahead_agent.bench.report import Report
    from lookahead_agent.bench.samples import read_results
    from lookahead_agent.jsonl import RowFile

    rows = RowFile(Path("docs/measurements/templates-own-6.jsonl.xz")).rows
    bad = "../$x^{$<script>|[/bold]\x1b[2J\ud800"
    report = Report(read_results({**row, "task": bad} for row in rows if row.get("task") == "react"))
    place = tmp_path / "in" / "report"
    report.write(place.with_suffix(".md"))
    markdown = place.with_suffix(".md").read_text(encoding="utf-8")
    assert r"## ../$x^{$\<script>\|\[/bold\]\\ud800" in markdown


# The command line as a process, on scripted engines.
PROGRAM = """
from lookahead_agent.cli.app import main
from tests.unit.test_terminal import saying
main(saying("1. Cost: 2 * 3\\n\\u2192 \\xe9 \\u2028 etc."))
"""


def command_line(*arguments: str, **how: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE, **how)


@pytest.mark.parametrize("arguments", [["ask", "x"], ["ask", "x", "--json"], ["agent", "x", "--live"]])
def test_a_reader_that_leaves_and_a_disk_that_is_full(arguments: list[str], tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    process = command_line(*arguments, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    process.stdout.close()
    _, said = process.communicate(timeout=120)
    assert (process.returncode, [line for line in said.split(b"\n") if b"rror" in line]) == (1, [])
    with open("/dev/full", "wb") as full:
        process = command_line(*arguments, stdout=full, env=environment)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1
    assert said.endswith(b"Error: the output cannot be written: No space left on device\n")
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "locale"),
    [
        (["ask", "x"], {"PYTHONIOENCODING": "ascii"}),
        (["agent", "x", "--live"], {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}),
        (["ask", "--help"], {"PYTHONIOENCODING": "ascii"}),
    ],
)
def test_a_locale_that_lacks_characters(arguments: list[str], locale: dict[str, str], tmp_path: Path) -> None:
    environment = os.environ | locale | {"XDG_STATE_HOME": str(tmp_path)}
    process = command_line(*arguments, stdout=subprocess.PIPE, env=environment)
    out, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert out.isascii()
    if "--help" not in arguments:
        assert rb"\u2192 \xe9 \u2028" in out
