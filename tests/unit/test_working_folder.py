"""Sandboxed code on the files of a user's folder: the files it sees, the changes it may make, and refusals."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from lookahead_agent.sandbox import Isolation, PythonLimits, available, run_isolated
from lookahead_agent.sandbox.protected_names import protection
from lookahead_agent.sandbox.working_folder import ChangeLimits, copy_files, save_changes
from tools.files import make_file_tools, read_text, write_text
from tools.python_code import make_python_tool, run_python

SHORT = PythonLimits(seconds=60, memory=256 << 20, output=2000, files=1 << 20)
LIMITS = ChangeLimits(files=20, size=1000, seconds=60)
COPYING_ISOLATIONS: tuple[Isolation, ...] = ("bubblewrap", "none")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "data").mkdir(parents=True)
    (root / "numbers.txt").write_text("4\n9\n2\n")
    (root / "data" / "a.csv").write_text("x\n1\n")
    (root / "util.py").write_text("def twice(x):\n    return 2 * x\n")
    (root / ".env").write_text("KEY=hidden")
    (tmp_path / "outside").write_text("hidden")
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "above").symlink_to(tmp_path)
    os.mkfifo(root / "fifo")
    return root


def run_code(code: str, root: Path, isolation: Isolation, limits: PythonLimits = SHORT) -> str:
    if isolation != "none" and (problem := available()[isolation]) is not None:
        pytest.skip(f"{isolation}: {problem}")
    try:
        return run_isolated(code, limits, isolation, folder=root)
    except ValueError as error:
        return str(error)


def file_names(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("isolation", [*COPYING_ISOLATIONS, "landlock"])
def test_code_reads_the_folders_files_and_imports_its_modules(isolation: Isolation, root: Path) -> None:
    code = "import util\nprint(util.twice(sum(map(int, open('numbers.txt')))), open('data/a.csv').read().split())"
    assert run_code(code, root, isolation) == "30 ['x', '1']\n"
    for name in ("link", "above/outside"):
        assert "Error in line 1" in run_code(f"print(open({name!r}).read())", root, isolation)
    assert file_names(root) == [".env", "data/a.csv", "link", "numbers.txt", "util.py"]


@pytest.mark.parametrize("isolation", COPYING_ISOLATIONS)
def test_changes_are_written_back(isolation: Isolation, root: Path) -> None:
    (root / "numbers.txt").chmod(0o640)
    code = """
import os
print('a line')
kept = open('new/deep.txt', 'w') if os.makedirs('new') is None else None
def closed_at_the_end(): return kept
kept.write('made')
open('numbers.txt', 'a').write('7\\n')
os.rename('data/a.csv', 'b.csv')
os.chdir('/')
"""
    assert run_code(code, root, isolation).splitlines()[0] == "a line"
    assert (root / "new" / "deep.txt").read_text() == "made"
    assert (root / "numbers.txt").read_text() == "4\n9\n2\n7\n"
    assert (root / "numbers.txt").stat().st_mode & 0o777 == 0o640
    assert (root / "b.csv").read_text() == "x\n1\n"
    assert not (root / "data" / "a.csv").exists()
    output = run_code("open('b.csv', 'w').write('y')", root, isolation)
    assert output == "1\n(wrote b.csv)"
    assert run_code("open('b.csv', 'w').write('y')", root, isolation) == "1\n", "equal bytes are not a change"


@pytest.mark.parametrize("isolation", COPYING_ISOLATIONS)
@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("1 / 0", "the code failed, and changed no file:\nZeroDivisionError in line 5"),
        ("while True: pass", "the code took more than 2 s, and changed no file"),
        ("os._exit(0)", ""),
        ("os.kill(os.getpid(), 9)", "the code used more than it may and was stopped, and changed no file"),
        ("print('x' * 9999)", "the code printed more than 2000 bytes, and changed no file"),
    ],
)
def test_code_that_fails_or_is_killed_changes_no_file(isolation: Isolation, end: str, message: str, root: Path) -> None:
    before = file_names(root)
    code = (
        f"import os\nopen('numbers.txt', 'w').write('lost')\nopen('new', 'w').write('x')\nos.remove('util.py')\n{end}"
    )
    limits = replace(SHORT, seconds=2) if "took" in message else SHORT
    assert run_code(code, root, isolation, limits).startswith(message)
    assert file_names(root) == before
    assert (root / "numbers.txt").read_text() == "4\n9\n2\n"


@pytest.mark.parametrize("isolation", COPYING_ISOLATIONS)
def test_links_fifos_and_hidden_files_are_not_written_back(isolation: Isolation, root: Path) -> None:
    code = f"""
import os
os.symlink({str(root.parent / "outside")!r}, 'planted')
os.mkfifo('pipe')
os.link('numbers.txt', 'same')
os.makedirs('.git/hooks')
open('.git/hooks/pre-commit', 'w').write('evil')
open('.env', 'w').write('evil')
os.chmod('util.py', 0o4755)
"""
    refused = "not saved, because their names are protected: .env, .git/hooks/pre-commit"
    assert run_code(code, root, isolation) == f"(wrote same; {refused})"
    assert not os.path.lexists(root / "planted")
    assert not os.path.lexists(root / "pipe")
    assert not (root / ".git").exists()
    assert (root / ".env").read_text() == "KEY=hidden"
    assert (root / "util.py").stat().st_mode & 0o4000 == 0
    assert (root / "same").stat().st_nlink == 1


@pytest.mark.parametrize("isolation", ["bubblewrap"])
def test_code_over_the_size_limit_changes_no_file(isolation: Isolation, root: Path) -> None:
    before = file_names(root)
    code = "n = 0\nwhile True:\n  n += 1\n  open(str(n), 'wb').write(bytes(1 << 18))"
    output = run_code(code, root, isolation)
    assert "No space left" in output
    assert file_names(root) == before


@pytest.mark.parametrize(
    "name", ["../outside", "/tmp/planted", "link", "above/outside", "fifo", "data", "a\0b", "", "."]
)
def test_forged_report_raises_under_the_rules_of_the_file_tools(name: str, root: Path) -> None:
    before = file_names(root)
    forged = json.dumps({"name": name, "size": 1}).encode() + b"\nx" + b'{"removed": []}\n'
    with pytest.raises(ValueError, match=r"outside|needs a name|regular|folder"):
        save_changes(root, {}, forged, LIMITS)
    assert (root.parent / "outside").read_text() == "hidden"
    assert file_names(root) == before


@pytest.mark.parametrize(
    "report",
    [
        b"", b"\n", b"[1]\n", b'{"name": "a", "size": -1}\n{"removed": []}\n', b'{"name": "a", "size": 1}\nx',
        b'{"name": "a", "size": 99}\nx{"removed": []}\n', b'{"removed": [1]}\n', b'{"removed": {"a": 1}}\n',
        b'{"name": "a", "size": 1}\nxx{"removed": []}\n', b"[" * 100_000 + b"\n",
    ],
)  # fmt: skip
def test_incomplete_or_malformed_report_changes_no_file(report: bytes, root: Path) -> None:
    before = file_names(root)
    assert save_changes(root, {}, report, LIMITS) == ""
    assert file_names(root) == before


def test_only_files_that_were_copied_are_removed(root: Path) -> None:
    report = json.dumps({"removed": ["util.py", ".env", "numbers.txt", "../outside", "gone"]}).encode() + b"\n"
    assert save_changes(root, {"util.py": b"", "gone": b""}, report, LIMITS) == "(removed util.py, gone)"
    assert file_names(root) == [".env", "data/a.csv", "link", "numbers.txt"]
    assert (root.parent / "outside").exists()


def test_tool_creation_raises_for_a_folder_that_is_too_large_or_missing(root: Path) -> None:
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"root has more than 67108864 bytes.*PythonLimits\.files"):
        make_python_tool(isolation="none", folder=root)
    with pytest.raises(ValueError, match="no folder nowhere"):
        make_python_tool(isolation="none", folder=root / "nowhere")


def test_removed_folder_is_reported_in_the_result(root: Path) -> None:
    tool = make_python_tool(isolation="none", folder=root)
    root.rename(root.parent / "moved")
    assert "the working folder cannot be opened" in tool.invoke({"code": "print(1)"})


def test_file_names_that_are_not_utf8_are_escaped(root: Path) -> None:
    with open(os.fsencode(root) + b"/\xff\n.txt", "w") as file:
        file.write("1")
    assert len(copy_files(root, 1 << 20)) == 4
    tool = make_python_tool(isolation="none", folder=root)
    assert r"'\udcff\n.txt'" in tool.description
    code = r"open('\udcff\n.txt', 'w').write('2')"
    assert tool.invoke({"code": code}) == "1\n" + r"(wrote '\udcff\n.txt')"


def test_file_tools_and_python_tool_share_one_folder(root: Path) -> None:
    read, write = make_file_tools(root)
    python = make_python_tool(isolation="none", folder=root)
    assert "the files data/a.csv, numbers.txt, util.py: open them by these names" in python.description
    write.invoke({"name": "in.txt", "text": "20"})
    assert "(wrote out.txt)" in python.invoke({"code": "open('out.txt', 'w').write(open('in.txt').read() + '1')"})
    assert read.invoke({"name": "out.txt"}) == "201"
    assert "It has no files" in make_python_tool(isolation="none").description


@pytest.mark.parametrize("isolation", COPYING_ISOLATIONS)
def test_concurrent_runs_keep_their_changes_apart(isolation: Isolation, root: Path) -> None:
    def write_file(number: int) -> str:
        return run_code(f"import time\ntime.sleep(0.1)\nopen('{number}.txt', 'w').write('{number}')", root, isolation)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(write_file, range(8))) == [f"1\n(wrote {number}.txt)" for number in range(8)]
    assert [(root / f"{number}.txt").read_text() for number in range(8)] == list("01234567")


EXECUTED = [
    "Makefile", "src/makefile", "GNUmakefile", "rules.mk", "conftest.py", "tests/CONFTEST.py", "sitecustomize.py",
    "usercustomize.py", "lib/evil.pth", "__pycache__/util.cpython-311.pyc", "setup.py", "pyproject.toml", "tox.ini",
    "noxfile.py", "package.json", "node_modules/x/index.js", "vite.config.ts", "Cargo.toml", "Dockerfile",
    "docker-compose.yml", "CLAUDE.md", "AGENTS.md", "x.code-workspace", "mcp.json", "bare/HEAD", "venv/bin/activate",
    "lib/site-packages/x.py", "x.desktop", "MAKEFILE", "Makefile. ", "makefile:stream", "a/\uff2dakefile",
    "repo.git/hooks/post-update", "repo.git/config", "githooks/pre-commit", "lefthook.yml", "docs/conf.py", "mypy.ini",
    "pylintrc", "mkdocs.yml", "hatch.toml", "gunicorn.conf.py", "jupyter_server_config.py", "sitecustomize/__init__.py",
    "sitecustomize.so", "package-lock.json", "deno.json", "turbo.json", "webpack.config.babel.js", "composer.json",
    "gradle/wrapper/gradle-wrapper.properties", "app/build.gradle.kts", "rust-toolchain.toml", "CMakePresets.json",
    "langgraph.json", "SKILL.md", "azure-pipelines.yml",
]  # fmt: skip
HIDDEN = [
    ".git/config", ".git/hooks/post-checkout", ".GIT/config", "data/.git/config", "./.git/config", "data//.git/HEAD",
    ".envrc", ".env", ".ENV", ".env.local", ".vscode/tasks.json", ".github/workflows/x.yml", ".mcp.json", ".bashrc",
    ".gitattributes", ".git. /config", " .git/config", ".git:x/config", "data\\.git\\config", "..\\.git",
    ".g\u200cit/config", "\u200d.git/config", "\uff0egit/config", "GIT~1/config", "prod.env", "id_rsa",
    "keys/id_ed25519", "server.pem",
    "tls/server.KEY", "credentials.json", "secrets.yaml", "store.p12", "service-account.json", "serviceAccountKey.json",
    "client-secret.json", "secrets/db.txt", "Secrets.txt", "secrets.prod.yaml", "api-keys.json", "passwords.txt",
    "token.json", "terraform.tfstate", "kubeconfig", "x.kubeconfig", "AuthKey.p8", "x.gpg", "netrc", ".htpasswd",
]  # fmt: skip
ORDINARY = ["a.txt", "src/main.py", "notes/makefile.txt", "environment.md", "keys.txt", "a.b.c", "build/out.txt", "~x"]
ORDINARY += ["src/token.py", "src/secrets.py", "hooks/useThing.ts", "workspace/a.md", "tokens.txt", "requirements.txt"]


@pytest.mark.parametrize("name", [*EXECUTED, *HIDDEN])
def test_names_that_run_code_or_hold_secrets_are_refused(name: str, root: Path) -> None:
    before = file_names(root)
    read, write = make_file_tools(root)
    message = write.invoke({"name": "write_file", "args": {"name": name, "text": "x"}, "id": "1", "type": "tool_call"})
    assert (message.status, "is protected and is not written" in message.text) == ("error", True)
    report = json.dumps({"name": name, "size": 1}).encode() + b"\nx" + json.dumps({"removed": [name]}).encode() + b"\n"
    assert "not saved, because their names are protected" in save_changes(root, {name: b""}, report, LIMITS)
    removal = json.dumps({"removed": [name]}).encode() + b"\n"
    assert "not saved, because their names are protected" in save_changes(root, {name: b""}, removal, LIMITS)
    assert file_names(root) == before
    assert ("is protected and is not read" in read.invoke({"name": name})) == (name in HIDDEN)


def test_ordinary_names_are_written_and_protected_ones_are_read_unless_they_are_secrets(root: Path) -> None:
    for name in ORDINARY:
        write_text(root, name, "x")
        assert read_text(root, name) == "x"
    (root / "Makefile").write_text("all:")
    assert read_text(root, "Makefile") == "all:"


def test_allowed_names_are_not_protected(root: Path) -> None:
    allow = [".GitHub", "makefile", "*.pem"]
    read, write = make_file_tools(root, allow)
    for name in (".github/workflows/x.yml", "Makefile", "a.pem"):
        assert write.invoke({"name": name, "text": "made"}) == f"wrote 4 bytes to {name}"
        assert read.invoke({"name": name}) == "made"
    for name in (".github/.env", ".git/config", "conftest.py"):
        assert "is protected" in write.invoke({"name": name, "text": "x"})
    code = "open('Makefile', 'a').write('!'); open('conftest.py', 'w').write('x'); open('.github/y', 'w').write('y')"
    output = run_python(code, SHORT, "none", root, allow=allow)
    assert "wrote" in output
    assert "not saved, because their names are protected: conftest.py" in output
    assert ((root / "Makefile").read_text(), (root / ".github" / "y").read_text()) == ("made!", "y")


@pytest.mark.parametrize("isolation", [*COPYING_ISOLATIONS, "landlock"])
def test_code_sees_no_secret_and_cannot_rename_a_file_to_a_protected_name(isolation: Isolation, root: Path) -> None:
    (root / "data" / "id_rsa").write_text("hidden")
    (root / "Makefile").write_text("all:")
    names = "import os\nprint(sorted(os.listdir('.')), os.listdir('data'))"
    assert run_code(names, root, isolation) == "['Makefile', 'data', 'numbers.txt', 'util.py'] ['a.csv']\n"
    if isolation == "landlock":
        assert "Error in line 1" in run_code(f"open({str(root / '.env')!r})", root, isolation)
        return
    code = """
import os
os.rename('util.py', 'conftest.py')
os.replace('numbers.txt', 'Makefile')
os.link('data/a.csv', '.b')
"""
    refused = "not saved, because their names are protected: .b, Makefile, conftest.py"
    assert run_code(code, root, isolation) == f"(removed numbers.txt, util.py; {refused})"
    assert (root / "Makefile").read_text() == "all:"
    assert not (root / "conftest.py").exists()


def test_protection_is_decided_in_linear_time() -> None:
    for name in ("*" * 4096, "a~1" * 1365, ".env" * 1024, "x/" * 2048, "a." * 2048 + "env"):
        assert protection(name, ["*a*b*c*"], writing=True) in (
            None,
            protection(".x", writing=True),
            "it may hold a secret",
        )


FORGING = """
import fcntl, json, os
def is_report(descriptor):
    try: return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
    except OSError: return False
report = next(filter(is_report, range(3, 256)))
def line(name, size=0): return json.dumps({"name": name, "size": size}).encode() + b"\\n" + bytes(size)
view = memoryview(b"".join(REPORT) + b'{"removed": []}\\n')
while view:
    view = view[os.write(report, view):]
os._exit(0)
"""


@pytest.mark.parametrize("isolation", COPYING_ISOLATIONS)
@pytest.mark.parametrize(
    ("report", "message"),
    [
        ("[line(f'd{n % 9}/f{n}') for n in range(9000)]", "the code wrote more than 4102 files and folders"),
        ("[line('same')] * 9000", "the code wrote more than 4102 files and folders"),
        ("[line(f'{letter}/' * 2040 + 'f') for letter in 'abc']", "the code wrote more than 4102 files and folders"),
        ("[line('a', 1000000), line('b', 1000000)]", "bytes, and changed no file"),
    ],
    ids=["names", "one name again", "folders", "bytes"],
)
def test_forged_report_is_counted_by_the_parent(report: str, message: str, isolation: Isolation, root: Path) -> None:
    before = file_names(root)
    output = run_code(FORGING.replace("REPORT", report), root, isolation)
    assert message in output
    assert file_names(root) == before


def test_saving_changes_has_a_timeout_and_counts_folders_and_bytes(root: Path) -> None:
    def report(*entries: tuple[str, int]) -> bytes:
        lines = [json.dumps({"name": name, "size": size}).encode() + b"\n" + b"x" * size for name, size in entries]
        return b"".join(lines) + b'{"removed": []}\n'

    with pytest.raises(ValueError, match=r"saving the changes took more than 0 s"):
        save_changes(root, {}, report(("a", 1)), replace(LIMITS, seconds=0))
    allowed = report(*((f"d/e/{number}", 10) for number in range(18)))
    with pytest.raises(ValueError, match="more than 19 files and folders"):
        save_changes(root, {}, allowed, replace(LIMITS, files=19))
    with pytest.raises(ValueError, match="more than 179 bytes"):
        save_changes(root, {}, allowed, replace(LIMITS, size=179))
    assert not (root / "d").exists()
    assert save_changes(root, {}, allowed, replace(LIMITS, size=180)).startswith("(wrote d/e/0, ")
    endless = b'{"removed": [' + b'"x", ' * 100_000 + b'"x"]}\n'
    assert save_changes(root, {"numbers.txt": b""}, endless, LIMITS) == "", "no line is longer than the copies' names"
