"""The command line without models: invalid arguments, help, installation and JSON output."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cli.app import run_command
from lookahead_agent.cli.serve import server_keys
from tests.unit.chat import scripted_chat


def test_leave_runs_threads_and_exit_handlers_skips_teardown_and_keeps_the_exit_code() -> None:
    script = (
        "import atexit, sys, threading, time\n"
        "from lookahead_agent.cli.app import _leave\n"
        "class Kept:\n"
        "    def __del__(self): print('taken apart')\n"
        "kept = Kept()\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()\n"
        "print('begun', end=' ')\n"
        "_leave(3)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (process.returncode, process.stdout) == (3, "begun thread\nhandler\n"), process.stderr


def run(*arguments: str, chat_class: Callable[..., Any] | None = None) -> int:
    return run_command(arguments, chat_class)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ask"], "question"),
        (["ask", " "], "empty"),
        (["ask", "x", "--policy", "lenient"], "off, exact, strict, balanced, fast"),
        (["ask", "x", "--policy", "balanced:depth=17"], "depth"),
        (["ask", "x", "--policy", "balanced:width"], "FIELD=VALUE"),
        (["ask", "x", "--token-speculation", "guess"], "auto, none, shared_draft, draft_model, ngram, suffix"),
        (["agent", "x", "--token-speculation", "guess"], "auto, none, shared_draft, draft_model, ngram, suffix"),
        (["ask", "x", "--depth", "0"], "--depth"),
        (["ask", "x", "--depth", "17"], "--depth"),
        (["ask", "x", "--max-tokens", "0"], "--max-tokens"),
        (["ask", "x", "--temperature", "-1"], "--temperature"),
        (["ask", "x", "--seed", "one"], "--seed"),
        (["ask", "x", "--model", "gpt-5"], "qwen2.5-coder-1.5b"),
        (["ask", "x", "--model", "owner/target"], "--draft"),
        (["ask", "x", "--engine-arg", "dtype"], "NAME=VALUE"),
        (["ask", "x", "--beams", "3"], "--beams"),
        (["agent", " "], "empty"),
        (["agent", "x", "--policy", "lenient"], "lenient"),
        (["agent", "x", "--node-policy", "planner=lenient"], "lenient"),
        (["agent", "x", "--node-policy", "poet=off"], "one of planner, executor, finisher"),
        (["agent", "x", "--node-policy", "planner"], "NODE=POLICY"),
        (["agent", "x", "--template", "oracle"], "is none of plan_execute, react"),
        (["agent", "x", "--compare"], "needs --depth"),
        (["agent", "x", "--tools", "oracle"], "there is no tool 'oracle'"),
        (["agent", "x", "--tools", "sql:gone.db"], "there is no database gone.db"),
        (["agent", "x", "--mcp", "gone.json"], "gone.json cannot be read"),
        (["agent", "x", "--template", "react", "--ask-before", "rm"], "ask_before names tools that there are not: rm"),
        (["agent", "x", "--template", "reflection", "--tools", "calculator"], "reflection uses no tools"),
        (["ask", "x", "--base-url", "target:8000"], "http://"),
        (["agent", "x", "--draft-url", "draft:8000"], "http://"),
        (["models", "fetch", "gpt-5"], "gpt-5"),
        (["up", "--base-url", "http://target/v1"], "run already"),
        (["new", "my agent"], "is not a name"),
        (["new", "x", "--template", "oracle"], "oracle"),
        (["agent", "x", "--trace", "run.txt"], "run.txt"),
        (["trace", "none.jsonl"], "cannot be read"),
        (["bench", "--dataset", "nowhere.jsonl"], "nowhere.jsonl"),
        (["serve", "--host", "0.0.0.0"], "LOOKAHEAD_SERVER_KEY"),
        (["serve", "--port", "99999"], "--port"),
        (["serve", "--node-policy", "planner"], "NODE=POLICY"),
        (["serve", "--node-policy", "planner=lenient"], "lenient"),
        (["serve", "--base-url", "server:8000"], "http://"),
        (["serve", "--queue", "-1"], "--queue"),
    ],
)
def test_invalid_arguments_exit_with_2_and_an_error_on_stderr(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOOKAHEAD_SERVER_KEY", raising=False)
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message.lower() in captured.err.replace("\n", " ").lower()
    assert captured.out == ""


def test_invalid_dataset_exits_with_2_and_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text('{"id": 1}\n')
    assert run("bench", "--dataset", str(file)) == 2
    assert "line 1" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["bench", "report"], ["bench", "--dataset"], ["trace"], ["calibrate", "fit"]])
def test_file_that_the_system_refuses_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments, "x" * 300) == 2
    shown = capsys.readouterr().err
    assert "File name too long" in shown
    assert "Traceback" not in shown


def test_models_list_prints_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("models", "list") == 0
    out = capsys.readouterr().out
    for name in ("qwen2.5-coder-1.5b", "qwen3-32b", "qwen3-8b", "deepseek-r1-distill-qwen-32b"):
        assert name in out


def test_version_and_help_exit_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out.strip() == "0.1.0"
    assert run("ask", "--help") == 0
    assert "--max-tokens" in capsys.readouterr().out


def test_console_script_is_installed() -> None:
    command = Path(sys.executable).parent / "lookahead-agent"
    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0.1.0"


def test_depth_overrides_the_policy_except_off_and_engine_args_are_parsed() -> None:
    from lookahead_agent.cli.options import engine_arguments, policy_of

    assert policy_of("balanced", 7).depth == 7
    assert policy_of("off", 7).depth == policy_of("off", None).depth
    assert engine_arguments(["dtype=float32", "max-model-len=4096"]) == {"dtype": "float32", "max_model_len": 4096}


def test_ask_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ask", "?", "--json", chat_class=lambda **_: scripted_chat("It is 4.", return_token_ids=True)) == 0
    result = json.loads(capsys.readouterr().out)
    assert {"text", "tool_calls", "lookahead", "usage", "seconds", "token_ids"} <= set(result)


@pytest.mark.parametrize("secret", ["hidden key", "hidden\u00e9", "  ", "hidden\x01"])
def test_a_server_key_that_no_client_can_send_is_refused_and_not_shown(
    secret: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOKAHEAD_SERVER_KEY", secret)
    assert run("serve", "--port", "0") == 2
    shown = capsys.readouterr().err
    assert "LOOKAHEAD_SERVER_KEY" in shown
    assert "hidden" not in shown
    monkeypatch.delenv("LOOKAHEAD_SERVER_KEY")
    # The error's frame would break a long path at any character.
    monkeypatch.chdir(tmp_path)
    Path("keys").write_text(f"good\n{secret}-\n" if secret.strip() else secret)
    assert run("serve", "--port", "0", "--key-file", "keys") == 2
    shown = capsys.readouterr().err
    assert "keys" in shown
    assert "hidden" not in shown
    assert "good" not in shown
    assert run("serve", "--key-file", str(tmp_path)) == 2
    assert run("serve", "--key-file", str(tmp_path / "missing")) == 2


def test_server_keys_come_from_the_environment_and_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOOKAHEAD_SERVER_KEY", "first\r\n")
    (tmp_path / "keys").write_text("second\n\n  third  \n")
    assert [key.get_secret_value() for key in server_keys(tmp_path / "keys")] == ["first", "second", "third"]
    assert [key.get_secret_value() for key in server_keys(None)] == ["first"]
    monkeypatch.delenv("LOOKAHEAD_SERVER_KEY")
    assert server_keys(None) == ()
