"""Engines are slow to start, so tests share them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from xdist.scheduler import LoadFileScheduling

from lookahead_agent import ChatLookahead
from lookahead_agent.models.cache import CACHE_VARIABLE, cache_dir
from tests.integration.tiny_models import make_pair

logging.getLogger("lookahead_agent").setLevel(logging.INFO)

# So small a cache that a few rounds of requests touch all of it: a test of what grows after that needs no other engine.
TINY_ENGINE = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 25, "max_model_len": 1024}


# Files whose tests share the tiny pair's engines, which one worker starts.
SHARE_TINY = frozenset({"lossless", "token_speculation", "tiny_pair", "forms", "streams", "synthetic", "remote"})
TINY = "tiny"
# Groups of tests that take minutes, the longest first: begun last, one would leave the other workers waiting.
LONGEST = (TINY, "precision", "processes", "crash_report", "sampling", "daemon", "bench", "estimate", "serve")
CALLS = ("invoke", "ainvoke", "stream", "astream")
# Properties by which LangChain's standard suite is told what a model can, where a test's name does not say it.
PROPERTIES = {
    "test_stream_time": "enable_vcr_tests",
    **{f"test_{call}_with_model_override": "supports_model_override" for call in CALLS},
}


class Groups(LoadFileScheduling):
    """Gives a worker all tests of a group."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(Path(nodeid.partition("::")[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


def _group(file: Path) -> str:
    name = file.stem.removeprefix("test_")
    return TINY if name in SHARE_TINY else name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.integration)
            if item.path.name == "test_smollm.py" or {"real", "by_itself"} & _fixtures(item):
                item.add_marker(pytest.mark.packaged)
            assert "tiny" not in _fixtures(item) or _group(item.path) == TINY, f"SHARE_TINY lacks {item.path.stem}"
    deselected = [item for item in items if _is_unsupported(item)]
    items[:] = [item for item in items if item not in deselected]
    config.hook.pytest_deselected(items=deselected)
    # Engines of the packaged pair stay in memory once they are there, and a third pair would not fit beside two.
    items.sort(key=lambda item: ["by_itself" in _fixtures(item), "real" in _fixtures(item), _rank(item)])


def _fixtures(item: pytest.Item) -> set[str]:
    return set(getattr(item, "fixturenames", ()))


def _rank(item: pytest.Item) -> int:
    group = _group(item.path)
    return LONGEST.index(group) if group in LONGEST else len(LONGEST)


def _is_unsupported(item: pytest.Item) -> bool:
    """Whether a test of LangChain's standard suite is of what its class says that the model cannot."""
    suite, name = getattr(item, "cls", None), getattr(item, "originalname", item.name)
    if not hasattr(suite, "supports_model_override"):
        return False
    return not getattr(suite(), PROPERTIES.get(name, name.replace("test_", "supports_", 1)), True)


@pytest.fixture(scope="session", autouse=True)
def _cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of its own for tests on tiny models, which leave nothing in the user's; what is there they find."""
    if any(item.get_closest_marker("packaged") for item in request.session.items):
        yield
        return
    users, own = cache_dir(), tmp_path_factory.mktemp("cache")
    (own / "models").mkdir()
    for model in users.glob("models/*/"):
        (own / "models" / model.name).symlink_to(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(own))
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
        # Models of two layers gain nothing from a draft: what is tested is commanded.
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
    """The packaged pair in real vLLM, guided, with the policies of the plan-and-execute agent; steps are commanded."""
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
def by_itself() -> Iterator[ChatLookahead]:
    """The packaged pair as it comes; models of the same configuration share its engines."""
    with ChatLookahead(temperature=0) as llm:
        llm.start()
        yield llm


def descendants(pid: int) -> list[psutil.Process]:
    """Processes that a process has started, and theirs."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
