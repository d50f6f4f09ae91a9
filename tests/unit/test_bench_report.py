"""Summaries and reports of benchmark results."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from lookahead_agent.bench.config import MODES
from lookahead_agent.bench.report import Report
from lookahead_agent.bench.row_report import RowReport
from lookahead_agent.bench.samples import SCHEMA, CallRecord, Sample, ToolRecord, environment, read_results
from lookahead_agent.bench.server_parity import ServerReply
from lookahead_agent.bench.summary import (
    ConfigurationSummary,
    Estimate,
    estimate,
    mean_difference,
    median_ratio,
    summarize,
)
from lookahead_agent.cli.bench import report_of, show_report
from lookahead_agent.cli.terminal import Terminal
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.system.jsonl import RowFile

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


def sample(configuration: str, problem: int, seconds: float, correct: bool = True, **changes: Any) -> Sample:
    """A sample with one call, whose reply has two steps."""
    off = configuration == "off"
    call = CallRecord(
        node=changes.pop("node", None),
        policy="off" if off else "balanced",
        seconds=seconds,
        first_token=seconds / 10,
        output_tokens=10,
        steps=2,
        accepted=0 if off else 1,
        verifier_calls=0 if off else 2,
        judge_calls=0 if off else 1,
        tokens={
            "target": {"committed": 10, "rejected": 0 if off else 5, "aborted": 0},
            "draft": {"committed": 0, "rejected": 0, "aborted": 0 if off else 2},
        },
        busy={"prompt": 0.1, "verifier": 0.0 if off else seconds / 4},
        token_ids=[1, 2] if correct else [1, 3],
    )
    fields: dict[str, Any] = {
        "task": "questions",
        "problem": str(problem),
        "mode": "off" if off else "lr",
        "configuration": configuration,
        "seconds": seconds,
        "correct": correct,
        "calls": [call],
    }
    return Sample(**fields | changes)


def off_and_lr() -> list[Sample]:
    samples = [sample("off", number, 10.0) for number in range(4)]
    return samples + [sample("lr", number, 5.0, correct=number != 3) for number in range(4)]


def test_summary_of_each_configuration() -> None:
    off, lr = summarize(off_and_lr())
    assert (off.samples, off.seconds, off.tokens_per_second, off.acceptance) == (4, 10.0, 1.0, 0.0)
    assert off.speedup is None
    assert off.accuracy == Estimate(1.0, 1.0, 1.0)
    assert lr.accuracy is not None
    assert lr.accuracy.value == 0.75
    assert lr.accuracy_difference is not None
    assert lr.accuracy_difference.value == -0.25
    assert lr.accuracy_difference.high == 0, "one wrong answer of four may be chance"
    assert lr.speedup == Estimate(2.0, 2.0, 2.0)
    assert (lr.acceptance, lr.wasted_target, lr.wasted_draft) == (0.5, 0.5, 0.2)
    assert lr.verifier_share == 0.25
    assert lr.first_token == 0.5
    assert lr.same_tokens == 3


def test_samples_are_compared_with_the_baseline_of_their_own_block() -> None:
    results = [
        sample("off", 0, 10.0),
        sample("off", 0, 20.0, block=1),
        sample("lr", 0, 5.0),
        sample("lr deep", 0, 5.0, block=1),
    ]
    speedups = {
        configuration.configuration: configuration.speedup.value
        for configuration in summarize(results)
        if configuration.speedup
    }
    assert speedups == {"lr": 2.0, "lr deep": 4.0}


def test_failed_samples_count_as_errors_and_not_towards_the_speedup() -> None:
    samples = off_and_lr()
    samples.append(sample("lr", 4, 0.1, correct=False, error="ValueError: no"))
    samples.append(sample("off", 4, 10.0))
    lr = summarize(samples)[1]
    assert (lr.samples, lr.errors) == (5, 1)
    assert lr.speedup is not None
    assert lr.speedup.value == 2.0
    assert lr.accuracy is not None
    assert lr.accuracy.value == 0.6


def test_node_table_has_a_row_per_configuration_and_node() -> None:
    results = [
        sample("off", 0, 4.0, node="planner", workload="rewoo"),
        sample("lr", 0, 2.0, node="planner", workload="rewoo"),
    ]
    headings, rows = Report(results).tables("questions")[1]
    off, lr = (next(row for row in rows if row[0] == name) for name in ("off", "lr"))
    assert headings[:6] == ["configuration", "node", "policy", "replies", "tokens", "accepted steps"]
    assert off[:6] == ["off", "planner", "off", "1", "10", ""]
    assert lr[:6] == ["lr", "planner", "balanced", "1", "10", "1 of 2"]


def test_confidence_intervals_narrow_with_the_number_of_samples() -> None:
    of_few, of_many = estimate(np.mean, [0.0, 1.0] * 2), estimate(np.mean, [0.0, 1.0] * 200)
    assert of_few.low is not None
    assert of_few.high is not None
    assert of_many.low is not None
    assert of_many.high is not None
    assert of_few.high - of_few.low > 5 * (of_many.high - of_many.low)
    assert estimate(np.mean, [1.0]) == Estimate(1.0)
    assert estimate(np.mean, [0.0, 1.0] * 5) == estimate(np.mean, [0.0, 1.0] * 5), "the bootstrap is deterministic"


def test_bootstrap_resamples_pairs_together() -> None:
    seconds = [float(number) for number in range(1, 30)]
    ratio = estimate(median_ratio, [2 * number for number in seconds], seconds)
    assert ratio == Estimate(2.0, 2.0, 2.0), "the ratio is the same in each resampling of pairs"
    assert estimate(mean_difference, seconds, seconds) == Estimate(0.0, 0.0, 0.0)


@pytest.mark.parametrize("file", sorted(MEASUREMENTS.glob("*.jsonl.xz")), ids=lambda file: file.stem)
def test_published_results_have_a_report_of_80_columns(file: Path) -> None:
    screen = io.StringIO()
    report = report_of(RowFile(file).rows, "off", ())
    show_report(report, Terminal(file=screen, width=80))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    words = set(screen.getvalue().replace(" ", "\n").split())
    for _, tables in report.sections():
        for headings, rows in tables:
            cells = [cell for row in (headings, *rows) for cell in row]
            assert set(" ".join(cells).split()) <= words, "no word is broken or left out"
    assert report.records()
    assert all(panel.bars for panel in report.panels())
    if isinstance(report, Report) and "gsm8k" in file.stem:
        off = report.configurations[0]
        assert off.mode == "off"
        assert off.accuracy is not None
        assert all(configuration.speedup for configuration in report.configurations if configuration.mode != "off")
        assert {configuration.mode for configuration in report.configurations} <= set(MODES)


def test_rows_of_other_programs_are_grouped(tmp_path: Path) -> None:
    rows = [{"template": name, "right": right, "int8": {"seconds": 2.0}} for name, right in (("a", True), ("a", False))]
    record = {"template": "a", "rows": 2, "right": 1, "int8.seconds, median": 2.0, "int8.seconds, sum": 4.0}
    assert report_of(rows, "off", ()).records() == [record]
    assert [record["rows"] for record in RowReport(rows, ["right"]).records()] == [1, 1]
    with pytest.raises(ConfigurationError, match="no row has the field colour: choose of template, right"):
        RowReport(rows, ["colour"])
    with pytest.raises(ConfigurationError, match="no results of a benchmark"):
        RowReport([{"id": "x"}])
    for option, arguments in (("--by", ("off", ["mode"])), ("--baseline", ("sd", []))):
        with pytest.raises(typer.BadParameter) as error:
            report_of([sample("off", 0, 1.0).model_dump()] if option == "--by" else rows, *arguments)
        assert error.value.param_hint == option


@pytest.mark.parametrize("file", ["shared-draft-vnni-gsm8k-12", "gpu-h100-8b-mps-shares", "agent-tasks-13"])
def test_report_of_each_kind_is_written_in_each_format(file: str, tmp_path: Path) -> None:
    report = report_of(RowFile(MEASUREMENTS / f"{file}.jsonl.xz").rows, "off", ())
    for suffix, beginning in ((".md", b"# Benchmark: r\n"), (".svg", b"<svg"), (".png", b"\x89PNG")):
        report.write(tmp_path / f"r{suffix}")
        assert (tmp_path / f"r{suffix}").read_bytes().startswith(beginning)
    report.write(tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="", encoding="utf-8") as written:
        rows = list(csv.DictReader(written))
    assert rows == [
        {name: "" if value is None else str(value) for name, value in record.items()} for record in report.records()
    ]
    with pytest.raises(ConfigurationError, match=r"r\.pdf: a report is a \.md or \.csv or \.svg or \.png file"):
        report.write(tmp_path / "r.pdf")


def test_reference_page_has_every_field_of_a_row() -> None:
    text = (MEASUREMENTS.parent / "reference" / "bench-rows.md").read_text(encoding="utf-8")
    cells = [re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE) for section in text.split("\n## ")[1:]]
    tables = [re.findall(r"`(\w+)`", " ".join(table)) for table in cells]
    summary = [field.name for field in dataclasses.fields(ConfigurationSummary)]
    sample = [[*Sample.model_fields], [*CallRecord.model_fields], [*ToolRecord.model_fields]]
    assert tables == [*sample, summary, [*ServerReply.model_fields]]


def test_speeds_are_against_the_named_baseline() -> None:
    samples = off_and_lr()
    off = Report(samples, "lr").configurations[1]
    assert (off.configuration, off.speedup) == ("off", Estimate(0.5, 0.5, 0.5))
    with pytest.raises(ConfigurationError, match="no sample has the configuration 'sd': choose of off, lr"):
        Report(samples, "sd")


def test_repeated_samples_of_a_problem_do_not_narrow_the_intervals() -> None:
    once = off_and_lr()
    thrice = [sample.model_copy(update={"sample": n}) for n in range(3) for sample in once]
    for one, three in zip(summarize(once), summarize(thrice), strict=True):
        assert three.samples == 3 * one.samples
        assert (three.accuracy, three.accuracy_difference) == (one.accuracy, one.accuracy_difference)
        assert (three.speedup, three.rate_ratio) == (one.speedup, one.rate_ratio)


def test_published_results_give_the_documented_numbers() -> None:
    """The pages' speeds, differences and intervals are those that `bench report` prints."""
    documented = [
        ("README.md", "default-vnni-fast-memory-gsm8k-30", "off", "auto", "**2.52** (2.33 to 2.57)"),
        ("README.md", "default-vnni-fast-memory-gsm8k-30", "off int8", "auto", "**1.39** (1.36 to 1.43)"),
        ("README.md", "peers-avx2-18", "earlier", "auto", "**1.44** (1.29 to 1.55)"),
        ("README.md", "peers-avx2-18", "llama.cpp", "auto", "0.75 (0.67 to 0.80)"),
        ("docs/results/cpu.md", "default-gsm8k-21", "off", "auto", "**2.47** (2.29 to 2.54)"),
        ("README.md", "load-8-vnni-gsm8k-48", "off", "auto", "0.99 (0.98 to 0.99)"),
        ("README.md", "configurations-vnni-gsm8k-24", "off", "lr balanced", "0.71 (0.65 to 0.76)"),
        ("docs/results/agents.md", "peers-18", "off", "auto", "1.20 (1.08 to 1.25)"),
        ("README.md", "peers-vnni-18", "llama.cpp", "auto", "1.07 (0.99 to 1.15)"),
        ("README.md", "peers-vnni-18", "earlier", "auto", "**1.07** (1.03 to 1.08)"),
        ("docs/results/cpu.md", "default-vnni-slow-memory-gsm8k-30", "off", "auto", "**3.01** (2.92 to 3.12)"),
        ("docs/results/cpu.md", "default-vnni-slow-memory-gsm8k-30", "off int8", "auto", "**1.30** (1.24 to 1.37)"),
        ("docs/results/cpu.md", "sampled-vnni-gsm8k-30", "off", "auto", "**2.25** (2.17 to 2.31)"),
        ("docs/results/cpu.md", "sampled-vnni-gsm8k-30", "off int8", "auto", "**1.31** (1.28 to 1.34)"),
        ("docs/results/cpu.md", "sampled-top-vnni-gsm8k-24", "off int8", "auto", "**1.29** (1.27 to 1.39)"),
        ("docs/results/cpu.md", "load-4-vnni-gsm8k-32", "off", "auto", "**1.16** (1.14 to 1.18)"),
        ("docs/results/cpu.md", "load-16-vnni-gsm8k-32", "off", "auto", "**1.08** (1.04 to 1.11)"),
        ("docs/results/cpu.md", "configurations-vnni-gsm8k-24", "off", "auto", "**1.31** (1.29 to 1.35)"),
        ("docs/results/cpu.md", "configurations-vnni-gsm8k-24", "off", "sd", "1.28 (1.20 to 1.30)"),
        ("docs/results/cpu.md", "configurations-vnni-gsm8k-24", "off", "shared_draft", "1.09 (1.05 to 1.13)"),
        (
            "docs/results/cpu.md", "configurations-vnni-gsm8k-24", "lr balanced", "lr+shared_draft balanced",
            "1.39 times as fast (1.34 to 1.47)",
        ),
        ("docs/results/cpu.md", "shared-draft-vnni-gsm8k-30", "off int8", "auto", "1.08 (1.05 to 1.12)"),
        ("docs/results/cpu.md", "shared-draft-vnni-gsm8k-12", "off", "auto", "1.89 (1.56 to 1.98)"),
        ("docs/results/verifiers.md", "risk-gsm8k-250", "off", "lr risk=0.02 depth=1", "0.41 (0.39 to 0.42)"),
        ("docs/results/verifiers.md", "risk-gsm8k-250", "off", "lr risk=0.02 depth=1", "+2.4 (−1.2 to +6.0)"),
        ("docs/results/verifiers.md", "risk-gsm8k-250", "off", "lr risk=0.05 depth=1", "0.55 (0.54 to 0.56)"),
        ("docs/results/verifiers.md", "risk-gsm8k-250", "off", "lr risk=0.1 depth=1", "−14.4 (−21.6 to −8.0)"),
        ("docs/results/verifiers.md", "risk-gsm8k-250", "lr random depth=1", "lr risk=0.02 depth=1", "+5.6 to +16.0"),
        ("docs/results/verifiers.md", "verifiers-gsm8k-30", "off", "lr exact", "0.58"),
    ]  # fmt: skip
    root, reports = MEASUREMENTS.parents[1], dict[tuple[str, str], Report]()
    for page, file, baseline, configuration, text in documented:
        assert text in (root / page).read_text(encoding="utf-8")
        if (file, baseline) not in reports:
            rows = RowFile(MEASUREMENTS / f"{file}.jsonl.xz").rows
            reports[file, baseline] = Report(read_results(rows), baseline)
        report = reports[file, baseline]
        (row, *_) = [
            dict(zip(table[0], row, strict=True))
            for table in (report.tables(task)[0] for task in report.tasks)
            for row in table[1]
            if row[0] == configuration
        ]
        printed = " ".join(row.values()).replace("times as fast ", "")
        assert text.replace("*", "").replace("−", "-").replace("times as fast ", "") in printed, printed


def _damaged(**fields: Any) -> dict[str, Any]:
    return sample("lr", 0, 1.0).model_dump(mode="json") | fields


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"schema_version": SCHEMA + 1}, "another version"),
        ({"schema_version": 2}, "another version"),
        ({"schema_version": SCHEMA, "kind": "sample"}, "not a result"),
        ({"id": "x"}, "not a result"),
        (_damaged(seconds=-5.0), r"seconds: Input should be greater than or equal to 0\Z"),
        (_damaged(seconds=float("nan")), r"seconds: Input should be a finite number\Z"),
        (_damaged(calls=[1]), r"calls\.0: Input should be a valid dictionary or instance of CallRecord\Z"),
    ],
)
def test_invalid_result_rows_are_rejected(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_results([row])


def test_samples_survive_a_round_trip_through_a_file(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "r.jsonl")
    one = sample("lr", 0, 1.0)
    file.append(one.model_dump(mode="json"))
    assert read_results(RowFile(file.path).rows) == [one]
    with_new_field = {**one.model_dump(mode="json"), "added_later": 1}
    assert read_results([with_new_field, {"kind": "turn"}]) == [one], "a newer writer of the same schema may add fields"


def test_report_is_a_markdown_file_with_escaped_names(tmp_path: Path) -> None:
    results = off_and_lr()
    results += [
        sample("off", 0, 4.0, task="rewoo", workload="rewoo", node="<script>alert(1)</script>"),
        sample("lr", 0, 2.0, task="rewoo", workload="rewoo", node="<script>alert(1)</script>"),
    ]
    report = Report(results)
    report.write(tmp_path / "deep" / "r.md")
    text = (tmp_path / "deep" / "r.md").read_text(encoding="utf-8")
    assert "2.00 (2.00 to 2.00)" in text
    assert r"| lr | \<script>" in text
    with pytest.raises(ConfigurationError, match=r"a report is a \.md or"):
        report.write(tmp_path / "r.pdf")


def test_report_without_results_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no results"):
        Report(read_results([]))


def test_invalid_jsonl_is_rejected_and_a_truncated_last_line_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("no json\n")
    with pytest.raises(ConfigurationError, match="line 1 is not JSON"):
        RowFile(file)
    file.write_text("[1]\n")
    with pytest.raises(ConfigurationError, match="line 1 is not a row"):
        RowFile(file)
    file.write_text(json.dumps({"id": 1}) + "\n" + '{"id": 2, "te')
    assert RowFile(file).rows == [{"id": 1}], "a truncated last line is ignored"


def test_environment_records_hardware_and_package_versions() -> None:
    recorded = environment()
    assert recorded["cores"] >= 1
    assert recorded["memory_gib"] > 0
    assert recorded["packages"]["langchain-core"]
    assert recorded["lookahead_agent"]
