from __future__ import annotations

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cpu import format_cores, share_cores
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.vllm_config import VLLMConfig, process_environment, runs_on_cpu
from lookahead_agent.errors import ConfigurationError, DiskSpaceError, EngineError, EngineStartError, LookaheadError
from lookahead_agent.hardware.mps import MultiProcessService
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.resolve import choose_models
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import Loaders
from lookahead_agent.runtime.runtime import Runtime
from lookahead_agent.runtime.weights import Platform, Weights
from lookahead_agent.system import background
from lookahead_agent.system.machine import available_cores
from lookahead_agent.verifiers.embedding import RemoteEmbedder
from lookahead_agent.verifiers.judge import EngineJudge, RemoteJudge
from tests.unit.fake_vllm import tokenizer_in
from tests.waiting import wait_until


class Pool:
    """Starts scripted engines instead of vLLM."""

    def __init__(self, failing: str = "") -> None:
        self.started: list[VLLMConfig] = []
        self.held: list[VLLMConfig] = []
        self.failing = failing

    def acquire(self, config: VLLMConfig) -> ScriptedEngine:
        if config.model.name == self.failing:
            raise EngineStartError("no memory")
        self.started.append(config)
        self.held.append(config)
        return ScriptedEngine(TOKENIZER, [])

    def release(self, config: VLLMConfig) -> None:
        # The runtime of an earlier test may be collected now and release engines of another pool.
        if config in self.started:
            self.held.remove(config)


class ConcurrentStarts(Pool):
    """Each start waits for the other one."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2, timeout=20)

    def acquire(self, config: VLLMConfig) -> ScriptedEngine:
        self._both.wait()
        return super().acquire(config)


@pytest.fixture(autouse=True)
def _collect_earlier_runtimes() -> None:
    """Runtimes of earlier tests release their engines before this test has a pool."""
    gc.collect()


TOKENIZER = ScriptedTokenizer()
MODELS = choose_models("qwen2.5-coder-1.5b")
FOLDER = Path("model")


@pytest.fixture(autouse=True, scope="module")
def _hub(tmp_path_factory: pytest.TempPathFactory) -> None:
    HUB.append(tmp_path_factory.mktemp("hub"))


HUB: list[Path] = []
CPU = Platform(on_cpu=True, int8=False)


def model_folder(facts: ModelFacts, _: object) -> Path:
    """The folder of a model, without weights."""
    folder = HUB[-1] / facts.hub_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def unconverted(folder: Path | None) -> Weights | None:
    return Weights(folder, None, {}) if folder is not None else None


def select_requested(spec: RuntimeSpec, target: Path | None, draft: Path | None, _: object) -> EngineSetup:
    """Select the requested setup without a look at the hardware."""
    return EngineSetup(unconverted(target), unconverted(draft) if spec.draft_engine else None, spec.draft_engine)


def loaders(pool: Pool, select: Any = select_requested, **options: Any) -> Loaders:
    return Loaders(model_folder, select, pool=pool, platform=CPU, **options)  # type: ignore[arg-type]


def with_own_draft(runtime: Runtime) -> Runtime:
    """Give the runtime a draft in a separate engine."""
    runtime.launcher.setup = EngineSetup(draft_engine=True)
    return runtime


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_cores_are_divided_between_target_and_draft() -> None:
    runtime = Runtime(RuntimeSpec(MODELS), expects_draft=True)
    with_own_draft(runtime)
    target, draft = share_cores(available_cores(), with_draft=True)
    assert runtime.launcher.config("target", FOLDER, {}).cores == format_cores(target)
    assert runtime.launcher.config("draft", FOLDER, {}).cores == format_cores(draft)


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_a_lone_target_gets_all_cores_and_explicit_cores_win() -> None:
    alone = Runtime(RuntimeSpec(MODELS), expects_draft=False)
    assert alone.launcher.config("target", FOLDER, {}).cores == format_cores(available_cores())
    explicit = Runtime(RuntimeSpec(MODELS, cores=("1", "0")), expects_draft=True)
    with_own_draft(explicit)
    assert explicit.launcher.config("target", FOLDER, {}).cores == "1"
    assert explicit.launcher.config("draft", FOLDER, {}).cores == "0"


def test_engine_arguments_reach_only_their_own_engine() -> None:
    spec = RuntimeSpec(MODELS, {"dtype": "float32"}, {"max_num_seqs": 4})
    runtime = Runtime(spec, expects_draft=True)
    target, draft = (dict(runtime.launcher.config(role, FOLDER, {}).arguments) for role in ("target", "draft"))
    assert target["dtype"] == "float32"
    assert "dtype" not in draft
    assert draft["max_num_seqs"] == 4


def runtime_on(pool: Pool, spec: RuntimeSpec, *, expects_draft: bool = True, **options: Any) -> Runtime:
    return Runtime(spec, expects_draft=expects_draft, loaders=loaders(pool, **options))


def start_engines(spec: RuntimeSpec, policy: str, pool: Pool | None = None, **options: Any) -> tuple[Pool, EngineSet]:
    pool = pool or Pool()
    runtime = runtime_on(pool, spec, expects_draft=as_policy(policy).forces_speculation, **options)

    async def start() -> EngineSet:
        async with runtime.engines(as_policy(policy)) as engines:
            return engines

    return pool, asyncio.run(start())


def test_target_and_draft_start_concurrently() -> None:
    pool, engines = start_engines(RuntimeSpec(MODELS), "exact:depth=4", ConcurrentStarts())
    assert engines.draft is not None
    assert {config.model.name for config in pool.started} == {
        Path(m.hub_id).name for m in (MODELS.target, MODELS.draft)
    }


def test_a_failed_start_of_the_target_releases_the_draft() -> None:
    pool = Pool(failing=Path(MODELS.target.hub_id).name)
    with pytest.raises(EngineStartError, match="no memory"):
        start_engines(RuntimeSpec(MODELS), "exact:depth=4", pool)
    assert len(pool.started) == 1
    assert not pool.held


def test_a_server_that_does_not_answer_is_an_error_before_a_draft_loads(tmp_path: Path) -> None:
    tokenizer_in(tmp_path)
    server = RemoteModel("http://127.0.0.1:9/v1", max_retries=0)
    pool, spec = Pool(), RuntimeSpec(MODELS, remote={"target": server})
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        start_engines(spec, "exact:depth=4", pool, fetch_config=lambda *_: tmp_path)
    assert not pool.started


def test_an_engine_whose_call_was_cancelled_during_its_start_is_released_on_close() -> None:
    entered, proceed = threading.Event(), threading.Event()

    class BlockingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            entered.set()
            proceed.wait(20)
            return super().acquire(config)

    pool = BlockingPool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS), expects_draft=False)

    async def cancel_during_start() -> None:
        async def call() -> None:
            async with runtime.engines(as_policy("off")):
                raise AssertionError("it was cancelled")

        task = asyncio.create_task(call())
        await asyncio.to_thread(entered.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proceed.set()
        await wait_until(lambda: len(pool.held) == len(runtime.launcher.held) == 1)

    asyncio.run(cancel_during_start())
    runtime.close()
    assert not pool.held


def judge_of(engines: EngineSet) -> object:
    return engines.judge.engine if isinstance(engines.judge, EngineJudge) else engines.judge


def test_the_target_judges_by_default() -> None:
    pool, engines = start_engines(RuntimeSpec(MODELS), "judge:depth=4")
    assert judge_of(engines) is engines.target
    assert len(pool.started) == 2


def test_a_third_model_judges_in_a_separate_engine() -> None:
    spec = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"), judge_arguments={"max_num_seqs": 2})
    pool, engines = start_engines(spec, "judge:depth=4")
    assert judge_of(engines) not in (engines.target, engines.draft)
    assert pool.started[-1].model.name == "judge"
    assert dict(pool.started[-1].arguments)["max_num_seqs"] == 2
    pool, _ = start_engines(spec, "exact:depth=4")
    assert len(pool.started) == 2, "a judge that the policy does not use is not started"


@pytest.mark.parametrize(("judge", "role"), [("draft", "draft"), ("target", "target")])
def test_a_judge_that_is_the_draft_or_target_shares_its_engine(judge: str, role: str) -> None:
    facts: ModelFacts = getattr(MODELS, judge)
    pool, engines = start_engines(RuntimeSpec(choose_models(MODELS.target.hub_id, judge=facts.hub_id)), "judge:depth=4")
    assert judge_of(engines) is getattr(engines, role)
    assert len(pool.started) == 2


def test_a_judge_behind_a_server_is_a_remote_judge() -> None:
    spec = RuntimeSpec(MODELS, remote={"judge": RemoteModel("http://judge/v1", "big")})
    _, engines = start_engines(spec, "judge:depth=4")
    assert isinstance(engines.judge, RemoteJudge)


def test_an_embedding_model_behind_a_server_is_a_remote_embedder() -> None:
    spec = RuntimeSpec(MODELS, remote={"embedding": RemoteModel("http://embedding/v1", "minilm")})
    _, engines = start_engines(spec, "fast:depth=4")
    assert isinstance(engines.embedder, RemoteEmbedder)


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_a_local_engine_with_a_remote_partner_gets_all_cores() -> None:
    server = RemoteModel("http://there/v1", "model")
    for local, remote in (("target", "draft"), ("draft", "target")):
        runtime = Runtime(RuntimeSpec(MODELS, remote={remote: server}), expects_draft=True)
        assert runtime.launcher.config(local, FOLDER, {}).cores == format_cores(available_cores())


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"vocab_size": 1000, "max_position_embeddings": 32768}
GPU_BYTES = 16 << 30


def small_model_folder(facts: ModelFacts, progress: object) -> Path:
    folder = model_folder(facts, progress)
    (folder / "config.json").write_text(json.dumps(SMALL))
    tokenizer_in(folder)
    return folder


def gpu_loaders(
    pool: Pool,
    select: Any = select_requested,
    gpus: int = 1,
    size: int = GPU_BYTES,
    mps: MultiProcessService | None = None,
) -> Loaders:
    return Loaders(
        small_model_folder,  # type: ignore[arg-type]
        select,
        pool=pool,  # type: ignore[arg-type]
        platform=Platform(on_cpu=False),
        fetch_config=small_model_folder,  # type: ignore[arg-type]
        gpus=lambda: [size] * gpus,
        mps=mps or MultiProcessService("no-such-program"),
    )


def started_on_gpus(
    spec: RuntimeSpec, policy: str = "exact:depth=4", **machine: Any
) -> tuple[dict[str, VLLMConfig], EngineSet]:
    """The configurations of the engines by the name of the model, and the engines."""
    pool = Pool()
    runtime = Runtime(spec, expects_draft=True, loaders=gpu_loaders(pool, **machine))
    engines = background.run(engines_of(runtime, policy))
    runtime.close()
    return {config.model.name: config for config in pool.started}, engines


TARGET_NAME, DRAFT_NAME = "Qwen2.5-Coder-1.5B-Instruct", "Qwen2.5-Coder-0.5B-Instruct"


@pytest.mark.parametrize("judge", [None, "a/judge"])
def test_engines_on_one_gpu_split_its_memory(judge: str | None) -> None:
    models = choose_models("qwen2.5-coder-1.5b", judge=judge)
    started, engines = started_on_gpus(RuntimeSpec(models), "exact:depth=4" if judge is None else "judge:depth=4")
    found = {name: dict(config.arguments) for name, config in started.items()}
    shares = [arguments["gpu_memory_utilization"] for arguments in found.values()]
    assert len(shares) == (2 if judge is None else 3)
    assert sum(shares) == pytest.approx(0.92, abs=0.001)
    assert all(arguments["max_model_len"] == -1 for arguments in found.values()), "the longest context that fits"
    assert {config.gpus for config in started.values()} == {None}
    assert started[TARGET_NAME].beside_draft
    assert engines.engine_setup is not None
    assert "share a GPU of 16 GiB with room for" in engines.engine_setup.reason


def test_draft_and_judge_take_gpus_of_their_own_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    judged = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"))
    started, engines = started_on_gpus(judged, "judge:depth=4", gpus=3)
    assert {name: config.gpus for name, config in started.items()} == {TARGET_NAME: None, DRAFT_NAME: "1", "judge": "2"}
    assert {config.arguments for config in started.values()} == {(("max_model_len", -1),)}, "each has its GPU's memory"
    assert not started[TARGET_NAME].beside_draft
    assert engines.engine_setup is not None
    assert "the draft has GPU 1 of its own" in engines.engine_setup.reason
    on_two, _ = started_on_gpus(judged, "judge:depth=4", gpus=2)
    assert {name: config.gpus for name, config in on_two.items()} == {TARGET_NAME: None, DRAFT_NAME: "1", "judge": "1"}
    assert "gpu_memory_utilization" not in dict(on_two[TARGET_NAME].arguments)
    shares = [dict(on_two[name].arguments)["gpu_memory_utilization"] for name in (DRAFT_NAME, "judge")]
    assert sum(shares) == pytest.approx(0.92, abs=0.001)


def test_requested_gpus_are_named_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    sharded = {"tensor_parallel_size": 2}
    started, _ = started_on_gpus(RuntimeSpec(MODELS, sharded, gpus={"target": "2,3", "draft": "0"}), gpus=4)
    assert {name: config.gpus for name, config in started.items()} == {TARGET_NAME: "6,7", DRAFT_NAME: "4"}
    together, _ = started_on_gpus(RuntimeSpec(MODELS, gpus={"target": "1", "draft": "1"}), gpus=4)
    assert {config.gpus for config in together.values()} == {"5"}
    assert together[TARGET_NAME].beside_draft
    if not runs_on_cpu():
        assert process_environment(together[TARGET_NAME], [])["CUDA_VISIBLE_DEVICES"] == "5"
    with pytest.raises(ConfigurationError, match="names GPU 4, and 4 are visible"):
        started_on_gpus(RuntimeSpec(MODELS, gpus={"draft": "4"}), gpus=4)
    on_cpu = Runtime(RuntimeSpec(MODELS, gpus={"draft": "1"}), expects_draft=True, loaders=loaders(Pool()))
    with pytest.raises(ConfigurationError, match="gpus are for vLLM's CUDA build"):
        background.run(engines_of(on_cpu))


def test_a_judge_of_the_catalogue_without_room_leaves_judging_to_the_target() -> None:
    spec = RuntimeSpec(choose_models("qwen3-32b"))
    started, engines = started_on_gpus(spec, "judge:depth=4", size=6 << 30)
    assert started.keys() == {"Qwen3-32B", "Qwen3-1.7B"}
    assert isinstance(engines.judge, EngineJudge)
    assert engines.engine_setup is not None
    assert engines.engine_setup.reason.endswith("has no room for Qwen/Qwen2.5-7B-Instruct")
    with_room, engines = started_on_gpus(spec, "judge:depth=4")
    assert with_room.keys() == {"Qwen3-32B", "Qwen3-1.7B", "Qwen2.5-7B-Instruct"}
    requested = RuntimeSpec(choose_models("qwen3-32b", judge="a/judge"))
    with pytest.raises(ConfigurationError, match=r"judge \d+\.\d GiB before any cache"):
        started_on_gpus(requested, "judge:depth=4", size=6 << 30)


def test_a_lone_target_has_its_gpu_and_the_longest_context() -> None:
    server = RemoteModel("http://there/v1")
    pool = Pool()
    for spec, draft in ((RuntimeSpec(MODELS), False), (RuntimeSpec(MODELS, remote={"draft": server}), True)):
        runtime = Runtime(spec, expects_draft=draft, loaders=gpu_loaders(pool))
        background.run(engines_of(runtime, "off"))
        assert pool.started[-1].arguments == (("max_model_len", -1),)
        runtime.close()


def test_explicit_gpu_memory_shares_are_kept() -> None:
    spec = RuntimeSpec(MODELS, {"gpu_memory_utilization": 0.5, "max_model_len": 512}, {"gpu_memory_utilization": 0.1})
    started, _ = started_on_gpus(spec)
    assert dict(started[TARGET_NAME].arguments) == {"gpu_memory_utilization": 0.5, "max_model_len": 512}
    assert dict(started[DRAFT_NAME].arguments) == {"gpu_memory_utilization": 0.1, "max_model_len": -1}


def with_shared_draft(_: RuntimeSpec, target: Path | None, draft: Path | None, __: object) -> EngineSetup:
    config = {"speculative_config": {"method": "custom_class"}}
    return EngineSetup(unconverted(target), unconverted(draft), True, config, "shared_draft")


def test_a_target_that_fails_with_a_shared_draft_starts_without_one() -> None:
    class RejectingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            if "speculative_config" in dict(config.arguments):
                raise EngineStartError("no such proposer")
            return super().acquire(config)

    pool = RejectingPool()
    runtime = Runtime(RuntimeSpec(MODELS), expects_draft=True, loaders=gpu_loaders(pool, with_shared_draft))
    engines = background.run(engines_of(runtime, "exact:depth=4"))
    assert engines.draft is not None
    assert engines.engine_setup is not None
    assert engines.engine_setup.speculation_method == "none"
    assert "without a shared draft, because they did not start so: no such proposer. " in engines.engine_setup.reason
    assert not engines.speculates_on_tokens
    assert len(pool.held) == 2, "the draft of the failed attempt is not held twice"
    runtime.close()


def test_a_garbage_collected_runtime_releases_its_engines() -> None:
    pool = Pool()
    released: list[VLLMConfig] = []
    pool.release = released.append  # type: ignore[method-assign]
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    background.run(engines_of(runtime))
    assert len(pool.started) == 2
    del runtime
    gc.collect()
    assert sorted(map(repr, released)) == sorted(map(repr, pool.started))


def test_a_policy_whose_judge_fails_to_start_has_no_verifier() -> None:
    spec = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"))
    _, engines = start_engines(spec, "judge:depth=4", Pool(failing="judge"))
    assert engines.verifier(as_policy("judge")) is None
    assert engines.problem == "no memory"
    assert engines.verifier(as_policy("exact")) is not None


def test_explicit_engine_arguments_override_those_of_the_selected_setup() -> None:
    def select(requested: RuntimeSpec, target: Path | None, draft: Path | None, _: object) -> EngineSetup:
        assert requested.token_speculation == "shared_draft"
        assert target is not None
        assert draft is not None
        config = {"speculative_config": {"method": "x"}, "additional_config": {"a": 1}}
        weights = (Weights(folder, None, {"dtype": "float32"}) for folder in (target, draft))
        return EngineSetup(*weights, True, config, "shared_draft")

    spec = RuntimeSpec(
        MODELS, {"dtype": "bfloat16", "additional_config": {"b": 2}}, token_speculation="shared_draft", precision="fp32"
    )
    pool, engines = start_engines(spec, "off", select=select)
    assert MODELS.draft is not None
    arguments = {started.model.name: dict(started.arguments) for started in pool.started}
    target, draft = (arguments[Path(facts.hub_id).name] for facts in (MODELS.target, MODELS.draft))
    assert target["speculative_config"] == {"method": "x"}
    assert target["dtype"] == "bfloat16"
    assert target["additional_config"] == {"a": 1, "b": 2}
    assert draft == {"dtype": "float32"}
    assert engines.engine_setup is not None
    assert engines.speculates_on_tokens


def test_a_policy_that_forces_steps_restarts_the_engines_with_a_draft(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS), expects_draft=False)

    async def engines(policy: str) -> EngineSet:
        async with runtime.engines(as_policy(policy)) as found:
            return found

    async def use_policies() -> None:
        assert (await engines("balanced")).draft is None
        assert (await engines("exact")).draft is None
        assert len(pool.started) == 1
        assert (await engines("exact:depth=4")).draft is not None
        assert len(pool.held) == 2
        assert (await engines("balanced")).draft is not None
        assert len(pool.started) == 3

    asyncio.run(use_policies())
    assert "has ended" not in caplog.text, "a requested restart is no crash"
    runtime.close()


async def engines_of(runtime: Runtime, policy: str = "judge:depth=4") -> EngineSet:
    async with runtime.engines(as_policy(policy)) as found:
        return found


WITH_JUDGE = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"))


async def test_an_ended_target_restarts_for_the_next_call() -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    first = await engines_of(runtime)
    assert await engines_of(runtime) is first
    first.target.close()
    second = await engines_of(runtime)
    assert second.target is not first.target
    assert second.target.healthy
    assert len(pool.held) == 2, "the previous engines are released"


async def test_an_ended_draft_restarts_in_the_background_at_most_three_times() -> None:
    runtime = runtime_on(Pool(), RuntimeSpec(MODELS))
    engines = await engines_of(runtime)
    target = engines.target
    for _ in range(3):
        draft = engines.draft
        assert draft is not None
        draft.close()
        assert (await engines_of(runtime)).draft is None
        assert engines.problem == "the draft model's process has ended; it is being started again"
        await wait_until(lambda: engines.draft is not None)
        assert engines.draft is not draft
        assert engines.problem is None
        assert engines.verifier(as_policy("judge")) is not None
    assert engines.draft is not None
    engines.draft.close()
    for _ in range(3):
        assert (await engines_of(runtime)).draft is None
        assert engines.problem == "the draft model's process has ended 4 times"
    assert (await engines_of(runtime)).target is target


async def test_an_ended_judge_restarts_in_the_background() -> None:
    pool = Pool()
    runtime = runtime_on(pool, WITH_JUDGE)
    engines = await engines_of(runtime)
    judge = engines.judge
    assert isinstance(judge, EngineJudge)
    judge.engine.close()
    await engines_of(runtime)
    assert engines.verifier(as_policy("judge")) is None
    assert engines.problem == "the judge model's process has ended; it is being started again"
    assert engines.verifier(as_policy("exact")) is not None
    await wait_until(lambda: engines.judge is not None)
    assert judge_of(engines) is not judge.engine
    assert engines.problem is None
    assert len(pool.started) == 4


async def test_a_draft_that_also_judges_is_the_judge_again_after_its_restart() -> None:
    assert MODELS.draft is not None
    spec = RuntimeSpec(choose_models(MODELS.target.hub_id, judge=MODELS.draft.hub_id))
    runtime = runtime_on(Pool(), spec)
    engines = await engines_of(runtime)
    assert engines.draft is not None
    engines.draft.close()
    await engines_of(runtime)
    await wait_until(lambda: engines.draft is not None)
    assert judge_of(engines) is engines.draft


async def test_a_failed_restart_of_the_draft_is_reported() -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    engines = await engines_of(runtime)
    assert engines.draft is not None
    assert MODELS.draft is not None
    pool.failing = Path(MODELS.draft.hub_id).name
    engines.draft.close()
    await engines_of(runtime)
    await wait_until(lambda: engines.problem == "no memory")
    assert (await engines_of(runtime)).draft is None


@pytest.mark.parametrize("role", ["draft", "judge"])
async def test_a_restart_with_invalid_arguments_is_reported_and_fails_no_call(
    role: str, caplog: pytest.LogCaptureFixture
) -> None:
    class UpdatedPool(Pool):
        is_updated = False

        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            if self.is_updated:
                raise ConfigurationError("vLLM has no argument bogus any more")
            return super().acquire(config)

    pool = UpdatedPool()
    runtime = runtime_on(pool, WITH_JUDGE)
    engines = await engines_of(runtime)
    assert engines.draft is not None
    pool.is_updated = True
    ended = engines.draft if role == "draft" else judge_of(engines)
    assert isinstance(ended, ScriptedEngine)
    ended.close()
    await engines_of(runtime)
    await wait_until(lambda: engines.problem == "vLLM has no argument bogus any more")
    assert engines.explain_missing(as_policy("judge")) == f"a model is missing: the {role} ({engines.problem})"
    assert (await engines_of(runtime)).verifier(as_policy("judge")) is None
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_engines_closed_during_their_start_are_released() -> None:
    entered, proceed = threading.Event(), threading.Event()

    class BlockingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            entered.set()
            assert proceed.wait(20)
            return super().acquire(config)

    pool = BlockingPool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    call = background.submit(engines_of(runtime))
    assert entered.wait(20)
    runtime.close()
    proceed.set()
    with pytest.raises(EngineError, match="closed while they started"):
        call.result(20)
    assert not pool.held


@pytest.mark.parametrize("token_speculation", ["auto", "shared_draft"])
async def test_the_target_runs_alone_if_the_draft_cannot_be_converted(token_speculation: str) -> None:
    def full_disk(weights: Weights, _: object) -> Path:
        if weights.source.name == draft.hub_id.rpartition("/")[2]:
            raise DiskSpaceError("the disk is full")
        return weights.source

    def select(requested: RuntimeSpec, target: Path | None, draft: Path | None, platform: object) -> EngineSetup:
        assert draft is not None or requested.token_speculation in ("auto", "none")
        return select_requested(requested, target, draft, platform)

    draft = MODELS.draft
    assert draft is not None
    spec = RuntimeSpec(MODELS, token_speculation=token_speculation)
    engines = await engines_of(runtime_on(Pool(), spec, select=select, write=full_disk))
    assert engines.draft is None
    assert engines.problem == "the disk is full"


async def test_an_embedding_model_that_fails_to_load_fails_no_call() -> None:
    def broken(folder: Path) -> None:
        raise ValueError("no such layer")

    runtime = runtime_on(Pool(), RuntimeSpec(MODELS), load_embedder=broken)
    engines = await engines_of(runtime, "fast:depth=4")
    assert engines.embedder is None
    assert engines.problem == "no such layer"
    assert engines.verifier(as_policy("fast")) is None


async def test_a_runtime_starts_its_own_engines_after_a_fork() -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    parent = await engines_of(runtime)
    runtime.reset_after_fork()
    child = await engines_of(runtime)
    assert child.target is not parent.target
    assert parent.target.healthy
    assert len(pool.held) == 4, "the child does not release the engines of its parent"


class Gate:
    """Blocks threads that pass it until it is opened, and counts them."""

    def __init__(self) -> None:
        self.entered = 0
        self.opened = threading.Event()

    def pass_through(self) -> None:
        self.entered += 1
        assert self.opened.wait(60)


async def wait_for_entry(gate: Gate) -> None:
    await wait_until(lambda: gate.entered > 0, 60)


class GatedPool(Pool):
    """Blocks the starts of the models with a gate, which are known by the end of their name."""

    def __init__(self, **gates: Gate) -> None:
        super().__init__()
        self._gates = {name.replace("_", "."): gate for name, gate in gates.items()}

    def acquire(self, config: VLLMConfig) -> ScriptedEngine:
        for name, gate in self._gates.items():
            if name in config.model.name:
                gate.pass_through()
        return super().acquire(config)


class SameEmbedder:
    """Rates all texts as equal."""

    async def similarity(self, first: str, second: str) -> float:
        return 1.0


async def test_no_other_call_waits_while_an_embedding_model_loads_for_one() -> None:
    gate = Gate()

    def load(_: Path) -> SameEmbedder:
        gate.pass_through()
        return SameEmbedder()

    runtime = runtime_on(Pool(), RuntimeSpec(MODELS), load_embedder=load)
    async with runtime.engines(as_policy("off")):
        first = asyncio.create_task(engines_of(runtime, "embedding:depth=4"))
        await wait_for_entry(gate)
    await asyncio.wait_for(engines_of(runtime, "exact:depth=4"), 60)
    first.cancel()
    await asyncio.wait({first})
    second = asyncio.create_task(engines_of(runtime, "embedding:depth=4"))
    await asyncio.sleep(0)
    assert not second.done()
    gate.opened.set()
    assert (await second).embedder is not None
    assert gate.entered == 1, "the load survived the call that began it"


async def test_a_start_survives_its_caller_and_is_not_begun_again() -> None:
    gate = Gate()
    pool = GatedPool(**{"1_5B": gate})
    runtime = runtime_on(pool, RuntimeSpec(MODELS), expects_draft=False)
    callers = [asyncio.create_task(engines_of(runtime, "off")) for _ in range(3)]
    await wait_for_entry(gate)
    callers[0].cancel()
    await asyncio.wait({callers[0]})
    callers.append(asyncio.create_task(engines_of(runtime, "off")))
    gate.opened.set()
    assert len({id(engines) for engines in await asyncio.gather(*callers[1:])}) == 1
    assert gate.entered == len(pool.started) == 1


@pytest.mark.parametrize("clients", [0, 3])
async def test_a_call_that_needs_a_restart_begins_beside_overlapping_calls(clients: int) -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS), expects_draft=False)
    running, ended = await engines_of(runtime, "off"), False
    used: list[EngineSet] = []

    async def call_again_and_again(number: int) -> None:
        await asyncio.sleep(number / 100)
        while not ended:
            async with runtime.engines(as_policy("off")) as engines:
                used.append(engines)
                await asyncio.sleep(0.02)
                assert runtime.running is engines, "nothing restarts under a running reply"

    tasks = [asyncio.create_task(call_again_and_again(number)) for number in range(clients)]
    await asyncio.sleep(0.05)
    forced = await asyncio.wait_for(engines_of(runtime, "exact:depth=4"), 60)
    assert forced.draft is not None
    assert forced is not running
    await wait_until(lambda: not clients or used[-1] is forced)
    ended = True
    await asyncio.gather(*tasks)
    assert len(pool.held) == 2
    runtime.close()


async def test_calls_go_on_while_the_draft_of_another_call_is_downloaded() -> None:
    gate = Gate()

    def fetch(facts: ModelFacts, progress: object) -> Path:
        if facts == MODELS.draft:
            gate.pass_through()
        return model_folder(facts, progress)

    spec = RuntimeSpec(MODELS, token_speculation="none")
    platform = Loaders(fetch, select_requested, pool=Pool(), platform=CPU)  # type: ignore[arg-type]
    runtime = Runtime(spec, expects_draft=False, loaders=platform)
    running = await engines_of(runtime, "off")
    forced = asyncio.create_task(engines_of(runtime, "exact:depth=4"))
    await wait_for_entry(gate)
    assert await asyncio.wait_for(engines_of(runtime, "off"), 60) is running
    gate.opened.set()
    assert (await forced).draft is not None
    runtime.close()


async def test_arguments_that_fail_one_policy_fail_no_other() -> None:
    class CheckingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            if "bogus" in dict(config.arguments):
                raise ConfigurationError("vLLM has no engine argument bogus")
            return super().acquire(config)

    runtime = runtime_on(CheckingPool(), RuntimeSpec(MODELS, draft_arguments={"bogus": 1}), expects_draft=False)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="bogus"):
            await engines_of(runtime, "exact:depth=4")
        assert (await engines_of(runtime, "off")).draft is None
    judged = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"), judge_arguments={"bogus": 1})
    runtime = runtime_on(CheckingPool(), judged)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match="bogus"):
            await engines_of(runtime, "judge:depth=4")
        assert (await engines_of(runtime, "exact:depth=4")).draft is not None


@pytest.mark.parametrize("error", [SystemExit("bye"), KeyboardInterrupt(), RuntimeError("no memory")])
async def test_whatever_a_start_raises_every_waiting_call_gets_an_error(error: BaseException) -> None:
    class RaisingPool(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            raise error

    runtime = runtime_on(RaisingPool(), RuntimeSpec(MODELS), expects_draft=False)
    results = await asyncio.gather(*(engines_of(runtime, "off") for _ in range(2)), return_exceptions=True)
    assert all(isinstance(result, LookaheadError | RuntimeError) for result in results)


async def test_a_runtime_tells_which_models_a_policy_would_start() -> None:
    spec = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"))
    runtime = runtime_on(Pool(), spec, expects_draft=False, load_embedder=lambda _: SameEmbedder())
    assert runtime.models_to_start(as_policy("off")) == ("target",)
    await engines_of(runtime, "off")
    assert runtime.models_to_start(as_policy("off")) == runtime.models_to_start(as_policy("balanced")) == ()
    assert runtime.models_to_start(as_policy("random")) == ("target", "draft")
    await engines_of(runtime, "random")
    assert runtime.models_to_start(as_policy("random")) == ()
    assert runtime.models_to_start(as_policy("balanced")) == ("embedding",)
    assert runtime.models_to_start(as_policy("judge")) == ("judge",)
    await engines_of(runtime, "cascade")
    assert runtime.models_to_start(as_policy("cascade")) == ()
    runtime.close()
