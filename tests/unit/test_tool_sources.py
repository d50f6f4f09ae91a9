"""Tools from short specifications, from modules and from MCP files."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import BaseTool, tool

from lookahead_agent.agents.mcp_tools import read_servers
from lookahead_agent.agents.middleware import standard_middleware
from lookahead_agent.agents.tool_sources import load_tools, open_tools, specialists
from lookahead_agent.agents.tool_use import with_sync_call
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.testing import scripted_chat, scripted_replies


@pytest.fixture
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with tool sources, which is the current directory."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as connection:
        connection.execute("CREATE TABLE items (name TEXT)")
    (tmp_path / "handbook").mkdir()
    (tmp_path / "handbook" / "a.md").write_text("Tea is at four.")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "n.txt").write_text("20")
    (tmp_path / "own_tools_of_test.py").write_text("""
from langchain_core.tools import tool

@tool
async def weather(city: str) -> str:
    '''The weather.'''
    return f"{city}: sun"

def clock(zone: str) -> str:
    '''The time in a zone.'''
    return zone

def undocumented(x): return x

BOTH = [weather, clock]
NUMBER = 3
""")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("own_tools_of_test", None)


def tool_names(tools: list[BaseTool]) -> list[str]:
    return [tool.name for tool in tools]


def test_each_kind_of_source_gives_a_working_tool(working_folder: Path) -> None:
    tools = load_tools([
        "sql:shop.db", "docs:handbook/", "files:folder/", "python", "calculator", "http:example.org,.python.org",
        "own_tools_of_test:weather", "own_tools_of_test:clock",
    ])  # fmt: skip
    assert tool_names(tools) == [
        "sql", "search_documents", "read_file", "write_file", "python", "calculator", "http_get", "weather", "clock",
    ]  # fmt: skip
    by_name = {tool.name: tool for tool in tools}
    assert "items(name TEXT)" in by_name["sql"].description
    assert "four" in by_name["search_documents"].invoke({"question": "tea"})
    assert by_name["python"].invoke({"code": "print(int(open('n.txt').read()) + 1)"}) == "21\n"
    assert by_name["clock"].invoke({"zone": "UTC"}) == "UTC"
    assert str(working_folder) not in sys.path


def test_source_may_be_a_list_of_tools_or_have_a_custom_name(working_folder: Path) -> None:
    assert tool_names(load_tools(["own_tools_of_test:BOTH", "shop=sql:shop.db", "sql:shop.db"])) == [
        "weather", "clock", "shop", "sql",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["nothing"], r"there is no tool 'nothing'; there are sql:FILE, .*MODULE:TOOL"),
        ([""], "there is no tool ''"),
        (["sql"], "the tool sql needs more: sql:FILE"),
        (["docs:"], "the tool docs: needs more: docs:FOLDER"),
        (["http"], "the tool http needs more: http:HOST,HOST"),
        (["python:x"], "the tool python:x cannot be made: No module named 'python'"),
        (["sql:gone.db"], "the tool sql:gone.db cannot be made: there is no database gone.db"),
        (["docs:gone"], "the tool docs:gone cannot be made: there is no folder"),
        (["files:gone"], "the tool files:gone cannot be made: there is no folder gone"),
        (["http:http://x/"], "the tool http:http://x/ cannot be made"),
        (["gone_module:x"], "No module named 'gone_module'"),
        (["own_tools_of_test:gone"], "has no attribute 'gone'"),
        (["own_tools_of_test:NUMBER"], "it is a int, and no tool, function, or list of them"),
        (["own_tools_of_test:undocumented"], "must have a docstring"),
        (
            ["sql:shop.db", "sql:shop.db"],
            "two tools are called sql, of sql:shop.db and of sql:shop.db.*other=sql",
        ),
        (["both=own_tools_of_test:BOTH"], "has 2 tools, and only one tool can be named"),
    ],
)
def test_invalid_sources_raise(working_folder: Path, sources: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_tools(sources)


def test_async_tool_works_in_invoke_and_ainvoke(working_folder: Path) -> None:
    """Sync calls share one event loop, so the tool can keep objects that are bound to a loop."""
    loops: list[asyncio.AbstractEventLoop] = []

    @tool
    async def where(text: str) -> str:
        """Where it runs."""
        loops.append(asyncio.get_running_loop())
        if text == "bad":
            raise ValueError("bad")
        return text

    wrapped = with_sync_call(where)
    assert [wrapped.invoke({"text": "a"}), wrapped.invoke({"text": "b"})] == ["a", "b"]
    assert loops[0] is loops[1]
    with pytest.raises(ValueError, match="bad"):
        wrapped.invoke({"text": "bad"})
    assert asyncio.run(wrapped.ainvoke({"text": "c"})) == "c"
    assert loops[3] is not loops[0]
    (weather,) = load_tools(["own_tools_of_test:weather"])
    assert weather.invoke({"city": "Bonn"}) == "Bonn: sun"

    @tool
    def plain(text: str) -> str:
        """Plain."""
        return text

    assert with_sync_call(plain) is plain


def test_agent_calls_async_tools_in_invoke_and_ainvoke() -> None:
    @tool
    async def price(item: str) -> str:
        """The price of an item."""
        await asyncio.sleep(0)
        return f"{item}: 3.50"

    call = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
    llm = scripted_chat(scripted_replies(**{"": [call, "It is 3.50."]}))
    agent: Any = create_agent(llm, [price], middleware=standard_middleware(llm, [price]))
    question: Any = {"messages": [HumanMessage("What does tea cost?")]}
    for messages in (agent.invoke(question)["messages"], asyncio.run(agent.ainvoke(question))["messages"]):
        assert [message.text for message in messages[2:]] == ["tea: 3.50", "It is 3.50."]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"s.json: Expecting property name"),
        ("[]", 's.json: there is neither "mcpServers" nor "servers"'),
        ("{}", 's.json: there is neither "mcpServers" nor "servers"'),
        ('{"servers": []}', "s.json: the servers have to be an object"),
        ('{"servers": {"a": 1}}', "the server 'a' has to be an object"),
        ('{"servers": {"a": {"url": "x"}}, "mcpServers": {"a": {"url": "y"}}}', "the server 'a' occurs twice"),
        ('{"mcpServers": {"a": {}}}', "the server 'a' needs either a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "url": "y"}}}', "the server 'a' needs either a command or a url"),
        (
            '{"mcpServers": {"a": {"command": ["x"]}}}',
            "s.json: the server 'a': command: Input should be a valid string",
        ),
        ('{"mcpServers": {"a": {"url": "x", "type": "ws"}}}', "s.json: the server 'a': type: Input should be"),
        (
            '{"mcpServers": {"a": {"url": "x", "transport": "ws"}}}',
            "s.json: the server 'a' has a wrong 'transport': type",
        ),
        (
            '{"mcpServers": {"a": {"command": "${UNSET_VARIABLE}"}}}',
            "the environment variable UNSET_VARIABLE, which is not set",
        ),
        ("\udcff", "s.json: 'utf-8' codec can't decode"),
    ],
)
def test_invalid_mcp_files_raise(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "s.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigurationError, match=message), open_tools([], file):
        pass


def test_mcp_file_is_read_with_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"gone\.json cannot be read: No such file"):
        read_servers(tmp_path / "gone.json")
    monkeypatch.setenv("SHOP_TOKEN", "t0ken")
    servers: dict[str, Any] = {
        "shop": {"command": "python", "args": ["-m", "shop"], "env": {"TOKEN": "${SHOP_TOKEN}"}, "disabled": False},
        "web": {"url": "https://example.org/${UNSET_PATH:-mcp}", "headers": {"Authorization": "Bearer ${SHOP_TOKEN}"}},
        "old": {"type": "sse", "url": "https://example.org/sse"},
    }
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": servers, "other": 1}))
    parsed = read_servers(tmp_path / "s.json")
    assert (parsed["shop"].env, parsed["shop"].args) == ({"TOKEN": "t0ken"}, ["-m", "shop"])
    assert (parsed["web"].url, parsed["web"].headers) == ("https://example.org/mcp", {"Authorization": "Bearer t0ken"})
    assert parsed["old"].type == "sse"


RUN, AT = {"command": "npx"}, {"url": "http://h/mcp"}
FULL = {"command": "npx", "args": ["-y", "x"], "type": "stdio"}
ENVIRONMENT = {"TOKEN": "t0ken", "INPUT_SHOP_KEY": "k3y"}


@pytest.mark.parametrize(
    ("entry", "fields"),
    [
        (RUN | {"env": {"T": "${env:TOKEN}", "N": 8080, "gone": None}}, RUN | {"env": {"T": "t0ken", "N": "8080"}}),
        (RUN | {"args": ["${TOKEN}", "${GONE:-d}", "${VAR:+x}"]}, RUN | {"args": ["t0ken", "d", "${VAR:+x}"]}),
        (RUN | {"args": ["${env:GONE:-d}", "${env:TOKEN:-d}"]}, RUN | {"args": ["d", "t0ken"]}),
        (RUN | {"environment": {"A": "b"}}, RUN | {"env": {"A": "b"}}),
        (RUN | {"env": {"K": "${input:shop-key}"}}, RUN | {"env": {"K": "k3y"}}),
        (RUN | {"cwd": "${workspaceFolder}${/}${workspaceFolderBasename}"}, RUN | {"cwd": "FOLDER/NAME"}),
        (RUN | {"args": ["${userHome}${pathSeparator}x"]}, RUN | {"args": [str(Path.home() / "x")]}),
        (RUN | {"envFile": "own.env", "env": {"B": "2"}}, RUN | {"env": {"A": "1 $X", "B": "2"}}),
        (RUN | {"timeout": 60, "autoApprove": [], "disabledTools": []}, RUN | {"timeout": 60.0}),
        (RUN | {"tools": ["*"], "description": "d", "_comment": "c", "//": "c"}, RUN),
        (FULL | {"alwaysAllow": ["x"]}, FULL),
        (FULL | {"type": "local", "url": None, "headers": {}}, FULL),
        (AT | {"headers": {"A": "Bearer ${env:TOKEN}"}}, AT | {"headers": {"A": "Bearer t0ken"}}),
        (AT | {"requestInit": {"headers": {"A": "x"}}}, AT | {"headers": {"A": "x"}}),
        (AT | {"transport": "sse"}, AT | {"type": "sse"}),
        (AT | {"transport": "streamable_http", "type": "streamableHttp"}, AT | {"type": "http"}),
        ({"httpUrl": "http://h/mcp", "type": "http"}, AT | {"type": "http"}),
        ({"serverUrl": "http://h/mcp"}, AT),
        (RUN | {"disabled": True, "args": ["${GONE}"]}, None),
        (RUN | {"enabled": False}, None),
        (RUN | {"isActive": False}, None),
        (RUN | {"active": True, "args": ["--port", 80]}, RUN | {"args": ["--port", "80"]}),
        (AT | {"headers": {"N": 1, "gone": None}}, AT | {"headers": {"N": "1"}}),
        (
            RUN | {"env": {"TOKEN": "x-${TOKEN}"}, "args": ["${TOKEN}"]},
            RUN | {"env": {"TOKEN": "x-t0ken"}, "args": ["x-t0ken"]},
        ),
        (AT | {"headers": {"A": "Bearer ${file:own.token} \n"}}, AT | {"headers": {"A": "Bearer t1"}}),
        (
            RUN | {"args": ["A:${KEY}"], "env": {"KEY": "${TOKEN}"}},
            RUN | {"args": ["A:t0ken"], "env": {"KEY": "t0ken"}},
        ),
    ],
)  # fmt: skip
def test_keys_of_other_clients_have_their_meaning(
    tmp_path: Path, entry: dict[str, Any], fields: dict[str, Any] | None
) -> None:
    (tmp_path / "own.env").write_text("A='1 $X'\nB=1\n")
    (tmp_path / "own.token").write_text("t1\n")
    file = tmp_path / ".vscode" / "mcp.json"
    file.parent.mkdir()
    text = f'\ufeff// servers of "VS Code"\n{{"SECTION": {{"s": {json.dumps(entry)[:-1]}, /* "x" */ }},}},}}'
    for section in ("servers", "mcpServers"):
        file.write_text(text.replace("SECTION", section), encoding="utf-8")
        read = {
            name: server.model_dump(exclude_defaults=True) for name, server in read_servers(file, ENVIRONMENT).items()
        }
        own = json.dumps(read).replace(str(tmp_path), "FOLDER").replace(tmp_path.name, "NAME")
        assert json.loads(own) == ({} if fields is None else {"s": fields})


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (RUN | {"env": {"T": "${env:GONE}"}}, "the server 's' needs the environment variable GONE"),
        (RUN | {"args": ["${input:api key}"]}, r"has \$\{input:api key\} \(Key of the shop\), .* INPUT_API_KEY$"),
        (RUN | {"args": ["${GONE:-a ${TOKEN} b}"]}, r"has \$\{GONE:-a \$\{TOKEN\} b\}, whose default has a variable"),
        (RUN | {"args": ["${command:pick}"]}, r"has \$\{command:pick\}, which only an editor knows"),
        (RUN | {"args": ["${config:x.y}"]}, r"has \$\{config:x.y\}"),
        (RUN | {"envFile": "gone.env"}, "has 'envFile', and there is no file .*gone.env"),
        *[
            (RUN | {key: ["x"]}, f"has '{key}', which has no effect here: remove it, and select tools")
            for key in ("disabledTools", "enabledTools", "includeTools", "excludeTools", "tools")
        ],
        (RUN | {"sandbox": True}, "has 'sandbox', which has no effect here"),
        (AT | {"auth": {"id": "x"}}, "has 'auth', which has no effect here: put a token"),
        (AT | {"requestInit": {"mode": "cors", "headers": {"A": "x"}}}, "has 'requestInit'"),
        (AT | {"headers": {"A": "y"}, "requestInit": {"headers": {"A": "x"}}}, "has 'requestInit', which contradicts"),
        (AT | {"type": "http", "transport": "sse"}, "has 'transport', which contradicts"),
        (AT | {"type": "stdio"}, "has a url, which contradicts the type 'stdio'"),
        (RUN | {"type": "sse"}, "has a command, which contradicts the type 'sse'"),
        (RUN | {"headers": {"A": "x"}}, "has a command, for which 'headers' has no effect"),
        (AT | {"env": {"A": "x"}}, "has a url, for which 'env' has no effect"),
        (RUN | {"timeout": 60_000}, "timeout: 60000 is more than the 3,600 seconds of an hour"),
        (RUN | {"isActive": "no"}, "has 'isActive', which has to be true or false"),
        (RUN | {"disabled": "yes"}, "has 'disabled', which has to be true or false"),
        (RUN | {"env": {"T": "$TOKEN"}}, r"has \$TOKEN, which stays as it is: write \$\{TOKEN\}"),
        (RUN | {"env": {"T": "${TOKEN:+x}"}}, r"has \$\{TOKEN:\+x\}, whose form is unknown"),
        (AT | {"headers": {"A": "${file:gone}"}}, r"has \$\{file:gone\}, which cannot be read: FileNotFoundError"),
        (AT | {"headers": {"A": "t0ken\nB: c"}}, "the header 'A' cannot be sent: its name or value has"),
        (AT | {"headers": {"A:": "t0ken"}}, "the header 'A:' cannot be sent"),
        (RUN | {"env": {"A": "t0\0ken"}}, "a text has a null character or a lone surrogate$"),
        (RUN | {"args": ["\ud800"]}, "a text has a null character or a lone surrogate$"),
        (RUN | {"env": {"A=B": "t0ken"}}, "a variable of 'env' has an empty name, or one with an equals sign$"),
        ({"url": "ws://h/mcp"}, "has a url that does not begin with http:// or https://"),
    ],
)  # fmt: skip
def test_keys_without_a_meaning_here_are_refused_by_name(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    inputs = [{"id": "api key", "type": "promptString", "description": "Key of the shop"}]
    (tmp_path / "s.json").write_text(json.dumps({"mcp": {"servers": {"s": entry}}, "inputs": inputs}))
    with pytest.raises(ConfigurationError, match=message):
        read_servers(tmp_path / "s.json", ENVIRONMENT)


def test_two_servers_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"mcpServers": {"shop": {"command": "x"}, "shop": {"command": "y"}}}')
    with pytest.raises(ConfigurationError, match=r"s\.json: 'shop' occurs twice in one object"):
        read_servers(tmp_path / "s.json")


def test_variables_of_an_mcp_file_are_read_in_linear_time(tmp_path: Path) -> None:
    """A pattern that reads on to the end from each "${" takes minutes for this file."""
    entry = {"command": "x", "args": ["${UNSET_VARIABLE:-" * 100_000, "${UNSET_VARIABLE:-a{b}"]}
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": {"s": entry}}))
    assert read_servers(tmp_path / "s.json")["s"].args == [entry["args"][0], "a{b"]


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"command": "/gone/program"}, "'bad' does not work: .*No such file or directory"),
        (
            {"command": sys.executable, "args": ["-c", "import sys; sys.exit('no licence')"]},
            "'bad' does not work: Connection closed: no licence",
        ),
        ({"url": "http://127.0.0.1:9/mcp"}, "'bad' does not work: All connection attempts failed"),
        ({"url": "http://127.0.0.1:9/sse", "type": "sse"}, "'bad' does not work: All connection attempts failed"),
    ],
)
def test_mcp_server_that_does_not_start_raises(tmp_path: Path, server: dict[str, Any], message: str) -> None:
    (tmp_path / "s.json").write_text(json.dumps({"mcpServers": {"bad": server}}))
    with pytest.raises(ConfigurationError, match=message), open_tools([], tmp_path / "s.json"):
        pass


def test_supervisor_gets_a_specialist_per_tool_and_one_for_a_folder(tmp_path: Path) -> None:
    loaded = load_tools(["calculator", "python", f"files:{tmp_path}"])
    tools_of = {name: [tool.name for tool in tools] for name, tools in specialists(loaded).items()}
    assert tools_of == {"calculator_expert": ["calculator"], "files_expert": ["python", "read_file", "write_file"]}
    assert list(specialists(load_tools(["python"]))) == ["python_expert"]


def test_missing_package_of_a_tool_names_the_extra(tmp_path: Path) -> None:
    code = """
import sys

from lookahead_agent.agents.tool_sources import load_tools
from lookahead_agent.errors import MissingExtraError

packages = {"Stemmer": "docs:.", "bm25s": "docs:.", "chardet": "docs:.", "webencodings": "http:a.org"}
for package, source in packages.items():
    sys.modules[package] = None
    try:
        load_tools([source])
    except MissingExtraError as error:
        assert "lookahead-agent[tools]" in str(error), error
    else:
        raise AssertionError(f"no error without {package}")
    del sys.modules[package]
"""
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
