"""`bench --parity --against` holds the same conversations with several servers and reports what differs."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from lookahead_agent.bench.conversations import NamedCall, RecordedConversation, RecordedTurn, load_conversations
from lookahead_agent.bench.parity_report import ParityReport
from lookahead_agent.bench.server_client import ServerAddress, ServerClient, parse_addresses
from lookahead_agent.bench.server_parity import ServerParity, ServerReply, judge, read_replies
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving
from tests.unit.test_cli import run
from tests.unit.test_shell_lines import lines

CLOSED_PORT = "http://127.0.0.1:9/v1"
MODEL = "qwen2.5-coder-1.5b"
CONVERSATIONS = load_conversations(prefix=0)
NAMES = [str(tool["function"]["name"]) for tool in CONVERSATIONS[0].tools]
BY_LAST_MESSAGE = {turn.messages[-1]["content"]: turn for conversation in CONVERSATIONS for turn in conversation.turns}


def as_text(calls: tuple[NamedCall, ...]) -> str:
    return "\n".join(
        f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>" for name, arguments in calls
    )


def reply_as_recorded(prompt: str) -> str:
    if "What time is it?" in prompt:
        return "I cannot know."
    turn = BY_LAST_MESSAGE[prompt.rstrip().split("\n")[-1].split(": ", 1)[1]]
    if turn.names:
        return "\n".join(NAMES)
    return as_text(turn.calls or ()) or f"The answer is {turn.answer}."


class LossyReplies:
    """The recorded replies with losses: 8 of 20 names after a longer prompt, 2 of 4 calls, sums, and cancellations."""

    def __init__(self) -> None:
        self._longer: set[str] = set()

    def __call__(self, prompt: str) -> str:
        reply = reply_as_recorded(prompt)
        if (ticket := re.search(r"Ticket \d+", prompt)) is not None:
            if "Rule 1" in prompt.partition("system: ")[2]:
                self._longer.add(ticket[0])
            elif ticket[0] in self._longer:
                return "\n".join(NAMES[:8] + NAMES[16:])
        last = prompt.rstrip().split("\n")[-1]
        if "at once" in last:
            return "\n".join(reply.split("\n")[:6])
        if "Cancel" in last:
            return "It is cancelled."
        return re.sub(r"answer is (\d+)", lambda found: f"answer is {int(found[1]) + 1}", reply)


def table(report: ParityReport, title: str) -> list[dict[str, str]]:
    ((headings, rows),) = dict(report.sections())[title]
    return [dict(zip(headings, row, strict=True)) for row in rows]


def test_lost_calls_of_a_server_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # The page's first command; a later one has its own files and models.
    line = next(line for line in lines("lookahead-agent") if " --against plain=" in line and "speculative=" in line)
    _, *arguments = shlex.split(line)
    models = scripted_chat(reply_as_recorded, policy="off"), scripted_chat(LossyReplies(), policy="off")
    with serving(models[0]) as (plain, _), serving(models[1]) as (lossy, _):
        addresses = {"plain": f"plain={plain}/v1", "speculative": f"speculative={MODEL}@{lossy}/v1"}
        arguments = [addresses.get(word.partition("=")[0], word) for word in arguments]
        options = ["--limit", "4", "--samples", "1", "--concurrency", "2", "--prefix", "0"]
        assert run(*arguments, *options) == 1
    shown = capsys.readouterr().out
    assert re.search("speculative is worse than plain: .*accuracy", shown)
    report = ParityReport(read_replies(RowFile(Path("results/parity.jsonl")).rows))
    each = {(row["task"], row["server"]): row for row in table(report, "each server")}
    assert {row["replies"] for key, row in each.items() if key[0] == "all"} == {"12"}
    assert each["all", "plain"]["recorded calls"].startswith("100%")
    assert [each["all", server]["calls"] for server in ("plain", "speculative")] == ["10", "6"]
    assert [each["all", server]["missing"] for server in ("plain", "speculative")] == ["0", "4"]
    assert [each["calls at once", server]["recorded calls"] for server in ("plain", "speculative")] == ["100%", "0%"]
    assert [each["repeated prompt", server]["tools named"] for server in ("plain", "speculative")] == ["100%", "87%"]
    named = [reply.named for reply in report.replies if reply.names and reply.server == "speculative"]
    assert named == [20, 20, 12], "as in vllm-project/vllm#43559"
    assert [each["turns", server]["accuracy"] for server in ("plain", "speculative")] == [
        "100% (100 to 100)",
        "0% (0 to 0)",
    ]
    assert (each["all", "plain"]["differs from itself"], each["all", "speculative"]["differs from itself"]) == (
        "0%",
        "100%",
    ), "the repeated prompt has another reply"
    (against,) = table(report, "against plain")
    assert (against["turns"], against["accuracy"]) == ("12", "-100.0 (-100.0 to -100.0)")
    assert "accuracy" in against["worse"]
    calls = {row["calls of"]: (row["plain"], row["speculative"]) for row in table(report, "calls")}
    assert calls == {
        "cancel_order": ("2", "0"),
        "get_order": ("2", "2"),
        "get_stock": ("4", "2"),
        "list_invoices": ("2", "2"),
        "all tools": ("10", "6"),
    }
    first = table(report, "first difference of speculative")
    assert [row["server"] for row in first] == ["plain", "speculative"]
    assert ["cancel_order" in row["own-1 (turns), turn 4, sample 1"] for row in first] == [True, False]
    for suffix in (".md", ".csv"):
        assert run("bench", "report", "results/parity.jsonl", "-o", f"report{suffix}") == 0
        assert "speculative" in Path(f"report{suffix}").read_text()


def test_a_single_server_is_compared_with_the_local_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = (line for line in lines("lookahead-agent") if " --against mine=" in line)
    local = partial(scripted_chat, reply_as_recorded)
    with serving(scripted_chat(reply_as_recorded)) as (url, _):
        arguments = [f"mine={url}/v1" if "=" in word else word for word in shlex.split(line)[1:]]
        arguments += ["--limit", "2", "--samples", "1", "--prefix", "0", "--out", "rows.jsonl"]
        assert run(*arguments, chat_class=local) == 0
        assert "0 of 14 replies are in rows.jsonl" in capsys.readouterr().err
        assert run(*arguments, chat_class=local) == 0
        assert "14 of 14 replies are in rows.jsonl" in capsys.readouterr().err
        assert run(*arguments, "--seed", "1", chat_class=local) == 2
        assert "results of other servers or settings" in capsys.readouterr().err
    assert Counter(row["server"] for row in RowFile(Path("rows.jsonl")).rows) == {"local": 7, "mine": 7}


COMPLETION = {
    "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 9, "completion_tokens": 1},
}


def client(handle: Callable[[httpx.Request], httpx.Response], address: str = "one=http://a/v1") -> ServerClient:
    (parsed,) = parse_addresses([address])
    return ServerClient(parsed, httpx.AsyncClient(transport=httpx.MockTransport(handle)))


def respond(
    models: Any = ("m",), chat: Any = None, status: int = 200, without_tools: Any = None
) -> Callable[[httpx.Request], httpx.Response]:
    """A server: the names that it lists, or a response, and its replies to requests with and without tools."""

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            if isinstance(models, httpx.Response):
                return models
            return httpx.Response(200, json={"data": [{"id": name} for name in models]})
        has_tools = "tools" in json.loads(request.content)
        if isinstance(chat, httpx.Response) and has_tools:
            return chat
        tokens = {"prompt_tokens": 90 if has_tools and without_tools is None else 9}
        return httpx.Response(status, json=COMPLETION | {"usage": tokens})

    return handle


PAGE = httpx.Response(200, text="<html>", headers={"Content-Type": "text/html"})
NO_PARSER = httpx.Response(400, json={"error": {"message": '"auto" tool choice requires\n--enable-auto-tool-choice'}})


@pytest.mark.parametrize(
    ("address", "handle", "message"),
    [
        ("one=http://a/v1", respond(models=httpx.Response(401)), r"refuses the API key \(401\): set ONE_API_KEY"),
        ("my-gpu=http://a/v1", respond(models=httpx.Response(403)), "set MY_GPU_API_KEY"),
        ("one=http://a", respond(models=httpx.Response(404)), "correct the URL, which usually ends with /v1"),
        ("one=http://a/v1", respond(models=PAGE), "lists no models: end the URL with /v1"),
        ("one=http://a/v1", respond(models=("a", "b")), "lists these models: a, b. Choose one with NAME=MODEL@URL"),
        ("one=http://a/v1", respond(models=()), "lists these models: none"),
        ("one=c@http://a/v1", respond(models=("a", "b")), "has no model 'c': choose of a, b"),
        ("one=http://a/v1", respond(chat=NO_PARSER), "refuses a request with a tool .*: vLLM needs --enable-auto"),
        ("one=http://a/v1", respond(chat=httpx.Response(401)), "refuses the API key"),
        ("one=http://a/v1", respond(chat=PAGE), "something else than JSON"),
        ("one=http://a/v1", respond(chat=httpx.Response(200, json={"choices": []})), "not with a chat completion"),
        ("one=http://a/v1", respond(without_tools=True), "does not put tools into the prompt"),
    ],
)
def test_unusable_server_is_one_error(address: str, handle: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as failure:
        background.run(client(handle, address).check())
    assert "\n" not in str(failure.value)


def test_a_server_needs_the_chat_endpoint_alone_if_its_model_is_named() -> None:
    for models in (httpx.Response(404), PAGE):
        server = client(respond(models=models), "one=org/m:7b@http://a/v1/")
        background.run(server.check())
        assert (server.model, server.address.url) == ("org/m:7b", "http://a/v1")


def test_a_server_gets_the_key_of_its_own_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    monkeypatch.setenv("TWO_API_KEY", "of-two")
    keys = []

    def handle(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["Authorization"])
        return respond()(request)

    for address in ("one=http://a/v1", "two=http://a/v1"):
        background.run(client(handle, address).check())
    assert Counter(keys) == {"Bearer none": 3, "Bearer of-two": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against", "http://a/v1"], "is not a server: write it as in plain="),
        (["--against", "one=a:8000"], "is not a server"),
        (["--against", "one=http://a/v1", "--against", "ONE=http://b/v1"], "a name of its own"),
        (["--against", f"one={CLOSED_PORT}"], "does not answer"),
        (["--against", f"one={CLOSED_PORT}", "--modes", "off"], "no use for --modes"),
        (["--against", "one=http://a", "--against", "two=http://b", "--model", "m"], "no use for --model"),
        (["--against", f"one={CLOSED_PORT}", "--dataset", "missing.jsonl"], "no dataset missing.jsonl"),
        (["--against", f"one={CLOSED_PORT}", "--skip", "99"], "no conversation after the first 99"),
        (["--prefix", "5"], "--parity --against NAME=URL"),
    ],
)
def test_invalid_comparison_is_one_error_before_a_model_loads(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "--parity", *arguments, chat_class=lambda **_: pytest.fail("a model loads")) == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", "").split())


def test_against_without_parity_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("bench", "--against", f"one={CLOSED_PORT}") == 2
    assert "--parity" in capsys.readouterr().err


def hold(out: Path, *servers: ServerClient, limit: int = 2, samples: int = 1) -> list[ServerReply]:
    for server in servers:
        server.model = "m"
    conversations = load_conversations(limit=limit, prefix=0)
    sampling = {"max_tokens": 5}
    rows = RowFile(out)
    return ServerParity(servers, conversations, rows, samples=samples, concurrency=1, sampling=sampling).run()


def test_lost_server_ends_the_run_and_the_same_run_continues(tmp_path: Path) -> None:
    requests: list[str] = []

    def fail_after(limit: int) -> Callable[[httpx.Request], httpx.Response]:
        def handle(request: httpx.Request) -> httpx.Response:
            if len(requests) >= limit:
                raise httpx.ConnectError("refused")
            requests.append(json.loads(request.content)["messages"][-1]["content"])
            return httpx.Response(200, json=COMPLETION)

        return handle

    out = tmp_path / "rows.jsonl"
    server = client(fail_after(5))
    server._client = server._client.with_options(max_retries=0)
    with pytest.raises(EngineError, match=r"one: http://a/v1 does not answer any more .* continues"):
        hold(out, server)
    assert [row["turn"] for row in RowFile(out).rows] == [0, 1, 2], "the conversation that was complete"
    requests.clear()
    assert len(hold(out, client(fail_after(99)))) == 7
    assert len(requests) == 4, "the interrupted conversation alone, from its beginning"
    rows = RowFile(out).rows
    out.write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert len(hold(out, client(fail_after(99)))) == 7
    assert len(requests) == 8, "its rows replace those of the first time"


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(500, json={"error": {"message": "the engine\ndied"}}), "500: the engine died"),
        (httpx.Response(400, json={"error": {"message": "too long"}}), "400: too long"),
        (httpx.Response(200, json={"error": "x"}), "no chat completion: KeyError"),
        (httpx.Response(200, text="{"), "no chat completion: JSONDecodeError"),
        (httpx.Response(200, json=[]), "no chat completion: TypeError"),
        (httpx.Response(200, json={"choices": [{"message": {"tool_calls": [3]}}]}), "no chat completion: TypeError"),
    ],
)
def test_failed_request_is_a_result(tmp_path: Path, response: httpx.Response, error: str) -> None:
    server = client(lambda _: response)
    server._client = server._client.with_options(max_retries=0)
    good = client(lambda _: httpx.Response(200, json=COMPLETION), "two=http://b/v1")
    replies = hold(tmp_path / "rows.jsonl", good, server, limit=1)
    failed = [reply for reply in replies if reply.server == "one"]
    assert all(reply.error is not None and reply.error.startswith(error) for reply in failed)
    (row,) = table(ParityReport(replies), "against two")
    assert (row["other bytes"], row["failed"]) == ("100%", "+1.000")


@pytest.mark.parametrize("status", [401, 404])
def test_key_or_model_that_is_refused_later_ends_the_run(tmp_path: Path, status: int) -> None:
    with pytest.raises(EngineError, match="refuses requests now"):
        hold(tmp_path / "rows.jsonl", client(lambda _: httpx.Response(status)))


RECORDED = (("get_stock", {"product_id": "P-1", "shop": {"a": 1, "b": [2]}}), ("get_order", {"order_id": "A-1"}))
STOCK = ("get_stock", '{"shop": {"b": [2], "a": 1}, "product_id": "P-1"}')
ORDER = ("get_order", '{"order_id": "A-1"}')


@pytest.mark.parametrize(
    ("calls", "content", "expected"),
    [
        ([STOCK, ORDER], "", (True, 0, 0, 0)),
        ([ORDER, STOCK], "So.", (True, 0, 0, 0)),
        ([STOCK], "", (False, 1, 0, 0)),
        ([], "", (False, 2, 0, 0)),
        ([STOCK, ORDER, ORDER], "", (False, 0, 1, 0)),
        ([STOCK, ("get_order", '{"order_id": "A-2"}')], "", (False, 0, 0, 0)),
        ([STOCK, ("get_order", '{"order_id": ')], "", (False, 0, 0, 1)),
        ([STOCK, ("get_order", "[]")], "", (False, 0, 0, 1)),
        ([STOCK, ("get_ordr", "{}")], "", (False, 1, 1, 1)),
        ([STOCK], "<tool_call>\n{}", (False, 1, 0, 1)),
        ([STOCK, ORDER], "<function=get_order>", (False, 0, 0, 1)),
    ],
)
def test_calls_are_compared_with_the_recorded_ones(
    calls: list[tuple[str, str]], content: str, expected: tuple[bool, int, int, int]
) -> None:
    turn = RecordedTurn(({"role": "user", "content": "?"},), RECORDED, "4")
    conversation = RecordedConversation("c", "t", CONVERSATIONS[0].tools, (turn,))
    reply = ServerReply(
        server="s", position=0, url="u", model="m", conversation="c", task="t", sample=0, turn=0, turns=1, request="r",
        content=content, calls=calls,
    )  # fmt: skip
    found = reply.model_copy(update=judge(reply, conversation, turn))
    assert (found.recorded, found.missing, found.extra, found.malformed) == expected
    assert found.correct is False


def test_recorded_conversations_are_read_from_a_file(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "get_order", "arguments": '{"order_id": "A-1"}'}}
    messages: list[Any] = [
        {"role": "user", "content": "How much is order A-1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "12"},
    ]
    row = {"id": "x", "messages": messages, "tools": [dict(CONVERSATIONS[0].tools[0])], "answer": "12"}
    file = tmp_path / "recorded.jsonl"
    last = {**row, "id": "y", "messages": [*messages, {"role": "assistant", "content": "12."}]}
    file.write_text(f"{json.dumps(row)}\n\n{json.dumps(last)}\n")
    first, second = load_conversations(str(file))
    assert [(len(turn.messages), turn.calls, turn.answer) for turn in first.turns] == [
        (1, (("get_order", {"order_id": "A-1"}),), None),
        (3, None, "12"),
    ]
    assert second.turns[-1].calls == (), "the recorded reply has no call"
    with pytest.raises(ConfigurationError, match="--prefix has no effect"):
        load_conversations(str(file), prefix=3)
    for broken in (
        {**row, "tools": []},
        {**row, "messages": [{"content": "?"}]},
        {"question": "?"},
        {**row, "answer": "none of them"},
    ):
        file.write_text(json.dumps(broken))
        with pytest.raises(ConfigurationError, match="line 1 is not a conversation with `messages` and `tools`"):
            load_conversations(str(file))
    file.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n")
    with pytest.raises(ConfigurationError, match="line 2: there is another conversation 'x'"):
        load_conversations(str(file))


def test_packaged_conversations_have_recorded_calls_with_known_tools_and_long_prefixes() -> None:
    conversations = load_conversations()
    assert len({conversation.id for conversation in conversations}) == 24
    for conversation in conversations:
        for turn in conversation.turns:
            assert turn.calls is not None
            assert {name for name, _ in turn.calls} <= conversation.tool_names
    descriptions = [tool["function"]["description"] for tool in conversations[0].tools]
    assert sum(map(len, descriptions)) >= 16_000
    first, longer, again = conversations[0].turns
    assert first == again
    assert len(longer.messages[0]["content"]) - len(first.messages[0]["content"]) >= 8192
    assert parse_addresses(["a=m@http://h/v1"]) == [ServerAddress("a", "http://h/v1", "m")]
