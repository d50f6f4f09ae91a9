"""The command line and scripts as subprocesses, and their cleanup after signals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from tests.integration.command_line import command
from tests.integration.conftest import descendants


def ask(pair: tuple[Path, Path], *arguments: str) -> list[str]:
    return command(pair, "ask", "A two and three?", *arguments)


def test_ask_prints_one_json_object_and_exact_equals_the_target_in_a_script(
    tiny_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    # So small a pair gains nothing from draft steps, so `--depth` forces step speculation.
    argv = ask(tiny_pair, "--policy", "exact", "--depth", "4", "--temperature", "0", "--max-tokens", "120", "--json")
    process = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("\n") == 1
    exact = json.loads(process.stdout)
    assert exact["lookahead"]["policy"] == "exact"
    assert sum(exact["lookahead"]["tokens"]["draft"].values()) > 0
    assert exact["usage"]["output_tokens"] == len(exact["token_ids"])
    assert target_reply_of_a_script(tiny_pair, tmp_path) == [exact["text"], exact["token_ids"]]


def target_reply_of_a_script(tiny_pair: tuple[Path, Path], folder: Path) -> list[object]:
    """Text and tokens of the target without speculation, from a script without a main guard."""
    script = folder / "script.py"
    script.write_text(
        "import json\n"
        "from lookahead_agent import ChatLookahead\n"
        "print('begun', flush=True)\n"
        "arguments = {'dtype': 'float32', 'kv_cache_memory_bytes': 1 << 28, 'max_model_len': 1024}\n"
        f"llm = ChatLookahead(model={str(tiny_pair[0])!r}, policy='off', engine_args=arguments,\n"
        "                    temperature=0, max_tokens=120, return_token_ids=True)\n"
        "message = llm.invoke('A two and three?')\n"
        "print(json.dumps([message.text, message.response_metadata['token_ids']]))\n"
    )
    process = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300, check=False)
    assert process.returncode == 0, process.stderr
    assert "Traceback" not in process.stderr
    begun, printed = process.stdout.splitlines()
    assert begun == "begun"
    reply: list[object] = json.loads(printed)
    return reply


def assert_ended(processes: list[psutil.Process], at_least: int) -> None:
    """Fail if one of an ended program's processes remains, or if it had fewer."""
    assert len(processes) >= at_least
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive


# `test_serve.py` tests `kill -9`, and `test_bench.py` a signal while two engines run.
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_a_reply_leaves_no_process_and_no_temporary_file(
    tiny_pair: tuple[Path, Path], signum: signal.Signals
) -> None:
    argv = ask(tiny_pair, "--policy", "off", "--max-tokens", "900", "--temperature", "1.0")
    temporary = Path(tempfile.mkdtemp(prefix="left-"))  # a short path, because sockets are in it
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
    process = subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(1), process.stderr.read()
    children = descendants(process.pid)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signum
    assert_ended(children, at_least=2)  # the engine's core, and the process that watches it
    assert "Traceback" not in errors
    assert [path.name for path in temporary.iterdir()] == []
    shutil.rmtree(temporary)


def test_interrupt_while_loading_leaves_no_process(tiny_pair: tuple[Path, Path]) -> None:
    process = subprocess.Popen(ask(tiny_pair), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (children := descendants(process.pid)):
        assert process.poll() is None
        try:
            process.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert_ended(children, at_least=1)
    assert "Traceback" not in errors
