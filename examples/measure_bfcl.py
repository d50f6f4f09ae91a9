"""Measure tool calls on BFCL: accuracy of the default configuration and of plain vLLM, and whether their calls agree.

    pip install --no-deps --target /tmp/bfcl bfcl-eval==2026.3.23    # its data and its checker; outside the project
    python examples/measure_bfcl.py /tmp/bfcl --configuration plain --configuration default --concurrency 2

Rows are appended, so that a later call continues. `plain` is vLLM's engine without this library's decoder, with the
same int8 weights; `default` is `ChatLookahead` with its default configuration. The model chooses whether to call.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import sys
import time
from contextlib import aclosing
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.summary import estimate, mean_difference
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.generation.json_tool_parsers import JsonToolParser
from lookahead_agent.generation.reader import ReplyReader
from lookahead_agent.jsonl import RowFile
from lookahead_agent.policy import as_policy

CATEGORIES = ("simple_python", "multiple", "parallel")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
MAX_TOKENS = 512


def as_schema(part: Any) -> Any:
    """BFCL's description of a function with JSON schema's names of types."""
    if isinstance(part, dict):
        schema = {key: as_schema(value) for key, value in part.items()}
        kind = schema.get("type")  # or the schema of a parameter of this name
        return schema | ({"type": TYPES.get(kind, kind)} if isinstance(kind, str) else {})
    return [as_schema(each) for each in part] if isinstance(part, list) else part


def tools_of(task: dict[str, Any]) -> list[dict[str, Any]]:
    """A task's functions as tools; names have no dots, as for OpenAI's API."""
    described = [as_schema(each) | {"name": each["name"].replace(".", "_")} for each in task["function"]]
    return [{"type": "function", "function": each} for each in described]


def read_tasks(folder: Path, limit: int) -> list[dict[str, Any]]:
    """The first tasks of each category, one of each in turn, with their possible answers."""
    found = []
    for category in CATEGORIES:
        files = [folder / "bfcl_eval/data" / part / f"BFCL_v4_{category}.json" for part in ("", "possible_answer")]
        tasks, answers = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
        known = {answer["id"]: answer["ground_truth"] for answer in answers}
        found.append([{**task, "category": category, "answers": known[task["id"]]} for task in tasks[:limit]])
    return [task for tasks in zip(*found, strict=True) for task in tasks]


def is_correct(task: dict[str, Any], calls: list[dict[str, Any]]) -> bool:
    """Whether BFCL's own checker takes the calls."""
    # The checker asks this module only whether names have dots; it would import the clients of every provider.
    module = ModuleType("bfcl_eval.constants.model_config")
    module.__dict__["MODEL_CONFIG_MAPPING"] = {"model": SimpleNamespace(underscore_to_dot=True)}
    sys.modules.setdefault(module.__name__, module)
    python = import_module("bfcl_eval.constants.enums").Language.PYTHON
    ast_checker = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    made = [{call["name"]: call["args"]} for call in calls]
    checked = ast_checker(task["function"], made, task["answers"], python, task["category"], "model")
    return bool(made) and bool(checked["valid"])


async def ask_plain(llm: ChatLookahead, task: dict[str, Any]) -> dict[str, Any]:
    """The text of vLLM's engine, its calls as this library reads them, and whether those that vLLM reads are right."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    messages, tools, ids = task["question"][0], tools_of(task), list[int]()
    async with llm.backend.engines(as_policy("off")) as engines:
        tokenizer = cast(HFTokenizer, engines.target.tokenizer).backend
        shown = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=True)
        async with aclosing(engines.target.generate(shown["input_ids"], Sampling(MAX_TOKENS))) as deltas:
            async for delta in deltas:
                ids += delta.token_ids
    text = tokenizer.decode(ids, skip_special_tokens=True)
    reader = ReplyReader(None, False, False, JsonToolParser(), tools, lambda _: None)
    reader.push(text)
    request = ChatCompletionRequest(messages=messages, model="", tools=tools)
    parser = ToolParserManager.get_tool_parser("hermes")(tokenizer, request.tools)
    read = [call.function for call in parser.extract_tool_calls(text, request).tool_calls]
    right = is_correct(task, [{"name": call.name, "args": json.loads(call.arguments)} for call in read])
    return {"text": text, "calls": reader.finish(len(ids) >= MAX_TOKENS).parsed.tool_calls, "correct_by_vllm": right}


async def ask_default(llm: ChatLookahead, task: dict[str, Any]) -> dict[str, Any]:
    """The text of `ChatLookahead`'s reply as the model wrote it, and its calls."""
    message = await llm.bind_tools(tools_of(task)).ainvoke(task["question"][0])
    text = llm.backend.tokenizer().decode(message.response_metadata["token_ids"])
    return {"text": text, "calls": message.tool_calls, "mode": message.response_metadata["lookahead"]["mode"]}


async def measure(
    name: str, llm: ChatLookahead, tasks: list[dict[str, Any]], at_once: int, rows: RowFile, until: float
) -> None:
    """Append a row for each task that begins before `until` (of `time.monotonic`)."""
    left = itertools.takewhile(lambda _: time.monotonic() < until, iter(tasks))

    async def work() -> None:
        for task in left:
            began = time.monotonic()
            reply = await (ask_plain if name == "plain" else ask_default)(llm, task)
            seconds = round(time.monotonic() - began, 2)
            calls = [{"name": call["name"], "args": call["args"]} for call in reply["calls"]]
            row = {"configuration": name, "concurrency": at_once, "id": task["id"], "category": task["category"]}
            rows.append(row | reply | {"calls": calls, "correct": is_correct(task, calls), "seconds": seconds})

    await asyncio.gather(*(work() for _ in range(at_once)))


def summarize(rows: list[dict[str, Any]]) -> None:
    """Print accuracy, its paired difference, and the replies that differ."""
    for at_once in sorted({row["concurrency"] for row in rows}):
        sides = [
            {row["id"]: row for row in rows if (row["configuration"], row["concurrency"]) == (name, at_once)}
            for name in ("plain", "default")
        ]
        both = [(sides[0][each], sides[1][each]) for each in sides[0] if each in sides[1]]
        for category in [*CATEGORIES, None]:
            pairs = [pair for pair in both if category in (None, pair[0]["category"])]
            if not pairs:
                continue
            plain, default = ([float(pair[side]["correct"]) for pair in pairs] for side in (0, 1))
            gap = estimate(mean_difference, default, plain).shown("{:+.3f}".format)
            same = sum(a["calls"] == b["calls"] and a["text"] == b["text"] for a, b in pairs)
            print(
                f"{at_once} at once, {category or 'all'}: {len(pairs)} tasks, right: plain {sum(plain):.0f}, default "
                f"{sum(default):.0f}, difference {gap}; the same byte for byte: {same}"
            )
        for plain_row, default_row in both:
            if plain_row["text"] != default_row["text"]:
                print(f"  {plain_row['id']}: {plain_row['text']!r}\n    by default {default_row['text']!r}")


def main() -> None:
    """Measure what is missing, for at most the minutes that are given, and show all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bfcl", type=Path, help="folder in which bfcl-eval is installed")
    parser.add_argument("--configuration", choices=("plain", "default"), action="append", default=[])
    parser.add_argument("--concurrency", type=int, default=2, help="tasks at once")
    parser.add_argument("--limit", type=int, default=80, help="tasks of each category")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no task begins")
    parser.add_argument("--out", type=Path, default=Path("bfcl.jsonl"))
    given, until = parser.parse_args(), time.monotonic()
    until += 60 * given.minutes
    sys.path.append(str(given.bfcl))
    rows = RowFile(given.out)
    for name in given.configuration:
        known = {
            row["id"] for row in rows.rows if (row["configuration"], row["concurrency"]) == (name, given.concurrency)
        }
        tasks = [task for task in read_tasks(given.bfcl, given.limit) if task["id"] not in known]
        fields: dict[str, Any] = {"policy": "off", "token_speculation": "none", "precision": "int8"}
        common = {"temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True, "use_daemon": False}
        with rows.writing(), ChatLookahead(**common, **(fields if name == "plain" else {})) as llm:
            if tasks:
                work = measure(name, llm, tasks, given.concurrency, rows, until)
                background.run(work) if name == "plain" else asyncio.run(work)
    summarize(rows.rows)


if __name__ == "__main__":
    main()
