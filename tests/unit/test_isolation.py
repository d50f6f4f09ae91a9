"""Code that means harm, behind each boundary that this machine has."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.isolation import (
    Isolation,
    IsolationError,
    PythonLimits,
    available,
    boundaries,
    choose,
    run_isolated,
)
from lookahead_agent.isolation.seccomp import system_call_filter
from tests.unit.escapes import ESCAPES, EXHAUSTIONS
from tools import python_code
from tools.python_code import make_python_tool, python

BOUNDARIES: tuple[Isolation, ...] = ("bubblewrap", "namespaces", "landlock")
SHORT = PythonLimits(seconds=2, memory=256 << 20, output=2000, files=16 << 20)
SHORTER = replace(SHORT, seconds=0.5)
UNTIL_IT_IS_ENDED = {
    "for ever", "sleep", "sleep without output", "ignore all signals", "a fifo that nobody reads",
    "locks that nobody opens", "numbers that grow", "a regular expression", "a stack without end", "threads",
    "small threads",
}  # fmt: skip


@dataclass(frozen=True)
class Outside:
    """What code must not reach."""

    secret: Path
    open: Path
    port: int
    victim: psutil.Process
    listener: socket.socket
    mode: int
    nice: int


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    # Not below pytest's folder, which is closed to others: the code may be another user.
    folder = Path(tempfile.mkdtemp(prefix="lookahead-outside-"))
    folder.chmod(0o755)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "secret").write_text("hidden")
    (folder / "secret").chmod(0o666)
    listener, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    abstract.bind(f"\0lookahead-test-{port}")
    abstract.listen()
    listener.listen()
    listener.setblocking(False)
    sleeper = subprocess.Popen(["sleep", "600"], user=65534 if os.geteuid() == 0 else None)
    try:
        victim = psutil.Process(sleeper.pid)
        yield Outside(folder / "secret", folder / "open", port, victim, listener, 0o666, victim.nice())
    finally:
        sleeper.kill()
        sleeper.wait()
        listener.close()
        abstract.close()
        shutil.rmtree(folder)


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """A boundary; those that the machine does not offer are skipped, and say why."""
    name: Isolation = request.param
    if name != "none" and (problem := available()[name]) is not None:
        pytest.skip(f"{name}: {problem}")
    return name


def here() -> list[Isolation]:
    """The boundaries that this machine offers, the strongest first."""
    return [name for name, problem in available().items() if problem is None]


def attempt(code: str, isolation: Isolation, limits: PythonLimits = SHORT) -> str:
    """What code printed or failed with."""
    try:
        return run_isolated(code, limits, isolation)
    except ValueError as error:
        return str(error)


def shared_objects() -> list[str]:
    """What attempts to leave something behind would leave: one name in shared memory, and System V's key 4711."""
    kinds = (Path("/proc/sysvipc") / name for name in ("shm", "msg", "sem"))
    lines = [line for kind in kinds if kind.exists() for line in kind.read_text().splitlines()]
    return [*map(str, Path("/dev/shm").glob("lookahead-x")), *(line for line in lines if line.split()[0] == "4711")]


def test_this_machine_has_a_boundary() -> None:
    """Without one, what follows would test nothing."""
    assert here()
    assert choose("auto") == here()[0]


@pytest.mark.parametrize("isolation", BOUNDARIES, indirect=True)
@pytest.mark.parametrize("name", ESCAPES)
def test_nothing_gets_out(name: str, isolation: Isolation, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    where = {"secret": outside.secret, "open": outside.open, "port": outside.port}
    said = attempt(ESCAPES[name].format(**where, victim=outside.victim.pid, agent=os.getpid()), isolation)
    assert "ESCAPED" not in said
    assert outside.secret.read_text() == "hidden"
    assert outside.secret.stat().st_mode & 0o777 == outside.mode
    assert os.listdir(outside.open) == []
    assert outside.victim.status() == psutil.STATUS_SLEEPING
    assert outside.victim.nice() == outside.nice
    with pytest.raises(BlockingIOError):
        outside.listener.accept()
    assert shared_objects() == []


@pytest.mark.parametrize(
    "name",
    [
        "read a file", "read it by way of folders above", "read it over a symbolic link", "list the folder",
        "read it with the C library", "start a program", "start Python again", "start a shell", "become a program",
        "spawn", "fork", "clone", "send a datagram", "connect to an abstract socket", "open by handle",
        "outlive the agent", "a user namespace", "read a process's environment",
    ],
)  # fmt: skip
def test_the_attempts_are_real(name: str, outside: Outside) -> None:
    """Without a boundary these get what they want: what the test above sees is the boundary."""
    where = {"secret": outside.secret, "open": outside.open, "port": outside.port}
    code = ESCAPES[name].format(**where, victim=outside.victim.pid, agent=os.getpid())
    assert "ESCAPED" in attempt(code, "none")


@pytest.mark.parametrize("isolation", BOUNDARIES, indirect=True)
@pytest.mark.parametrize("name", EXHAUSTIONS)
def test_nothing_takes_more_than_its_limits(
    name: str, isolation: Isolation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = attempt(EXHAUSTIONS[name], isolation, SHORTER if name in UNTIL_IT_IS_ENDED else SHORT)
    assert "ESCAPED" not in said
    assert not said.startswith("the code failed:\nTraceback"), "it was not the code that failed"
    assert said.startswith(
        ("the code took more", "the code printed more", "the code used more", "the code wrote more", "the code failed")
    ), said
    assert running() == []
    assert os.listdir(tmp_path) == []


def running() -> list[str]:
    """Isolated code that this process has started and that still runs."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if "-S" in child.cmdline():
                found.append(str(child))
    return found


@pytest.mark.parametrize("isolation", [*BOUNDARIES, "none"], indirect=True)
def test_honest_code_runs(isolation: Isolation) -> None:
    assert attempt("import math\nprint(sum(range(10)), math.pi)", isolation) == "45 3.141592653589793\n"
    assert attempt("open('own.txt', 'w').write('x')\nprint(open('own.txt').read())", isolation) == "x\n"
    assert attempt("import sys\nsys.exit()", isolation) == ""
    assert attempt("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'ab'))", isolation) == "2\n"
    assert attempt("print('ü ✓')", isolation) == "ü ✓\n"
    whole = """
import asyncio, collections, csv, ctypes, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, io
import itertools, json, lzma, random, re, sqlite3, ssl, statistics, string, textwrap, threading, unicodedata
import zlib, zoneinfo
from concurrent.futures import ThreadPoolExecutor

async def twice(x):
    await asyncio.sleep(0.001)
    return 2 * x

print(asyncio.run(twice(2)), *ThreadPoolExecutor(4).map(abs, [-1, -2]))
c = sqlite3.connect('own.db')
c.execute('create table t(x)')
c.execute('insert into t values (3)')
c.commit()
print(c.execute('select * from t').fetchall(), random.SystemRandom().random() < 1, datetime.date(2026, 1, 1))
with open('a.csv', 'w', newline='') as f: csv.writer(f).writerow([1, 2])
print(open('a.csv').read().strip(), hashlib.sha256(b'').hexdigest()[:4])
"""
    assert attempt(whole, isolation) == "4 1 2\n[(3,)] True 2026-01-01\n1,2 e3b0\n"


@pytest.mark.parametrize("isolation", [*BOUNDARIES, "none"], indirect=True)
def test_errors_say_what_and_where(isolation: Isolation) -> None:
    assert attempt("print('before')\n1 / 0", isolation) == (
        "the code failed:\nbefore\nZeroDivisionError in line 2: division by zero\n"
    )
    assert "SyntaxError" in attempt("def", isolation)
    assert "null bytes" in attempt("print(1)\0", isolation)
    assert attempt("raise SystemExit('no')", isolation) == "the code failed:\nno\n"


@pytest.mark.parametrize("isolation", BOUNDARIES, indirect=True)
def test_every_run_has_a_folder_of_its_own(isolation: Isolation) -> None:
    attempt("open('x', 'w').write('x')", isolation)
    assert attempt("import os\nprint(os.listdir('.'))", isolation) == "[]\n"


def test_without_a_boundary_only_amounts_are_limited(tmp_path: Path) -> None:
    """What "none" says of itself is so."""
    file = tmp_path / "reached"
    assert attempt(f"open({str(file)!r}, 'w').write('x')", "none") == ""
    assert file.read_text() == "x"
    assert attempt("while True: pass", "none").startswith("the code took more")
    assert "MemoryError" in attempt("x = bytearray(1 << 40)", "none")


def test_where_there_is_no_boundary_code_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(boundaries, "_problem", lambda name: f"no {name} here")
    for make in (lambda: choose("auto"), lambda: make_python_tool(), lambda: choose("landlock")):
        with pytest.raises(IsolationError, match=r"no (bubblewrap|landlock) here"):
            make()
    with pytest.raises(IsolationError, match=r"install bubblewrap.*isolation='none'"):
        run_isolated(f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not (tmp_path / "x").exists()
    monkeypatch.setitem(vars(python_code), "python", python)  # to be put back
    without = python_code.__getattr__("python")
    assert "nothing here to isolate" in without.description
    assert "install bubblewrap" in without.invoke({"code": "print(1)"}), "the model is told, the agent goes on"
    assert run_isolated("print(1)", isolation="none") == "1\n"


def test_the_best_one_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    boundaries._problem.cache_clear()
    monkeypatch.setattr(boundaries.shutil, "which", lambda _: None)
    try:
        assert boundaries.available()["bubblewrap"] == "bwrap is not installed"
        rest = [name for name in here() if name != "bubblewrap"]
        if rest:
            assert choose("auto") == rest[0]
    finally:
        monkeypatch.undo()
        boundaries._problem.cache_clear()


def test_names_that_are_none() -> None:
    with pytest.raises(ConfigurationError, match="landlock"):
        choose("chroot")  # type: ignore[arg-type]


def test_the_tool_says_what_is_in_use() -> None:
    assert f"isolated by {here()[0]}" in make_python_tool().description
    assert python.description == make_python_tool().description
    assert "not isolated" in make_python_tool(isolation="none").description
    assert python.invoke({"code": "x = 1"}).startswith("(nothing was printed")
    assert "NameError in line 1" in python.invoke({"code": "print(x)"})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_goes_forward_and_ends(machine: str) -> None:
    """As the kernel checks it: jumps stay inside, and every way ends in a verdict."""
    for landlock in (False, True):
        program = system_call_filter(landlock=landlock, machine=machine)
        assert program is not None
        lines = list(struct.iter_unpack("<HBBI", program))
        assert len(lines) < 4096
        for place, (code, yes, no, _) in enumerate(lines):
            if code & 7 == 5:
                assert place + 1 + max(yes, no) < len(lines)
        assert lines[-1][0] == 6
    assert system_call_filter(landlock=False, machine="vax") is None


def test_what_isolated_code_imports() -> None:
    """The texts that run inside have the standard library only, and no folder of packages."""
    import ast

    import lookahead_agent.isolation as package

    for name in ("inside", "sqlite_inside"):
        tree = ast.parse((Path(package.__file__).parent / f"{name}.py").read_text())
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(imported.partition(".")[0] in sys.stdlib_module_names for imported in names)
