"""Row files, traces, problem files and server-sent events keep any text and split only at their own line ends."""

from __future__ import annotations

import asyncio
import errno
import json
import lzma
import resource
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lookahead_agent.bench.problems import Problem, read_problems
from lookahead_agent.certificates.certificate import digest
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.servers import RemoteModel, Server, events
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.generation.backend import ChatReply, GenerateEvent, GenerateRequest, TextDelta
from lookahead_agent.generation.server_backend import ServerBackend, ServerStatus
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.server.errors import ErrorReplies
from lookahead_agent.server.replies import Replies
from lookahead_agent.system.files import writable, write_atomically
from lookahead_agent.system.jsonl import RowFile, append_line, read_lines, read_value
from lookahead_agent.testing import scripted_chat
from lookahead_agent.trace.recorder import TraceRecorder, read_trace
from lookahead_agent.trace.timeline import timeline, write_page
from tests.unit.serving import serving

SEPARATORS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n\ud800\ufeff"
"""Characters that some readers take for line ends, a lone surrogate, and a byte order mark."""
TEXTS = st.text(st.one_of(st.sampled_from(SEPARATORS), st.characters(codec=None)))
EVERY_SEPARATOR = f"one{'two'.join(SEPARATORS)}three"


@given(st.lists(TEXTS, max_size=4))
@example([EVERY_SEPARATOR, EVERY_SEPARATOR])
def test_appended_rows_are_ascii_and_read_back_unchanged(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = RowFile(Path(folder) / "rows.jsonl")
        file.path.touch()
        with file.open_for_writing():
            for text in texts:
                file.append({text: text})
        assert RowFile(file.path).rows == [{text: text} for text in texts]
        assert file.path.read_bytes().isascii()


@given(TEXTS)
@example(EVERY_SEPARATOR)
@settings(max_examples=60)
def test_problem_files_of_other_programs_are_read(text: str) -> None:
    """Files written with `ensure_ascii=False`, with a byte order mark, and with Windows line ends."""
    text = text.replace("\ud800", "") if any("\ud800" <= each <= "\udfff" for each in text) else text
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    row = {"question": f"q{text}", "check": {"text": [text]}}
    raw = json.dumps(row, ensure_ascii=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problems.jsonl"
        for content in (f"{raw}\n", f"\ufeff{raw}\r\n\r\n", raw):
            file.write_bytes(content.encode())
            assert read_problems(file) == [Problem("1", f"q{text}", None, check={"text": [text]})]


@given(TEXTS)
@example(EVERY_SEPARATOR)
@settings(max_examples=60)
def test_trace_rows_of_two_recorders_are_read_back_unchanged(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        with TraceRecorder(file) as recorder:
            recorder._add({"type": "step", "text": text})
        with TraceRecorder(file) as second_recorder:  # appends to the same file
            second_recorder._add({"type": "step", "text": text})
        assert read_trace(file) == recorder.rows + second_recorder.rows


def test_reply_with_separators_is_unchanged_in_its_trace_and_escaped_in_its_page(tmp_path: Path) -> None:
    llm = scripted_chat("one\u2028two\x85.\n\nthree\x1e.", policy="balanced:depth=2")
    with TraceRecorder(tmp_path / "run.jsonl") as recorder:
        llm.invoke("q", config={"callbacks": [recorder]})
    rows = read_trace(tmp_path / "run.jsonl")
    assert rows == json.loads(json.dumps(recorder.rows))
    calls = timeline(rows)
    assert calls[0].text == "one\u2028two\x85.\n\nthree\x1e."
    calls[0].text = "\ud800</script>"
    write_page(calls, tmp_path / "run.html")
    assert r"\ud800\u003c/script>" in (tmp_path / "run.html").read_text(encoding="utf-8")


@given(TEXTS)
@example(EVERY_SEPARATOR)
@settings(max_examples=60)
def test_daemon_events_round_trip_to_the_server_backend(text: str) -> None:
    reply = ChatReply(text, text, [], [], "stop", 1, 0, [1], {text: text})
    sent_events: list[GenerateEvent] = [TextDelta("thinking", f"{text}."), TextDelta("answer", f"{text}."), reply]
    request = GenerateRequest("1", Sampling(max_tokens=1), VerifierPolicy(verifier="off"))
    status = ServerStatus(
        pid=1, engines="", models="", reason="", context_length=1, version="", seconds=0, replies=0, running=0
    )

    async def generated() -> AsyncGenerator[GenerateEvent, None]:
        for event in sent_events:
            yield event

    async def received() -> list[GenerateEvent]:
        replies = Replies([generated()], 1, "m", chat=True, with_events=True)
        body = "".join([event async for event in replies.events(ErrorReplies(lambda _: None))]).encode()
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
        backend, events, last = ServerBackend(status, transport), list[GenerateEvent](), list[GenerateEvent]()
        await backend.emit_reply(request, events.append)
        await backend.emit_reply(request, last.append, kinds=())
        assert last == [reply], "events of other kinds stay behind"
        return events

    assert asyncio.run(received()) == sent_events


@given(TEXTS)
@example(EVERY_SEPARATOR)
def test_write_atomically_writes_any_text_and_leaves_no_temporary_file(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.md"
        write_atomically(file, text)
        assert file.read_bytes().decode() == text.encode(errors="backslashreplace").decode()
        assert list(Path(folder).iterdir()) == [file]


def test_read_value_rejects_deep_nesting() -> None:
    with pytest.raises(ValueError, match="too deeply"):
        read_value("[" * 200_000)


@pytest.mark.parametrize("text", ["", "{}\n", "{}\nb", "b", "{}\n" + "b" * 200_000, "{}" + 70_000 * " " + "\nb"])
def test_incomplete_last_line_is_removed(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    RowFile(file).end_at_whole_line()
    assert file.read_text() == text[: text.rfind("\n") + 1]


# --- Server-sent events


async def parsed_events(chunks: list[bytes]) -> list[str]:
    async def stream() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [data async for data in events(stream())]


def split(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(body), *(cut % (len(body) + 1) for cut in cuts)})
    return [body[first:last] for first, last in pairwise(edges)]


@given(
    st.lists(st.text(st.one_of(st.sampled_from("\u2028\x85\x0b\x1c:é🎉"), st.characters(codec="utf-8"))), max_size=4),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
)
@example(["one\u2028two\x85", "🎉"], "\r\n", list(range(100)), True)
@settings(max_examples=300)
def test_events_with_any_text_are_parsed_in_any_chunks(texts: list[str], end: str, cuts: list[int], bom: bool) -> None:
    texts = [" ".join(text.replace("\r", "\n").split("\n")) for text in texts]
    body = ("\ufeff" if bom else "") + "".join(f": ping{end}event: x{end}data: {text}{end}{end}" for text in texts)
    assert asyncio.run(parsed_events(split(body.encode(), cuts))) == texts


@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_every_form_of_event_is_parsed_in_any_chunks(cuts: list[int]) -> None:
    body = (
        b"\xef\xbb\xbfdata:no space\n\ndata: one\r\ndata: two\r\n\r\n: comment\n\nid: 7\nretry: 10\n\ndata\n\n"
        b"data:  two spaces\r\rdatum: x\n\ndata: \xff\n\ndata: without an end"
    )
    expected = ["no space", "one\ntwo", "", " two spaces", "\ufffd", "without an end"]
    assert asyncio.run(parsed_events(split(body, cuts))) == expected


def test_line_of_many_chunks_is_parsed_whole() -> None:
    (data,) = asyncio.run(parsed_events([b"data: ", *[b"x" * 100] * 20_000, b"\n\n"]))
    assert len(data) == 2_000_000


@given(st.text(st.one_of(st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\n\r"), st.characters(codec="utf-8"))))
@settings(max_examples=60, deadline=None)
def test_remote_engine_events_may_contain_separators(text: str) -> None:
    event = {"choices": [{"text": text, "token_ids": [1], "finish_reason": "stop"}]}
    body = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()

    async def received() -> list[Any]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
        server = Server(RemoteModel("http://t/v1", "m", max_retries=0), "target", transport)
        return [parsed async for parsed in server.stream("/completions", {})]

    assert asyncio.run(received()) == [event]


@pytest.mark.parametrize("data", ["{", "[" * 200_000, '{"a": ' + "1" * 5000 + "}"])
def test_unparsable_event_of_a_server_raises_engine_error(data: str) -> None:
    async def received() -> list[Any]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=f"data: {data}\n\n".encode()))
        server = Server(RemoteModel("http://t/v1", "m", max_retries=0), "target", transport)
        return [parsed async for parsed in server.stream("/completions", {})]

    with pytest.raises(EngineError, match="not JSON"):
        asyncio.run(received())


# --- Compressed files, full disks and atomic writes


class FullDiskFile(FileIO):
    """A file on a disk with room for `free_bytes` more bytes."""

    def __init__(self, path: Path, free_bytes: int) -> None:
        super().__init__(path, "ab")
        self.free_bytes = free_bytes

    def write(self, data: Any) -> int:
        if self.free_bytes == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(data)[: self.free_bytes])
        self.free_bytes -= written
        return written


def test_compressed_row_file_is_read_only_and_rejected_if_damaged(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.xz"
    compressed = lzma.compress(b'{"a": 1}\n{"a": 2}\n')
    path.write_bytes(compressed)
    rows = RowFile(path)
    assert rows.rows == [{"a": 1}, {"a": 2}]
    with pytest.raises(ConfigurationError, match=r"is compressed, and only read"), rows.open_for_writing():
        pass
    assert path.read_bytes() == compressed
    for broken in (compressed[:-4], b"{}\n", compressed[:12] + b"?" * 12):
        path.write_bytes(broken)
        with pytest.raises(ConfigurationError, match=r"cannot be read: it is not a whole \.xz file"):
            RowFile(path)


def test_digest_of_a_compressed_file_is_that_of_its_content(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl.xz"
    plain.write_bytes(b'{"a": 1}\n')
    compressed.write_bytes(lzma.compress(b'{"a": 1}\n'))
    assert digest(compressed) == digest(plain)


@pytest.mark.parametrize("free_bytes", [0, 1, 8])
def test_failed_append_leaves_no_partial_line(free_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    with FullDiskFile(path, free_bytes) as file, pytest.raises(OSError, match="No space left"):
        append_line(file, {"a": 2, "text": "long enough"})
    assert path.read_text() == '{"a": 1}\n'
    with FullDiskFile(path, 100) as file:
        append_line(file, {"a": 3})
    assert read_lines(path) == ['{"a": 1}', '{"a": 3}', ""]


def test_row_on_a_full_disk_raises_configuration_error() -> None:
    rows = RowFile(Path("/dev/full"))
    with pytest.raises(ConfigurationError, match=r"/dev/full cannot be written: No space left on device"):
        rows.append({"a": 1})


def test_full_disk_fails_when_a_trace_is_closed_and_not_during_the_run(tmp_path: Path) -> None:
    link = tmp_path / "run.jsonl"
    link.symlink_to("/dev/full")
    llm = scripted_chat("Fine.", policy="off")
    recorder = TraceRecorder(link)
    assert llm.invoke("q", config={"callbacks": [recorder]}).text == "Fine."  # the run goes on
    with pytest.raises(ConfigurationError, match=r"run\.jsonl cannot be written: No space left on device"):
        recorder.close()
    recorder.close()
    assert [row["type"] for row in recorder.rows if row["type"] != "step"] == ["trace", "reply"]
    with pytest.raises(ZeroDivisionError), TraceRecorder(link):
        raise ZeroDivisionError
    with pytest.raises(OSError, match="No space left"):
        write_page([], link)


def test_recorder_appends_after_a_truncated_row(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with TraceRecorder(file):
        pass
    file.write_bytes(file.read_bytes() + b'{"type": "st')
    with TraceRecorder(file):
        pass
    assert [row["type"] for row in read_trace(file)] == ["trace", "trace"]


def test_failed_atomic_write_keeps_the_previous_file(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    write_atomically(file, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores SIGXFSZ
    try:
        with pytest.raises(ConfigurationError, match=r"report\.md cannot be written: File too large"), writable(file):
            write_atomically(file, "after" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_atomic_write_to_a_link_keeps_the_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    write_atomically(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"


def test_concurrent_atomic_writes_leave_one_complete_file(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    file = tmp_path / "file"
    texts = [str(number) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(file, text), texts * 50))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


def test_server_events_are_ascii_and_keep_the_separators_of_a_reply() -> None:
    reply_text = "one\u2028two\x85three\x1e\n\nfour\u2029\x0c."
    with serving(scripted_chat(reply_text, policy="off")) as (url, _):
        body = {"model": "qwen2.5-coder-1.5b", "messages": [{"role": "user", "content": "?"}], "stream": True}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert response.content.isascii()

        async def received() -> str:
            server = Server(RemoteModel(f"{url}/v1", "m"), "target")
            try:
                parsed = [event async for event in server.stream("/chat/completions", body)]
            finally:
                await server.aclose()
            return "".join(event["choices"][0]["delta"].get("content") or "" for event in parsed if event["choices"])

        assert asyncio.run(received()) == reply_text
