"""The configuration of a pair: a table of defaults by instruction set, then the speed of measured replies."""

from __future__ import annotations

from typing import Any

import pytest

from lookahead_agent.cpu import INSTRUCTIONS
from lookahead_agent.decoding.accounting import ReplyReport
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.modes.table import (
    WITH_AVX2,
    WITH_DOT_PRODUCTS,
    WITHOUT_INT8,
    Configuration,
    CPUDefaults,
    SpeculationMethod,
    choose_configuration,
    defaults_of,
)
from lookahead_agent.system.passes import acceptance_rate_of, tokens_per_pass

METHODS: tuple[SpeculationMethod, ...] = ("none", "draft_model", "shared_draft")
ALONE, DRAFTING = "none, target int8", "draft_model, target int8, draft int8"
SHARED = "shared_draft, target int8, draft int8"


def choice(defaults: CPUDefaults, **overrides: Any) -> tuple[Configuration, str]:
    options = {"methods": METHODS, "target": defaults.kernels, "draft": defaults.kernels, "draft_size": 0.32}
    return choose_configuration(defaults, **(options | overrides))


def chosen(defaults: CPUDefaults, **overrides: Any) -> Configuration:
    return choice(defaults, **overrides)[0]


def test_default_configuration_depends_on_int8_instructions() -> None:
    for defaults in (WITH_DOT_PRODUCTS, WITH_AVX2):
        drafting = Configuration("draft_model", "int8", "int8", ((1, 1, 2), (2, 5, 1), (6, 32, 0)))
        assert chosen(defaults) == drafting
    assert chosen(WITHOUT_INT8).target == "fp32"


@pytest.mark.parametrize(
    ("flags", "defaults"),
    [
        ("avx2", WITH_AVX2),
        ("avx2 avx512_vnni", WITH_DOT_PRODUCTS),
        ("avx2 avx_vnni", WITH_DOT_PRODUCTS),
        ("amx_int8", WITH_DOT_PRODUCTS),
        ("i8mm", WITH_DOT_PRODUCTS),
        ("", WITHOUT_INT8),
    ],
)
def test_defaults_follow_the_cpu_flags(flags: str, defaults: CPUDefaults, monkeypatch: pytest.MonkeyPatch) -> None:
    assert defaults_of(f"a processor {flags}") is defaults
    monkeypatch.setenv(INSTRUCTIONS, "avx2")
    assert defaults_of() is WITH_AVX2, "the kernel takes the instruction set that the environment names"


def test_choice_respects_the_allowed_methods_and_precisions() -> None:
    for method in METHODS:
        configuration = chosen(WITHOUT_INT8, methods=(method,), target=("bf16",))
        assert configuration.method == method
        assert configuration.target == "bf16"
    with pytest.raises(ConfigurationError, match="no configuration"):
        choice(WITHOUT_INT8, draft=(), methods=("shared_draft",))


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        (("bf16",), WITH_DOT_PRODUCTS.kernels, ("bf16", "int8")),
        (WITHOUT_INT8.kernels, ("bf16",), ("bf16", "bf16")),
        (WITHOUT_INT8.kernels, ("fp32",), ("fp32", "fp32")),
        (("bf16",), WITHOUT_INT8.kernels, ("bf16", "bf16")),
    ],
)
def test_target_and_draft_get_compatible_precisions(target: Any, draft: Any, expected: tuple[str, str]) -> None:
    defaults = WITH_DOT_PRODUCTS if "int8" in (*target, *draft) else WITHOUT_INT8
    pair = chosen(defaults, methods=("draft_model",), target=target, draft=draft)
    assert (pair.target, pair.draft) == expected


def test_incompatible_precisions_are_refused_if_the_draft_must_run() -> None:
    with pytest.raises(ConfigurationError, match="both compute in bf16 or both in float32"):
        choice(WITHOUT_INT8, methods=("draft_model",), target=("bf16",), draft=("fp32",))
    assert chosen(WITHOUT_INT8, target=("bf16",), draft=("fp32",)).method == "none"


def test_draft_tokens_are_off_where_they_do_not_pay() -> None:
    assert chosen(WITH_DOT_PRODUCTS, draft_size=1.0).method == "none", "a draft costs as much as its target"
    assert chosen(WITH_DOT_PRODUCTS, acceptance_rate=0.3).method == "none"
    assert chosen(WITHOUT_INT8, target=("bf16",)).method == "none", "the cost of a pass is proportional to its tokens"
    assert chosen(WITHOUT_INT8, target=("fp32",)).method == "draft_model"
    forced = chosen(WITH_DOT_PRODUCTS, methods=("draft_model",), acceptance_rate=0.3)
    assert forced.draft_tokens == ((1, 1, 1), (2, 32, 0))


def test_a_higher_acceptance_rate_gives_more_draft_tokens() -> None:
    for target in ("int8", "bf16"):
        schedules = [
            chosen(WITH_DOT_PRODUCTS, methods=("draft_model",), target=(target,), acceptance_rate=rate).draft_tokens
            for rate in (0.3, 0.7, 0.85, 0.97)
        ]
        single_request = [schedule[0][2] for schedule in schedules]
        assert single_request == sorted(single_request)
        assert single_request[0] < single_request[-1]
        for schedule in schedules:
            assert [first for first, _, _ in schedule] == [1, *(last + 1 for _, last, _ in schedule[:-1])]
            assert [count for _, _, count in schedule] == sorted((count for _, _, count in schedule), reverse=True)
            assert schedule[-1][1:] == (32, 0), "large batches have no draft tokens"


@pytest.mark.parametrize(
    ("paces", "method"),
    [
        ({DRAFTING: 0.05}, "draft_model"),
        ({DRAFTING: 9.0}, "draft_model"),
        ({DRAFTING: 0.05, ALONE: 0.04}, "none"),
        ({DRAFTING: 0.05, ALONE: 0.051}, "none"),
        ({DRAFTING: 0.05, ALONE: 0.054}, "draft_model"),
        ({DRAFTING: 0.05, SHARED: 0.045}, "draft_model"),
        ({DRAFTING: 0.05, SHARED: 0.025}, "shared_draft"),
        ({ALONE: 0.01, SHARED: 0.005}, "draft_model"),
        ({"another": 0.001, DRAFTING: 0.05}, "draft_model"),
    ],
)
def test_measured_replies_decide_between_the_measured_methods(paces: dict[str, float], method: str) -> None:
    configuration, reason = choice(WITH_DOT_PRODUCTS, paces=paces)
    assert configuration.method == method
    assert configuration.name in reason
    if DRAFTING in paces:
        assert f"draft_model {1000 * paces[DRAFTING]:.0f} ms per token" in reason


@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
def test_acceptance_rate_is_the_inverse_of_tokens_per_pass(draft_tokens: int) -> None:
    for rate in (0.0, 0.5, 0.9):
        assert acceptance_rate_of(tokens_per_pass(draft_tokens, rate), draft_tokens) == pytest.approx(rate, abs=1e-6)
    assert acceptance_rate_of(draft_tokens + 1, draft_tokens) < 1, "a rate of 1 would allow any draft length"


def test_forward_passes_with_more_tokens_cost_more() -> None:
    for defaults in (WITH_DOT_PRODUCTS, WITH_AVX2, WITHOUT_INT8):
        for kernel in defaults.kernels:
            costs = defaults.pass_costs[kernel]
            assert costs[1] == 1
            assert costs[8] < costs[16] < costs[128]


def test_pace_is_the_decode_time_per_token_after_the_first() -> None:
    report = ReplyReport(seconds={"total": 90.0, "prompt": 80.0, "writing": 10.0})
    assert report.pace(101) == pytest.approx(0.1)
    assert report.pace(1) == 0
