"""The arrangement of engines follows from what the machine's kernels take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lookahead_agent.decoding.accounting import ReplyReport
from lookahead_agent.errors import ConfigurationError, EngineStartError
from lookahead_agent.hardware import kernels as kernels_module
from lookahead_agent.hardware.choice import (
    REPLY_TOKENS,
    Arrangement,
    Choice,
    SpeculationMethod,
    Times,
    acceptance_rate_of,
    choose_arrangement,
    draft_tokens_by_load,
    pass_costs,
    tokens_of_a_pass,
)
from lookahead_agent.hardware.kernels import BATCHES, KernelTimes, kernel_times
from lookahead_agent.hardware.observed import Observed
from lookahead_agent.hardware.shape import ModelShape
from lookahead_agent.progress import LogProgress

TARGET = ModelShape(layers=28, weights=1310.0, head=233.0)
DRAFT = ModelShape(layers=24, weights=358.0, head=136.0)


def times(bf16: list[float], fp32: list[float], int8: list[float], int8_weights: list[float] | None = None) -> Times:
    """In microseconds of a million weights, by `BATCHES`."""
    rows = {"bf16": bf16, "fp32": fp32, "int8": int8}
    rows["int8-weights"] = int8_weights or [100 * one for one in fp32]
    return {kernel: dict(zip(BATCHES, (1e-6 * one for one in row), strict=True)) for kernel, row in rows.items()}  # type: ignore[misc]


# Two machines of two cores each, as measured: one that has instructions for bf16 and int8, and one that has neither.
WITH_INT8 = times([61, 68, 65, 73, 90, 300], [120, 122, 125, 140, 170, 1000], [33, 31, 40, 47, 58, 170])
WITH_INT8_ONE_CORE = times([110, 112, 115, 130, 160, 580], [200, 205, 210, 240, 300, 1900], [44, 46, 49, 65, 90, 330])
PLAIN = times([120, 208, 438, 873, 1728, 12857], [166, 179, 235, 275, 405, 2121], [1026, 1886, 2028, 1998, 2090, 2956])
PLAIN_ONE_CORE = times(
    [221, 410, 830, 1578, 3264, 24626], [289, 297, 364, 495, 692, 3948], [1731, 1743, 1806, 1869, 2022, 3230]
)


def chosen(every: Times, one: Times, **more: object) -> Choice:
    return choose_arrangement(TARGET, DRAFT, every_core=every, targets_share=one, drafts_share=one, **more)  # type: ignore[arg-type]


def test_int8_where_the_processor_has_it_and_fp32_where_it_has_nothing() -> None:
    assert chosen(WITH_INT8, WITH_INT8_ONE_CORE).arrangement.target == "int8"
    assert chosen(WITH_INT8, WITH_INT8_ONE_CORE).arrangement.draft == "int8"
    plain = chosen(PLAIN, PLAIN_ONE_CORE)
    assert plain.arrangement.target == "fp32", "bf16 gains nothing from a batch there, and prompts take minutes"
    assert plain.arrangement.speculation_method != "none"


def test_the_reason_compares_the_ways() -> None:
    reason = chosen(PLAIN, PLAIN_ONE_CORE).reason
    assert "predicted" in reason
    assert "none, target fp32" in reason


def test_only_what_may_be_chosen_is() -> None:
    ways: tuple[SpeculationMethod, ...] = ("none", "draft_model", "shared_draft")
    for way in ways:
        choice = chosen(PLAIN, PLAIN_ONE_CORE, speculation_method=(way,), target_precisions=("bf16",))
        assert choice.arrangement.speculation_method == way
        assert choice.arrangement.target == "bf16"
    alone = choose_arrangement(TARGET, None, every_core=PLAIN, targets_share=PLAIN, drafts_share=PLAIN)
    assert alone.arrangement == Arrangement("none", "fp32")
    with pytest.raises(ConfigurationError, match="no way"):
        choose_arrangement(
            TARGET,
            None,
            every_core=PLAIN,
            targets_share=PLAIN,
            drafts_share=PLAIN,
            speculation_method=("shared_draft",),
        )


def test_nothing_is_guessed_where_a_draft_costs_as_much_as_its_target() -> None:
    twin = choose_arrangement(
        TARGET, TARGET, every_core=PLAIN, targets_share=PLAIN_ONE_CORE, drafts_share=PLAIN_ONE_CORE
    )
    assert twin.arrangement.speculation_method == "none"


def test_what_replies_took_goes_before_what_was_predicted() -> None:
    first = chosen(PLAIN, PLAIN_ONE_CORE)
    others = {candidate.arrangement.name: candidate.pace for candidate in first.candidates}
    worse = {first.arrangement.name: 10 * others[first.arrangement.name]}
    second = chosen(PLAIN, PLAIN_ONE_CORE, observed=others | worse)
    assert second.arrangement != first.arrangement
    assert "measured" in second.reason


@pytest.mark.parametrize(("share", "speculation_method"), [(0.9, "draft_model"), (0.5, "shared_draft")])
def test_a_draft_on_cores_of_its_own_must_be_worth_them(share: float, speculation_method: str) -> None:
    ways: tuple[SpeculationMethod, ...] = ("draft_model", "shared_draft")
    known = chosen(WITH_INT8, WITH_INT8_ONE_CORE, speculation_method=ways)
    names = {candidate.arrangement.speculation_method: candidate.arrangement.name for candidate in known.candidates}
    paces = {names["draft_model"]: 0.05, names["shared_draft"]: share * 0.05}
    found = chosen(WITH_INT8, WITH_INT8_ONE_CORE, speculation_method=ways, observed=paces)
    assert found.arrangement.speculation_method == speculation_method


def test_one_slow_reply_makes_all_predictions_slower_and_changes_nothing() -> None:
    first = chosen(PLAIN, PLAIN_ONE_CORE)
    slow = chosen(PLAIN, PLAIN_ONE_CORE, observed={first.arrangement.name: 1.3 * first.candidates[0].pace})
    assert slow.arrangement == first.arrangement


def test_a_shared_drafts_shortfall_says_nothing_of_other_ways() -> None:
    before = {one.arrangement.speculation_method: one for one in chosen(WITH_INT8, WITH_INT8_ONE_CORE).candidates}

    def after(way: SpeculationMethod) -> dict[SpeculationMethod, float]:
        """Paces, against what was predicted, once replies of this way have taken twice as long."""
        seen = {before[way].arrangement.name: 2 * before[way].pace}
        found = chosen(WITH_INT8, WITH_INT8_ONE_CORE, observed=seen).candidates
        return {
            one.arrangement.speculation_method: round(one.pace / before[one.arrangement.speculation_method].pace, 3)
            for one in found
        }

    assert after("shared_draft") == {"shared_draft": 2, "draft_model": 1, "none": 1}
    assert after("none") == {"shared_draft": 2, "draft_model": 2, "none": 2}, "both of the others run on the same cores"


@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
def test_how_often_guesses_are_right_is_known_by_what_passes_win(draft_tokens: int) -> None:
    for right in (0.0, 0.5, 0.9):
        assert acceptance_rate_of(tokens_of_a_pass(draft_tokens, right), draft_tokens) == pytest.approx(right, abs=1e-6)
    assert acceptance_rate_of(draft_tokens + 1, draft_tokens) < 1, "never more than can be reckoned with"


def test_the_more_guesses_are_right_the_more_are_made() -> None:
    made = [
        chosen(
            PLAIN, PLAIN_ONE_CORE, speculation_method=("draft_model",), acceptance_rate=right
        ).arrangement.draft_tokens
        for right in (0.3, 0.7, 0.97)
    ]
    assert made == sorted(made)
    assert made[0] < made[-1]
    known = chosen(PLAIN, PLAIN_ONE_CORE, speculation_method=("draft_model",), acceptance_rate=0.97)
    seen = chosen(
        PLAIN,
        PLAIN_ONE_CORE,
        speculation_method=("draft_model",),
        acceptance_rate=0.97,
        observed={known.arrangement.name: 0.2},
    )
    assert seen.arrangement.draft_tokens == known.arrangement.draft_tokens, (
        "what was observed is of any number of guesses"
    )


def test_passes_cost_more_with_more_tokens() -> None:
    costs = pass_costs(TARGET, "fp32", PLAIN)
    assert list(costs) == list(BATCHES)
    assert costs[1] < costs[8] < costs[128]
    assert costs[1] == pytest.approx(166e-6 * 1543 + 28 * 0.35e-3)


def test_fewer_tokens_are_guessed_the_more_replies_are_written_at_once() -> None:
    arrangement = Arrangement("draft_model", "fp32", "fp32", 4)
    steep = {kernel: {tokens: tokens * costs[1] for tokens in costs} for kernel, costs in PLAIN.items()}
    flat = draft_tokens_by_load(TARGET, DRAFT, arrangement, PLAIN)
    assert [first for first, _, _ in flat] == [1, *(last + 1 for _, last, _ in flat[:-1])]
    assert flat[-1][1] == 32
    assert flat[0][2] >= flat[-1][2]
    assert draft_tokens_by_load(TARGET, DRAFT, arrangement, steep) == [(1, 1, 1), (2, 32, 0)], (
        "the target is faster alone"
    )
    nearly_free = draft_tokens_by_load(TARGET, ModelShape(1, 1, 1), arrangement, PLAIN, most_replies=8)
    assert all(draft_tokens for _, _, draft_tokens in nearly_free)
    level = {kernel: dict.fromkeys(costs, costs[1]) for kernel, costs in PLAIN.items()}
    many = draft_tokens_by_load(ModelShape(1000, 1, 1), DRAFT, arrangement, level)
    assert many[-1][2] < many[0][2], "matrices that cost nothing more leave activations and attention, by token"


def test_shapes_are_read_from_configurations(tmp_path: Path) -> None:
    config = {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "intermediate_size": 8960,
        "vocab_size": 151936,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = ModelShape.of(tmp_path)
    assert shape is not None
    assert shape.weights == pytest.approx(1310, rel=0.01)
    assert shape.head == pytest.approx(233, rel=0.01)
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 8}))
    assert ModelShape.of(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    assert ModelShape.of(tmp_path) is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOOKAHEAD_AGENT_CACHE", str(tmp_path))
    return tmp_path


def test_a_machine_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[object] = []

    def measure(shares: object) -> dict[int, Times]:
        measured.append(shares)
        return {1: PLAIN_ONE_CORE, 2: PLAIN}

    monkeypatch.setattr(kernels_module, "_measure_in_child", measure)
    first = kernel_times(LogProgress())
    assert kernel_times(LogProgress()) == first
    assert len(measured) == 1
    kernel_times(LogProgress(), again=True)
    assert len(measured) == 2
    (file,) = cache.glob("hardware/kernels-*.json")
    file.write_text("not JSON")
    assert kernel_times(LogProgress()) == first
    assert len(measured) == 3, "what cannot be read is measured anew"
    assert KernelTimes.model_validate_json(file.read_text()) == first
    assert first.on([7]) == PLAIN_ONE_CORE
    assert first.on([0, 5]) == PLAIN


def test_a_measurement_that_fails_says_why(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(EngineStartError, match="could not be measured"):
        kernel_times(LogProgress())


def test_paces_are_remembered_by_arrangement(cache: Path) -> None:
    observed = Observed(["target", "draft"])
    assert observed.paces() == {}
    observed.learn("shared_draft", 0.1)
    observed.learn("shared_draft", 0.1)
    assert observed.paces() == {}, "two may be chance"
    observed.learn("shared_draft", 9.0)  # something else ran on the machine
    assert observed.acceptance_rate() is None
    for _ in range(3):
        observed.learn("none", 0.2, right=0.9)
    assert Observed(["target", "draft"]).paces() == {"shared_draft": 0.1, "none": 0.2}
    assert Observed(["target", "draft"]).acceptance_rate() == 0.9
    assert Observed(["target", "other"]).paces() == {}
    (file,) = cache.glob("hardware/paces-*.json")
    for _ in range(100):
        observed.learn("shared_draft", 0.3)
    assert observed.paces()["shared_draft"] == 0.3
    assert len(file.read_text()) < 1000
    file.write_text("[]")
    assert observed.paces() == {}


def test_what_a_prompt_takes_is_no_part_of_the_pace() -> None:
    report = ReplyReport(seconds={"total": 30.0, "first": 20.0})
    assert report.pace(101) == pytest.approx(0.1)
    assert report.pace(1) == 0
    first = chosen(PLAIN, PLAIN_ONE_CORE)
    (seen, *_) = chosen(PLAIN, PLAIN_ONE_CORE, observed={first.arrangement.name: 0.05}).candidates
    assert seen.observed
    assert seen.seconds == pytest.approx(seen.prompt + 0.05 * REPLY_TOKENS)
    before = {candidate.arrangement: candidate.prompt for candidate in first.candidates}
    assert seen.prompt == before[seen.arrangement]
