"""The vLLM engine: generation, and cleanup when it closes."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from lookahead_agent.cpu import VARIABLE
from lookahead_agent.engines import Delta, Sampling, VLLMConfig, VLLMEngine
from lookahead_agent.engines.vllm_config import as_arguments
from lookahead_agent.errors import ConfigurationError, ContextLengthError, EngineError, EngineStartError
from lookahead_agent.system import background
from tests.integration.conftest import TINY_ENGINE, engine_processes
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def engine(tiny_pair: tuple[Path, Path]) -> Iterator[VLLMEngine]:
    before = engine_processes()
    with closing(VLLMEngine(VLLMConfig(tiny_pair[0], "0", as_arguments(TINY_ENGINE)))) as engine:
        started = engine_processes() - before
        assert started
        yield engine
        prompt = prompt_of(engine)
        running = background.submit(collect(engine, prompt, Sampling(max_tokens=900)))
        background.run(wait_until(engine._llm.output_processor.has_unfinished_requests))
        delay_input_processing(engine)
        structured = Sampling(max_tokens=900, structured={"json_object": True})
        starting = background.submit(collect(engine, prompt, structured))
        background.run(wait_until(lambda: engine.in_flight == 2))
    for requested in (running, starting):
        with pytest.raises(EngineError, match="shut down"):
            requested.result(timeout=30)  # the reader does not wait forever
    assert not any(process.is_running() for process in started), "closing leaves no process"
    with pytest.raises(EngineError, match="shut down"):
        generate(engine, [1, 2], Sampling(max_tokens=1))


def delay_input_processing(engine: VLLMEngine) -> None:
    """Delay vLLM's input processing of each request, as on a busy machine."""
    processor = engine._llm.input_processor
    process_inputs = processor.process_inputs_async

    async def delayed(*arguments: object, **keywords: object) -> object:
        await asyncio.sleep(1)
        return await process_inputs(*arguments, **keywords)

    processor.process_inputs_async = delayed


async def collect(engine: VLLMEngine, prompt: list[int], sampling: Sampling) -> list[Delta]:
    return [delta async for delta in engine.generate(prompt, sampling)]


def generate(engine: VLLMEngine, prompt: list[int], sampling: Sampling) -> list[Delta]:
    return background.run(collect(engine, prompt, sampling))


def ids(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def prompt_of(engine: VLLMEngine) -> list[int]:
    return engine.tokenizer.chat_prompt([{"role": "user", "content": "A two and three?"}])


def test_engine_core_is_its_own_worker_on_its_cores(engine: VLLMEngine) -> None:
    (core,) = (process for process in engine.processes if process.name().startswith("VLLM::"))
    assert core.cpu_affinity() == [0]
    assert not os.environ.keys() & {VARIABLE, "VLLM_CPU_OMP_THREADS_BIND"}


def test_tokens_are_streamed_and_the_last_delta_has_the_finish_reason(engine: VLLMEngine) -> None:
    deltas = generate(engine, prompt_of(engine), Sampling(max_tokens=20))
    assert len(deltas) > 5
    assert len(ids(deltas)) == 20
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert engine.in_flight == 0


def test_greedy_continuation_of_a_prefix_equals_the_whole_reply(engine: VLLMEngine) -> None:
    prompt = prompt_of(engine)
    whole = ids(generate(engine, prompt, Sampling(max_tokens=30)))
    rest = ids(generate(engine, prompt + whole[:11], Sampling(max_tokens=19)))
    assert whole[11:] == rest


def test_stop_string_ends_the_reply(engine: VLLMEngine) -> None:
    prompt = prompt_of(engine)
    whole = engine.tokenizer.decode(ids(generate(engine, prompt, Sampling(max_tokens=30))))
    word = whole.split()[3]
    stopped = generate(engine, prompt, Sampling(max_tokens=30, stop=(word,)))
    assert stopped[-1].finish_reason == "stop"
    assert len(ids(stopped)) < 30


def test_greedy_token_has_the_highest_logprob(engine: VLLMEngine) -> None:
    (delta,) = generate(engine, prompt_of(engine), Sampling(max_tokens=1, logprobs=5))
    assert delta.logprobs is not None
    values = delta.logprobs[0]
    assert len(values) >= 5
    assert max(values, key=lambda token: values[token]) == delta.token_ids[0]
    assert sum(math.exp(value) for value in values.values()) <= 1.0001


def test_allowed_token_ids_constrain_the_reply(engine: VLLMEngine) -> None:
    allowed = tuple(engine.tokenizer.encode("yes") + engine.tokenizer.encode("no"))
    assert set(ids(generate(engine, prompt_of(engine), Sampling(max_tokens=5, allowed_token_ids=allowed)))) <= set(
        allowed
    )


def test_seed_determines_the_sampled_reply(engine: VLLMEngine) -> None:
    prompt = prompt_of(engine)

    def sample(seed: int) -> list[int]:
        return ids(generate(engine, prompt, Sampling(max_tokens=20, temperature=1.0, seed=seed)))

    assert sample(1) == sample(1) != sample(2)


def test_temperature_top_k_and_top_p_take_effect(engine: VLLMEngine) -> None:
    prompt = prompt_of(engine)
    greedy = ids(generate(engine, prompt, Sampling(max_tokens=20)))
    hot = {"temperature": 2.0, "seed": 5}
    assert ids(generate(engine, prompt, Sampling(max_tokens=20, **hot))) != greedy  # type: ignore[arg-type]
    assert ids(generate(engine, prompt, Sampling(max_tokens=20, top_k=1, **hot))) == greedy  # type: ignore[arg-type]
    assert ids(generate(engine, prompt, Sampling(max_tokens=20, top_p=1e-6, **hot))) == greedy  # type: ignore[arg-type]


def test_prompt_that_fills_the_context_raises_a_context_length_error(engine: VLLMEngine) -> None:
    with pytest.raises(ContextLengthError, match="max_model_len"):
        generate(engine, [6] * engine.context_length, Sampling(max_tokens=1))


def test_closing_the_generator_ends_the_request(engine: VLLMEngine) -> None:
    async def close() -> None:
        deltas = engine.generate(prompt_of(engine), Sampling(max_tokens=900))
        await anext(deltas)
        assert engine.in_flight == 1
        await deltas.aclose()
        assert engine.in_flight == 0
        assert not engine._llm.output_processor.has_unfinished_requests()

    background.run(close())


def test_concurrent_requests_get_the_same_greedy_reply(engine: VLLMEngine) -> None:
    async def concurrent_replies() -> list[list[Delta]]:
        prompt = prompt_of(engine)
        return await asyncio.gather(*(collect(engine, prompt, Sampling(max_tokens=15)) for _ in range(16)))

    replies = background.run(concurrent_replies())
    assert all(ids(reply) == ids(replies[0]) for reply in replies)


def test_unknown_engine_argument_raises_a_configuration_error(tiny_pair: tuple[Path, Path]) -> None:
    with pytest.raises(ConfigurationError, match="tensor_paralel_size"):
        VLLMEngine(VLLMConfig(tiny_pair[0], "0", as_arguments({"tensor_paralel_size": 1})))


def test_failed_start_leaves_no_process(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_pair[0], broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    before = engine_processes()
    with pytest.raises(EngineStartError, match="could not start broken"):
        VLLMEngine(VLLMConfig(broken, "0", as_arguments(TINY_ENGINE)))
    assert not [p for p in engine_processes() - before if p.is_running()]
