"""The child's program: it enters the sandbox, drops its privileges, and only then runs the code.

Another interpreter runs this file's text (`python -I -S -c`), so it imports the standard library only. Its argument is
a JSON object, see `start` in `backends.py`. It reads the code from standard input.
"""

import ast
import base64
import ctypes
import hashlib
import json
import math
import os
import re
import struct
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any, BinaryIO

MS_NOSUID, MS_NODEV = 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 8, 22, 24
PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 38, 41
CAP_DAC_READ_SEARCH = 2
HOST = b"isolated"  # The host name that the code sees
STOPPED = 201  # Exit status: the code was killed
NO_SANDBOX = 202
"""Exit status: the sandbox could not be set up. After `BEGUN`, the code itself has chosen this status."""
BEGUN = b"\x01"  # First byte of the output, once the sandbox is set up: the code's output follows
FILE = "code.py"  # The name of the code in its errors
CO_COROUTINE = 0x80  # Flag of code with an `await` outside of functions, as in `inspect`, whose import takes long
LANGUAGES = ("python", "python3", "py", "py3", "ipython", "tool_code")
# A command of IPython: `%timeit f()`, `files = !ls`, `?len` or `len?`.
COMMAND = re.compile(
    r"\s*+(?:[\w., \t]++=\s*+)?+(?P<command>%%?[a-zA-Z]\w*|!!?[^\s=]\S*|\?\??\w[\w.]*)|\s*+(?P<help>[\w.]++\?\??)\s*$"
)
# A session of IPython, and the code in it; results are left out.
IPYTHON = re.compile(r"\s*In \[\d+\]: ")
IPYTHON_LINE = re.compile(r"^[ \t]*(?:In \[\d+\]|\.{3,}): ?(.*)$", re.MULTILINE)
FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*\{?[ \t]*([\w+-]*)[^`]*$")

if hasattr(os, "fork"):  # Windows has none of the sandboxes
    import resource

    libc = ctypes.CDLL(None, use_errno=True)


def call(name: str, *arguments: object) -> None:
    """Call a function of the C library; raises OSError if it fails."""
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def may_change_user() -> bool:
    """Whether this process can change its user: root can, unless its user namespace has no other user."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        return os.geteuid() == 0 and sum(int(line.split()[2]) for line in file) > 1


def become_unprivileged(kept: int = 0) -> None:
    """Become an unused user with the kept capabilities, because the kernel counts threads by user."""
    call("prctl", PR_SET_KEEPCAPS, int(kept != 0), 0, 0, 0)
    os.setgroups([])
    number = int.from_bytes(os.urandom(4), "big")
    # User ids above all assigned ones; a container may have only 65,536 of them.
    for user in (1 << 30 | number >> 2, 50_000 + number % 10_000):
        with suppress(OSError):
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            break
    call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)  # restores access to its own files in /proc


def drop_privileges(kept: int = 0) -> None:
    """Become an unprivileged user, with no capabilities but `kept`."""
    if os.geteuid() == 0:
        for capability in range(64):
            if libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
                break  # the kernel has no more capabilities
        become_unprivileged(kept)
    header = struct.pack("<Ii", 0x20080522, 0)  # version 3, this process
    call("capset", header, struct.pack("<6I", kept, kept, 0, 0, 0, 0))  # a started program inherits none
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent ends, even by a signal. A change of user resets this."""
    call("prctl", PR_SET_PDEATHSIG, 9, 0, 0, 0)
    if os.getppid() != parent:  # the parent had ended before
        os._exit(STOPPED)


def landlock(plan: dict[str, Any]) -> None:
    """Close all files except readable ones, see landlock(7). Nothing is writable, as Landlock cannot limit files."""
    create, add, restrict = 444, 445, 446
    version = libc.syscall(create, None, 0, 1)
    if version < 3:
        raise OSError(f"Landlock is of version {max(0, version)}, and 3 or newer is needed (Linux 6.2)")
    every = (1 << (16 if version >= 5 else 15)) - 1
    attributes = struct.pack("<QQQ", every, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    attributes = attributes[: 24 if version >= 6 else 16 if version >= 4 else 8]
    ruleset = libc.syscall(create, attributes, len(attributes), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    execute, write, read, listing = 1, 2, 4, 8
    rules = [(path, execute | read | (listing if os.path.isdir(path) else 0)) for path in plan["readable"]]
    # Python lists a folder of packages to find one.
    rules += [("/dev/null", read | write), ("/dev/urandom", read), *((path, listing) for path in plan["packages"])]
    if plan["folder"] is not None:
        rules.append((plan["folder"], read | listing))
    for path, allowed in rules:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if libc.syscall(add, ruleset, 1, struct.pack("<Qi", allowed, descriptor), 0) != 0:
            raise OSError(ctypes.get_errno(), f"landlock_add_rule for {path}")
        os.close(descriptor)
    if libc.syscall(restrict, ruleset, 0) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def set_limits(plan: dict[str, Any]) -> None:
    """Limit the code's resources."""
    for limit, value in (
        (resource.RLIMIT_CPU, math.ceil(plan["seconds"]) + 1),
        (resource.RLIMIT_AS, plan["memory"]),
        (resource.RLIMIT_FSIZE, plan["file"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, plan["threads"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(limit, (value, value))


def refuse_uncounted(plan: dict[str, Any]) -> None:
    """Close what the limits above leave open. Raises OSError if the kernel does not count this user's threads."""
    call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)  # a core dump handler would ignore RLIMIT_CORE
    # A huge page that is partly released stays whole, and only the rest of it counts.
    call("prctl", PR_SET_THP_DISABLE, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_SIGPENDING, (64, 64))  # limits timers
    resource.setrlimit(resource.RLIMIT_NPROC, (0, plan["threads"]))
    try:
        child = os.fork()
    except BlockingIOError:
        resource.setrlimit(resource.RLIMIT_NPROC, (plan["threads"], plan["threads"]))
        return
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    raise OSError("the kernel does not count this user's threads")


def install_filter(program: bytes) -> None:
    """Refuse system calls from here on, see seccomp(2)."""
    instructions = ctypes.create_string_buffer(program, len(program))

    class FilterProgram(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    filter_program = FilterProgram(len(program) // 8, ctypes.cast(instructions, ctypes.c_void_p))
    call("prctl", PR_SET_SECCOMP, 2, ctypes.byref(filter_program), 0, 0)


def enter_sandbox(plan: dict[str, Any]) -> None:
    """Enter the sandbox."""
    kind = plan["isolation"]
    # bwrap's own process is between, and bwrap ends with the agent.
    parent = os.getppid() if kind == "bubblewrap" else plan["agent"]
    die_with_parent(parent)
    if plan["cgroup"] is not None:
        os.write(plan["cgroup"], b"0")
        os.close(plan["cgroup"])
    if kind == "landlock":
        if plan["folder"] is not None:
            os.chdir(plan["folder"])
        # Other users may not enter folders above Python's library; Landlock decides what is readable.
        drop_privileges(1 << CAP_DAC_READ_SEARCH if os.geteuid() == 0 else 0)
        landlock(plan)
    elif kind == "bubblewrap":
        # The code's folder is in memory: the kernel counts all its content, also of unlinked files. A size of 0 means
        # no limit.
        options = f"size={max(1, plan['files'])},nr_inodes={plan['inodes']},huge=never,mode=777".encode()
        call("mount", b"tmpfs", plan["inside"].encode(), b"tmpfs", ctypes.c_ulong(MS_NOSUID | MS_NODEV), options)
        os.chdir(plan["inside"])
        drop_privileges()
    die_with_parent(parent)
    set_limits(plan)
    if kind != "none":
        if 0 in os.getresuid():
            raise OSError("the code would be root")
        refuse_uncounted(plan)
        install_filter(base64.b64decode(plan["filter"]))


def code_blocks(text: str, languages: Sequence[str]) -> list[str]:
    """Return the contents of a text's Markdown fences in these languages, or else of the fences without a language.

    The last fence may be unclosed, and a fence may be on one line. A text between single backticks is one block. A text
    with fences around nothing, such as one that only closes, is a block without them.
    """
    found: list[tuple[bool, str]] = []
    fence, language, lines = "", "", list[str]()
    has_fence = has_content = False
    for line in [*text.splitlines(keepends=True), None]:
        mark = None if line is None else FENCE.match(line)
        if fence and (line is None or (mark is not None and mark[1].startswith(fence) and not mark[2])):
            block = textwrap.dedent("".join(lines))
            if (not language or language in languages) and block.strip():
                found.append((bool(language), block))
            has_content = has_content or bool(block.strip())
            fence = ""
        elif fence and line is not None:
            lines.append(line)
        elif mark is not None:
            fence, language, lines = mark[1], mark[2].lower(), []
            has_fence = True
    quoted = re.search("(?<!`)(`{3,}+)([^`\n]++)\\1", text) or re.fullmatch("(`)([^`]++)`", text.strip())
    if not found and quoted is not None:
        word, _, others = quoted[2].strip().partition(" ")
        return [others if word.lower() in languages else quoted[2].strip()]
    if not found and has_fence and not has_content:
        return ["".join(line for line in text.splitlines(keepends=True) if FENCE.match(line) is None)]
    has_language = any(named for named, _ in found)
    return [block for named, block in found if named is has_language]


def parse(code: str) -> tuple[str, ast.Module, bool]:
    """Parse code; code that is invalid as it stands may be in Markdown fences, indented, or typed at a prompt.

    Returns the code, its syntax tree, and whether it was typed at a prompt, which shows the value of each expression.
    """
    if IPYTHON.match(code) is not None:  # it may be valid, as an annotation
        session = "\n".join(line[1] for line in IPYTHON_LINE.finditer(code))
        with suppress(SyntaxError):
            return session, ast.parse(session, FILE), True
    try:
        return code, ast.parse(code, FILE), False
    except SyntaxError as error:
        blocks = code_blocks(code, LANGUAGES)
        other = textwrap.dedent("\n".join(blocks) if blocks else code.removeprefix("\ufeff"))
        if is_session := other.lstrip().startswith(">>>"):
            other = "\n".join(line[4:] for line in other.splitlines() if line.startswith((">>>", "...")))
        if other != code:
            try:
                return other, ast.parse(other, FILE), is_session
            except SyntaxError as new:
                error = new if blocks else error
        raise explain(error) from None


def explain(error: SyntaxError) -> SyntaxError:
    """Return the error, in words of its own if its line is a command of a notebook."""
    if (found := COMMAND.match(error.text or "")) is not None:
        command = (found["command"] or found["help"])[:50]
        starts = (
            "starts a program, and none can be started here" if command[0] == "!" else "is a command of notebooks only"
        )
        error.msg = f"{command} {starts}: write it in Python" + (", with help(...)" if "?" in command else "")
    return error


def run(code: str) -> None:
    """Run the code like a notebook cell, which shows the value of a last expression; print one line if it fails."""
    import linecache
    import site
    import traceback
    from types import ModuleType

    site.setquit()
    site.sethelper()
    sys.argv[:] = [FILE]
    # A module of its own, in which `pickle` and `dataclasses` find the code's classes.
    main_module = sys.modules["__main__"] = ModuleType("__main__")
    names = vars(main_module)
    names["__file__"] = FILE
    names["display"] = lambda *values: print(*map(repr, values), sep="\n")  # notebooks have this function
    try:
        code, module, is_session = parse(code)
        linecache.cache[FILE] = (len(code), None, code.splitlines(keepends=True), FILE)
        last = [module.body.pop()] if module.body and isinstance(module.body[-1], ast.Expr) else []
        if is_session:
            last, module.body = module.body + last, []
        with ExitStack() as stack:
            run_coroutine = None
            for mode, part in (("exec", module), ("single", ast.Interactive(last))):
                compiled = compile(part, FILE, mode, flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                returned = eval(compiled, names)  # noqa: S307
                if not compiled.co_flags & CO_COROUTINE:
                    continue
                if run_coroutine is None:
                    from asyncio import Runner  # takes longer than all other imports

                    run_coroutine = stack.enter_context(Runner()).run
                run_coroutine(returned)
    except BaseException as error:
        if isinstance(error, SystemExit) and (error.code in (None, 0) or isinstance(error.code, str)):
            if error.code:
                raise
            return
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
        where = f" in line {lines[-1]}" if lines else ""
        try:
            message = f"{error}"
        except Exception:
            message = "its message cannot be shown"
        print(f"{type(error).__name__}{where}{': ' if message else ''}{message}", file=sys.stderr)
        sys.exit(1)
    finally:
        names.clear()  # closes, and so flushes, files that the code left open


def write_copies(files: Iterable[tuple[str, bytes]], base: str = "") -> dict[str, bytes]:
    """Write copies of the user's files into the code's folder, and return their digests by name."""
    digests = {}
    for name, data in files:
        path = os.path.join(base, name)
        if folder := os.path.dirname(path):
            os.makedirs(folder, exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
        digests[name] = hashlib.sha256(data).digest()
    return digests


def report_changes(before: dict[str, bytes], changes: BinaryIO) -> None:
    """Write the new and changed files of the code's folder, and the names of removed files."""
    pending, present = [""], set()
    while pending:
        with os.scandir(pending.pop() or ".") as entries:
            for entry in entries:
                name = os.path.relpath(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(name)
                if not entry.is_file(follow_symlinks=False):
                    continue
                present.add(name)
                with open(name, "rb") as file:
                    data = file.read()
                if before.get(name) != hashlib.sha256(data).digest():
                    changes.write(json.dumps({"name": name, "size": len(data)}).encode() + b"\n" + data)
    changes.write(json.dumps({"removed": sorted(before.keys() - present)}).encode() + b"\n")


def main() -> None:
    """Enter the sandbox, and run the code from standard input there."""
    _, text, *descriptors = sys.argv  # the code has arguments of its own
    plan = json.loads(text)
    try:
        enter_sandbox(plan)
    except OSError as error:
        print(f"no sandbox: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(NO_SANDBOX)
    with os.fdopen(0, "rb", closefd=False) as source:
        header = json.loads(source.readline())
        code = source.read(header["code"]).decode()
        before = write_copies((name, source.read(size)) for name, size in header["files"])
    sys.path += plan["packages"]
    if plan["importable"] is not None:
        sys.dont_write_bytecode = True
        sys.path.insert(0, plan["importable"])
    os.write(1, BEGUN)
    run(code)
    for descriptor in descriptors:
        os.chdir(plan["inside"])
        with open(int(descriptor), "wb") as changes:
            report_changes(before, changes)


if __name__ == "__main__":
    main()
