"""Lines end at a line feed and nowhere else: in files of rows, in traces, in problems, and in server-sent events."""

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
from lookahead_agent.jsonl import RowFile, append_line, read_lines, read_value
from lookahead_agent.models.cache import writable, write_atomically
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.server.errors import ErrorReplies
from lookahead_agent.server.replies import Replies
from lookahead_agent.testing import scripted_chat
from lookahead_agent.trace.recorder import TraceRecorder, read_trace
from lookahead_agent.trace.timeline import timeline, write_page
from tests.unit.serving import serving

ENDS = "\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n\ud800\ufeff"
"""What some reader or other takes for the end of a line, or cannot read at all."""
TEXTS = st.text(st.one_of(st.sampled_from(ENDS), st.characters(codec=None)))
WORST = f"one{'two'.join(ENDS)}three"


@given(st.lists(TEXTS, max_size=4))
@example([WORST, WORST])
def test_rows(texts: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = RowFile(Path(folder) / "rows.jsonl")
        file.path.touch()
        with file.writing():
            for text in texts:
                file.append({text: text})
        assert RowFile(file.path).rows == [{text: text} for text in texts]
        assert file.path.read_bytes().isascii()


@given(TEXTS)
@example(WORST)
@settings(max_examples=60)
def test_problems_that_others_wrote(text: str) -> None:
    """As they are written with `ensure_ascii=False`, with a byte order mark and Windows' ends of lines."""
    text = text.replace("\ud800", "") if any("\ud800" <= each <= "\udfff" for each in text) else text
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    row = {"question": f"q{text}", "answer": text}
    raw = json.dumps(row, ensure_ascii=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "problems.jsonl"
        for content in (f"{raw}\n", f"\ufeff{raw}\r\n\r\n", raw):
            file.write_bytes(content.encode())
            assert read_problems(file) == [Problem("1", f"q{text}", text)]


@given(TEXTS)
@example(WORST)
@settings(max_examples=60)
def test_traces(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.jsonl"
        with TraceRecorder(file) as recorder:
            recorder._add({"type": "step", "text": text})
        with TraceRecorder(file) as again:  # appended
            again._add({"type": "step", "text": text})
        assert read_trace(file) == recorder.rows + again.rows


def test_a_run_whose_words_are_separators(tmp_path: Path) -> None:
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
@example(WORST)
@settings(max_examples=60)
def test_events_for_programs_of_this_user(text: str) -> None:
    reply = ChatReply(text, text, [], [], "stop", 1, 0, [1], {text: text})
    told: list[GenerateEvent] = [TextDelta("thinking", f"{text}."), TextDelta("answer", f"{text}."), reply]
    request = GenerateRequest("1", Sampling(max_tokens=1), VerifierPolicy(verifier="off"))
    status = ServerStatus(
        pid=1, engines="", models="", reason="", context_length=1, version="", seconds=0, replies=0, running=0
    )

    async def generated() -> AsyncGenerator[GenerateEvent, None]:
        for event in told:
            yield event

    async def received() -> list[GenerateEvent]:
        replies = Replies([generated()], 1, "m", chat=True, with_events=True)
        body = "".join([event async for event in replies.events(ErrorReplies(lambda _: None))]).encode()
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
        return [event async for event in ServerBackend(status, transport).generate(request)]

    assert asyncio.run(received()) == told


@given(TEXTS)
@example(WORST)
def test_a_file_that_is_written_whole(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.md"
        write_atomically(file, text)
        assert file.read_bytes().decode() == text.encode(errors="backslashreplace").decode()
        assert list(Path(folder).iterdir()) == [file]


def test_lines() -> None:
    with pytest.raises(ValueError, match="too deeply"):
        read_value("[" * 200_000)


@pytest.mark.parametrize("text", ["", "{}\n", "{}\nb", "b", "{}\n" + "b" * 200_000, "{}" + 70_000 * " " + "\nb"])
def test_half_a_line_is_taken_off(text: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    RowFile(file).end_at_whole_line()
    assert file.read_text() == text[: text.rfind("\n") + 1]


# --- Server-sent events


async def told(chunks: list[bytes]) -> list[str]:
    async def come() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    return [data async for data in events(come())]


def cut(body: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(body), *(place % (len(body) + 1) for place in places)})
    return [body[first:last] for first, last in pairwise(edges)]


@given(
    st.lists(st.text(st.one_of(st.sampled_from("\u2028\x85\x0b\x1c:é🎉"), st.characters(codec="utf-8"))), max_size=4),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
)
@example(["one\u2028two\x85", "🎉"], "\r\n", list(range(100)), True)
@settings(max_examples=300)
def test_any_text_in_any_pieces(texts: list[str], end: str, places: list[int], mark: bool) -> None:
    texts = [" ".join(text.replace("\r", "\n").split("\n")) for text in texts]
    body = ("\ufeff" if mark else "") + "".join(f": ping{end}event: x{end}data: {text}{end}{end}" for text in texts)
    assert asyncio.run(told(cut(body.encode(), places))) == texts


@given(st.lists(st.integers(0, 10_000), max_size=8))
def test_forms_of_events(places: list[int]) -> None:
    body = (
        b"\xef\xbb\xbfdata:no space\n\ndata: one\r\ndata: two\r\n\r\n: comment\n\nid: 7\nretry: 10\n\ndata\n\n"
        b"data:  two spaces\r\rdatum: x\n\ndata: \xff\n\ndata: without an end"
    )
    expected = ["no space", "one\ntwo", "", " two spaces", "\ufffd", "without an end"]
    assert asyncio.run(told(cut(body, places))) == expected


def test_one_line_in_many_pieces_is_joined_once() -> None:
    # Joined at each piece, this would copy 200 GB.
    (data,) = asyncio.run(told([b"data: ", *[b"x" * 100] * 20_000, b"\n\n"]))
    assert len(data) == 2_000_000


@given(st.text(st.one_of(st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\n\r"), st.characters(codec="utf-8"))))
@settings(max_examples=60, deadline=None)
def test_a_remote_engines_tokens(text: str) -> None:
    event = {"choices": [{"text": text, "token_ids": [1], "finish_reason": "stop"}]}
    body = f"data: {json.dumps(event, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()

    async def received() -> list[Any]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
        server = Server(RemoteModel("http://t/v1", "m", max_retries=0), "target", transport)
        return [found async for found in server.stream("/completions", {})]

    assert asyncio.run(received()) == [event]


@pytest.mark.parametrize("data", ["{", "[" * 200_000, '{"a": ' + "1" * 5000 + "}"])
def test_events_that_cannot_be_read(data: str) -> None:
    async def received() -> list[Any]:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=f"data: {data}\n\n".encode()))
        server = Server(RemoteModel("http://t/v1", "m", max_retries=0), "target", transport)
        return [found async for found in server.stream("/completions", {})]

    with pytest.raises(EngineError, match="not JSON"):
        asyncio.run(received())


# --- Full disks


class Full(FileIO):
    """A file on a disk that takes some bytes and no more."""

    def __init__(self, path: Path, room: int) -> None:
        super().__init__(path, "ab")
        self.room = room

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = super().write(bytes(data)[: self.room])
        self.room -= written
        return written


def test_compressed_rows_are_read_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.xz"
    compressed = lzma.compress(b'{"a": 1}\n{"a": 2}\n')
    path.write_bytes(compressed)
    rows = RowFile(path)
    assert rows.rows == [{"a": 1}, {"a": 2}]
    with pytest.raises(ConfigurationError, match=r"is compressed, and only read"), rows.writing():
        pass
    assert path.read_bytes() == compressed
    for broken in (compressed[:-4], b"{}\n", compressed[:12] + b"?" * 12):
        path.write_bytes(broken)
        with pytest.raises(ConfigurationError, match=r"cannot be read: it is no whole \.xz file"):
            RowFile(path)


def test_a_digest_is_of_what_a_compressed_file_holds(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "pairs.jsonl", tmp_path / "pairs.jsonl.xz"
    plain.write_bytes(b'{"a": 1}\n')
    compressed.write_bytes(lzma.compress(b'{"a": 1}\n'))
    assert digest(compressed) == digest(plain)


@pytest.mark.parametrize("room", [0, 1, 8])
def test_what_does_not_fit_leaves_no_half_line(room: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n')
    with Full(path, room) as file, pytest.raises(OSError, match="No space left"):
        append_line(file, {"a": 2, "text": "long enough"})
    assert path.read_text() == '{"a": 1}\n'
    with Full(path, 100) as file:
        append_line(file, {"a": 3})
    assert read_lines(path) == ['{"a": 1}', '{"a": 3}', ""]


def test_rows_on_a_full_disk() -> None:
    rows = RowFile(Path("/dev/full"))
    with pytest.raises(ConfigurationError, match=r"/dev/full cannot be written: No space left on device"):
        rows.append({"a": 1})


def test_a_trace_on_a_full_disk(tmp_path: Path) -> None:
    link = tmp_path / "run.jsonl"
    link.symlink_to("/dev/full")
    llm = scripted_chat("Fine.", policy="off")
    recorder = TraceRecorder(link)
    assert llm.invoke("q", config={"callbacks": [recorder]}).text == "Fine."  # it ends no run
    with pytest.raises(ConfigurationError, match=r"run\.jsonl cannot be written: No space left on device"):
        recorder.close()
    recorder.close()
    assert [row["type"] for row in recorder.rows if row["type"] != "step"] == ["trace", "reply"]
    with pytest.raises(ZeroDivisionError), TraceRecorder(link):
        raise ZeroDivisionError
    with pytest.raises(OSError, match="No space left"):
        write_page([], link)


def test_a_trace_goes_on_after_a_row_that_was_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with TraceRecorder(file):
        pass
    file.write_bytes(file.read_bytes() + b'{"type": "st')
    with TraceRecorder(file):
        pass
    assert [row["type"] for row in read_trace(file)] == ["trace", "trace"]


def test_a_whole_file_on_a_full_disk_leaves_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "report.md"
    write_atomically(file, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # Python ignores the signal
    try:
        with pytest.raises(ConfigurationError, match=r"report\.md cannot be written: File too large"), writable(file):
            write_atomically(file, "after" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "file"
    link.symlink_to(file)
    write_atomically(link, "text")
    assert link.is_symlink()
    assert file.read_text() == "text"


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    file = tmp_path / "file"
    texts = [str(number) * 50_000 for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: write_atomically(file, text), texts * 50))
    assert file.read_text() in texts
    assert list(tmp_path.iterdir()) == [file]


def test_the_servers_events_are_ascii_and_whatever_the_reply_says_comes_whole() -> None:
    said = "one\u2028two\x85three\x1e\n\nfour\u2029\x0c."
    with serving(scripted_chat(said, policy="off")) as (url, _):
        body = {"model": "qwen2.5-coder-1.5b", "messages": [{"role": "user", "content": "?"}], "stream": True}
        response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
        assert response.content.isascii()

        async def received() -> str:
            server = Server(RemoteModel(f"{url}/v1", "m"), "target")
            try:
                found = [event async for event in server.stream("/chat/completions", body)]
            finally:
                await server.aclose()
            return "".join(event["choices"][0]["delta"].get("content") or "" for event in found if event["choices"])

        assert asyncio.run(received()) == said
