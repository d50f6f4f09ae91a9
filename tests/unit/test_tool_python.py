from __future__ import annotations

import os

import psutil
import pytest

from tools.python_code import PythonLimits, python, run_python

FAST = PythonLimits(seconds=5, memory=256 << 20, output=1000)


def test_what_it_prints() -> None:
    assert run_python("import math\nprint(sum(range(10)), math.pi)") == "45 3.141592653589793\n"
    assert run_python("from fractions import Fraction\nprint(Fraction(1, 3) + 1)") == "4/3\n"
    assert run_python("open('own.txt', 'w').write('x')\nprint(open('own.txt').read())") == "x\n"
    assert run_python("import sys\nsys.exit()") == ""
    assert python.invoke({"code": "x = 1"}).startswith("(nothing was printed")


def test_errors_say_what_and_where() -> None:
    with pytest.raises(ValueError, match="ZeroDivisionError in line 2: division by zero"):
        run_python("print('before')\n1 / 0")
    with pytest.raises(ValueError, match="SyntaxError"):
        run_python("def")
    assert "NameError in line 1" in python.invoke({"code": "print(x)"})


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import multiprocessing as m; p = m.Process(target=print); p.start(); p.join()",
        "print(open('/etc/passwd').read())",
        "print(open('../../etc/passwd').read())",
        "import os; os.symlink('/etc/passwd', 'link')",
        "import pathlib; print(pathlib.Path('/etc/hostname').read_text())",
        "import os; print(os.listdir('/'))",
        "import os; os.remove('/tmp/x')",
        "open('/tmp/escaped', 'w')",
        "import ctypes; ctypes.CDLL(None)",
        "import os; os.kill(os.getppid(), 9)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (1, 1))",
        "import sys; open(sys.prefix + '/x', 'w')",
    ],
)
def test_attempts_to_escape(code: str) -> None:
    with pytest.raises(ValueError, match=r"PermissionError|may not|used more|ModuleNotFound|ImportError"):
        run_python(code, FAST)
    assert not os.path.exists("/tmp/escaped")


def test_the_environment_stays_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    assert "SECRET_KEY" not in run_python("import os; print(dict(os.environ))")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("while True: pass", "more than 1 s|used more"),
        ("import time; time.sleep(60)", "more than 1 s"),
        ("x = bytearray(1 << 40)", "MemoryError"),
        ("x = []\nwhile True: x.append(' ' * 10_000_000)", "MemoryError|more than 1 s"),
        ("while True: print('x' * 100)", "more than 1000 characters"),
        ("open('big', 'wb').write(b'x' * (10 << 20))", "File too large|used more"),
        (
            "import threading\nwhile True: threading.Thread(target=lambda: __import__('time').sleep(9)).start()",
            "more than 1 s|new thread|used more",
        ),
    ],
)
def test_limits(code: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        run_python(code, PythonLimits(seconds=1, memory=256 << 20, output=1000))
    assert not [child for child in psutil.Process().children() if "code.py" in " ".join(child.cmdline())]
