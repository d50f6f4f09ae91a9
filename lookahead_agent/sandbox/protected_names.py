"""Names of a working folder that its tools refuse, because programs of the user run them or they hold secrets.

A name is checked part by part, as a case-insensitive or a Windows file system would read it.
"""

import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatchcase

SECRETS = (
    *("*.env", "*.env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.tfvars"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "credentials", "credentials.json", "credentials.y*ml"),
    *("secrets.json", "secrets.toml", "secrets.y*ml", "client_secret*.json", "service_account*.json", "_netrc"),
)
"""Files that hold keys or passwords, besides names that begin with a dot; neither read nor written."""

EXECUTED = (
    # Build tools and task runners
    *("makefile", "gnumakefile", "*.mk", "cmakelists.txt", "*.cmake", "configure", "justfile", "taskfile.y*ml"),
    *("rakefile", "gemfile", "*.gemspec", "pom.xml", "build.xml", "build.gradle*", "settings.gradle*", "gradlew*"),
    *("mvnw*", "build.sbt", "sconstruct", "sconscript", "wscript", "meson.build", "*.bazel"),
    *("cargo.toml", "build.rs", "package.swift", "mix.exs", "setup.hs", "*.*proj", "*.targets", "*.props", "*.nix"),
    # Containers and continuous integration
    *("dockerfile*", "*.dockerfile", "containerfile*", "docker-compose*", "compose.y*ml", "compose.*.y*ml"),
    *("devcontainer.json", "vagrantfile", "jenkinsfile", "procfile", "tiltfile", "earthfile"),
    # Python
    *("setup.py", "setup.cfg", "pyproject.toml", "tox.ini", "pytest.ini", "noxfile.py", "conftest.py", "tasks.py"),
    *("fabfile.py", "dodo.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.pyo", "__pycache__"),
    *("site-packages", "venv", "virtualenv", "pyvenv.cfg"),
    # JavaScript
    *("package.json", "node_modules", "*.config.js", "*.config.ts", "*.config.[cm][jt]s", "gulpfile.*", "gruntfile.*"),
    # Git reads a folder with this file as a repository, whose configuration names programs.
    "head",
    # Editors, desktops and agents
    *("*.code-workspace", "*.desktop", "*.lnk", "*.url", "autorun.inf", "desktop.ini", "mcp.json", "claude.md"),
    *("claude.*.md", "agents.md", "agents.*.md", "agent.md", "gemini.md"),
)
"""Files and folders that programs run, load or obey without being told to; read, and never written."""


def protection(name: str, allow: Iterable[str] = (), *, writing: bool) -> str | None:
    """Return why a path of a working folder is refused; None: it is not.

    Args:
        name: The path. "/" and the backslash separate its parts.
        allow: Names of files or folders that are not refused, which may have wildcards (`*.pem`).
        writing: Whether the file is to be written or removed; otherwise it is read.
    """
    allowed = [pattern.casefold() for pattern in allow]
    for part in name.replace("\\", "/").split("/"):
        readings = _readings(part)
        if _matches(readings, allowed):
            continue
        if part not in ("", ".", "..") and any(reading.startswith(".") for reading in readings):
            return "names that begin with a dot hold settings and secrets"
        if _matches(readings, SECRETS):
            return "it may hold a secret"
        if writing and _matches(readings, EXECUTED):
            return "programs run or obey a file of this name without being told to"
        if "~" in part and any(_is_short_name(reading) for reading in readings):
            return "it may be the short form of another name"
    return None


def refuse_protected(name: str, allow: Iterable[str], *, writing: bool) -> None:
    """Raise ValueError for a path that is refused."""
    if (reason := protection(name, allow, writing=writing)) is not None:
        done = "written" if writing else "read"
        raise ValueError(f"{name[:500]!r} is protected and is not {done}: {reason}; use a file of another name")


def _readings(part: str) -> set[str]:
    """Return how file systems may read a part of a path: without case, invisible characters, streams, final dots."""
    visible = "".join(char for char in part if unicodedata.category(char) not in ("Cf", "Cc"))
    folded = unicodedata.normalize("NFKC", visible).casefold()
    return {reading.strip(" ").rstrip(" .") or reading for reading in (folded, folded.partition(":")[0])}


def _matches(readings: Iterable[str], patterns: Iterable[str]) -> bool:
    patterns = tuple(patterns)
    return any(fnmatchcase(reading, pattern) for reading in readings for pattern in patterns)


def _is_short_name(reading: str) -> bool:
    """Whether a name has Windows' short form of a longer name, such as `GIT~1`."""
    stem, _, suffix = reading.partition(".")
    return fnmatchcase(stem, "?*~[0-9]*") and len(stem) <= 8 and len(suffix) <= 3
