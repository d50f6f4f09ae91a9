"""Holds the same conversations with several OpenAI-compatible servers, and records what each replied."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead_agent.bench.answers import is_correct
from lookahead_agent.bench.conversations import NamedCall, RecordedConversation, RecordedTurn, count_by_name, parse_call
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import Row, RowFile

if TYPE_CHECKING:  # its package is an extra
    from lookahead_agent.bench.server_client import ServerClient

SCHEMA = 1
KIND: Literal["server reply"] = "server reply"

_MARKUP = re.compile(r"</?tool_call|<function=|<\|tool_call|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool▁call")
"""The beginning of a call in the formats of known models: in a reply's text, it is a call that was not parsed."""


class ServerReply(BaseModel):
    """A row: the reply of one server to one turn."""

    model_config = ConfigDict(allow_inf_nan=False)

    schema_version: int = SCHEMA
    kind: Literal["server reply"] = KIND
    server: str
    position: int = Field(ge=0)  # place of the server in the command; the others are compared with the first
    url: str
    model: str
    conversation: str
    task: str
    sample: int
    turn: int
    turns: int  # number of turns of the conversation
    request: str  # fingerprint of messages and tools
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = Field(default_factory=list)  # name and arguments, as written
    finish_reason: str | None = None
    recorded: bool | None = None  # whether the calls are the recorded ones; None: those are unknown
    missing: int = 0  # calls of tools that the recorded calls have more often
    extra: int = 0  # the same of the reply
    malformed: int = 0  # calls with invalid arguments or an unknown tool, and calls left in the text
    named: int | None = None  # names of tools in the reply, of `names` that it should have; None: not asked for
    names: int = 0
    correct: bool | None = None  # whether it ends with the answer; None: there is none
    prompt_tokens: int | None = None  # None: the server does not tell, as for the next two
    cached_tokens: int | None = None
    output_tokens: int | None = None
    seconds: float = 0.0
    error: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @property
    def text(self) -> str:
        """Everything that the server wrote, to be compared byte for byte."""
        calls = "".join(f"\n{name}({arguments})" for name, arguments in self.calls)
        return f"{self.reasoning}\n{self.content}{calls}" if self.error is None else f"error: {self.error}"

    @property
    def parsed_calls(self) -> list[NamedCall]:
        """The calls, whose arguments are equal if they are the same JSON object."""
        return [parse_call({"name": name, "arguments": arguments}) for name, arguments in self.calls]


def read_replies(rows: Sequence[Mapping[str, Any]]) -> list[ServerReply]:
    """Parse rows, without those of conversations that were held again; raises ConfigurationError for invalid rows."""
    replies: dict[tuple[str, str, int, int], ServerReply] = {}
    for number, row in enumerate(rows, 1):
        try:
            reply = ServerReply.model_validate(row)
        except ValidationError as error:
            reason = validation_message(error)
            raise ConfigurationError(f"row {number} is not a reply of `bench --parity --against`: {reason}") from error
        if reply.schema_version != SCHEMA:
            raise ConfigurationError(f"row {number} was written by another version of lookahead-agent")
        replies[reply.server, reply.conversation, reply.sample, reply.turn] = reply
    return list(replies.values())


class ServerParity:
    """A comparison of servers, and its file of results."""

    def __init__(
        self,
        servers: Sequence[ServerClient],
        conversations: Sequence[RecordedConversation],
        out: RowFile,
        *,
        samples: int,
        concurrency: int,
        sampling: Mapping[str, Any],
    ) -> None:
        """Prepare the requests.

        Args:
            servers: Compared with the first of them.
            conversations: Held `samples` times with each server.
            out: Gets a row for each reply.
            samples: Number of times.
            concurrency: Conversations at once with each server.
            sampling: Fields of each request, such as `max_tokens`.

        Raises:
            ConfigurationError: The file has results of another comparison.
        """
        self.servers = servers
        self.out = out
        self._samples, self._concurrency = samples, concurrency
        self._conversations, self._sampling = conversations, dict(sampling)
        self._settings = {**sampling, "concurrency": concurrency}
        self._check_rows()

    @property
    def total(self) -> int:
        """Number of replies."""
        return len(self.servers) * self._samples * sum(len(each.turns) for each in self._conversations)

    @property
    def missing(self) -> int:
        """Number of replies that the file does not have yet."""
        return sum(len(conversation.turns) for _, conversation, _ in self.list_missing())

    def list_missing(self) -> list[tuple[ServerClient, RecordedConversation, int]]:
        """Return the conversations to hold, by sample; one that was interrupted is held again from its beginning."""
        counts: dict[tuple[str, str, int], int] = {}
        for reply in read_replies(self.out.rows):
            key = reply.server, reply.conversation, reply.sample
            counts[key] = counts.get(key, 0) + 1
        return [
            (server, conversation, sample)
            for sample in range(self._samples)
            for conversation in self._conversations
            for server in self.servers
            if counts.get((server.address.name, conversation.id, sample), 0) < len(conversation.turns)
        ]

    def run(self, on_conversation: Callable[[list[ServerReply]], None] = lambda _: None) -> list[ServerReply]:
        """Hold the missing conversations with all servers at once, and return all replies.

        Raises EngineError if a server does not answer any more; the same call continues.
        """
        with self.out.open_for_writing():
            for replies in background.stream(partial(background.forward, self._hold_all())):
                for reply in replies:
                    self.out.append(reply.model_dump(mode="json"))
                on_conversation(replies)
        return read_replies(self.out.rows)

    def _hold_all(self) -> AsyncGenerator[list[ServerReply], None]:
        slots = {server.address.name: asyncio.Semaphore(self._concurrency) for server in self.servers}

        async def hold(server: ServerClient, conversation: RecordedConversation, sample: int) -> list[ServerReply]:
            async with slots[server.address.name]:
                turns = enumerate(conversation.turns)
                return [await self._reply(server, conversation, sample, number, turn) for number, turn in turns]

        return background.as_completed(hold(*job) for job in self.list_missing())

    async def _reply(
        self, server: ServerClient, conversation: RecordedConversation, sample: int, number: int, turn: RecordedTurn
    ) -> ServerReply:
        started = monotonic()
        fields = await server.reply({"messages": turn.messages, "tools": conversation.tools, **self._sampling})
        reply = ServerReply(
            server=server.address.name,
            position=self.servers.index(server),
            url=server.address.url,
            model=server.model,
            conversation=conversation.id,
            task=conversation.task,
            sample=sample,
            turn=number,
            turns=len(conversation.turns),
            request=conversation.fingerprint(turn),
            seconds=round(monotonic() - started, 3),
            settings=self._settings,
            **fields,
        )
        return reply if reply.error else reply.model_copy(update=judge(reply, conversation, turn))

    def _check_rows(self) -> None:
        requests = {
            (each.id, number): each.fingerprint(turn)
            for each in self._conversations
            for number, turn in enumerate(each.turns)
        }
        servers = {each.address.name: (at, each.address.url, each.model) for at, each in enumerate(self.servers)}
        for reply in read_replies(self.out.rows):
            is_same = reply.settings == self._settings
            is_same &= servers.get(reply.server) == (reply.position, reply.url, reply.model)
            is_same &= requests.get((reply.conversation, reply.turn), reply.request) == reply.request
            if not is_same:
                raise ConfigurationError(
                    f"{self.out.path} has results of other servers or settings: choose another file with --out"
                )


def judge(reply: ServerReply, conversation: RecordedConversation, turn: RecordedTurn) -> Row:
    """Compare a reply with the recorded calls, the answer and the names of its turn."""
    calls, known = reply.parsed_calls, conversation.tool_names
    fields: Row = {
        "malformed": sum(name not in known or isinstance(arguments, str) for name, arguments in calls)
        + len(_MARKUP.findall(reply.content)[:1])
    }
    if turn.calls is not None:
        fields |= {
            "recorded": _sort(calls) == _sort(turn.calls) and not fields["malformed"],
            "missing": count_by_name(turn.calls, calls),
            "extra": count_by_name(calls, turn.calls),
        }
    if turn.names:
        text = {*re.findall(r"[\w.-]+", reply.content), *(name for name, _ in calls)}
        fields |= {"named": sum(name in text for name in turn.names), "names": len(turn.names)}
    if turn.answer is not None:
        fields["correct"] = is_correct(reply.content, turn.answer)
    return fields


def _sort(calls: Sequence[NamedCall]) -> list[str]:
    """Order calls: those of one reply may run in any order."""
    return sorted(repr((name, _sort_keys(arguments))) for name, arguments in calls)


def _sort_keys(value: Any) -> Any:
    match value:
        case dict():
            return sorted((key, _sort_keys(each)) for key, each in value.items())
        case list():
            return [_sort_keys(each) for each in value]
        case _:
            return value
