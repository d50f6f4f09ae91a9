"""Engines shared by tests, because they start slowly, and the order of test files."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.processes import child_processes
from lookahead_agent.engines.starter import keep_starters
from lookahead_agent.system.files import CACHE_VARIABLE, cache_dir
from tests.integration.tiny_models import make_pair

logging.getLogger("lookahead_agent").setLevel(logging.INFO)

# A few rounds of requests touch all of so small a KV cache: a test of memory growth needs no engine of its own.
TINY_ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 2048}

# Files that run one test after another: SmolLM2's engines fill a machine, and a daemon has a session of its own, whose
# processes some schedulers starve beside busy ones.
ALONE = frozenset({"test_smollm.py", "test_daemon.py"})
# Test files that take minutes, longest first: a late start of one would leave the other workers idle.
LONGEST = (
    "remote",
    "precision",
    "processes",
    "replay",
    "lossless",
    "gpu_arguments",
    "sampling",
    "crash_report",
    "token_speculation",
    "estimate",
    "serve",
    "bench",
)
CALLS = ("invoke", "ainvoke", "stream", "astream")
# The property of LangChain's standard suite that enables a test, where the test's name does not give it.
PROPERTIES = {
    "test_stream_time": "enable_vcr_tests",
    **{f"test_{call}_with_model_override": "supports_model_override" for call in CALLS},
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.path.name in ALONE or {"real", "default_llm"} & _fixtures(item):
                item.add_marker(pytest.mark.packaged)
    deselected = [item for item in items if _is_unsupported(item)]
    items[:] = [item for item in items if item not in deselected]
    config.hook.pytest_deselected(items=deselected)
    # Engines of the packaged pair stay in memory once loaded, and a third pair does not fit beside two.
    items.sort(key=lambda item: ["default_llm" in _fixtures(item), "real" in _fixtures(item), _rank(item)])


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _rank(item: pytest.Item) -> int:
    name = item.path.stem.removeprefix("test_")
    return LONGEST.index(name) if name in LONGEST else len(LONGEST)


def _is_unsupported(item: pytest.Item) -> bool:
    """Whether a test of LangChain's standard suite needs a feature or a model that its class does not have."""
    suite, name = getattr(item, "cls", None), getattr(item, "originalname", item.name)
    if not hasattr(suite, "supports_model_override"):
        return False
    if not getattr(suite, "runs", lambda name: True)(name):
        return True
    return not getattr(suite(), PROPERTIES.get(name, name.replace("test_", "supports_", 1)), True)


def engine_processes() -> set[psutil.Process]:
    """The processes of this process's engines, without their starters, which tests keep: these are its own children."""
    return {process for process in child_processes() if process.ppid() != os.getpid()}


@pytest.fixture(scope="session", autouse=True)
def _starters() -> Iterator[None]:
    """Import vLLM once for the engines of all tests."""
    with keep_starters():
        yield


@pytest.fixture(scope="session", autouse=True)
def _cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A temporary cache for tests on tiny models: they find the user's models and add none to them."""
    if any(item.get_closest_marker("packaged") for item in request.session.items):
        yield
        return
    user_cache, own_cache = cache_dir(), tmp_path_factory.mktemp("cache")
    (own_cache / "models").mkdir()
    for model in user_cache.glob("models/*/"):
        (own_cache / "models" / model.name).symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(own_cache))
        yield


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a tiny target and draft."""
    return make_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_pair: tuple[Path, Path]) -> Iterator[ChatLookahead]:
    """The tiny pair in real vLLM."""
    with ChatLookahead(
        model=str(tiny_pair[0]),
        draft_model=str(tiny_pair[1]),
        policy="exact",
        # Models of two layers gain nothing from a draft, so `depth` forces step speculation.
        depth=4,
        token_speculation="none",
        temperature=0,
        max_tokens=96,
        engine_args=TINY_ENGINE,
        draft_engine_args=TINY_ENGINE,
        return_token_ids=True,
    ) as llm:
        llm.start()
        yield llm


@pytest.fixture(scope="session")
def real() -> Iterator[ChatLookahead]:
    """The packaged pair in real vLLM: a shared draft, a forced depth, policies of the plan-and-execute agent."""
    with ChatLookahead(
        depth=4,
        token_speculation="shared_draft",
        policies={"planner": "balanced", "executor": "strict", "finisher": "strict"},
        temperature=0,
        max_tokens=400,
        return_token_ids=True,
    ) as llm:
        llm.start()
        yield llm


@pytest.fixture(scope="session")
def default_llm() -> Iterator[ChatLookahead]:
    """The packaged pair in its default configuration; models of that configuration share its engines."""
    with ChatLookahead(temperature=0) as llm:
        llm.start()
        yield llm


def descendants(pid: int) -> list[psutil.Process]:
    """All descendants of a process; none if it has ended."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
