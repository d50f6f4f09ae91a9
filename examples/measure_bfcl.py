"""Tool calls on BFCL: whether the default configuration makes the calls of plain vLLM, and how many are correct.

    pip install --no-deps --target /tmp/bfcl bfcl-eval==2026.3.23    # data and checker, outside of the project
    python examples/measure_bfcl.py /tmp/bfcl --configuration plain --configuration default --concurrency 16

`plain` is vLLM's engine alone, with the same int8 weights and prompts. The model chooses whether to call a tool. Rows
are appended, and a later call continues.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.summary import estimate, mean_difference
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.generation.json_tool_parsers import JsonToolParser
from lookahead_agent.generation.reader import ReplyReader
from lookahead_agent.policy import as_policy
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile

CATEGORIES, MAX_TOKENS = ("simple_python", "multiple", "parallel"), 512
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
Task = dict[str, Any]


def as_schema(part: Any) -> Any:
    """BFCL's description of arguments with JSON schema's names of types."""
    if isinstance(part, dict):
        kind = part.get("type")  # or the schema of a parameter of this name
        named = {"type": TYPES.get(kind, kind)} if isinstance(kind, str) else {}
        return {key: as_schema(value) for key, value in part.items()} | named
    return [as_schema(each) for each in part] if isinstance(part, list) else part


def read_tasks(folder: Path, limit: int) -> list[Task]:
    """The first tasks of each category in turns, with their answers, and with tools whose names have no dots."""
    found: list[Task] = []
    for category in CATEGORIES:
        paths = [folder / "bfcl_eval/data" / part / f"BFCL_v4_{category}.json" for part in ("", "possible_answer")]
        tasks, answers = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
        for task, answer in list(zip(tasks, answers, strict=True))[:limit]:
            described = [as_schema(each) | {"name": each["name"].replace(".", "_")} for each in task["function"]]
            tools = [{"type": "function", "function": each} for each in described]
            found.append({**task, "category": category, "tools": tools, "answers": answer["ground_truth"]})
    return sorted(found, key=lambda task: int(task["id"].rpartition("_")[2]))


def is_correct(task: Task, calls: list[Any]) -> bool:
    """Whether BFCL's own checker takes the calls."""
    # Of this module, which imports the clients of every provider, the checker asks only whether names had dots.
    config = SimpleNamespace(MODEL_CONFIG_MAPPING={"model": SimpleNamespace(underscore_to_dot=True)})
    sys.modules.setdefault("bfcl_eval.constants.model_config", cast(ModuleType, config))
    python = import_module("bfcl_eval.constants.enums").Language.PYTHON
    check = import_module("bfcl_eval.eval_checker.ast_eval.ast_checker").ast_checker
    made, rest = [{call["name"]: call["args"]} for call in calls], (python, task["category"], "model")
    return bool(made) and check(task["function"], made, task["answers"], *rest)["valid"]


async def ask_plain(llm: ChatLookahead, task: Task) -> tuple[str, Any]:
    """The text that vLLM's engine writes, and the calls in it."""
    async with llm.backend.engines(as_policy("off")) as engines:
        tokenizer = engines.target.tokenizer
        prompt = tokenizer.chat_prompt(task["question"][0], task["tools"])
        deltas = [delta.token_ids async for delta in engines.target.generate(prompt, Sampling(MAX_TOKENS))]
    reader = ReplyReader(None, False, False, JsonToolParser(), task["tools"], lambda _: None)
    reader.push(text := tokenizer.decode([token for ids in deltas for token in ids]))
    return text, reader.finish(False).parsed.tool_calls


parser = argparse.ArgumentParser()
parser.add_argument("bfcl", type=Path)
parser.add_argument("--configuration", choices=("plain", "default"), action="append", default=[])
for option, default in (("concurrency", 16), ("limit", 70), ("minutes", 1e6)):
    parser.add_argument(f"--{option}", type=type(default), default=default)
parser.add_argument("--out", type=Path, default=Path("bfcl.jsonl"))
given, begun = parser.parse_args(), time.monotonic()
sys.path.append(str(given.bfcl))
rows = RowFile(given.out)


def measure(name: str, llm: ChatLookahead, task: Task) -> None:
    """Append a task's row: a reply as it was written, and its calls. Unless the time is up, or it is there."""
    key = {"configuration": name, "concurrency": given.concurrency, "id": task["id"]}
    if time.monotonic() - begun > 60 * given.minutes or any(key.items() <= row.items() for row in rows.rows):
        return
    if name == "plain":
        text, found = background.run(ask_plain(llm, task))
    else:
        message = llm.bind_tools(task["tools"]).invoke(task["question"][0])
        text, found = llm.backend.tokenizer().decode(message.response_metadata["token_ids"]), message.tool_calls
    calls = [{"name": call["name"], "args": call["args"]} for call in found]
    reply = {"category": task["category"], "text": text, "calls": calls}
    rows.append(key | reply | {"correct": is_correct(task, calls)})


for name in given.configuration:
    fields: Task = {"temperature": 0, "max_tokens": MAX_TOKENS, "return_token_ids": True, "use_daemon": False}
    fields |= {"policy": "off", "token_speculation": "none", "precision": "int8"} if name == "plain" else {}
    with rows.open_for_writing(), ChatLookahead(**fields) as llm, ThreadPoolExecutor(given.concurrency) as pool:
        list(pool.map(partial(measure, name, llm), read_tasks(given.bfcl, given.limit)))
for at_once in sorted({row["concurrency"] for row in rows.rows}):
    of = {(row["configuration"], row["id"]): row for row in rows.rows if row["concurrency"] == at_once}
    pairs = [(row, of["default", id]) for (name, id), row in of.items() if name == "plain" and ("default", id) in of]
    for category in CATEGORIES:
        both = [pair for pair in pairs if pair[0]["category"] == category]
        right = [sum(pair[side]["correct"] for pair in both) for side in (0, 1)]
        print(f"{at_once} at once, {category}: {len(both)} tasks, correct (plain, default): {right}")
    if pairs:
        gap = estimate(mean_difference, *([float(pair[side]["correct"]) for pair in pairs] for side in (1, 0)))
        print("accuracy of default minus plain:", gap.format("{:+.3f}".format))
        print("replies that differ:", [first["id"] for first, other in pairs if first["text"] != other["text"]])
