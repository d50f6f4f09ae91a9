"""Benchmarks of templates with the user's tools, on problems that define their check."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.config import BenchConfig, TaskConfig
from lookahead_agent.bench.problems import Problem, read_problems
from lookahead_agent.bench.runner import Bench, solve, tools_of
from lookahead_agent.errors import ConfigurationError
from tests.unit.bench_models import scripted_configuration
from tests.unit.chat import scripted_chat


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("CREATE TABLE pens (colour TEXT)")
        database.executemany("INSERT INTO pens VALUES (?)", [("red",), ("blue",)])
    database.close()
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "note.txt").write_text("before")
    return tmp_path


def problems(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("check", "reply", "correct"),
    [
        ({"number": 156.48}, "The total is $156.48 in 7 invoices.", True),
        ({"number": 156.48}, "The total is 156.4800001.", True),
        ({"number": 156.48}, "The total is 156.5.", False),
        ({"number": 1200}, "They are 1,200.", True),
        ({"number": 5}, "", False),
        ({"text": ["Iron Maiden"], "number": 21}, "iron maiden, with 21 albums", True),
        ({"text": ["Iron Maiden"], "number": 21}, "Iron Maiden, with 20 albums", False),
        ({"text": ["lens|glass", "dirty"]}, "The glass is dirty.", True),
        ({"text": ["lens|glass", "dirty"]}, "The glass is broken.", False),
        ({"file": "a.txt", "lines": ["1"]}, "It is written.", None),
        (None, "Anything.", None),
    ],
)
def test_check_of_a_problem_decides_correctness(tmp_path: Path, check: Any, reply: str, correct: bool | None) -> None:
    (problem,) = read_problems(problems(tmp_path, {"question": "?", "check": check}))
    assert problem.accepts(reply) is correct


def test_fingerprint_depends_on_the_check_and_not_on_the_tools() -> None:
    checked = [Problem("1", "?", None, check={"number": number}) for number in (1, 2)]
    assert checked[0].fingerprint != checked[1].fingerprint
    assert Problem("1", "?", "4").fingerprint == Problem("1", "?", "4", ("sql",)).fingerprint


@pytest.mark.parametrize("check", [{"number": "many"}, 5, {"text": 5}])
def test_invalid_checks_are_rejected(tmp_path: Path, check: Any) -> None:
    with pytest.raises(ConfigurationError, match="line 1 is not a problem"):
        read_problems(problems(tmp_path, {"question": "?", "check": check}))


def test_run_gets_the_tools_of_its_problem_and_a_copy_of_the_folder(shop: Path) -> None:
    task = TaskConfig(task="react", tools=(f"sql:{shop}/shop.db", f"files:{shop}/files"))
    with tools_of(task, ["sql"]) as tools:
        assert tools is not None
        assert [tool.name for tool in tools] == ["sql"]
        assert "2" in tools[0].invoke({"statement": "SELECT count(*) FROM pens"})
    with tools_of(task) as tools:
        assert tools is not None
        assert len(tools) == 3
        write = next(tool for tool in tools if tool.name == "write_file")
        read = next(tool for tool in tools if tool.name == "read_file")
        write.invoke({"name": "note.txt", "text": "after"})
        assert "after" in read.invoke({"name": "note.txt"})
    assert (shop / "files" / "note.txt").read_text() == "before"
    with tools_of(TaskConfig(task="react")) as no_tools:
        assert no_tools is None


def test_template_runs_with_the_tools_of_its_task(shop: Path) -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "There are 2 pens."

    task = TaskConfig(task="react", tools=(f"sql:{shop}/shop.db",))
    answer = solve(task, scripted_chat(reply, policy="off"), "How many pens are there?", None, {})
    assert answer == "There are 2 pens."
    assert any("sql" in prompt for prompt in prompts)
    assert not any("calculator" in prompt for prompt in prompts)


def test_missing_tools_are_reported_before_a_model_is_created(shop: Path) -> None:
    file = problems(shop, {"id": "two", "question": "?", "tools": ["sql", "calculator"]})

    def failing_model(*_: object) -> ChatLookahead:
        raise AssertionError("no model is made for it")

    task = TaskConfig(task="react", dataset=str(file), tools=(f"sql:{shop}/shop.db",))
    with pytest.raises(ConfigurationError, match="problem two needs calculator; the tools are sql: add --tools"):
        Bench(BenchConfig(tasks=(task,)), shop / "rows.jsonl", failing_model)
    with pytest.raises(ConfigurationError, match="sql:FILE"):
        Bench(BenchConfig(tasks=(task.model_copy(update={"tools": ("sql:",)}),)), shop / "rows.jsonl", failing_model)
    with pytest.raises(ValueError, match="tools are for templates that call some"):
        TaskConfig(tools=("calculator",))


def test_results_record_the_tools_of_the_task(shop: Path) -> None:
    file = problems(shop, {"id": "one", "question": "How many pens?", "check": {"number": 14}, "tools": ["sql"]})
    needed: list[Any] = []

    def agent(task: TaskConfig, llm: ChatLookahead, question: str, seed: int | None, config: Any, *, needs: Any) -> str:
        needed.append(needs)
        with tools_of(task, needs) as tools:
            return str(create_agent(llm, tools).invoke({"messages": [("user", question)]}, config)["messages"][-1].text)

    task = TaskConfig(task="react", dataset=str(file), tools=(f"sql:{shop}/shop.db",))
    samples = Bench(BenchConfig(tasks=(task,)), shop / "rows.jsonl", scripted_configuration, agent).run()
    assert needed == [("sql",), ("sql",)]
    assert [sample.correct for sample in samples] == [True, True]
    assert samples[0].settings["tools"] == [f"sql:{shop}/shop.db"]
    more_tools = task.model_copy(update={"tools": (f"sql:{shop}/shop.db", "calculator")})
    with pytest.raises(ConfigurationError, match="results of other settings"):
        Bench(BenchConfig(tasks=(more_tools,)), shop / "rows.jsonl", scripted_configuration, agent)
