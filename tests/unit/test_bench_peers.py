"""Benchmarks of the library against peers, which are servers of other programs."""

import shlex
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.bench.config import BenchConfig, make_config
from lookahead_agent.bench.report import Report
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import read_results
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.system.jsonl import RowFile
from tests.unit.bench_models import REPLY, scripted_configuration
from tests.unit.chat import scripted_chat
from tests.unit.serving import serving
from tests.unit.test_cli import run
from tests.unit.test_shell_lines import lines

CLOSED_PORT = "http://127.0.0.1:9/v1"


def config(*peers: str, **fields: Any) -> BenchConfig:
    task = {"modes": ["auto"], "peers": peers, "limit": 2, **fields}
    return make_config({"tasks": [task]})


@pytest.mark.parametrize("task", ["questions", "self_consistency"])
def test_peers_are_measured_with_the_library_and_the_first_is_the_baseline(tmp_path: Path, task: str) -> None:
    with serving(scripted_chat(REPLY)) as (url, _):
        peers = (f"one=http://{url.removeprefix('http://')}/v1", f"two={url}/v1/")
        results = Bench(config(*peers, task=task), tmp_path / "r.jsonl", scripted_configuration).run()
    assert [summary.configuration for summary in Report(results).configurations] == ["one", "two", "auto"]
    assert all(sample.correct is not None and sample.error is None for sample in results)
    for sample in results:
        assert sample.correct == (sample.problem == "own-0")
        assert sample.calls
        assert all(call.output_tokens > 0 and call.first_token is not None for call in sample.calls)
    peer_sample = next(sample for sample in results if sample.configuration == "one")
    assert peer_sample.mode == "peer"
    assert peer_sample.engines["target"] == {"server": peers[0], "model": "qwen2.5-coder-1.5b"}
    assert all(0 < call.busy["prompt"] <= call.seconds for call in peer_sample.calls)
    assert {call.node for call in peer_sample.calls} == ({None} if task == "questions" else {"sampler"})
    (headings, rows), *_ = Report(results).tables(task)
    assert "accuracy against one" in headings
    assert [bool(row[headings.index("speed (seconds)")]) for row in rows] == [False, True, True]


def test_requests_to_a_peer_have_the_seed_the_temperature_and_max_tokens(tmp_path: Path) -> None:
    requests: list[Any] = []
    with serving(scripted_chat(REPLY)) as (url, writer):
        generate = writer.generate

        def recorded(request: Any, owner: Any) -> Any:
            requests.append(request)
            return generate(request, owner)

        writer.generate = recorded  # type: ignore[method-assign]
        settings = config(f"one={url}/v1", limit=1, max_tokens=77).model_copy(update={"seed": 5, "temperature": 0.5})
        Bench(settings, tmp_path / "r.jsonl", scripted_configuration).run()
    sampling = requests[-1].sampling
    assert (sampling.seed, sampling.temperature, sampling.max_tokens) == (5, 0.5, 77)


def test_unreachable_peer_is_reported_before_any_model_loads(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"llama\.cpp: no OpenAI-compatible server .* start it first"):
        # Models are only created: None cannot load.
        Bench(config(f"llama.cpp={CLOSED_PORT}"), tmp_path / "r.jsonl", lambda *_: None)  # type: ignore[arg-type, return-value]


def test_lost_peer_ends_the_benchmark_and_keeps_earlier_results(tmp_path: Path) -> None:
    with serving(scripted_chat(REPLY)) as (url, _):
        bench = Bench(config(f"one={url}/v1"), tmp_path / "r.jsonl", scripted_configuration)
        measured = []

        def interrupt(sample: Any) -> None:
            measured.append(sample)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            bench.run(on_sample=interrupt)
    with pytest.raises(EngineError, match="does not answer any more"):
        bench.run()
    assert bench.results()[0].key == measured[0].key
    assert all(sample.error is None for sample in bench.results())


def test_documented_peer_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (line,) = (line for line in lines("lookahead-agent") if " bench peers " in line)
    _, *arguments = shlex.split(line)
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect("shop.db")) as shop:
        shop.execute("CREATE TABLE pens (colour TEXT)")
    Path("problems.jsonl").write_text('{"question": "How many pens?", "answer": "14"}')
    with serving(scripted_chat(REPLY)) as (url, _):
        assert arguments[2].startswith("llama.cpp=")
        arguments[2] = f"llama.cpp={url}/v1"
        assert run(*arguments, chat_class=partial(scripted_chat, REPLY)) == 0
    printed = capsys.readouterr().out.split()
    assert {"accuracy", "against", "auto"} <= set(printed)
    assert printed.count("llama.cpp") > 1, "headings and rows name it"
    assert {row["configuration"] for row in RowFile(Path("results/peers.jsonl")).rows} == {
        "llama.cpp",
        "auto",
    }


def test_published_peer_results_are_readable() -> None:
    report = Report(read_results(RowFile(Path(__file__).parents[2] / "docs/measurements/peers-18.jsonl.xz").rows))
    for task in ("questions", "plan_execute"):
        summaries = [summary for summary in report.configurations if summary.task == task]
        assert [summary.configuration for summary in summaries] == ["llama.cpp", "llama.cpp with draft", "vLLM", "auto"]
        assert summaries[0].speedup is None
        assert all(summary.speedup is not None and summary.accuracy is not None for summary in summaries[1:])


@pytest.mark.parametrize(
    ("peers", "message"),
    [
        (["http://127.0.0.1:8080/v1"], "is not a server: write it as in llama.cpp=http"),
        (["one=127.0.0.1:8080"], "is not a server"),
        (["auto=http://a/v1"], "a name of its own"),
        (["one=http://a/v1", "one=http://b/v1"], "a name of its own"),
    ],
)
def test_invalid_peers_are_rejected(peers: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        config(*peers)


def test_peer_is_not_accepted_as_a_mode() -> None:
    with pytest.raises(ConfigurationError, match="servers are named by peers"):
        make_config({"tasks": [{"modes": ["peer"]}]})
