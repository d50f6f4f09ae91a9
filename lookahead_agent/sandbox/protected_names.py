"""Names of a working folder that its tools refuse, because programs of the user run them or they hold secrets.

A name is checked part by part, as a case-insensitive or a Windows file system would read it.
"""

import re
import unicodedata
from collections.abc import Iterable
from fnmatch import fnmatchcase, translate
from functools import lru_cache

_DATA = ("json", "toml", "y*ml", "txt", "ini", "cfg", "conf", "xml", "csv", "properties")

SECRETS = (
    *("*.env", "*.env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "*.tfvars"),
    *("*.tfvars.json", "*.tfstate", "*.tfstate.*", "*.p8", "*.pk8", "*.kdb", "*.ovpn", "*.gpg", "*.pgp", "*.keytab"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "ssh_host_*_key", "deploy_key", "credentials", "secrets"),
    *(f"{stem}.{end}" for stem in ("secret", "secrets", "credentials", "password", "passwords") for end in _DATA),
    *(f"api{join}key{plural}.{end}" for join in ("", "_", "-") for plural in ("", "s") for end in _DATA),
    *("secrets[.-]*.y*ml", "*_credentials.json", "client[_-]secret*.json", "service[_-]account*.json"),
    *("serviceaccount*.json", "*firebase-adminsdk*.json", "token.json", "token.txt", "token.pickle", "tokens.json"),
    *("auth.json", "accesskeys.csv", "rootkey.csv", "kubeconfig", "kubeconfig.y*ml", "*.kubeconfig", "*htpasswd"),
    *("netrc", "_netrc", "pgpass.conf", "vault[_-]pass*", "local.settings.json", "wp-config.php", "wallet.dat"),
)
"""Files that hold keys or passwords, besides names that begin with a dot; neither read nor written."""

EXECUTED = (
    # Build tools and task runners
    *("makefile", "gnumakefile", "*.mk", "cmakelists.txt", "*.cmake", "configure", "justfile", "taskfile.y*ml"),
    *("rakefile", "gemfile", "*.gemspec", "pom.xml", "build.xml", "build.gradle*", "settings.gradle*", "gradlew*"),
    *("mvnw*", "build.sbt", "sconstruct", "sconscript", "wscript", "meson.build", "*.bazel"),
    *("cargo.toml", "build.rs", "package.swift", "mix.exs", "setup.hs", "*.*proj", "*.targets", "*.props", "*.nix"),
    *("makefile.am", "makefile.in", "makefile.inc", "makefile.win", "makefile.local", "bsdmakefile", "makevars*"),
    *("*.mak", "cmakepresets.json", "cmakeuserpresets.json", "configure.ac", "*.gradle", "*.gradle.kts", "ivy.xml"),
    *("gradle.properties", "gradle-wrapper.*", "build.sc", "build.mill", "*.bzl", "pants.toml", "magefile.go"),
    *("build.zig", "build.zig.zon", "rust-toolchain", "rust-toolchain.toml", "go.work", "dune", "dune-project"),
    *("*.opam", "*.cabal", "stack.yaml", "rebar.config", "project.clj", "deps.edn", "bb.edn", "shadow-cljs.edn"),
    *("conanfile.*", "xmake.lua", "premake5.lua", "gems.rb", "config.ru", "*.rake", "*.podspec", "podfile"),
    *("brewfile", "guardfile", "capfile", "fastfile", "dangerfile", "thorfile", "composer.json", "nuget.config"),
    *("directory.build.rsp", "msbuild.rsp", "global.json", "mise.toml", "mise.*.toml"),
    # Containers and continuous integration
    *("dockerfile*", "*.dockerfile", "containerfile*", "docker-compose*", "compose.y*ml", "compose.*.y*ml"),
    *("devcontainer.json", "vagrantfile", "jenkinsfile", "procfile", "tiltfile", "earthfile"),
    *("docker-bake.*", "procfile.*", "skaffold.y*ml", "azure-pipelines*.y*ml", "bitbucket-pipelines.y*ml"),
    *("appveyor.y*ml", "buildspec.y*ml", "cloudbuild.y*ml", "netlify.toml", "vercel.json", "now.json", "fly.toml"),
    *("render.y*ml", "heroku.yml", "wercker.yml", "codemagic.y*ml", "action.y*ml", "serverless.y*ml", "cdk.json"),
    *("pulumi.y*ml", "ansible.cfg", "devfile.y*ml"),
    # Python
    *("setup.py", "setup.cfg", "pyproject.toml", "tox.ini", "pytest.ini", "noxfile.py", "conftest.py", "tasks.py"),
    *("fabfile.py", "dodo.py", "sitecustomize.py", "usercustomize.py", "*.pth", "*.pyc", "*.pyo", "__pycache__"),
    *("site-packages", "venv", "virtualenv", "pyvenv.cfg", "sitecustomize", "usercustomize", "*._pth"),
    *("*.so", "*.pyd", "*.dll", "*.dylib", "*.egg-link", "*.egg-info", "*.dist-info", "entry_points.txt"),
    *("pytest.toml", "mypy.ini", "pylintrc", "pylintrc.toml", "hatch.toml", "hatch_build.py", "uv.toml", "poetry.toml"),
    *("pdm.toml", "pixi.toml", "pipfile", "pip.conf", "pip.ini", "conf.py", "mkdocs.y*ml", "*.conf.py", "manage.py"),
    *("jupyter_*config.py", "jupyter_*config.json", "ipython_config.py", "celeryconfig.py", "scrapy.cfg", "snakefile"),
    *("alembic.ini", "invoke.y*ml", "langgraph.json", "airflow.cfg", "waf"),
    # JavaScript
    *("package.json", "node_modules", "*.config.js", "*.config.ts", "*.config.[cm][jt]s", "gulpfile.*", "gruntfile.*"),
    *("*.config.*.[jt]s", "*.conf.[jt]s", "*.workspace.[jt]s", "babel.config.json", "jest.config.json", "jakefile*"),
    *("cakefile", "gatsby-*.js", "ember-cli-build.js", "angular.json", "project.json", "workspace.json", "nx.json"),
    *("package.json5", "package.yaml", "package-lock.json", "npm-shrinkwrap.json", "yarn.lock", "pnpm-lock.y*ml"),
    *("pnpm-workspace.y*ml", "bun.lock*", "bunfig.toml", "deno.json*", "deno.lock", "lerna.json", "turbo.json"),
    *("rush.json", "import_map.json"),
    # Git reads a folder with this file as a repository, whose configuration names programs. Bare ones end in `.git`.
    *("head", "*.git", "githooks", "lefthook.*", "captainhook.json"),
    # Editors, desktops and agents
    *("*.code-workspace", "*.desktop", "*.lnk", "*.url", "autorun.inf", "desktop.ini", "mcp.json", "claude.md"),
    *("claude.*.md", "agents.md", "agents.*.md", "agent.md", "gemini.md", "qwen.md", "warp.md", "skill.md"),
    *("copilot-instructions.md", "claude_desktop_config.json", "opencode.json*", "_vimrc", "_exrc", "_gvimrc"),
    *("startup.m", "startup.jl", "rprofile.site", "profile.ps1", "*.sublime-project", "*.sublime-workspace"),
    *("*.scf", "*.library-ms", "*.webloc", "*.command", "*.workflow"),
)
"""Files and folders that programs run, load or obey without being told to; read, and never written."""


def protection(name: str, allow: Iterable[str] = (), *, writing: bool) -> str | None:
    """Return why a path of a working folder is refused; None: it is not.

    Args:
        name: The path. "/" and the backslash separate its parts.
        allow: Names of files or folders that are not refused, which may have wildcards (`*.pem`).
        writing: Whether the file is to be written or removed; otherwise it is read.
    """
    allowed = tuple(pattern.casefold() for pattern in allow)
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


def _matches(readings: Iterable[str], patterns: tuple[str, ...]) -> bool:
    return any(map(_compile(patterns).match, readings))


@lru_cache(maxsize=64)
def _compile(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def _is_short_name(reading: str) -> bool:
    """Whether a name has Windows' short form of a longer name, such as `GIT~1`."""
    stem, _, suffix = reading.partition(".")
    return fnmatchcase(stem, "?*~[0-9]*") and len(stem) <= 8 and len(suffix) <= 3
