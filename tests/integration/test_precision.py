"""Weights in every precision, on real vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lookahead_agent import ChatLookahead
from lookahead_agent.cpu import INSTRUCTIONS, INT8, LAYOUT
from lookahead_agent.engines.protocol import Engine, Sampling
from lookahead_agent.engines.vllm_config import VLLMConfig, as_arguments
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConversionError
from lookahead_agent.models.conversion import ensure_form
from lookahead_agent.modes.table import Precision, defaults_of
from lookahead_agent.runtime.weights import Platform, weights_in
from lookahead_agent.system import background
from lookahead_agent.system.progress import LogProgress
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

QUESTIONS = questions(12, seed=31)
ENGINE = {name: value for name, value in TINY_ENGINE.items() if name != "dtype"}
INSTRUCTION_SETS = ("avx512_vnni", "avx_vnni", "avx2")
needs_int8 = pytest.mark.skipif("int8" not in defaults_of().kernels, reason="for processors with int8 arithmetic")


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
        precision="int8",
        draft_precision="int8",
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
    folder = ensure_form(tiny_pair[0], "int8", LogProgress())
    written = (folder / "model.safetensors").stat().st_mtime_ns
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["layout"]) == (INT8, LAYOUT)
    assert ensure_form(tiny_pair[0], "int8", LogProgress()) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert ensure_form(folder, "int8", LogProgress()) == folder, "a quantized model is not converted again"
    broken = cache / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match="writing broken as int8 failed"):
        ensure_form(broken, "int8", LogProgress())
    assert not list(cache.glob("models/broken*unfinished*"))


@needs_int8
@pytest.mark.parametrize("default", ["float32", "bfloat16"])
@pytest.mark.parametrize("outputs", [700, 704])
def test_int8_product_is_accurate_and_batch_invariant(default: str, outputs: int) -> None:
    """Runs our own kernel if it supports the processor, else vLLM's.

    The products are created under the default dtype of a loading model, and used after freed memory was reused.
    """
    import torch

    from lookahead_agent.cpu.int8 import int8_product
    from lookahead_agent.cpu.packing import quantize_output_layer

    torch.manual_seed(0)
    weight, tokens, bias = torch.randn(outputs, 256), torch.randn(9, 256).bfloat16(), torch.randn(outputs)
    exact = tokens.float() @ weight.T + bias
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, default))
    try:
        products = [int8_product(*quantize_output_layer(weight), torch.float32) for _ in range(20)]
    finally:
        torch.set_default_dtype(before)
    reused = [torch.full((outputs,), float("nan")) for _ in range(40)]
    assert all(tensor.isnan().all() for tensor in reused)
    for product in products:
        batched = product(tokens, bias)
        assert batched.dtype == torch.float32
        assert (batched - exact).abs().max() < 0.1 * exact.std(), "int8 activations add this little error"
        for size in range(1, 9):
            assert torch.equal(product(tokens[:size], bias), batched[:size]), "the batch size changes no bit"
    assert product(tokens[None, :2], None).shape == (1, 2, outputs)


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@given(
    tokens=st.integers(1, 30),
    shape=st.sampled_from([(32, 4), (64, 144), (33, 5), (7, 130), (96, 1028)]),
    weights=st.sampled_from([None, -128, -127, 127]),
    seed=st.integers(0, 2**31),
    with_bias=st.booleans(),
    activations=st.sampled_from(["bfloat16", "float32"]),
    out=st.sampled_from(["bfloat16", "float32"]),
)
@settings(max_examples=60, deadline=None)
def test_kernel_equals_the_formula_bit_for_bit(
    name: str,
    tokens: int,
    shape: tuple[int, int],
    weights: int | None,
    seed: int,
    with_bias: bool,
    activations: str,
    out: str,
) -> None:
    """It rounds only the tokens before the sum, and the result after it, for each of the processor's instruction sets.

    Tokens and weights of the largest magnitude would saturate sums of 16 bits.
    """
    import torch

    from lookahead_agent.cpu.int8_kernel import available_instruction_sets, multiplication
    from lookahead_agent.cpu.packing import pack

    if name not in available_instruction_sets():
        pytest.skip("for processors with these instructions")
    generator = torch.Generator().manual_seed(seed)
    rows, columns = shape
    integers = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    values = torch.randn(tokens, columns, generator=generator) * 10
    values[0] = 0
    if weights is not None:
        integers[:] = weights
        values[1:] = 3.0 if seed % 2 else -3.0
    values = values.to(getattr(torch, activations))
    scale = torch.rand(rows, generator=generator)
    bias = torch.randn(rows, generator=generator) if with_bias else None
    dtype = getattr(torch, out)
    found = multiplication(pack(integers), scale, columns, dtype, name)(values, bias)
    largest = values.float().abs().amax(dim=1).clamp(min=1e-10)
    rounded = torch.round(values.float() * (torch.full_like(largest, 127) / largest)[:, None]).numpy().astype(int)
    sums = torch.from_numpy(rounded @ integers.numpy().astype(int).T).float() * (scale * (largest / 127)[:, None])
    assert torch.equal(found, (sums + (bias if bias is not None else 0)).to(dtype))


def test_kernel_multiplies_long_prompts_and_any_strides_on_any_number_of_threads() -> None:
    import torch

    from lookahead_agent.cpu.int8_kernel import multiplication
    from lookahead_agent.cpu.packing import pack

    torch.manual_seed(0)
    multiply = multiplication(
        pack(torch.randint(-127, 128, (96, 64), dtype=torch.int8)), torch.rand(96), 64, torch.float32
    )
    tokens = torch.randn(300, 64)
    batched = multiply(tokens, None)
    assert torch.equal(batched, torch.cat([multiply(tokens[first : first + 7], None) for first in range(0, 300, 7)]))
    assert torch.equal(multiply(torch.stack([tokens, tokens], dim=2)[:, :, 0], None), batched)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(multiply(tokens, None), batched)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "processor", "feature", "instruction"),
    [
        ("avx512_vnni", "icelake-server", "+avx512vnni", r"vpdpbusd\s.*%zmm"),
        ("avx_vnni", "alderlake", "+avxvnni", r"\{vex\}\s+vpdpbusd\s.*%ymm"),
    ],
)
def test_kernel_compiles_for_processors_that_this_one_is_not(
    name: str, processor: str, feature: str, instruction: str, tmp_path: Path
) -> None:
    code = (
        "import lookahead_agent.cpu.int8_kernel as kernel\n"
        f"print(kernel.instruction_set(), kernel.compile_share({name!r})._library.get_asm_str())"
    )
    environment = {**os.environ, "NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": feature}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    found, assembly = result.stdout.split(" ", 1)
    assert found == name
    assert re.search(instruction, assembly)


def test_environment_chooses_one_of_the_processors_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    from lookahead_agent.cpu.int8_kernel import available_instruction_sets, instruction_set

    chosen = instruction_set.__wrapped__
    for name in available_instruction_sets():
        monkeypatch.setenv(INSTRUCTIONS, name)
        assert chosen() == name
    monkeypatch.setenv(INSTRUCTIONS, "avx1024")
    with pytest.raises(ValueError, match="LOOKAHEAD_AGENT_INT8='avx1024': this processor has "):
        chosen()


def test_int8_kernel_works_without_a_numba_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from numba.core import caching

    from lookahead_agent.cpu import int8_kernel
    from lookahead_agent.cpu.packing import pack

    if int8_kernel.instruction_set() is None:
        pytest.skip("for processors that the kernel supports")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    spec = importlib.util.spec_from_file_location("kernel_anew", int8_kernel.__file__)
    assert spec is not None
    assert spec.loader is not None
    reloaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_anew", reloaded)  # dataclasses look their module up
    spec.loader.exec_module(reloaded)
    integers, tokens = torch.randint(-127, 128, (7, 16), dtype=torch.int8), torch.randn(3, 16)
    found = reloaded.multiplication(pack(integers), torch.ones(7), 16, torch.float32)(tokens, None)
    assert torch.equal(
        found, int8_kernel.multiplication(pack(integers), torch.ones(7), 16, torch.float32)(tokens, None)
    )


# Also for the draft alone: vLLM's processes then receive only the name of the quantization method.
@needs_int8
@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_engines_with_an_int8_draft_report_their_precision(tiny_pair: tuple[Path, Path], precision: Precision) -> None:
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="off",
        precision=precision,
        draft_precision="int8",
        token_speculation="draft_model",
        temperature=0,
        max_tokens=24,
        engine_args=ENGINE,
    ) as llm:
        message = llm.invoke(QUESTIONS[0])
        assert message.text
        metadata = message.response_metadata["lookahead"]
        assert metadata["mode"] == "sd"
        assert metadata["engines"]["precision"] == {"target": precision, "draft": "int8"}
        assert precision in llm.explain()


def test_exact_is_lossless_in_int8(llm: ChatLookahead, tiny_pair: tuple[Path, Path]) -> None:
    """Integer sums do not depend on the batch, so draft steps and draft tokens change no token of a reply."""
    token_ids: dict[tuple[str, str], list[list[int]]] = {}
    with int8_pair(tiny_pair, "shared_draft") as shared_draft_llm:  # both chat models share the draft engine
        for speculation_method, each in (("none", llm), ("shared_draft", shared_draft_llm)):
            for policy in ("off", "exact", "exact:synchronous=true"):
                metadata = [message.response_metadata for message in each.batch(questions(24, seed=5), policy=policy)]
                token_ids[speculation_method, policy] = [entry["token_ids"] for entry in metadata]
            assert metadata[0]["lookahead"]["engines"]["precision"] == {"target": "int8", "draft": "int8"}
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
