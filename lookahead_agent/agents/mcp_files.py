"""Files that name MCP servers, as Claude, Cursor, VS Code and other clients write them.

Each key of a server has the meaning that it has for its client, or is an error that names it.
"""

import json
import logging
import os
import re
from collections.abc import Mapping
from copy import copy
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from lookahead_agent.errors import ConfigurationError, extra_imports, validation_message

logger = logging.getLogger(__name__)

_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_LAST_COMMA = re.compile(r'("(?:[^"\\\n]|\\.)*")|,(?=\s*[}\]])')
# A default has no further variable in it, so that a text of many "${" is read in linear time.
_VARIABLE = re.compile(
    r"\$\{(?:(?!env:)([A-Za-z]\w*):([A-Za-z_][^{}]*)|(?:env:)?(\w+)(?::-((?:(?!\$\{)[^}])*))?|(/))\}"
)
# A variable, perhaps in a form that is unknown here, and a whole value that another program would replace.
_ANY_VARIABLE = re.compile(rf"{_VARIABLE.pattern}|\$\{{[^{{}}]*\}}")
_BARE_VARIABLE = re.compile(r"\$[A-Z_][A-Z0-9_]*|%[A-Z_][A-Z0-9_]*%")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNUSABLE = re.compile("[\0\ud800-\udfff]")
_FILE = re.compile(r"\$\{file:([^{}]+)\}")
_DEFAULT_WITH_VARIABLE = re.compile(r"\$\{(?:env:)?\w+:-[^{}]*\$\{[^{}]*\}[^{}]*\}")

_TRANSPORTS = {"stdio": "stdio", "local": "stdio", "http": "http", "streamablehttp": "http", "sse": "sse"}
_OTHER_NAMES = {
    "environment": "env", "serverUrl": "url", "httpUrl": "url", "transport": "type", "transportType": "type",
}  # fmt: skip
"""Names that some clients have for a key."""

_SWITCHES = ("enabled", "isActive", "active")
"""Keys whose value false switches a server off."""

_OF_PROGRAMS = ("args", "env", "environment", "cwd", "envFile")
_OF_URLS = ("headers", "requestInit")
_WITHOUT_EFFECT = frozenset({"name", "title", "description", "comment", "note", "icon", "gallery", "version"})
_APPROVALS = ("autoApprove", "alwaysAllow", "trust")
_MAX_SECONDS = 3_600
_TOOLS_ADVICE = "remove it, and select tools in Python, or ask before their calls (`ask_before`)"
_ADVICE = {
    **dict.fromkeys(
        ("disabledTools", "enabledTools", "includeTools", "excludeTools", "allowedTools", "tools"), _TOOLS_ADVICE
    ),
    **dict.fromkeys(("oauth", "auth"), 'put a token into "headers"'),
}


def _as_transport(value: Any) -> Any:
    return _TRANSPORTS.get(re.sub("[-_ ]", "", value).lower(), value) if isinstance(value, str) else value


def _as_texts(value: Any) -> Any:
    """Return variables as texts, without those that VS Code removes, whose value is null."""
    if not isinstance(value, Mapping):
        return value
    return {name: _as_text(entry) for name, entry in value.items() if entry is not None}


def _as_text(value: Any) -> Any:
    """Return a number as a text: a port may be written so."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return str(value) if is_number else value


def _check_seconds(value: float | None) -> float | None:
    if value is not None and value > _MAX_SECONDS:
        raise PydanticCustomError(
            "seconds",
            "{value} is more than the 3,600 seconds of an hour: other clients mean milliseconds",
            {"value": f"{value:g}"},
        )
    return value


class McpServer(BaseModel):
    """An MCP server: a program that serves over its standard streams, or a URL."""

    command: str | None = None
    args: list[Annotated[str, BeforeValidator(_as_text)]] = Field(default_factory=list)
    # Besides the variables that every program needs.
    env: Annotated[dict[str, str], BeforeValidator(_as_texts)] = Field(default_factory=dict)
    cwd: str | None = None  # working directory
    url: str | None = None  # URL of a running server
    type: Annotated[Literal["stdio", "http", "sse"] | None, BeforeValidator(_as_transport)] = None
    headers: Annotated[dict[str, str], BeforeValidator(_as_texts)] = Field(default_factory=dict)  # Headers of requests
    timeout: Annotated[float | None, Field(gt=0), AfterValidator(_check_seconds)] = None  # Seconds of a call

    model_config = ConfigDict(hide_input_in_errors=True)  # the input may be a key

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        """Refuse what no request or program can be given; no message has a value, which may be a key."""
        for key, value in self.headers.items():
            value = self.headers[key] = value.strip()
            if _HEADER_NAME.fullmatch(key) is None or not (value.isascii() and value.isprintable()):
                raise ValueError(f"the header {key[:40]!r} cannot be sent: its name or value has other characters")
        texts = [self.command or "", *self.args, *self.env, *self.env.values(), self.url or "", self.cwd or ""]
        if any(map(_UNUSABLE.search, texts)):
            raise ValueError("a text has a null character or a lone surrogate")
        if any("=" in name or not name for name in self.env):
            raise ValueError("a variable of 'env' has an empty name, or one with an equals sign")
        return self


def read_servers(file: Path, environment: Mapping[str, str] = os.environ) -> dict[str, McpServer]:
    """Read the servers of a file by name, without disabled ones.

    The file has them under `mcpServers`, `servers`, or `servers` of `mcp`, and may have comments. Values may hold
    `${NAME}` and `${env:NAME}` from the environment, also with a default (`${NAME:-default}`), `${userHome}`, and
    `${workspaceFolder}`, the file's folder or the one of its `.vscode` or `.cursor`. `${input:token}` is the
    environment variable `INPUT_TOKEN`, since no person is asked, and `${file:token.txt}` the text of a file.

    Raises:
        ConfigurationError: The file does not exist or is invalid, a variable is not set, a server has a key that is not
            known here, or has neither a command nor a URL, or both.
        MissingExtraError: There is an `envFile`, and `python-dotenv` is not installed.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        content = json.loads(_LAST_COMMA.sub(r"\1", _COMMENT.sub(r"\1", text)), object_pairs_hook=_read_object)
        entries = _entries(content)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8
        raise ConfigurationError(f"{file.name}: {error}") from None
    variables = _Variables(file, content, environment)
    servers: dict[str, McpServer] = {}
    for name, entry in entries.items():
        try:
            if not _is_disabled(entry):
                servers[name] = _read(variables.of_entry(entry), name, variables.folder)
        except ValidationError as error:
            raise ConfigurationError(f"{file.name}: the server {name!r}: {validation_message(error)}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{file.name}: the server {name!r} {error}") from None
    return servers


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; raises ValueError if two of its values have one name."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return values


def _entries(content: Any) -> dict[str, Any]:
    """Return the entries of all servers; raises ValueError if there is no object of servers."""
    settings = content.get("mcp") if isinstance(content, dict) else None  # the settings of VS Code have "mcp"
    sections = [(content, "mcpServers"), (content, "servers"), (settings, "servers")]
    found = [section[key] for section, key in sections if isinstance(section, dict) and section.get(key) is not None]
    if not found:
        raise ValueError('there is neither "mcpServers" nor "servers"')
    entries: dict[str, Any] = {}
    for servers in found:
        if not isinstance(servers, dict):
            raise ValueError("the servers have to be an object, by name")
        if twice := sorted(servers.keys() & entries.keys()):
            raise ValueError(f"the server {twice[0]!r} occurs twice")
        entries |= servers
    return entries


def _is_disabled(entry: Any) -> bool:
    if not isinstance(entry, dict):
        raise ValueError("has to be an object")
    for key in ("disabled", *_SWITCHES):
        if not isinstance(entry.get(key, False), (bool, type(None))):
            raise ValueError(f"has {key!r}, which has to be true or false")
    return bool(entry.get("disabled")) or any(entry.get(key) is False for key in _SWITCHES)


class _Variables:
    """The values of `${…}` in a file."""

    def __init__(self, file: Path, content: Mapping[str, Any], environment: Mapping[str, str]) -> None:
        folder = file.absolute().parent
        self.folder = folder.parent if folder.name in (".vscode", ".cursor") else folder
        self._environment = environment
        self._known = {
            "userHome": str(Path.home()),
            "workspaceFolder": str(self.folder),
            "workspaceFolderBasename": self.folder.name,
            "pathSeparator": os.sep,
        }
        inputs = content.get("inputs")
        entries = [entry for entry in inputs if isinstance(entry, dict)] if isinstance(inputs, list) else []
        self._inputs = {str(entry.get("id")): entry.get("description") for entry in entries}

    def of_entry(self, entry: dict[str, Any]) -> Any:
        """Replace the variables in an entry, which may use those that it sets for its own program."""
        own = _as_texts(self._replace(entry.get("env") or entry.get("environment")))
        inner = copy(self)
        inner._environment = {**self._environment, **own} if isinstance(own, Mapping) else self._environment
        # The program may be a shell, which has variables of its own.
        return {
            key: (self if key in ("env", "environment") else inner)._replace(part, keeps=key in ("command", "args"))
            for key, part in entry.items()
        }

    def _replace(self, value: Any, *, keeps: bool = False) -> Any:
        """Replace the variables in all texts of a value; raises ValueError for an unset one.

        Variables of an unknown form are an error, too, unless it `keeps` them.
        """
        if isinstance(value, str):
            if (nested := _DEFAULT_WITH_VARIABLE.search(value)) is not None:
                raise ValueError(f"has {nested[0][:80]}, whose default has a variable: write its value")
            if not keeps and _BARE_VARIABLE.fullmatch(value) is not None:
                raise ValueError(f"has {value[:80]}, which stays as it is: write ${{{value.strip('$%')[:80]}}}")
            return _ANY_VARIABLE.sub(lambda found: self._variable(found[0], keeps=keeps), value)
        if isinstance(value, list):
            return [self._replace(part, keeps=keeps) for part in value]
        if isinstance(value, dict):
            return {key: self._replace(part, keeps=keeps) for key, part in value.items()}
        return value

    def _variable(self, text: str, *, keeps: bool) -> str:
        """Return the value of a text such as `${NAME}`."""
        if (file := _FILE.fullmatch(text)) is not None:
            try:
                return (self.folder / Path(file[1]).expanduser()).read_text(encoding="utf-8").strip()
            except (OSError, RuntimeError, ValueError) as error:
                raise ValueError(f"has {text[:80]}, which cannot be read: {type(error).__name__}") from None
        if (match := _VARIABLE.fullmatch(text)) is None:
            if keeps:
                return text
            raise ValueError(
                f"has {text[:80]}, whose form is unknown: write ${{NAME}}, ${{NAME:-default}} or the value"
            )
        return self._value(match)

    def _value(self, match: re.Match[str]) -> str:
        kind, of_kind, name, default, separator = match.groups()
        if separator:
            return os.sep
        if kind == "input":
            variable = "INPUT_" + re.sub(r"\W", "_", of_kind).upper()
            if (text := self._environment.get(variable)) is not None:
                return text
            about = f" ({self._inputs[of_kind]})" if self._inputs.get(of_kind) else ""
            raise ValueError(
                f"has {match[0]}{about}, which another client asks a person for: set the environment variable "
                f"{variable}"
            )
        if kind is not None:
            raise ValueError(f"has {match[0]}, which only an editor knows: write the value, or ${{NAME}} of a variable")
        text = self._environment.get(name, default)
        if text is None and not match[0].startswith("${env:"):
            text = self._known.get(name)
        if text is None:
            raise ValueError(f"needs the environment variable {name}, which is not set")
        return text


def _read(entry: dict[str, Any], name: str, folder: Path) -> McpServer:
    """Read the entry of a server; raises ValueError, which names the key."""
    fields: dict[str, Any] = {}
    keys: dict[str, str] = {}
    give = partial(_give, fields, keys)
    env_file = None
    for key, value in entry.items():
        # Clients write empty values for all that they know.
        if value in (None, "", [], {}, False) or key in (*_SWITCHES, *_WITHOUT_EFFECT) or key[:1] in ("_", "$", "/"):
            continue
        if key in _OTHER_NAMES or key in McpServer.model_fields:
            give(_OTHER_NAMES.get(key, key), value, key)
            if key == "httpUrl":
                give("type", "http", key)
        elif key == "requestInit" and isinstance(value, dict) and value.keys() == {"headers"}:
            give("headers", value["headers"], key)
        elif key == "envFile" and isinstance(value, str):
            env_file = folder / Path(value).expanduser()
        elif key in _APPROVALS:
            logger.warning("the MCP server %r: %r has no effect: only calls of `ask_before` are asked about", name, key)
        elif (key, value) != ("tools", ["*"]):
            advice = _ADVICE.get(key, "remove it, or write it as the page of the tools has it")
            raise ValueError(f"has {key!r}, which has no effect here: {advice}")
    try:
        server = McpServer.model_validate(fields)
    except ValidationError as error:
        field = str(next(iter(error.errors()[0]["loc"]), ""))  # a check of several fields names none
        if keys.get(field, field) == field:
            raise
        raise ValueError(f"has a wrong {keys[field]!r}: {validation_message(error)}") from None
    if (server.command is None) == (server.url is None):
        raise ValueError("needs either a command or a url")
    if server.url is not None and re.match(r"https?://[^/?#]", server.url, re.IGNORECASE) is None:
        raise ValueError("has a url that does not begin with http:// or https://")
    kind, others = ("command", _OF_URLS) if server.command is not None else ("url", _OF_PROGRAMS)
    if ignored := [key for key in others if entry.get(key)]:
        raise ValueError(f"has a {kind}, for which {ignored[0]!r} has no effect: remove it")
    if server.type is not None and (server.type == "stdio") != (kind == "command"):
        raise ValueError(f"has a {kind}, which contradicts the type {server.type!r}")
    return server if env_file is None else server.model_copy(update={"env": _read_env(env_file) | server.env})


def _give(fields: dict[str, Any], keys: dict[str, str], field: str, value: Any, key: str) -> None:
    """Note the value of a field, and the key that names it."""
    keys.setdefault(field, key)
    if field == "type":
        value = _as_transport(value)
    if fields.setdefault(field, value) != value:
        raise ValueError(f"has {key!r}, which contradicts another key for {field!r}")


def _read_env(file: Path) -> dict[str, str]:
    with extra_imports("an envFile needs python-dotenv: pip install 'lookahead-agent[mcp]'"):
        from dotenv import dotenv_values
    if not file.is_file():
        raise ValueError(f"has 'envFile', and there is no file {file}")
    values = dotenv_values(file, interpolate=False, encoding="utf-8-sig")
    return {name: value for name, value in values.items() if value is not None}
