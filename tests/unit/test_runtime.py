from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.cpu import binding, share_cores
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer, background
from lookahead_agent.engines.processes import available_cores
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.engines.vllm_config import VLLMConfig, runs_on_cpu
from lookahead_agent.errors import DiskSpaceError, EngineError, EngineStartError
from lookahead_agent.models.catalogue import ModelFacts
from lookahead_agent.models.resolve import choose_models
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_selection import EngineSetup, RuntimeSpec
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.launcher import Loaders
from lookahead_agent.runtime.runtime import Runtime
from lookahead_agent.runtime.weights import Platform, Weights
from lookahead_agent.verifiers.embedding import RemoteEmbedder
from lookahead_agent.verifiers.judge import EngineJudge, RemoteJudge
from tests.waiting import becomes


class Pool:
    """Starts scripted engines where the real pool starts vLLM."""

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
        # A runtime of an earlier test may be collected now: what it had was not from here.
        if config in self.started:
            self.held.remove(config)


class Together(Pool):
    """Each start waits for the other."""

    def __init__(self) -> None:
        super().__init__()
        self._both = threading.Barrier(2, timeout=20)

    def acquire(self, config: VLLMConfig) -> ScriptedEngine:
        self._both.wait()
        return super().acquire(config)


@pytest.fixture(autouse=True)
def _collected() -> None:
    """Runtimes of earlier tests let their engines go before this one has a pool, and not in the middle of it."""
    gc.collect()


TOKENIZER = ScriptedTokenizer()
MODELS = choose_models("qwen2.5-coder-1.5b")
FOLDER = Path("model")


@pytest.fixture(autouse=True, scope="module")
def _hub(tmp_path_factory: pytest.TempPathFactory) -> None:
    HUB.append(tmp_path_factory.mktemp("hub"))


HUB: list[Path] = []
CPU = Platform(on_cpu=True, int8=False)


def fetched(facts: ModelFacts, _: object) -> Path:
    """A model's folder, without weights."""
    folder = HUB[-1] / facts.hub_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


def as_it_is(folder: Path | None) -> Weights | None:
    return Weights(folder, None, {}) if folder is not None else None


def plainly(wanted: RuntimeSpec, target: Path | None, draft: Path | None, _: object) -> EngineSetup:
    """Arranges what is wanted without a look at the machine."""
    return EngineSetup(as_it_is(target), as_it_is(draft) if wanted.draft_engine else None, wanted.draft_engine)


def loaders(pool: Pool, select: Any = plainly, **given: Any) -> Loaders:
    return Loaders(fetched, select, pool=pool, platform=CPU, **given)  # type: ignore[arg-type]


def both(runtime: Runtime) -> Runtime:
    """The runtime with a draft in an engine of its own."""
    runtime.launcher.setup = EngineSetup(draft_engine=True)
    return runtime


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_cores_are_divided_between_target_and_draft() -> None:
    runtime = Runtime(RuntimeSpec(MODELS), expects_draft=True)
    both(runtime)
    target, draft = share_cores(available_cores(), with_draft=True)
    assert runtime.launcher.config("target", FOLDER, {}).cores == binding(target)
    assert runtime.launcher.config("draft", FOLDER, {}).cores == binding(draft)


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_a_target_alone_has_all_cores_and_cores_can_be_given() -> None:
    alone = Runtime(RuntimeSpec(MODELS), expects_draft=False)
    assert alone.launcher.config("target", FOLDER, {}).cores == binding(available_cores())
    given = Runtime(RuntimeSpec(MODELS, cores=("1", "0")), expects_draft=True)
    both(given)
    assert given.launcher.config("target", FOLDER, {}).cores == "1"
    assert given.launcher.config("draft", FOLDER, {}).cores == "0"


def test_engine_arguments_go_to_their_engine() -> None:
    spec = RuntimeSpec(MODELS, {"dtype": "float32"}, {"max_num_seqs": 4})
    runtime = Runtime(spec, expects_draft=True)
    target, draft = (dict(runtime.launcher.config(role, FOLDER, {}).arguments) for role in ("target", "draft"))
    assert target["dtype"] == "float32"
    assert "dtype" not in draft
    assert draft["max_num_seqs"] == 4


def runtime_on(pool: Pool, spec: RuntimeSpec, *, expects_draft: bool = True, **given: Any) -> Runtime:
    return Runtime(spec, expects_draft=expects_draft, loaders=loaders(pool, **given))


def started(spec: RuntimeSpec, policy: str, pool: Pool | None = None, **given: Any) -> tuple[Pool, EngineSet]:
    pool = pool or Pool()
    runtime = runtime_on(pool, spec, expects_draft=as_policy(policy).forces_speculation, **given)

    async def start() -> EngineSet:
        async with runtime.engines(as_policy(policy)) as engines:
            return engines

    return pool, asyncio.run(start())


def test_target_and_draft_start_at_the_same_time() -> None:
    pool, engines = started(RuntimeSpec(MODELS), "exact:depth=4", Together())
    assert engines.draft is not None
    assert {config.model.name for config in pool.started} == {
        Path(m.hub_id).name for m in (MODELS.target, MODELS.draft)
    }


def test_no_draft_is_left_where_the_target_fails() -> None:
    pool = Pool(failing=Path(MODELS.target.hub_id).name)
    with pytest.raises(EngineStartError, match="no memory"):
        started(RuntimeSpec(MODELS), "exact:depth=4", pool)
    assert len(pool.started) == 1
    assert not pool.held


def test_an_engine_that_starts_during_a_cancelled_call_is_released_like_others() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Slow(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            begun.set()
            go_on.wait(20)
            return super().acquire(config)

    pool = Slow()
    runtime = runtime_on(pool, RuntimeSpec(MODELS), expects_draft=False)

    async def cancelled() -> None:
        async def call() -> None:
            async with runtime.engines(as_policy("off")):
                raise AssertionError("it was cancelled")

        task = asyncio.create_task(call())
        await asyncio.to_thread(begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()
        await becomes(lambda: len(pool.held) == len(runtime.launcher.held) == 1)

    asyncio.run(cancelled())
    runtime.close()
    assert not pool.held


def judge_of(engines: EngineSet) -> object:
    return engines.judge.engine if isinstance(engines.judge, EngineJudge) else engines.judge


def test_the_target_judges_where_nothing_else_is_said() -> None:
    pool, engines = started(RuntimeSpec(MODELS), "judge:depth=4")
    assert judge_of(engines) is engines.target
    assert len(pool.started) == 2


def test_a_third_model_judges_on_an_engine_of_its_own() -> None:
    spec = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"), judge_arguments={"max_num_seqs": 2})
    pool, engines = started(spec, "judge:depth=4")
    assert judge_of(engines) not in (engines.target, engines.draft)
    assert pool.started[-1].model.name == "judge"
    assert dict(pool.started[-1].arguments)["max_num_seqs"] == 2
    pool, _ = started(spec, "exact:depth=4")
    assert len(pool.started) == 2, "a judge that no policy asks is not started"


@pytest.mark.parametrize(("judge", "role"), [("draft", "draft"), ("target", "target")])
def test_a_judge_that_runs_already_is_not_started_again(judge: str, role: str) -> None:
    facts: ModelFacts = getattr(MODELS, judge)
    pool, engines = started(RuntimeSpec(choose_models(MODELS.target.hub_id, judge=facts.hub_id)), "judge:depth=4")
    assert judge_of(engines) is getattr(engines, role)
    assert len(pool.started) == 2


def test_a_judge_behind_a_server() -> None:
    spec = RuntimeSpec(MODELS, remote={"judge": RemoteModel("http://judge/v1", "big")})
    _, engines = started(spec, "judge:depth=4")
    assert isinstance(engines.judge, RemoteJudge)


def test_an_embedding_model_behind_a_server() -> None:
    spec = RuntimeSpec(MODELS, remote={"embedding": RemoteModel("http://embedding/v1", "minilm")})
    _, engines = started(spec, "fast:depth=4")
    assert isinstance(engines.embedder, RemoteEmbedder)


@pytest.mark.skipif(not runs_on_cpu(), reason="cores are chosen for CPU engines only")
def test_an_engine_whose_partner_is_elsewhere_has_all_cores() -> None:
    there = RemoteModel("http://there/v1", "model")
    for here, remote in (("target", "draft"), ("draft", "target")):
        runtime = Runtime(RuntimeSpec(MODELS, remote={remote: there}), expects_draft=True)
        assert runtime.launcher.config(here, FOLDER, {}).cores == binding(available_cores())


def gpu_loaders(pool: Pool, select: Any = plainly) -> Loaders:
    def shares(engines: dict[str, Any], usable: float) -> dict[str, float]:
        return {role: round(usable * part, 4) for role, part in zip(engines, (0.75, 0.25), strict=True)}

    platform = Platform(on_cpu=False, int8=True)
    return Loaders(fetched, select, pool=pool, platform=platform, memory_shares=shares)  # type: ignore[arg-type]


@pytest.mark.parametrize(("judge", "usable"), [(None, 0.92), ("a/judge", 0.76)])
def test_engines_of_one_gpu_divide_its_memory(judge: str | None, usable: float) -> None:
    pool, models = Pool(), choose_models("qwen2.5-coder-1.5b", judge=judge)
    runtime = Runtime(RuntimeSpec(models), expects_draft=True, loaders=gpu_loaders(pool))
    background.run(engines_of(runtime, "exact:depth=4" if judge is None else "judge:depth=4"))
    found = {config.model.name: dict(config.arguments) for config in pool.started}
    shares = [arguments["gpu_memory_utilization"] for arguments in found.values()]
    assert sorted(shares, reverse=True)[:2] == pytest.approx([0.75 * usable, 0.25 * usable])
    assert len(shares) == (2 if judge is None else 3)
    assert sum(shares) == pytest.approx(0.92)
    assert all(arguments["max_model_len"] == -1 for arguments in found.values()), "as much as the share has room for"
    runtime.close()


def test_a_target_alone_has_the_gpus_memory() -> None:
    there = RemoteModel("http://there/v1")
    pool = Pool()
    for spec, draft in ((RuntimeSpec(MODELS), False), (RuntimeSpec(MODELS, remote={"draft": there}), True)):
        runtime = Runtime(spec, expects_draft=draft, loaders=gpu_loaders(pool))
        background.run(engines_of(runtime, "off"))
        assert dict(pool.started[-1].arguments) == {}
        runtime.close()


def test_memory_that_a_user_divides_stays_as_it_is() -> None:
    pool = Pool()
    spec = RuntimeSpec(MODELS, {"gpu_memory_utilization": 0.5, "max_model_len": 512}, {"gpu_memory_utilization": 0.1})
    runtime = Runtime(spec, expects_draft=True, loaders=gpu_loaders(pool))
    background.run(engines_of(runtime, "exact:depth=4"))
    target, draft = sorted((dict(config.arguments) for config in pool.started), key=lambda each: each["max_model_len"])[
        ::-1
    ]
    assert target == {"gpu_memory_utilization": 0.5, "max_model_len": 512}
    assert draft == {"gpu_memory_utilization": 0.1, "max_model_len": -1}
    runtime.close()


def with_shared_draft(_: RuntimeSpec, target: Path | None, draft: Path | None, __: object) -> EngineSetup:
    config = {"speculative_config": {"method": "custom_class"}}
    return EngineSetup(as_it_is(target), as_it_is(draft), True, config, "shared_draft")


def test_a_target_that_does_not_start_with_a_shared_draft_starts_without() -> None:
    class Refusing(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            if "speculative_config" in dict(config.arguments):
                raise EngineStartError("no such proposer")
            return super().acquire(config)

    pool = Refusing()
    runtime = Runtime(RuntimeSpec(MODELS), expects_draft=True, loaders=gpu_loaders(pool, with_shared_draft))
    engines = background.run(engines_of(runtime, "exact:depth=4"))
    assert engines.draft is not None
    assert engines.engine_setup is not None
    assert engines.engine_setup.speculation_method == "none"
    assert engines.engine_setup.reason.endswith("it did not start with one: no such proposer")
    assert not engines.speculates_on_tokens
    assert len(pool.held) == 2, "the draft of the first try is not held twice"
    runtime.close()


def test_a_collected_runtime_gives_its_engines_back() -> None:
    pool = Pool()
    released: list[VLLMConfig] = []
    pool.release = released.append  # type: ignore[method-assign]
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    background.run(engines_of(runtime))
    assert len(pool.started) == 2
    del runtime
    gc.collect()
    assert sorted(map(repr, released)) == sorted(map(repr, pool.started))


def test_without_its_judge_a_policy_runs_the_target_alone() -> None:
    spec = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"))
    _, engines = started(spec, "judge:depth=4", Pool(failing="judge"))
    assert engines.verifier(as_policy("judge")) is None
    assert engines.problem == "no memory"
    assert engines.verifier(as_policy("exact")) is not None


def test_what_was_arranged_goes_to_the_engines_and_what_was_given_before_it() -> None:
    def engine_setup(wanted: RuntimeSpec, target: Path | None, draft: Path | None, _: object) -> EngineSetup:
        assert wanted.token_speculation == "shared_draft"
        assert target is not None
        assert draft is not None
        more = {"speculative_config": {"method": "x"}, "additional_config": {"a": 1}}
        weights = (Weights(folder, None, {"dtype": "float32"}) for folder in (target, draft))
        return EngineSetup(*weights, True, more, "shared_draft")

    spec = RuntimeSpec(
        MODELS, {"dtype": "bfloat16", "additional_config": {"b": 2}}, token_speculation="shared_draft", precision="fp32"
    )
    pool, engines = started(spec, "off", select=engine_setup)
    assert MODELS.draft is not None
    arguments = {config.model.name: dict(config.arguments) for config in pool.started}
    target, draft = (arguments[Path(facts.hub_id).name] for facts in (MODELS.target, MODELS.draft))
    assert target["speculative_config"] == {"method": "x"}
    assert target["dtype"] == "bfloat16"
    assert target["additional_config"] == {"a": 1, "b": 2}
    assert draft == {"dtype": "float32"}
    assert engines.engine_setup is not None
    assert engines.speculates_on_tokens


def test_a_policy_that_forces_steps_starts_the_engines_anew(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS), expects_draft=False)

    async def engines(policy: str) -> EngineSet:
        async with runtime.engines(as_policy(policy)) as found:
            return found

    async def both() -> None:
        assert (await engines("balanced")).draft is None
        assert (await engines("exact")).draft is None
        assert len(pool.started) == 1
        assert (await engines("exact:depth=4")).draft is not None
        assert len(pool.held) == 2
        assert (await engines("balanced")).draft is not None
        assert len(pool.started) == 3

    asyncio.run(both())
    assert "has ended" not in caplog.text, "they were asked to"
    runtime.close()


async def engines_of(runtime: Runtime, policy: str = "judge:depth=4") -> EngineSet:
    async with runtime.engines(as_policy(policy)) as found:
        return found


JUDGED = RuntimeSpec(choose_models("qwen2.5-coder-1.5b", judge="a/judge"))


async def test_a_target_that_has_ended_is_started_again_for_the_next_call() -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    first = await engines_of(runtime)
    assert await engines_of(runtime) is first
    first.target.close()
    again = await engines_of(runtime)
    assert again.target is not first.target
    assert again.target.healthy
    assert len(pool.held) == 2, "what was held before is given back"


async def test_a_draft_that_has_ended_is_started_again_while_calls_go_on_without_it() -> None:
    runtime = runtime_on(Pool(), RuntimeSpec(MODELS))
    engines = await engines_of(runtime)
    target = engines.target
    for _ in range(3):
        draft = engines.draft
        assert draft is not None
        draft.close()
        assert (await engines_of(runtime)).draft is None
        assert engines.problem == "the draft model's process has ended; it is being started again"
        await becomes(lambda: engines.draft is not None)
        assert engines.draft is not draft
        assert engines.problem is None
        assert engines.verifier(as_policy("judge")) is not None
    assert engines.draft is not None
    engines.draft.close()
    for _ in range(3):
        assert (await engines_of(runtime)).draft is None
        assert engines.problem == "the draft model's process has ended 4 times"
    assert (await engines_of(runtime)).target is target


async def test_a_judge_that_has_ended_is_started_again_while_calls_go_on_without_it() -> None:
    pool = Pool()
    runtime = runtime_on(pool, JUDGED)
    engines = await engines_of(runtime)
    judge = engines.judge
    assert isinstance(judge, EngineJudge)
    judge.engine.close()
    await engines_of(runtime)
    assert engines.verifier(as_policy("judge")) is None
    assert engines.problem == "the judge model's process has ended; it is being started again"
    assert engines.verifier(as_policy("exact")) is not None
    await becomes(lambda: engines.judge is not None)
    assert judge_of(engines) is not judge.engine
    assert engines.problem is None
    assert len(pool.started) == 4


async def test_a_draft_that_judges_judges_again_once_it_is_started_again() -> None:
    assert MODELS.draft is not None
    spec = RuntimeSpec(choose_models(MODELS.target.hub_id, judge=MODELS.draft.hub_id))
    runtime = runtime_on(Pool(), spec)
    engines = await engines_of(runtime)
    assert engines.draft is not None
    engines.draft.close()
    await engines_of(runtime)
    await becomes(lambda: engines.draft is not None)
    assert judge_of(engines) is engines.draft


async def test_a_draft_that_cannot_be_started_again_says_why() -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    engines = await engines_of(runtime)
    assert engines.draft is not None
    assert MODELS.draft is not None
    pool.failing = Path(MODELS.draft.hub_id).name
    engines.draft.close()
    await engines_of(runtime)
    await becomes(lambda: engines.problem == "no memory")
    assert (await engines_of(runtime)).draft is None


def test_engines_that_are_closed_while_they_start_are_not_held() -> None:
    begun, go_on = threading.Event(), threading.Event()

    class Waiting(Pool):
        def acquire(self, config: VLLMConfig) -> ScriptedEngine:
            begun.set()
            assert go_on.wait(20)
            return super().acquire(config)

    pool = Waiting()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    call = background.submit(engines_of(runtime))
    assert begun.wait(20)
    runtime.close()
    go_on.set()
    with pytest.raises(EngineError, match="closed while they started"):
        call.result(20)
    assert not pool.held


@pytest.mark.parametrize("token_speculation", ["auto", "shared_draft"])
async def test_without_a_draft_that_cannot_be_written_in_its_precision_the_target_runs_alone(
    token_speculation: str,
) -> None:
    def full_disk(weights: Weights, _: object) -> Path:
        if weights.source.name == draft.hub_id.rpartition("/")[2]:
            raise DiskSpaceError("the disk is full")
        return weights.source

    def select(wanted: RuntimeSpec, target: Path | None, draft: Path | None, platform: object) -> EngineSetup:
        assert draft is not None or wanted.token_speculation in ("auto", "none")
        return plainly(wanted, target, draft, platform)

    draft = MODELS.draft
    assert draft is not None
    spec = RuntimeSpec(MODELS, token_speculation=token_speculation)
    engines = await engines_of(runtime_on(Pool(), spec, select=select, write=full_disk))
    assert engines.draft is None
    assert engines.problem == "the disk is full"


async def test_whatever_reading_the_embedding_model_raises_fails_no_call() -> None:
    def broken(folder: Path) -> None:
        raise ValueError("no such layer")

    runtime = runtime_on(Pool(), RuntimeSpec(MODELS), load_embedder=broken)
    engines = await engines_of(runtime, "fast:depth=4")
    assert engines.embedder is None
    assert engines.problem == "no such layer"
    assert engines.verifier(as_policy("fast")) is None


async def test_in_a_forked_process_a_runtime_starts_engines_of_its_own() -> None:
    pool = Pool()
    runtime = runtime_on(pool, RuntimeSpec(MODELS))
    parents = await engines_of(runtime)
    runtime.reset_after_fork()
    own = await engines_of(runtime)
    assert own.target is not parents.target
    assert parents.target.healthy
    assert len(pool.held) == 4, "what the parent holds is not given back here"
