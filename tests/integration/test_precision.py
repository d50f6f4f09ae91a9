"""Weights in every precision, on real vLLM."""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent import ChatLookahead
from lookahead_agent.cpu import vnni_kernel
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConversionError
from lookahead_agent.hardware.choice import Precision, has_int8_instructions
from lookahead_agent.models.conversion import converted
from lookahead_agent.progress import LogProgress
from lookahead_agent.runtime.weights import Platform, weights_in
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

ASKED = questions(12, seed=31)
ENGINE = {name: value for name, value in TINY_ENGINE.items() if name != "dtype"}
KERNEL: Precision = "int8" if has_int8_instructions() else "int8-weights"
needs_int8 = pytest.mark.skipif(KERNEL != "int8", reason="without instructions for int8, vLLM's sums overflow")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty one."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKAHEAD_AGENT_CACHE", str(folder))
        yield folder


async def logprobs(engine: Engine) -> list[float]:
    """Log-probabilities of the same tokens."""
    ids = engine.tokenizer.encode(" so then we add two and three which makes five apples.\n\n" * 12)
    async with aclosing(engine.generate(ids, Sampling(max_tokens=1, temperature=0, prompt_logprobs=True))) as deltas:
        async for delta in deltas:
            assert delta.prompt_logprobs is not None
            return [logprob for logprob in delta.prompt_logprobs if logprob is not None]
    raise AssertionError


def logprobs_in(folder: Path, **arguments: Any) -> list[float]:
    """The same by an engine of its own."""
    with closing(VLLMEngine(VLLMConfig(folder, arguments=as_arguments(ENGINE | arguments)))) as engine:
        return background.run(logprobs(engine))


def in_integers(pair: tuple[Path, Path], token_speculation: str) -> ChatLookahead:
    """The pair with weights as integers, whose engines are started when they are needed."""
    return ChatLookahead(
        model=str(pair[0]),
        draft_model=str(pair[1]),
        depth=4,
        precision=KERNEL,
        draft_precision=KERNEL,
        token_speculation=token_speculation,
        temperature=0,
        max_tokens=64,
        engine_args=ENGINE,
        draft_engine_args=ENGINE,
        return_token_ids=True,
    )


@pytest.fixture(scope="module")
def llm(cache: Path, tiny_pair: tuple[Path, Path]) -> Iterator[ChatLookahead]:
    """The pair in integers, without draft tokens."""
    with in_integers(tiny_pair, "none") as llm:
        llm.start()
        yield llm


@pytest.fixture(scope="module")
def in_int8(llm: ChatLookahead, tiny_pair: tuple[Path, Path]) -> list[float]:
    """Those of the target in int8."""
    weights = weights_in(tiny_pair[0], "int8", Platform.detect())
    assert "quantization" in weights.arguments
    engines = llm.backend.running  # that of the pair
    assert engines is not None
    return background.run(logprobs(engines.target))


def test_int8_weights_are_written_once(cache: Path, tiny_pair: tuple[Path, Path]) -> None:
    folder = converted(tiny_pair[0], "int8", LogProgress())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert "lm_head" in config["ignore"]
    assert converted(tiny_pair[0], "int8", LogProgress()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert converted(folder, "int8", LogProgress()) == folder, "what is quantized is left as it is"
    broken = cache / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match="writing broken as int8 failed"):
        converted(broken, "int8", LogProgress())
    assert not list(cache.glob("models/broken*unfinished*"))


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (97, 8), (5, 4104), (700, 2056)])
def test_a_matrix_of_int8_weights(outputs: int, inputs: int) -> None:
    """Sizes with packs and blocks that are whole, and that are not."""
    import torch

    from lookahead_agent.cpu.int8 import int8_weights_product

    torch.manual_seed(0)
    weight, tokens, bias = torch.randn(outputs, inputs), torch.randn(37, inputs), torch.randn(outputs)
    matrix = int8_weights_product(weight)
    exact = tokens @ weight.T + bias
    many = matrix(tokens, None, bias)
    assert many.dtype == torch.float32
    assert (many - exact).abs().max() < 0.05 * exact.std(), "eight bits are this close"
    for size in range(1, 10):
        assert torch.equal(matrix(tokens[:size], None, bias), many[:size]), "a batch changes nothing, bit for bit"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(matrix(tokens, None, bias), many), "nor does the number of threads"
    torch.set_num_threads(threads)
    assert matrix(tokens[None, :2], None, None).shape == (1, 2, outputs)
    assert matrix(tokens[:2].bfloat16(), None, bias).dtype == torch.bfloat16
    strided = torch.stack([tokens, tokens], dim=2)[:, :, 0]
    assert torch.equal(matrix(strided, None, bias), many), "wherever the tokens lie in memory"


@needs_int8
@pytest.mark.parametrize("default", ["float32", "bfloat16"])
@pytest.mark.parametrize("outputs", [700, 704])
def test_a_matrix_of_int8_with_int8_activations(default: str, outputs: int) -> None:
    """By vLLM's kernel, and by our own for a shape that fits, if the processor is one for it.

    Made under the dtype that a model loads with, and used after its memory was used for something else.
    """
    import torch

    from lookahead_agent.cpu.int8 import int8_product, rounded

    torch.manual_seed(0)
    weight, tokens, bias = torch.randn(outputs, 256), torch.randn(9, 256).bfloat16(), torch.randn(outputs)
    exact = tokens.float() @ weight.T + bias
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, default))
    try:
        products = [int8_product(*rounded(weight), torch.bfloat16, torch.float32) for _ in range(20)]
    finally:
        torch.set_default_dtype(before)
    others = [torch.full((outputs,), float("nan")) for _ in range(40)]
    assert all(other.isnan().all() for other in others)
    for product in products:
        many = product(tokens, None, bias)
        assert many.dtype == torch.float32
        assert (many - exact).abs().max() < 0.1 * exact.std(), "twice eight bits are this close"
        for size in range(1, 9):
            assert torch.equal(product(tokens[:size], None, bias), many[:size]), "a batch changes nothing, bit for bit"
    assert product(tokens[None, :2], None, None).shape == (1, 2, outputs)


@pytest.mark.skipif(not vnni_kernel.is_supported(), reason="for processors with AVX-512 VNNI and without AMX")
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_our_kernel_sums_integers_exactly(
    tokens: int, panels: int, sixteens: int, seed: int, biased: bool, halves: bool
) -> None:
    """The same bits as the formula, whatever the shape: what is rounded is a token before and a sum after."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, columns = panels * vnni_kernel.ROWS, sixteens * 16
    integers = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = torch.rand(rows, generator=generator)
    bias = torch.randn(rows, generator=generator) if biased else None
    values = (torch.randn(tokens, columns, generator=generator) * 10).bfloat16()
    values[0] = 0
    out = torch.bfloat16 if halves else torch.float32
    found = vnni_kernel.multiplication(integers, scale, out)(values, bias)
    largest = values.float().abs().amax(dim=1).clamp(min=1e-10)
    rounded = torch.round(values.float() * (torch.full_like(largest, 127) / largest)[:, None]).long()
    sums = (rounded @ integers.long().t()).float() * (scale * (largest / 127)[:, None])
    assert torch.equal(found, (sums + (bias if bias is not None else 0)).to(out))


def test_our_kernel_takes_only_what_fits() -> None:
    import torch

    fits = vnni_kernel.fits
    assert fits(64, 48, torch.bfloat16, torch.float32)
    assert not fits(60, 48, torch.bfloat16, torch.float32)
    assert not fits(64, 44, torch.bfloat16, torch.float32)
    assert not fits(64, 48, torch.float16, torch.float32)
    assert not fits(64, 48, torch.bfloat16, torch.float16)


def test_the_kernel_needs_no_place_to_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from numba.core import caching

    from lookahead_agent.cpu import int8_kernel

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    spec = importlib.util.spec_from_file_location("kernel_anew", int8_kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    integers, tokens = torch.randint(-127, 128, (7, 16), dtype=torch.int8), torch.randn(3, 16)
    found = anew.multiply(tokens, anew.packed(integers), torch.ones(7))
    assert torch.allclose(found, tokens @ integers.float().t(), rtol=1e-4, atol=1e-2)


def test_rows_of_integers_are_whole_numbers_of_lanes() -> None:
    import torch

    from lookahead_agent.cpu.int8_kernel import packed

    with pytest.raises(ValueError, match="12 inputs has no whole number of 8"):
        packed(torch.zeros(4, 12, dtype=torch.int8))


# The draft's alone, too: vLLM's processes then know the method by nothing that they are sent but its name.
@pytest.mark.parametrize("precision", ["int8-weights", "fp32"])
def test_an_engine_keeps_its_weights_as_integers(tiny_pair: tuple[Path, Path], precision: Precision) -> None:
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="off",
        precision=precision,
        draft_precision="int8-weights",
        token_speculation="draft_model",
        temperature=0,
        max_tokens=24,
        engine_args=ENGINE,
    ) as llm:
        message = llm.invoke(ASKED[0])
        assert message.text
        figures = message.response_metadata["lookahead"]
        assert figures["mode"] == "sd"
        assert figures["engines"]["precision"] == {"target": precision, "draft": "int8-weights"}
        assert precision in llm.explain()


def test_exact_is_the_targets_reply_in_int8(llm: ChatLookahead, tiny_pair: tuple[Path, Path]) -> None:
    """Integers sum the same in every batch, so draft steps and draft tokens change no token of a reply."""
    written: dict[tuple[str, str], list[list[int]]] = {}
    with in_integers(tiny_pair, "shared_draft") as sharing:  # both models have the same draft engine
        for speculation_method, each in (("none", llm), ("shared_draft", sharing)):
            for policy in ("off", "exact", "exact:synchronous=true"):
                told = [message.response_metadata for message in each.batch(questions(24, seed=5), policy=policy)]
                written[speculation_method, policy] = [one["token_ids"] for one in told]
            assert told[0]["lookahead"]["engines"]["precision"] == {"target": KERNEL, "draft": KERNEL}
            # In rounds the target waits for its draft, so that steps of it stand on any machine.
            assert sum(one["lookahead"]["accepted"] for one in told) > 0
    alone = written.pop(("none", "off"))
    assert {way for way, ids in written.items() if ids != alone} == set()


@needs_int8
def test_int8_is_sure_of_what_the_model_is_sure_of(in_int8: list[float], tiny_pair: tuple[Path, Path]) -> None:
    """With wrong weights, or a wrong output layer, nothing is alike."""
    weights = weights_in(tiny_pair[0], "bf16", Platform.detect())
    folder, arguments = weights.write(LogProgress()), weights.arguments
    assert "quantization" not in arguments
    exact = logprobs_in(folder, **arguments)
    apart = statistics.mean(abs(one - other) for one, other in zip(exact, in_int8, strict=True))
    assert apart < 0.25 * statistics.stdev(exact)
    assert apart > 0, "it is another precision"
