"""Measures how long an agent's turns take as its conversation grows, on the models of this machine.

    python docs/measurements/conversations.py measure now.jsonl --conversations 6
    python docs/measurements/conversations.py table before.jsonl now.jsonl

A conversation has ten turns. Each turn brings the result of a tool with 200 to 2,000 tokens, and a question about it.
Conversations are drawn from seeds, so that two versions or machines get the same ones. A row is one turn.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage

TURNS = 10
SYSTEM = "You help the staff of a shop. Answer in one or two short sentences from what the tool says."
WORDS = ("amber", "birch", "cedar", "delta", "ember", "grove", "heath", "larch")


def result(draw: random.Random, tokens: int) -> str:
    """A table of about so many tokens: numbers take one for each digit."""
    rows = [f"{draw.choice(WORDS)} {draw.choice(WORDS)} | {draw.uniform(10, 99):.2f}" for _ in range(tokens // 11)]
    return "\n".join(["name | price", *rows])


def conversation(seed: int) -> list[list[BaseMessage]]:
    """The messages that each turn adds."""
    draw = random.Random(seed)
    turns: list[list[BaseMessage]] = []
    sizes = [int(200 * 10 ** draw.random()) for _ in range(TURNS)]
    shrink = min(1.0, 6500 / sum(sizes))  # all of it fits into 8,192 tokens
    for turn, size in enumerate(sizes):
        call = {"name": "sql", "args": {"statement": f"SELECT * FROM items OFFSET {turn}"}, "id": f"c{turn}"}
        turns.append(
            [
                HumanMessage(f"Question {turn + 1}: which of the next items costs most, and how much?"),
                AIMessage("", tool_calls=[{**call, "type": "tool_call"}]),  # type: ignore[list-item]
                ToolMessage(result(draw, max(200, int(shrink * size))), tool_call_id=f"c{turn}"),
            ]
        )
    return turns


def measure(out: Path, conversations: range, **fields: Any) -> None:
    """Append the rows of these conversations."""
    from lookahead_agent import ChatLookahead

    llm = ChatLookahead(temperature=0, max_tokens=48, use_daemon=False, streaming=True, **fields)
    llm.start()
    llm.invoke("What is 2 + 3?")
    for seed in conversations:
        messages: list[BaseMessage] = [SystemMessage(SYSTEM)]
        for turn, added in enumerate(conversation(seed)):
            messages += added
            started, first, reply = time.perf_counter(), None, None
            for chunk in llm.stream(messages):
                if first is None and chunk.content:
                    first = time.perf_counter() - started
                reply = chunk if reply is None else reply + chunk
            seconds, usage = time.perf_counter() - started, reply.usage_metadata or {}
            messages.append(AIMessage(reply.content))
            row = {"conversation": seed, "turn": turn, "seconds": seconds, "first": first, "text": reply.content}
            row |= {"prompt": usage["input_tokens"], "output": usage["output_tokens"]}
            row |= {"cached": usage.get("input_token_details", {}).get("cache_read")}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    llm.close()


def table(files: list[Path]) -> None:
    """Print the figures of each file, and the ratio to the first, conversation by conversation."""
    baseline: dict[int, float] = {}
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        seconds: dict[int, float] = {}
        read = new = 0
        last: dict[int, int] = {}
        for row in rows:
            seconds[row["conversation"]] = seconds.get(row["conversation"], 0.0) + row["seconds"]
            before = last.get(row["conversation"], 0)
            if row["cached"] is not None:
                read, new = read + row["prompt"] - row["cached"], new + row["prompt"] - before
            last[row["conversation"]] = row["prompt"] + row["output"]
        late = [row["first"] for row in rows if row["prompt"] > 4000 and row["first"] is not None]
        baseline = baseline or seconds
        ratios = [seconds[each] / baseline[each] for each in seconds if each in baseline]
        print(
            f"{file.stem}: {statistics.median(seconds.values()):.1f} s a conversation ({len(seconds)}), "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of the first file's; "
            f"prompt tokens read anew over new ones {read / new if new else float('nan'):.2f}; "
            f"first token behind 4,000 tokens {statistics.median(late):.2f} s"
        )


def main() -> None:
    """Measure, or show what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measured = commands.add_parser("measure")
    measured.add_argument("out", type=Path)
    measured.add_argument("--conversations", type=int, default=6)
    measured.add_argument("--skip", type=int, default=0)
    measured.add_argument("--model", default=None)
    measured.add_argument("--draft", default=None)
    commands.add_parser("table").add_argument("files", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "table":
        table(given.files)
    else:
        fields = {"model": given.model, "draft_model": given.draft}
        fields = {name: value for name, value in fields.items() if value is not None}
        measure(given.out, range(given.skip, given.skip + given.conversations), **fields)


if __name__ == "__main__":
    main()
