"""Tools from short texts, such as `sql:shop.db`, `python` or `my_module:my_tool`, and tools of MCP servers."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count as count_from
from pathlib import Path
from typing import Any, Protocol, TypeVar

from langchain_core.tools import BaseTool, tool

from lookahead_agent.agents.mcp_tools import open_mcp_tools, read_servers
from lookahead_agent.agents.templates import template
from lookahead_agent.agents.tool_use import with_sync_call
from lookahead_agent.errors import ConfigurationError, LookaheadError
from lookahead_agent.system.imports import import_object
from lookahead_agent.system.urls import hide_passwords

KINDS = ("sql:FILE", "docs:FOLDER", "files:FOLDER", "python", "calculator", "http:HOST,HOST", "MODULE:TOOL")
"""Forms of sources, as the command line shows them."""

_NAMED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.+)", re.DOTALL)


def load_tools(sources: Iterable[str]) -> list[BaseTool]:
    """Create tools, in the order of their sources.

    Args:
        sources: Each is one of

            - `sql:shop.db`, or `sql:sqlite:///shop.db`: SELECTs on a SQLite database,
            - `docs:handbook/`: search in a folder of documents,
            - `files:folder/`: `read_file` and `write_file` in a folder,
            - `python`: code in a sandbox, on the files of that folder if there is one,
            - `calculator`,
            - `http:example.org,.python.org`: pages of these hosts,
            - `my_module:my_tool`: a tool, a function with a docstring, or a list of them, from a module of the current
              folder or on Python's path.

            `crm=sql:crm.db` renames the source's only tool to `crm`.

    Returns:
        Tools that work in `invoke` and in `ainvoke`.

    Raises:
        ConfigurationError: A source has an unknown form or does not work, or two tools have one name.
    """
    return _without_clashes(_load(sources))


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Tool = TypeVar("Tool", bound=_Named)


def specialists(tools: Iterable[Tool]) -> dict[str, list[Tool]]:
    """Group tools into a supervisor's specialists: one per tool, and one for all tools that work in a folder."""
    all_tools = list(tools)
    in_folder = {"read_file", "write_file", "python"} if any(tool.name == "read_file" for tool in all_tools) else set()
    teams: dict[str, list[Tool]] = {}
    for member in all_tools:
        teams.setdefault("files_expert" if member.name in in_folder else f"{member.name}_expert", []).append(member)
    return teams


@contextmanager
def open_tools(sources: Iterable[str], servers: Path | None = None) -> Iterator[list[BaseTool]]:
    """Load tools as `load_tools` does, and then the tools of MCP servers, whose connections close at the end.

    `servers` is an `mcpServers` file. A tool of a server whose name another tool has is named `SERVER_TOOL`. Raises
    what `read_servers` and `open_mcp_tools` raise as well.
    """
    loaded = _load(sources)
    opened: AbstractContextManager[list[tuple[str, BaseTool]]] = nullcontext([])
    if servers is not None:
        opened = open_mcp_tools(read_servers(servers))
    with opened as mcp_tools:
        yield [*_without_clashes(loaded), *_rename_clashes(mcp_tools, {item.name for _, item in loaded})]


def _rename_clashes(mcp_tools: Sequence[tuple[str, BaseTool]], taken: set[str]) -> Iterator[BaseTool]:
    """Yield tools of servers; one whose name is taken, or that several have, is named after its server as well."""
    counts = Counter(mcp_tool.name for _, mcp_tool in mcp_tools)
    used = taken | {name for name, count in counts.items() if count == 1}
    for server, mcp_tool in mcp_tools:
        name = mcp_tool.name
        if name in taken or counts[name] > 1:
            base = re.sub(r"[^A-Za-z0-9_-]", "_", f"{server}_{name}")
            numbered = (f"{base}_{number}" if number > 1 else base for number in count_from(1))
            name = next(candidate for candidate in numbered if candidate not in used)
            used.add(name)
        yield mcp_tool if name == mcp_tool.name else mcp_tool.model_copy(update={"name": name})


def _load(sources: Iterable[str]) -> list[tuple[str, BaseTool]]:
    texts = list(sources)
    folders = [value for kind, _, value in (_split_name(text)[1].partition(":") for text in texts) if kind == "files"]
    loaded: list[tuple[str, BaseTool]] = []
    for text in texts:
        name, source = _split_name(text)
        try:
            tools = _create(source, folders[0] if folders else None)
        except LookaheadError:
            raise
        except Exception as error:
            problem = f"the tool {text} cannot be made: {error or type(error).__name__}"
            raise ConfigurationError(hide_passwords(problem, text)) from error
        if name is not None:
            if len(tools) != 1:
                problem = f"{text}: {source} has {len(tools)} tools, and only one tool can be named"
                raise ConfigurationError(hide_passwords(problem, source))
            tools = [tools[0].model_copy(update={"name": name})]
        loaded += [(source, with_sync_call(entry)) for entry in tools]
    return loaded


def _split_name(text: str) -> tuple[str | None, str]:
    """Split a text into the tool's new name, if any, and the source."""
    found = _NAMED.fullmatch(text)
    return (found[1], found[2]) if found else (None, text)


def _create(source: str, folder: str | None) -> Sequence[BaseTool]:
    kind, colon, value = source.partition(":")
    match kind, value.strip():
        case ("python", "") if not colon:
            return [template("tools", "python_code").make_python_tool(folder=folder)]
        case ("calculator", "") if not colon:
            return [template("tools", "calculator").calculator]
        case (("sql" | "docs" | "files" | "http"), ""):
            form = next(form for form in KINDS if form.startswith(f"{kind}:"))
            raise ConfigurationError(f"the tool {source} needs more: {form}")
        case ("sql", path):
            return [template("tools", "sql").make_sql_tool(path)]
        case ("docs", path):
            return [template("tools", "search_documents").make_search_tool(path)]
        case ("files", path):
            return list(template("tools", "files").make_file_tools(path))
        case ("http", hosts):
            return [template("tools", "http_get").make_http_tool([host.strip() for host in hosts.split(",")])]
        case (module, name) if module and name:
            return _import(module, name)
    shown = hide_passwords(source, source)
    raise ConfigurationError(f"there is no tool {shown!r}; there are {', '.join(KINDS)}")


def _import(module: str, name: str) -> Sequence[BaseTool]:
    found = import_object(module, name)
    return [_as_tool(entry) for entry in (found if isinstance(found, (list, tuple)) else [found])]


def _as_tool(found: BaseTool | Callable[..., Any]) -> BaseTool:
    if isinstance(found, BaseTool):
        return found
    if isinstance(found, type) or not callable(found):
        raise TypeError(f"it is a {type(found).__name__}, and no tool, function, or list of them")
    return tool(found)


def _without_clashes(loaded: Sequence[tuple[str, BaseTool]]) -> list[BaseTool]:
    sources: dict[str, str] = {}
    for source, item in loaded:
        if item.name in sources:
            first, second = (hide_passwords(each, each) for each in (sources[item.name], source))
            raise ConfigurationError(
                f"two tools are called {item.name}, of {first} and of {second}: leave one out, or call "
                "the only tool of a source otherwise, as in other=sql:other.db"
            )
        sources[item.name] = source
    return [item for _, item in loaded]
