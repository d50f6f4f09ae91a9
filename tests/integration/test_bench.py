"""`bench` on a tiny pair in real vLLM, once in a subprocess."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from pathlib import Path

import psutil
import pytest

from lookahead_agent.bench.report import Report
from lookahead_agent.bench.samples import Sample, read_results
from lookahead_agent.system.jsonl import RowFile
from tests.integration.command_line import command, run_in_process
from tests.integration.conftest import descendants


def results(file: Path) -> list[Sample]:
    return read_results(RowFile(file).rows)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("tiny")  # the second run shares its engines
def test_interrupted_benchmark_leaves_no_process_and_the_next_run_completes_it(
    tiny_pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.jsonl"
    options = ["--limit", "4", "--modes", "lr,specreason", "--policies", "exact", "--max-tokens", "24"]
    bench = command(
        tiny_pair, "bench", *options, "--concurrency", "2", "--token-speculation", "ngram", "--out", str(out)
    )
    with subprocess.Popen(bench, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("3/12"):
                break
        children = descendants(process.pid)
        assert len(children) >= 3
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    interrupted_keys = [sample.key for sample in results(out)]
    assert 3 <= len(interrupted_keys) < 12
    rerun = run_in_process(bench, capsys)
    assert rerun.returncode == 0, rerun.stderr
    assert f"{len(interrupted_keys)} of 12 samples" in rerun.stderr
    measured = results(out)
    assert [sample.key for sample in measured][: len(interrupted_keys)] == interrupted_keys
    assert set(Counter(sample.key for sample in measured).values()) == {1}
    assert len(measured) == 12
    exact = next(
        configuration for configuration in Report(measured).configurations if configuration.configuration == "lr exact"
    )
    assert exact.same_tokens == 4, "in float32, `exact` generates the target's replies"
    assert "lr exact" in rerun.stdout
    sample = measured[-1]
    assert sample.engines["target"]["arguments"]["dtype"] == "float32"
    assert str(tiny_pair[0].parent) not in json.dumps(sample.engines), "the recorded arguments hold no local path"
