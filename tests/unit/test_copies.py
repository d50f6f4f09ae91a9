"""Copies of a model share its engines, which stay open until the last copy closes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.errors import ConfigurationError
from tests.unit.chat import scripted_chat


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


COPIES: dict[str, Callable[[ChatLookahead], ChatLookahead]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda llm: llm.model_copy(),
    "deep model_copy": lambda llm: llm.model_copy(deep=True),
    "changed": lambda llm: llm.model_copy(update={"temperature": 0.5}),
    "pickle": lambda llm: pickle.loads(pickle.dumps(llm)),
    "bound": lambda llm: copy.deepcopy(llm.bind_tools([add])).bound,  # type: ignore[attr-defined]
    "in a list": lambda llm: copy.deepcopy([llm, llm])[1],
    "copy of a copy": lambda llm: copy.deepcopy(copy.copy(llm)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("closed_first", ["original", "copy"])
def test_engines_close_with_the_last_copy(kind: str, closed_first: str) -> None:
    # Unique engine arguments: models of other tests would keep a shared runtime open.
    llm = ChatLookahead(engine_args={"max_num_seqs": 11}, rate_limiter=None)
    copied = COPIES[kind](llm)
    runtime = llm.backend.runtime
    assert runtime is not None
    assert copied is not llm
    assert (copied == llm) == (kind != "changed")
    assert copied.backend.runtime is runtime
    assert copied.backend is copied.backend is not llm.backend
    closed: list[bool] = []
    runtime.close = lambda: closed.append(True)  # type: ignore[method-assign]
    one, other = (llm, copied) if closed_first == "original" else (copied, llm)
    one.close()
    one.close()
    assert closed == [], "the other copy still uses the engines"
    other.close()
    assert closed == [True]


@pytest.mark.parametrize("kind", [name for name in COPIES if name not in ("pickle", "changed")])
def test_copy_has_the_same_fields_and_engines_and_outlives_the_original(kind: str) -> None:
    llm = scripted_chat(
        "It is 4.",
        policies={"planner": VerifierPolicy(verifier="exact")},
        cache=InMemoryCache(),
        rate_limiter=InMemoryRateLimiter(requests_per_second=1000),
        temperature=0.5,
    )
    copied = COPIES[kind](llm)
    assert copied.engines is llm.engines
    assert copied.cache is llm.cache
    assert copied.rate_limiter is llm.rate_limiter
    assert copied.asdict() == llm.asdict()
    assert copied.policies == llm.policies
    assert copied.invoke("q").text == "It is 4."
    llm.close()
    assert copied.invoke("again").text == "It is 4."


def test_deepcopy_has_its_own_policies() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "exact"})
    copied = copy.deepcopy(llm)
    copied.policies["planner"] = "off"
    assert llm.policies == {"planner": "exact"}


def test_pickle_restores_fields_bound_tools_and_secrets() -> None:
    custom = VerifierPolicy(name="mine", verifier="exact", depth=7)
    llm = ChatLookahead(
        policies={"planner": custom}, temperature=0.5, stop="END", judge_url="http://j/v1", judge_model="big"
    )
    restored = pickle.loads(pickle.dumps(llm))
    assert restored.asdict() == llm.asdict()
    assert restored.policies == {"planner": custom}
    assert restored.stop == ["END"]
    assert restored.model_fields_set == llm.model_fields_set
    bound: Any = pickle.loads(pickle.dumps(llm.bind_tools([add])))
    assert bound.kwargs["tools"][0]["function"]["name"] == "add"
    secret = ChatLookahead(base_url="http://t/v1", api_key="hidden", policy="off")  # type: ignore[arg-type]
    key = pickle.loads(pickle.dumps(secret)).api_key
    assert key.get_secret_value() == "hidden"


@pytest.mark.parametrize(
    ("field", "llm"),
    [
        ("engines", lambda: scripted_chat("It is 4.")),
        ("rate_limiter", lambda: ChatLookahead(rate_limiter=InMemoryRateLimiter(requests_per_second=1))),
        ("custom_get_token_ids", lambda: ChatLookahead(custom_get_token_ids=lambda text: [len(text)])),
    ],
)
def test_pickle_error_names_the_field_that_cannot_be_pickled(field: str, llm: Callable[[], ChatLookahead]) -> None:
    for value in (llm(), llm().bind(stop=["END"]), [llm()]):
        with pytest.raises(ConfigurationError, match=f"{field} cannot be pickled.*pickle a model without it"):
            pickle.dumps(value)
