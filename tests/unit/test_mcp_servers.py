"""MCP servers that mean harm or are broken: each is one clear error, and delays nothing else."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from lookahead_agent.agents.early_calls import EarlyCallMiddleware
from lookahead_agent.agents.mcp_tools import McpServer, open_mcp_tools
from lookahead_agent.agents.prompts import describe_tools
from lookahead_agent.agents.tool_schemas import (
    check_references,
    check_tool_schema,
    describe_function,
    misfit,
    without_named_references,
)
from lookahead_agent.agents.tool_sources import open_tools
from lookahead_agent.errors import ConfigurationError

PROGRAM = str(Path(__file__).with_name("mcp_raw_server.py"))


def server(**given: Any) -> McpServer:
    return McpServer(command=sys.executable, args=["-S", PROGRAM, json.dumps(given)])


@contextmanager
def opened(seconds: float = 60, **given: Any) -> Iterator[BaseTool]:
    with open_mcp_tools({"s": server(**given)}, start_seconds=60, seconds=seconds) as tools:
        yield tools[0][1]


def call(tool: BaseTool, **arguments: Any) -> ToolMessage:
    message = tool.invoke({"name": tool.name, "args": arguments, "id": "1", "type": "tool_call"})
    assert isinstance(message, ToolMessage)
    return message


def tool_with(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "t", "description": "A tool.", "inputSchema": {"type": "object", **schema}, **more}


def doubling(levels: int) -> dict[str, Any]:
    """A schema of a few hundred bytes, which doubles with each level once its references are resolved."""
    refs = [{"a": {"$ref": f"#/$defs/n{level}"}, "b": {"$ref": f"#/$defs/n{level}"}} for level in range(levels)]
    definitions = {f"n{level + 1}": {"type": "object", "properties": ref} for level, ref in enumerate(refs)}
    return {"type": "object", "properties": refs[-1], "$defs": {"n0": {"type": "string"}, **definitions}}


def mutual(count: int) -> dict[str, Any]:
    """A schema whose definitions all refer to all others: as many paths as permutations."""
    refs = {f"p{number}": {"$ref": f"#/$defs/n{number}"} for number in range(count)}
    return {
        "type": "object",
        "properties": refs,
        "$defs": {f"n{number}": {"properties": refs} for number in range(count)},
    }


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (doubling(14), "more than 5,000 parts"),
        (mutual(9), "more than 5,000 parts"),
        ({"anyOf": [doubling(2), {"$ref": "#/anyOf/0"}] * 900}, "more than"),
        (deep(100), "more than 64 levels"),
        (deep(2_000), "nested too deeply|more than 64"),
        ({"properties": {"x": {"$ref": "http://127.0.0.1:9/x"}}}, "refers to 'http://127.0.0.1:9/x'"),
        ({"properties": {"x": {"$ref": "file:///etc/passwd"}}}, "refers to 'file:///etc/passwd'"),
        ({"properties": {"x": {"$ref": "//host/x"}}}, "refers to"),
        ({"properties": {"x": {"$ref": "#/$defs/gone"}}}, "refers to '#/[$]defs/gone'"),
        ({"properties": {"x": {"$ref": "#name"}}}, "refers to '#name'"),
        ({"properties": {"x": {"$ref": ["#"]}}}, "refers to"),
        ({"properties": {"x": {"$dynamicRef": "#name"}}, "$defs": {"a": {"$anchor": "other"}}}, "refers to '#name'"),
        ({"properties": {"x": {"$ref": "http://a/b#/x"}}, "$id": "http://a/c"}, "refers to 'http://a/b#/x'"),
        ({"$anchor": "a", "properties": {"x": {"$ref": "#a"}}, **doubling(14)}, "more than 5,000 parts"),
        ({"properties": {"x": {"enum": list(range(50_000))}}}, "more than 64 KiB"),
        ({"properties": {"x": {"description": "\ud83d"}}}, "lone surrogate"),
        ({"properties": {"\ud83d": {}}}, "lone surrogate"),
        ({"properties": {"x": 3}}, "property without a schema"),
        ({"properties": [1]}, "of an object"),
        ({"type": "string"}, "of an object"),
    ],
)  # fmt: skip
def test_schemas_that_take_long_or_lead_outside_are_refused(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_tool_schema(schema)


def test_ordinary_schemas_are_accepted() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/properties/left"}}}
    for schema in (tree, doubling(8), mutual(3), {}, {"properties": {"x": True, "y": {}}}):
        check_tool_schema(schema)
    check_references({"type": "string", "pattern": "^(a+)+$"})


@pytest.mark.parametrize(
    ("reference", "definition"),
    [
        ({"$ref": "#place"}, {"$anchor": "place"}),
        ({"$dynamicRef": "#place"}, {"$dynamicAnchor": "place"}),
        ({"$ref": "#place"}, {"$id": "#place"}),
        ({"$ref": "place.json"}, {"$id": "place.json"}),
        ({"$ref": "place.json#/properties/city/.."}, None),
        ({"$ref": "https://a/tool#/$defs/p"}, {"$id": "https://a/place"}),
    ],
)
def test_references_by_anchors_and_identifiers_lead_to_their_parts(
    reference: dict[str, Any], definition: dict[str, Any] | None
) -> None:
    place = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}}}
    schema = {
        "$id": "https://a/tool", "type": "object", "properties": {"at": {**reference, "title": "Where"}},
        "required": ["at"], "$defs": {"p": {**place, **(definition or {})}},
    }  # fmt: skip
    tool = StructuredTool(name="find", description="d", args_schema=schema, func=print)
    if definition is None:
        with pytest.raises(ConfigurationError, match="is not a part of it"):
            describe_function(tool)
    else:
        assert describe_function(tool)["parameters"]["properties"]["at"] == {**place, "title": "Where"}
        readable = StructuredTool(name="f", description="d", args_schema=without_named_references(schema), func=print)
        parameters = convert_to_openai_tool(readable)["function"]["parameters"]
        assert parameters["properties"]["at"]["properties"]["city"] == {"type": "string", "description": "Its name"}
        assert without_named_references(doubling(2)) == doubling(2)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"n": 1}, None), ({"n": 1.0}, None), ({"n": None}, None), ({"n": 1, "more": []}, None),
        ({"n": "1"}, "'n' is not of the type integer/null"), ({"n": True}, "'n' is not of the type"),
        ({}, "'n' is missing"), (None, "it has no structured content"), ([1], "it has no structured content"),
    ],
)  # fmt: skip
def test_result_is_compared_with_the_properties_of_its_schema(value: Any, problem: str | None) -> None:
    schema = {"type": "object", "properties": {"n": {"type": ["integer", "null"]}}, "required": ["n"]}
    found = misfit(value, schema)
    assert found == problem if problem is None else found is not None and problem in found
    assert misfit(value, None) is None
    assert misfit({"n": "a" * 40 + "!"}, {"properties": {"n": {"type": "string", "pattern": "^(a+)+$"}}}) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tools": 3}, "'s' does not work: tools: Input should be a valid list"),
        ({"act": "many tools"}, "'s' does not work: it has more than 1,000 tools"),
        ({"act": "pages"}, "'s' does not work: its list of tools has more than 100 pages"),
        ({"act": "endless line"}, "'s' does not work: Connection closed: it sent a message of more than 16 MiB"),
    ],
)
def test_server_with_unusable_tools_is_one_error(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as raised, opened(**given):
        pytest.fail("opened")
    assert len(str(raised.value)) < 1200


ODD_TOOLS = {
    "more than 5,000 parts": tool_with(doubling(14), name="large"),
    "refers to 'http://127.0.0.1:9": tool_with({"properties": {"x": {"$ref": "http://127.0.0.1:9/x"}}}, name="outside"),
    "a lone surrogate": tool_with({"properties": {"x": {"title": "\ud83d"}}}, name="half"),
    "depth exceeded": tool_with(deep(300), name="deep"),
    "a name has 1 to 128 characters": tool_with({}, name=""),
    "name: Field required": {"inputSchema": {"type": "object"}},
    "name: Input should be a valid string": tool_with({}, name=7),
    "more than 64 levels": tool_with(deep(70), name="levels"),
    "inputSchema.type": tool_with({"type": "string"}, name="text"),
    "inputSchema: Input should be a valid dictionary": {"name": "list", "inputSchema": []},
    "it is not an object": "tool",
    "inputSchema.properties.y": tool_with({"properties": {"y": 3}}, name="number"),
}


def test_odd_tools_are_left_out_with_a_warning_each(caplog: pytest.LogCaptureFixture) -> None:
    usable = {
        "none": {"name": "none"},
        "null": {"name": "null", "inputSchema": None},
        "true": {"name": "true", "inputSchema": True},
        "nulls": tool_with({"properties": None, "required": None}, name="nulls"),
        "untyped": {"name": "untyped", "inputSchema": {"properties": {"x": True}}},
        "listing": tool_with({}, name="listing", outputSchema={"type": "array"}),
    }
    tools = [*ODD_TOOLS.values(), *usable.values()]
    with open_mcp_tools({"s": server(tools=tools)}, start_seconds=60) as opened_tools:
        assert [tool.name for _, tool in opened_tools] == list(usable)
        assert [call(tool).text for _, tool in opened_tools] == ["fine"] * len(usable)
        assert all(describe_tools([tool]) for _, tool in opened_tools)
    for problem in ODD_TOOLS:
        found = [text for text in caplog.messages if problem in text]
        assert len(found) == 1, (problem, caplog.messages)
        assert all("the MCP server 's': its tool '" in text and len(text) < 800 for text in found)
    assert len(caplog.messages) == len(ODD_TOOLS)


def test_server_that_does_not_answer_at_its_start_is_one_error() -> None:
    with (
        pytest.raises(ConfigurationError, match=r"'s' does not work: it did not answer within 0\.5 s"),
        open_mcp_tools({"s": server(act="silent start")}, start_seconds=0.5),
    ):
        pytest.fail("opened")


class _Answers(BaseHTTPRequestHandler):
    """Answers every request with the server's `body` and `headers`."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body, headers = self.server.answer  # type: ignore[attr-defined]
        self.send_response(headers.get("status", 200))
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the client has read enough
            self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (b"[" + b" " * (17 << 20) + b"]", {}, "it sent a message of more than 16 MiB"),
        (gzip.compress(b" " * 1000, mtime=0), {"Content-Encoding": "gzip"}, "it compressed its answer"),
        (b"no message", {}, "Invalid JSON"),
        (b"{}", {"Content-Type": "text/html"}, "content type"),
        (b"", {"status": 401}, "it answered 401 Unauthorized"),
        (b"", {"status": 503, "type": "sse"}, r"503 Service Unavailable.*token=\*\*\*"),
    ],
)
def test_answers_over_http_are_bounded_and_their_status_is_named(
    body: bytes, headers: dict[str, Any], message: str
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as http:
        http.answer = body, headers  # type: ignore[attr-defined]
        Thread(target=http.serve_forever, daemon=True).start()
        try:
            url = f"http://127.0.0.1:{http.server_port}/mcp?token=hunter2"
            remote = McpServer(url=url, type=headers.get("type"))
            with pytest.raises(ConfigurationError, match=f"'s' does not work: .*{message}") as caught:
                open_mcp_tools({"s": remote}, start_seconds=60).__enter__()
            assert "hunter2" not in str(caught.value)
        finally:
            http.shutdown()


class _HalfCharacters(BaseHTTPRequestHandler):
    """An MCP server whose tools and results have lone surrogates, in JSON or, if `events` is true, in events."""

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        version = request.get("params", {}).get("protocolVersion")
        results = {
            "initialize": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": SERVER_INFO},
            "tools/list": {"tools": [tool_with({"properties": {"x": {"title": "\ud83d"}}}), tool_with({}, name="u")]},
            "tools/call": {"content": [{"type": "text", "text": "\ud83d \ude00\ud83d \ud83d\ude00 \\ud83d \u00fc"}]},
        }
        answer = {"jsonrpc": "2.0", "id": request.get("id"), "result": results.get(request["method"], {})}
        body, events = json.dumps(answer).encode(), self.server.events  # type: ignore[attr-defined]
        body = b"event: message\rdata: " + body + b"\r\r" if events else body
        self.send_response(200 if "id" in request else 202)
        self.send_header("Content-Type", "text/event-stream" if events else "application/json")
        self.send_header("Content-Length", str(len(body) if "id" in request else 0))
        self.end_headers()
        self.wfile.write(body if "id" in request else b"")

    def do_GET(self) -> None:
        self.send_error(405)

    def log_message(self, *_: object) -> None:
        pass


SERVER_INFO = {"name": "", "version": ""}


@pytest.mark.parametrize("events", [False, True])
def test_half_a_character_over_http_ends_neither_a_list_of_tools_nor_a_result(events: bool) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _HalfCharacters) as http:
        http.events = events  # type: ignore[attr-defined]
        Thread(target=http.serve_forever, daemon=True).start()
        try:
            remote = McpServer(url=f"http://127.0.0.1:{http.server_port}/mcp")
            with open_mcp_tools({"s": remote}, start_seconds=60) as tools:
                assert [tool.name for _, tool in tools] == ["t", "u"]
                assert call(tools[0][1], x=1).text == "\\ud83d \\ude00\\ud83d \U0001f600 \\ud83d \u00fc"
        finally:
            http.shutdown()


def test_description_and_output_of_a_server_are_bounded_and_printable() -> None:
    with opened(act="stderr", tools=[tool_with({}, description="\x1b[2Ja\u202eb\n" + "d" * 100_000)]) as tool:
        assert tool.description.startswith(" [2Ja b\nddd")
        assert len(tool.description) < 10_200
        assert call(tool).text == "fine"
    with opened(act="garbage") as tool:
        assert call(tool).text == "fine"


PICTURE = {"type": "image", "data": "AA==", "mimeType": "image/png"}
LINK = {"type": "resource_link", "uri": "file:///a", "name": "a"}


@pytest.mark.parametrize(
    ("texts", "data", "shown"),
    [
        (["Found 1 row."], {"rows": [{"born": 1815}]}, 'Found 1 row.\n{"rows": [{"born": 1815}]}'),
        (['{"born":1815}'], {"born": 1815}, '{"born":1815}'),
        (["1815"], {"result": 1815}, "1815"),
        (["Ada"], {"result": "Ada"}, "Ada"),
        (["1815", "1852"], {"result": [1815, 1852]}, "1815\n1852"),
        (["Ada", "Eve"], {"result": ["Ada", "Eve"]}, "Ada\nEve"),
        (["[1815, 1852]"], {"result": [1815, 1852]}, "[1815, 1852]"),
        ([], {"born": 1815}, '{"born": 1815}'),
        ([], {}, "{}"),
    ],
)  # fmt: skip
def test_structured_content_reaches_the_model_once(texts: list[str], data: Any, shown: str) -> None:
    blocks = [{"type": "text", "text": text} for text in texts]
    for is_error in (False, True):
        with opened(result={"content": blocks, "structuredContent": data, "isError": is_error}) as tool:
            assert (call(tool).text, call(tool).status) == (shown, "error" if is_error else "success")


@pytest.mark.parametrize("block", [PICTURE, LINK])
def test_structured_content_is_kept_beside_media(block: dict[str, Any]) -> None:
    with opened(result={"content": [block], "structuredContent": {"born": 1815}}) as tool:
        assert call(tool).text.endswith(')\n{"born": 1815}')


CARRIED_OUT = "the MCP server 's' has carried out the call, which need not be repeated, but"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"result": {}}, f"{CARRIED_OUT} its result cannot be read: content: Field required"),
        ({"result": {"content": [{"type": "video"}]}}, f"{CARRIED_OUT} its result cannot be read: "),
        ({"result": {"content": [{"type": "text", "text": "\ud83d"}]}}, f"{CARRIED_OUT} its result cannot be read: "),
        ({"result": 3}, f"{CARRIED_OUT} its result cannot be read: "),
        (
            {"result": {"content": [{"type": "text", "text": "paid"}], "structuredContent": {"n": "x"}}},
            f"{CARRIED_OUT} its result does not fit the tool's output schema: 'n' is not of the type integer\npaid",
        ),
        ({"result": {"content": [{"type": "text", "text": "paid"}]}}, f"{CARRIED_OUT} its result does not fit"),
    ],
)
def test_call_with_an_unreadable_result_was_carried_out(given: dict[str, Any], message: str) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "pattern": "^(a+)+$"}}}
    with opened(tools=[tool_with({}, outputSchema=schema)], **given) as tool:
        result = call(tool)
    assert result.text.startswith(message)
    assert result.status == "success", "a tool node and a model repeat what failed"


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("silent", "timed out"), ("exit", "Connection closed"),
        ("huge", "Connection closed: it sent a message of more than 16 MiB"),
        ("deep", "Connection closed: it sent a message that is nested too deeply"),
    ],
)  # fmt: skip
def test_call_without_a_result_may_have_been_carried_out(act: str, message: str) -> None:
    with opened(seconds=1 if act == "silent" else 60, act=act) as tool:
        result = call(tool, x=1)
    assert result.status == "error"
    assert result.text.startswith("the MCP server 's' gave no result, and may have carried out the call: ")
    assert result.text.endswith(message)


def test_refused_call_and_arguments_without_a_message_were_not_carried_out() -> None:
    with opened() as tool:
        for x in ("\ud83d", float("nan")):
            result = call(tool, x=x)
            assert (result.status, "did not carry out the call" in result.text) == ("error", True)
        assert call(tool, x="a").text == "fine", "the connection still works"


def test_servers_that_hang_stream_die_or_ask_a_model_hold_up_and_end_no_other() -> None:
    endless, ending = ["silent", "stream"], ["exit", "huge", "deep", "error", "asks"]
    servers = {act: server(act=act) for act in [*endless, *ending]} | {"quick": server()}
    results: dict[str, ToolMessage] = {}

    def ask(act: str) -> None:
        results[act] = call(named[act])

    with open_mcp_tools(servers, start_seconds=60, seconds=300) as tools:
        named = dict(tools)
        threads = {act: Thread(target=ask, args=(act,), daemon=True) for act in [*endless, *ending]}
        for thread in threads.values():
            thread.start()
            assert call(named["quick"]).text == "fine"
        for act in ending:
            threads[act].join(60)
            assert (act, results[act].status) == (act, "success" if act == "asks" else "error")
        assert all(threads[act].is_alive() for act in endless)
        assert call(named["quick"]).text == "fine"
    assert "not supported" in results["asks"].text
    for act in endless:
        threads[act].join(60)
        assert not threads[act].is_alive(), "the end of the connection ends its calls"


def test_tools_of_equal_names_are_named_after_their_servers(tmp_path: Path) -> None:
    def entry(*names: str) -> dict[str, Any]:
        return server(tools=[tool_with({}, name=name) for name in names]).model_dump(exclude_defaults=True)

    file = tmp_path / "s.json"
    file.write_text(
        json.dumps({"mcpServers": {"hub": entry("search", "own"), "lab": entry("search", "a.b", "a_b", "calculator")}})
    )
    with open_tools(["calculator"], file) as tools:
        assert [tool.name for tool in tools] == [
            "calculator", "hub_search", "own", "lab_search", "lab_a_b", "lab_a_b_2", "lab_calculator",
        ]  # fmt: skip
        assert call(tools[-1]).text == "fine"


def test_tools_that_only_read_start_early() -> None:
    tools = [tool_with({}, name=name, annotations=hints) for name, hints in HINTS.items()]
    with open_mcp_tools({"s": server(tools=tools)}) as opened_tools:
        loaded = [tool for _, tool in opened_tools]
        assert [tool.metadata for tool in loaded] == [{"readOnlyHint": True}, {"readOnlyHint": False}, {}]
        assert list(EarlyCallMiddleware(loaded, planner="planner", finisher="finisher").early) == ["reads"]


HINTS = {"reads": {"readOnlyHint": True}, "writes": {"readOnlyHint": False}, "unknown": {}}
