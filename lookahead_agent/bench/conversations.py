"""Conversations with tools, each a list of turns whose prompts do not depend on what a server replied before.

A turn's prompt has the recorded calls and results of the turns before it. So two servers get the same prompts, even if
their calls differ, and each turn is a comparison of its own.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from lookahead_agent.bench.answers import kind_of
from lookahead_agent.bench.problems import OWN, dataset_file
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.jsonl import read_lines, read_value

JsonMessage = Mapping[str, Any]  # message in the format of OpenAI's API, which tools have too
NamedCall = tuple[str, Any]  # name and arguments; arguments that are not a JSON object stay a string

OWN_CONVERSATIONS = 24
PREFIX_CHARACTERS = 16_384
"""Length of the packaged tools' descriptions, about as long as those in vllm-project/vllm#43559."""

_SHORTEST_PADDING = 400


@dataclass(frozen=True)
class RecordedTurn:
    """A request, and what its reply should be."""

    messages: tuple[JsonMessage, ...]
    calls: tuple[NamedCall, ...] | None = None  # the recorded calls; None: unknown
    answer: str | None = None  # the number, letter or formula with which the reply must end; None: no such answer
    names: tuple[str, ...] = ()  # names of tools that the reply must name


@dataclass(frozen=True)
class RecordedConversation:
    """Turns that are requested one after another, with the same tools."""

    id: str  # unique among the conversations
    task: str  # its kind, by which reports group
    tools: tuple[Mapping[str, Any], ...]
    turns: tuple[RecordedTurn, ...]

    @property
    def tool_names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(str(tool["function"]["name"]) for tool in self.tools)

    def fingerprint(self, turn: RecordedTurn) -> str:
        """Return a hash of the turn's request."""
        request = json.dumps([turn.messages, self.tools], sort_keys=True)
        return hashlib.sha256(request.encode()).hexdigest()[:12]


def load_conversations(
    dataset: str = OWN, limit: int | None = None, skip: int = 0, prefix: int | None = None
) -> list[RecordedConversation]:
    """Return the packaged conversations, or those of a JSON Lines file; raises ConfigurationError for an invalid file.

    `prefix` is the number of characters in the descriptions of the packaged tools; None: the default.
    """
    if dataset != OWN and prefix is not None:
        raise ConfigurationError(f"the tools of {dataset} have descriptions of their own: --prefix has no effect")
    own = PREFIX_CHARACTERS if prefix is None else prefix
    found = own_conversations(own) if dataset == OWN else read_conversations(dataset_file(dataset))
    chosen = found[skip:][:limit]
    if not chosen:
        raise ConfigurationError(f"there is no conversation after the first {skip} of {dataset}")
    return chosen


def read_conversations(file: Path) -> list[RecordedConversation]:
    """Read recorded conversations: `messages` and `tools` of OpenAI's API on each line, optionally `id` and `answer`.

    Each assistant's message is a turn, whose calls are the recorded ones. Messages after the last one are a turn whose
    calls are unknown. `answer` is that of the last turn.
    """
    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    conversations: dict[str, RecordedConversation] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = read_value(line)
            conversation = _parse(row, str(row.get("id", number)))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{file}, line {number} is not a conversation with `messages` and `tools` of OpenAI's API: {error!r}"
            ) from error
        if conversation.id in conversations:
            raise ConfigurationError(f"{file}, line {number}: there is another conversation {conversation.id!r}")
        conversations[conversation.id] = conversation
    return list(conversations.values())


def _parse(row: Mapping[str, Any], name: str) -> RecordedConversation:
    messages, tools = [dict(message) for message in row["messages"]], [dict(tool) for tool in row["tools"]]
    answer = None if row.get("answer") is None else str(row["answer"])
    if answer is not None and kind_of(answer) is None:
        raise ValueError(f"the answer {answer[:80]!r} is not a number, a letter of a choice, or a formula")
    if not tools or not all(isinstance(tool["function"]["name"], str) for tool in tools):
        raise ValueError("it has no tools")
    turns = []
    for at, message in enumerate(messages):
        if message["role"] == "assistant" and at > 0:
            calls = [parse_call(each["function"]) for each in message.get("tool_calls") or ()]
            turns.append(RecordedTurn(tuple(messages[:at]), tuple(calls)))
    if messages[-1]["role"] != "assistant":
        turns.append(RecordedTurn(tuple(messages)))
    turns[-1] = RecordedTurn(turns[-1].messages, turns[-1].calls, answer)
    return RecordedConversation(name, str(row.get("task", "recorded")), tuple(tools), tuple(turns))


def parse_call(function: Mapping[str, Any]) -> NamedCall:
    """Return name and arguments of a call; arguments that are not a JSON object stay the string that they are."""
    text = str(function["arguments"])
    try:
        arguments = read_value(text)
    except ValueError:
        return str(function["name"]), text
    return str(function["name"]), arguments if isinstance(arguments, dict) else text


_SYSTEM = (
    "You are the assistant of a shop. Look facts up with the tools, since you know none. Call only the tools that a "
    "request needs. End a calculation with: The answer is NUMBER."
)
_TOOLS = {
    "get_order": "order_id", "list_orders": "customer_id", "cancel_order": "order_id", "ship_order": "order_id",
    "get_customer": "customer_id", "find_customer": "email", "block_customer": "customer_id",
    "list_invoices": "customer_id", "get_invoice": "invoice_id", "send_invoice": "invoice_id",
    "get_product": "product_id", "find_product": "name", "get_stock": "product_id", "reserve_stock": "product_id",
    "get_price": "product_id", "get_parcel": "parcel_id", "trace_parcel": "parcel_id", "get_refund": "refund_id",
    "open_ticket": "subject", "close_ticket": "ticket_id",
}  # fmt: skip
_SENTENCES = (
    "The id has a capital letter, a hyphen and a number, as on the paper that the customer has.",
    "An unknown id returns an error, and nothing changes in the books.",
    "The result is a JSON object with the fields that the accounts keep.",
    "Amounts are whole dollars, without tax and without the costs of the parcel.",
    "The call is recorded with its time, and the customer can read the record.",
    "Dates are those of the warehouse, which is seven hours behind the shop.",
    "Call it once for each id, since several ids in one call return an error.",
)


def _filler(characters: int, start: int) -> str:
    """Return a text of this length that no other `start` has."""
    sentences = (f"Rule {start}.{number}: {text}" for number, text in enumerate(cycle(_SENTENCES), 1))
    return " ".join(islice(sentences, characters // 60 + 1))[:characters]


def _own_tools(prefix: int) -> tuple[dict[str, Any], ...]:
    def tool(number: int, name: str, parameter: str) -> dict[str, Any]:
        purpose = f"{name.replace('_', ' ').capitalize()} by {parameter.replace('_', ' ')}."
        parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
        description = f"{purpose} {_filler(prefix // len(_TOOLS), number)}".strip()
        return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}

    return tuple(tool(number, *each) for number, each in enumerate(_TOOLS.items(), 1))


def own_conversations(prefix: int = PREFIX_CHARACTERS) -> list[RecordedConversation]:
    """Generate the packaged conversations, which share their tools and system message.

    Of four, the first repeats a prompt after a longer one, as in vllm-project/vllm#43559; two have several turns, and
    one needs several calls at once.
    """
    tools = _own_tools(prefix)
    makers = {"repeated prompt": _repeat_prompt, "turns": _several_turns, "calls at once": _calls_at_once}
    kinds = ("repeated prompt", "turns", "calls at once", "turns")
    return [
        RecordedConversation(f"own-{number}", kind, tools, tuple(makers[kind](number, prefix)))
        for number, kind in zip(range(OWN_CONVERSATIONS), cycle(kinds), strict=False)
    ]


def _messages(*texts: str, system: str = _SYSTEM) -> tuple[JsonMessage, ...]:
    return ({"role": "system", "content": system}, *({"role": "user", "content": text} for text in texts))


def _repeat_prompt(number: int, prefix: int) -> Iterator[RecordedTurn]:
    names = tuple(_TOOLS)
    request = f"Ticket {number}: list the names of all your tools, one a line, and nothing else. Call no tool."
    padded = f"{_SYSTEM} {_filler(max(prefix // 2, _SHORTEST_PADDING), 100 + number)}"
    for system in (_SYSTEM, padded, _SYSTEM):
        yield RecordedTurn(_messages(request, system=system), (), names=names)


def _several_turns(number: int, prefix: int) -> Iterator[RecordedTurn]:
    order, customer = f"A-{1000 + 7 * number}", f"C-{200 + 3 * number}"
    amounts = [17 + 5 * number, 40 + number, 8 + 2 * number]
    messages = _messages(f"How many dollars do all invoices of the customer who placed order {order} come to?")
    yield RecordedTurn(messages, (("get_order", {"order_id": order}),))
    messages += _result("get_order", {"order_id": order}, {"order_id": order, "customer_id": customer}, 1)
    yield RecordedTurn(messages, (("list_invoices", {"customer_id": customer}),))
    invoices = [{"invoice_id": f"I-{number}{at}", "dollars": dollars} for at, dollars in enumerate(amounts)]
    messages += _result("list_invoices", {"customer_id": customer}, {"invoices": invoices}, 2)
    yield RecordedTurn(messages, (), str(sum(amounts)))
    messages += ({"role": "assistant", "content": f"The answer is {sum(amounts)}."},)
    messages += ({"role": "user", "content": f"Cancel order {order}, please."},)
    yield RecordedTurn(messages, (("cancel_order", {"order_id": order}),))


def _calls_at_once(number: int, prefix: int) -> Iterator[RecordedTurn]:
    products = [f"P-{10 * number + at}" for at in range(4)]
    text = f"How many of the products {', '.join(products)} are in stock? Call get_stock for all of them at once."
    yield RecordedTurn(_messages(text), tuple(("get_stock", {"product_id": product}) for product in products))


def _result(name: str, arguments: Any, result: Any, number: int) -> tuple[JsonMessage, ...]:
    """Return the messages of a call and its result."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    return (
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call_{number}", "content": json.dumps(result)},
    )


def count_by_name(calls: Iterable[NamedCall], others: Sequence[NamedCall]) -> int:
    """Count the calls whose tool occurs less often in `others`."""
    remaining = [name for name, _ in others]
    count = 0
    for name, _ in calls:
        if name in remaining:
            remaining.remove(name)
        else:
            count += 1
    return count
