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

QUESTIONS = questions(12, seed=31)
ENGINE = {name: value for name, value in TINY_ENGINE.items() if name != "dtype"}
KERNEL: Precision = "int8" if has_int8_instructions() else "int8-weights"
needs_int8 = pytest.mark.skipif(KERNEL != "int8", reason="without instructions for int8, vLLM's sums overflow")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOOKAHEAD_AGENT_CACHE", str(folder))
        yield folder


async def logprobs(engine: Engine) -> list[float]:
    """The target's log-probabilities of a fixed prompt."""
    ids = engine.tokenizer.encode(" so then we add two and three which makes five apples.\n\n" * 12)
    async with aclosing(engine.generate(ids, Sampling(max_tokens=1, temperature=0, prompt_logprobs=True))) as deltas:
        async for delta in deltas:
            assert delta.prompt_logprobs is not None
            return [logprob for logprob in delta.prompt_logprobs if logprob is not None]
    raise AssertionError


def logprobs_of_weights(folder: Path, **arguments: Any) -> list[float]:
    """Log-probabilities of the fixed prompt by a separate engine."""
    with closing(VLLMEngine(VLLMConfig(folder, arguments=as_arguments(ENGINE | arguments)))) as engine:
        return background.run(logprobs(engine))


def int8_pair(pair: tuple[Path, Path], token_speculation: str) -> ChatLookahead:
    """The pair with int8 weights; its engines start on demand."""
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
    """The int8 pair without draft tokens."""
    with int8_pair(tiny_pair, "none") as llm:
        llm.start()
        yield llm


@pytest.fixture(scope="module")
def int8_logprobs(llm: ChatLookahead, tiny_pair: tuple[Path, Path]) -> list[float]:
    """Log-probabilities of the fixed prompt by the int8 target."""
    weights = weights_in(tiny_pair[0], "int8", Platform.detect())
    assert "quantization" in weights.arguments
    engines = llm.backend.running  # of the int8 pair
    assert engines is not None
    return background.run(logprobs(engines.target))


def test_int8_weights_are_converted_once_and_failures_leave_no_files(cache: Path, tiny_pair: tuple[Path, Path]) -> None:
    folder = converted(tiny_pair[0], "int8", LogProgress())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["num_bits"] == 8
    assert "lm_head" in config["ignore"]
    assert converted(tiny_pair[0], "int8", LogProgress()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert converted(folder, "int8", LogProgress()) == folder, "a quantized model is not converted again"
    broken = cache / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match="writing broken as int8 failed"):
        converted(broken, "int8", LogProgress())
    assert not list(cache.glob("models/broken*unfinished*"))


@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (97, 8), (5, 4104), (700, 2056)])
def test_int8_weights_product_is_accurate_and_batch_invariant(outputs: int, inputs: int) -> None:
    """Shapes that fill the kernel's packs and blocks, and shapes that do not."""
    import torch

    from lookahead_agent.cpu.int8 import int8_weights_product

    torch.manual_seed(0)
    weight, tokens, bias = torch.randn(outputs, inputs), torch.randn(37, inputs), torch.randn(outputs)
    matrix = int8_weights_product(weight)
    exact = tokens @ weight.T + bias
    batched = matrix(tokens, None, bias)
    assert batched.dtype == torch.float32
    assert (batched - exact).abs().max() < 0.05 * exact.std(), "the error of eight bits is this small"
    for size in range(1, 10):
        assert torch.equal(matrix(tokens[:size], None, bias), batched[:size]), "the batch size changes no bit"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(matrix(tokens, None, bias), batched), "the number of threads changes no bit"
    torch.set_num_threads(threads)
    assert matrix(tokens[None, :2], None, None).shape == (1, 2, outputs)
    assert matrix(tokens[:2].bfloat16(), None, bias).dtype == torch.bfloat16
    strided = torch.stack([tokens, tokens], dim=2)[:, :, 0]
    assert torch.equal(matrix(strided, None, bias), batched), "strides change no bit"


@needs_int8
@pytest.mark.parametrize("default", ["float32", "bfloat16"])
@pytest.mark.parametrize("outputs", [700, 704])
def test_int8_product_is_accurate_and_batch_invariant(default: str, outputs: int) -> None:
    """Runs vLLM's kernel, or our own if the shape fits and the processor supports it.

    The products are created under the default dtype of a loading model, and used after freed memory was reused.
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
    reused = [torch.full((outputs,), float("nan")) for _ in range(40)]
    assert all(tensor.isnan().all() for tensor in reused)
    for product in products:
        batched = product(tokens, None, bias)
        assert batched.dtype == torch.float32
        assert (batched - exact).abs().max() < 0.1 * exact.std(), "int8 activations add this little error"
        for size in range(1, 9):
            assert torch.equal(product(tokens[:size], None, bias), batched[:size]), "the batch size changes no bit"
    assert product(tokens[None, :2], None, None).shape == (1, 2, outputs)


@pytest.mark.skipif(not vnni_kernel.is_supported(), reason="for processors with AVX-512 VNNI and without AMX")
@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_vnni_kernel_equals_the_formula_bit_for_bit(
    tokens: int, panels: int, column_blocks: int, seed: int, with_bias: bool, bf16_output: bool
) -> None:
    """Every shape has the formula's bits: the kernel rounds only the tokens before the sum, and the result after it."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    rows, columns = panels * vnni_kernel.ROWS, column_blocks * 16
    integers = torch.randint(-128, 128, (rows, columns), dtype=torch.int8, generator=generator)
    scale = torch.rand(rows, generator=generator)
    bias = torch.randn(rows, generator=generator) if with_bias else None
    values = (torch.randn(tokens, columns, generator=generator) * 10).bfloat16()
    values[0] = 0
    out = torch.bfloat16 if bf16_output else torch.float32
    found = vnni_kernel.multiplication(integers, scale, out)(values, bias)
    largest = values.float().abs().amax(dim=1).clamp(min=1e-10)
    rounded = torch.round(values.float() * (torch.full_like(largest, 127) / largest)[:, None]).long()
    sums = (rounded @ integers.long().t()).float() * (scale * (largest / 127)[:, None])
    assert torch.equal(found, (sums + (bias if bias is not None else 0)).to(out))


def test_vnni_kernel_supports_only_certain_shapes_and_dtypes() -> None:
    import torch

    fits = vnni_kernel.fits
    assert fits(64, 48, torch.bfloat16, torch.float32)
    assert not fits(60, 48, torch.bfloat16, torch.float32)
    assert not fits(64, 44, torch.bfloat16, torch.float32)
    assert not fits(64, 48, torch.float16, torch.float32)
    assert not fits(64, 48, torch.bfloat16, torch.float16)


def test_int8_kernel_works_without_a_numba_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from numba.core import caching

    from lookahead_agent.cpu import int8_kernel

    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    spec = importlib.util.spec_from_file_location("kernel_anew", int8_kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    reloaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reloaded)
    integers, tokens = torch.randint(-127, 128, (7, 16), dtype=torch.int8), torch.randn(3, 16)
    found = reloaded.multiply(tokens, reloaded.packed(integers), torch.ones(7))
    assert torch.allclose(found, tokens @ integers.float().t(), rtol=1e-4, atol=1e-2)


def test_packing_rejects_rows_that_do_not_fill_whole_lanes() -> None:
    import torch

    from lookahead_agent.cpu.int8_kernel import packed

    with pytest.raises(ValueError, match="12 inputs has no whole number of 8"):
        packed(torch.zeros(4, 12, dtype=torch.int8))


# Also for the draft alone: vLLM's processes then receive only the name of the quantization method.
@pytest.mark.parametrize("precision", ["int8-weights", "fp32"])
def test_engines_with_int8_weights_report_their_precision(tiny_pair: tuple[Path, Path], precision: Precision) -> None:
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
        message = llm.invoke(QUESTIONS[0])
        assert message.text
        metadata = message.response_metadata["lookahead"]
        assert metadata["mode"] == "sd"
        assert metadata["engines"]["precision"] == {"target": precision, "draft": "int8-weights"}
        assert precision in llm.explain()


def test_exact_is_lossless_in_int8(llm: ChatLookahead, tiny_pair: tuple[Path, Path]) -> None:
    """Integer sums do not depend on the batch, so draft steps and draft tokens change no token of a reply."""
    token_ids: dict[tuple[str, str], list[list[int]]] = {}
    with int8_pair(tiny_pair, "shared_draft") as shared_draft_llm:  # both chat models share the draft engine
        for speculation_method, each in (("none", llm), ("shared_draft", shared_draft_llm)):
            for policy in ("off", "exact", "exact:synchronous=true"):
                metadata = [message.response_metadata for message in each.batch(questions(24, seed=5), policy=policy)]
                token_ids[speculation_method, policy] = [entry["token_ids"] for entry in metadata]
            assert metadata[0]["lookahead"]["engines"]["precision"] == {"target": KERNEL, "draft": KERNEL}
            # The synchronous target waits for its draft, so draft steps are accepted on any machine.
            assert sum(entry["lookahead"]["accepted"] for entry in metadata) > 0
    target_only = token_ids.pop(("none", "off"))
    assert {configuration for configuration, ids in token_ids.items() if ids != target_only} == set()


@needs_int8
def test_int8_logprobs_are_close_to_those_of_bf16(int8_logprobs: list[float], tiny_pair: tuple[Path, Path]) -> None:
    """Wrong weights or a wrong output layer would make the log-probabilities unrelated."""
    weights = weights_in(tiny_pair[0], "bf16", Platform.detect())
    folder, arguments = weights.write(LogProgress()), weights.arguments
    assert "quantization" not in arguments
    exact = logprobs_of_weights(folder, **arguments)
    difference = statistics.mean(abs(expected - found) for expected, found in zip(exact, int8_logprobs, strict=True))
    assert difference < 0.25 * statistics.stdev(exact)
    assert difference > 0, "the precisions differ"
