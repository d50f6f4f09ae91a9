"""`lookahead-agent bench --parity --against`: compares servers with each other, or with the local model."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from lookahead_agent.bench.conversations import RecordedConversation
from lookahead_agent.bench.parity_report import ParityReport
from lookahead_agent.bench.server_parity import ServerParity, ServerReply
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.cli.terminal import ProgressBars, Terminal
from lookahead_agent.errors import extra_imports
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile

if TYPE_CHECKING:  # imported on demand: its package is an extra
    from lookahead_agent.bench.server_client import ServerClient

_LOCAL_URL = "http://localhost/v1"  # address of a server in this process
_CONVERSATIONS_AT_ONCE = 8  # so that a server has batches, and prompts that share a prefix at once


def compare_servers(
    against: Sequence[str],
    conversations: Sequence[RecordedConversation],
    local_model: Callable[[], ChatLookahead],
    out: Path,
    *,
    samples: int,
    concurrency: int | None,
    sampling: Mapping[str, Any],
) -> ParityReport:
    """Hold conversations with servers.

    Args:
        against: The servers, as `parse_addresses` reads them. A single one is compared with the local model.
        conversations: Held with each server.
        local_model: Creates the local model, if it is needed.
        out: File of the rows.
        samples: Number of times that each conversation is held.
        concurrency: Conversations at once with each server; None: the default.
        sampling: Fields of each request.
    """
    from lookahead_agent.bench.server_client import ServerClient, parse_addresses

    rows, log = RowFile(out), Terminal(stderr=True)
    with ExitStack() as stack:
        servers = [ServerClient(address) for address in parse_addresses(against)]
        stack.callback(lambda: [background.run(server.close()) for server in servers])
        for server in servers:
            background.run(server.check())
        if len(servers) == 1:
            servers.insert(0, stack.enter_context(_serve_local(local_model())))
        limit = concurrency or _CONVERSATIONS_AT_ONCE
        benchmark = ServerParity(servers, conversations, rows, samples=samples, concurrency=limit, sampling=sampling)
        done = benchmark.total - benchmark.missing
        log.print(f"{done} of {benchmark.total} replies are in {out}")

        def on_conversation(replies: list[ServerReply]) -> None:
            nonlocal done
            done += len(replies)
            calls = sum(len(reply.calls) for reply in replies)
            failed = "".join(f", failed: {reply.error}" for reply in replies if reply.error)
            log.print(f"{done}/{benchmark.total} {replies[0].conversation} {replies[0].server}: {calls} calls{failed}")

        return ParityReport(benchmark.run(on_conversation))


@contextmanager
def _serve_local(llm: ChatLookahead) -> Iterator["ServerClient"]:
    """Load the local model, and yield a client of the library's own server, which listens on no port."""
    from lookahead_agent.bench.server_client import ServerAddress, ServerClient

    with extra_imports("a comparison with the local model needs: pip install 'lookahead-agent[server]'"):
        from lookahead_agent.server.app import create_app
    with llm:
        llm.start(ProgressBars())
        client = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(llm)), timeout=None)
        server = ServerClient(ServerAddress("local", _LOCAL_URL), client)
        background.run(server.check())
        yield server
