"""The configuration of a pair follows from a table by instruction set, and from the speed of measured replies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_agent.decoding.accounting import ReplyReport
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.hardware.choice import (
    REPLY_TOKENS,
    Choice,
    Configuration,
    SpeculationMethod,
    acceptance_rate_of,
    choose_configuration,
    draft_tokens_by_batch_size,
    tokens_per_pass,
)
from lookahead_agent.hardware.kernels import KERNELS, Kernel, KernelCosts, ModelSize, multiplies_int8

TARGET = ModelSize(layers=28, weights=1543.0, head=233.0)
DRAFT = ModelSize(layers=24, weights=494.0, head=136.0)
WITH_INT8, WITHOUT_INT8 = KernelCosts(with_int8=True), KernelCosts(with_int8=False)
METHODS: tuple[SpeculationMethod, ...] = ("none", "draft_model", "shared_draft")


def kernels(costs: KernelCosts) -> tuple[Kernel, ...]:
    """Those that are not emulated."""
    return tuple(kernel for kernel in KERNELS if kernel != ("int8-weights" if costs is WITH_INT8 else "int8"))


def chosen(costs: KernelCosts, **more: object) -> Choice:
    options = {"target_kernels": kernels(costs), "draft_kernels": kernels(costs), **more}
    return choose_configuration(costs, TARGET, DRAFT, **options)  # type: ignore[arg-type]


def test_int8_where_the_processor_has_it_and_integer_weights_where_it_has_nothing() -> None:
    assert chosen(WITH_INT8).configuration == Configuration("draft_model", "int8", "int8", 2)
    assert chosen(WITHOUT_INT8).configuration == Configuration("none", "int8-weights")


@pytest.mark.parametrize(
    ("flags", "found"), [("avx2", False), ("avx2 avx512_vnni", True), ("amx_int8", True), ("i8mm", True), ("", False)]
)
def test_instructions_for_int8_are_read_from_the_cpu_flags(flags: str, *, found: bool) -> None:
    assert multiplies_int8(f"a processor {flags}") is found


def test_the_reason_compares_the_configurations() -> None:
    reason = chosen(WITH_INT8).reason
    assert "expected" in reason
    assert "none, target int8" in reason


def test_only_what_may_be_chosen_is() -> None:
    for method in METHODS:
        choice = chosen(WITHOUT_INT8, methods=(method,), target_kernels=("bf16",))
        assert choice.configuration.method == method
        assert choice.configuration.target == "bf16"
    alone = choose_configuration(WITHOUT_INT8, TARGET, None, target_kernels=("bf16", "fp32", "int8-weights"))
    assert alone.configuration == Configuration("none", "int8-weights")
    with pytest.raises(ConfigurationError, match="no configuration"):
        choose_configuration(WITHOUT_INT8, TARGET, None, methods=("shared_draft",))


def test_there_are_no_draft_tokens_where_a_draft_costs_as_much_as_its_target() -> None:
    for costs in (WITH_INT8, WITHOUT_INT8):
        twin = choose_configuration(
            costs, TARGET, TARGET, target_kernels=kernels(costs), draft_kernels=kernels(costs), acceptance_rate=0.95
        )
        assert twin.configuration.method == "none"


def test_measured_replies_go_before_the_table() -> None:
    first = chosen(WITH_INT8)
    others = {candidate.configuration.name: candidate.pace for candidate in first.candidates}
    worse = {first.configuration.name: 10 * others[first.configuration.name]}
    second = chosen(WITH_INT8, paces=others | worse)
    assert second.configuration != first.configuration
    assert "measured" in second.reason


@pytest.mark.parametrize(("share", "method"), [(0.9, "draft_model"), (0.5, "shared_draft")])
def test_a_draft_on_cores_of_its_own_must_be_worth_them(share: float, method: str) -> None:
    methods: tuple[SpeculationMethod, ...] = ("draft_model", "shared_draft")
    paces = {"draft_model, target int8, draft int8": 0.05, "shared_draft, target int8, draft int8": share * 0.05}
    assert chosen(WITH_INT8, methods=methods, paces=paces).configuration.method == method


def test_a_shared_draft_is_not_taken_before_a_reply_was_measured_with_it() -> None:
    found = chosen(WITH_INT8)
    assert [one.configuration.method for one in found.candidates] == ["draft_model", "none"]


def test_slow_replies_make_all_expectations_slower_and_change_nothing() -> None:
    first = chosen(WITH_INT8)
    slow = chosen(WITH_INT8, paces={first.configuration.name: 1.3 * first.candidates[0].pace})
    assert slow.configuration == first.configuration


def test_a_shared_drafts_speed_says_nothing_of_other_methods() -> None:
    before = {one.configuration.method: one for one in chosen(WITH_INT8).candidates}
    shared = "shared_draft, target int8, draft int8"
    after = {one.configuration.method: one for one in chosen(WITH_INT8, paces={shared: 0.2}).candidates}
    assert after["draft_model"].pace == before["draft_model"].pace
    assert after["shared_draft"].pace == 0.2
    alone = before["none"]
    scaled = chosen(WITH_INT8, paces={alone.configuration.name: 2 * alone.pace}).candidates
    paces = {one.configuration.method: one.pace for one in scaled}
    assert paces["draft_model"] == pytest.approx(2 * before["draft_model"].pace), "both run on the same cores"


@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
def test_the_acceptance_rate_is_known_by_the_tokens_per_pass(draft_tokens: int) -> None:
    for rate in (0.0, 0.5, 0.9):
        assert acceptance_rate_of(tokens_per_pass(draft_tokens, rate), draft_tokens) == pytest.approx(rate, abs=1e-6)
    assert acceptance_rate_of(draft_tokens + 1, draft_tokens) < 1, "a rate of 1 would give infinitely many"


def test_a_higher_acceptance_rate_gives_more_draft_tokens() -> None:
    made = [
        chosen(WITH_INT8, methods=("draft_model",), acceptance_rate=rate).configuration.draft_tokens
        for rate in (0.3, 0.7, 0.97)
    ]
    assert made == sorted(made)
    assert made[0] < made[-1]
    known = chosen(WITH_INT8, methods=("draft_model",), acceptance_rate=0.97)
    paces = {known.configuration.name: 0.2}
    seen = chosen(WITH_INT8, methods=("draft_model",), acceptance_rate=0.97, paces=paces)
    assert seen.configuration.draft_tokens == known.configuration.draft_tokens, "a pace is of any number of them"


def test_passes_cost_more_with_more_tokens() -> None:
    costs = WITHOUT_INT8.by_size(TARGET, "fp32")
    assert costs[1] < costs[8] < costs[128]
    assert WITHOUT_INT8.seconds(TARGET, "fp32", 1) == pytest.approx(177e-6 * 1543 + 28 * 0.35e-3)
    assert costs[1] > WITHOUT_INT8.seconds(TARGET, "fp32", 1), "a share of the cores is slower than all"


def test_more_requests_have_fewer_draft_tokens() -> None:
    configuration = Configuration("draft_model", "int8", "int8", 2)
    ranges = draft_tokens_by_batch_size(WITH_INT8, TARGET, DRAFT, configuration, 0.85)
    assert ranges == [(1, 1, 2), (2, 5, 1), (6, 32, 0)], "from six on the target is faster alone"
    bf16 = Configuration("draft_model", "bf16", "bf16", 4)
    steep = draft_tokens_by_batch_size(WITHOUT_INT8, TARGET, DRAFT, bf16, 0.85)
    assert steep == [(1, 1, 1), (2, 32, 0)], "a pass costs eight times as much for eight tokens"
    free = draft_tokens_by_batch_size(WITH_INT8, TARGET, ModelSize(1, 2, 1), configuration, 0.85)
    assert free[0][2] == 2
    assert all(count for first, _, count in free if first < 8)


def test_sizes_are_read_from_configurations(tmp_path: Path) -> None:
    config = {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    size = ModelSize.of(tmp_path)
    assert size is not None
    assert size.weights == pytest.approx(1543, rel=0.01)
    assert size.head == pytest.approx(233, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    assert ModelSize.of(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert ModelSize.of(tmp_path) is None


def test_the_prompt_is_no_part_of_the_pace() -> None:
    report = ReplyReport(seconds={"total": 30.0, "first": 20.0})
    assert report.pace(101) == pytest.approx(0.1)
    assert report.pace(1) == 0
    first = chosen(WITH_INT8)
    (seen, *_) = chosen(WITH_INT8, paces={first.configuration.name: 0.01}).candidates
    assert seen.measured
    assert seen.seconds == pytest.approx(seen.prompt + 0.01 * REPLY_TOKENS)
    assert seen.prompt == first.candidates[0].prompt
