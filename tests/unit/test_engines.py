from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cpu import format_cores, share_cores
from lookahead_agent.engines import Sampling, ScriptedEngine, ScriptedStep, ScriptedTokenizer, VLLMConfig
from lookahead_agent.engines.engine_pool import EnginePool
from lookahead_agent.errors import EngineError, EngineStartError
from tests.virtual_time import run_in_virtual_time


@pytest.mark.parametrize("count", range(2, 40))
def test_target_and_draft_never_share_a_core(count: int) -> None:
    target, draft = share_cores(list(range(count)), with_draft=True)
    assert target
    assert draft
    assert sorted(target + draft) == list(range(count))
    assert len(target) >= len(draft)


def test_target_has_all_cores_without_a_draft_and_shares_a_single_core() -> None:
    assert share_cores([0, 1], with_draft=False) == ([0, 1], [])
    assert share_cores([3], with_draft=True) == ([3], [3])


def test_binding_writes_cores_as_ranges() -> None:
    assert format_cores([0, 1, 2, 5]) == "0-2,5"
    assert format_cores([7]) == "7"


class FakeEngine:
    def __init__(self) -> None:
        self.closed = 0
        self.healthy = True

    def close(self) -> None:
        self.closed += 1


def pool_of(started: list[FakeEngine]) -> EnginePool:
    def start(config: VLLMConfig) -> Any:
        started.append(FakeEngine())
        return started[-1]

    return EnginePool(start, lambda: None)


CONFIG = VLLMConfig(Path("model"), "0", (("dtype", "float32"),))


def test_equal_configurations_share_an_engine_until_the_last_release() -> None:
    started: list[FakeEngine] = []
    pool = pool_of(started)
    first, second = pool.acquire(CONFIG), pool.acquire(VLLMConfig(Path("model"), "0", (("dtype", "float32"),)))
    assert first is second
    pool.acquire(VLLMConfig(Path("model"), "1"))
    assert len(started) == 2
    pool.release(CONFIG)
    assert not started[0].closed
    pool.release(CONFIG)
    assert started[0].closed == 1
    pool.close()
    assert [engine.closed for engine in started] == [1, 1]


def test_concurrent_acquires_share_one_start() -> None:
    started: list[FakeEngine] = []
    pool = pool_of(started)
    threads = [threading.Thread(target=pool.acquire, args=(CONFIG,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(started) == 1


def test_dead_engine_is_replaced_although_others_hold_it() -> None:
    started: list[FakeEngine] = []
    pool = pool_of(started)
    first = pool.acquire(CONFIG)
    started[0].healthy = False
    second = pool.acquire(CONFIG)
    assert second is not first
    assert pool.acquire(CONFIG) is second
    assert [engine.closed for engine in started] == [1, 0]
    for _ in range(3):
        assert started[1].closed == 0
        pool.release(CONFIG)
    assert started[1].closed == 1


def test_an_acquire_after_a_failed_start_starts_the_engine_again() -> None:
    starts: list[VLLMConfig] = []

    def start(config: VLLMConfig) -> Any:
        starts.append(config)
        raise EngineStartError("no memory")

    pool = EnginePool(start, lambda: None)
    for attempts in (1, 2):
        with pytest.raises(EngineStartError):
            pool.acquire(CONFIG)
        assert len(starts) == attempts


def test_closed_pool_refuses_to_start_engines() -> None:
    pool = pool_of([])
    pool.close()
    with pytest.raises(EngineError, match="shutting down"):
        pool.acquire(CONFIG)


def test_engine_released_during_its_start_is_closed() -> None:
    starting, proceed = threading.Event(), threading.Event()
    engine = FakeEngine()

    def start(_: VLLMConfig) -> Any:
        starting.set()
        assert proceed.wait(20)
        return engine

    pool = EnginePool(start, lambda: None)
    with ThreadPoolExecutor() as threads:
        acquired = threads.submit(pool.acquire, CONFIG)
        assert starting.wait(20)
        pool.release(CONFIG)
        proceed.set()
        with pytest.raises(EngineError, match="released while it started"):
            acquired.result(20)
    assert engine.closed == 1


def test_closing_the_pool_aborts_a_start_that_was_already_released() -> None:
    starting, aborted = threading.Event(), threading.Event()

    def start(_: VLLMConfig) -> Any:
        starting.set()
        assert aborted.wait(20)
        raise EngineError("the process is shutting down")

    pool = EnginePool(start, aborted.set)
    with ThreadPoolExecutor() as threads:
        acquired = threads.submit(pool.acquire, CONFIG)
        assert starting.wait(20)
        pool.release(CONFIG)
        pool.close()
        with pytest.raises(EngineError, match="shutting down"):
            acquired.result(20)


def test_scripted_engine_takes_the_time_of_its_script() -> None:
    tokenizer = ScriptedTokenizer()
    prompt = tokenizer.encode("p")
    engine = ScriptedEngine(tokenizer, [ScriptedStep("a b c\n\n", 4.0), ScriptedStep("d", 2.0)], len(prompt))

    async def run() -> tuple[str, float]:
        ids: list[int] = []
        async for delta in engine.generate(prompt, Sampling(max_tokens=100)):
            ids += delta.token_ids
        return tokenizer.decode(ids), asyncio.get_running_loop().time()

    assert run_in_virtual_time(run()) == ("a b c\n\nd", pytest.approx(6.0))


def test_scripted_engine_counts_requests_in_flight() -> None:
    tokenizer = ScriptedTokenizer()
    engine = ScriptedEngine(tokenizer, [ScriptedStep("a b c", hangs=True)], 0)

    async def run() -> int:
        deltas = engine.generate([], Sampling(max_tokens=9))
        await anext(deltas)
        running = engine.in_flight
        await deltas.aclose()
        return running

    assert run_in_virtual_time(run()) == 1
    assert engine.in_flight == 0


def test_virtual_time_reports_a_deadlock() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="no timer"):
        run_in_virtual_time(wait())


def test_importing_the_library_loads_no_engine_package() -> None:
    code = (
        "import sys, lookahead_agent, lookahead_agent.chat.model, lookahead_agent.cli\n"
        "heavy = {'vllm', 'torch', 'transformers', 'sentence_transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_missing_vllm_raises_an_error_that_names_the_extras() -> None:
    code = (
        "import importlib.util, sys\n"
        "sys.modules['vllm'] = None\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *a: None if name == 'vllm' else real(name, *a)\n"
        "from lookahead_agent import ChatLookahead\n"
        "from lookahead_agent.errors import MissingExtraError\n"
        "try:\n"
        "    ChatLookahead()\n"
        "except MissingExtraError as error:\n"
        "    assert 'lookahead-agent[cpu]' in str(error) and '[gpu]' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_scripted_prefix_cache_is_separate_for_each_salt() -> None:
    engine = ScriptedEngine(ScriptedTokenizer(), [], prefix_cache=True)
    prompt = engine.tokenizer.encode("one two three")

    async def cached(salt: str | None) -> int | None:
        found = [delta async for delta in engine.generate(prompt, Sampling(max_tokens=1, cache_salt=salt))]
        return found[0].cached_tokens

    async def read() -> list[int | None]:
        return [await cached(salt) for salt in (None, "a", "b", "a", None)]

    assert asyncio.run(read()) == [0, 0, 0, 2, 2]
