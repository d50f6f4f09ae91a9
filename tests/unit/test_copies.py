"""Copies of a model share its engines, and none takes them away from another."""

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


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("first", ["original", "copy"])
def test_closing_one_leaves_the_other_its_engines(way: str, first: str) -> None:
    # Arguments that no other test has, whose models would keep the engines.
    llm = ChatLookahead(engine_args={"max_num_seqs": 11}, rate_limiter=None)
    copied = COPIES[way](llm)
    runtime = llm.backend.runtime
    assert runtime is not None
    assert copied is not llm
    assert (copied == llm) == (way != "changed")
    assert copied.backend.runtime is runtime
    assert copied.backend is copied.backend is not llm.backend
    closed: list[bool] = []
    runtime.close = lambda: closed.append(True)  # type: ignore[method-assign]
    one, other = (llm, copied) if first == "original" else (copied, llm)
    one.close()
    one.close()
    assert closed == [], "the other one uses them"
    other.close()
    assert closed == [True]


@pytest.mark.parametrize("way", [name for name in COPIES if name not in ("pickle", "changed")])
def test_a_copy_is_the_same_model(way: str) -> None:
    llm = scripted_chat(
        "It is 4.",
        policies={"planner": VerifierPolicy(verifier="exact")},
        cache=InMemoryCache(),
        rate_limiter=InMemoryRateLimiter(requests_per_second=1000),
        temperature=0.5,
    )
    copied = COPIES[way](llm)
    assert copied.engines is llm.engines
    assert copied.cache is llm.cache
    assert copied.rate_limiter is llm.rate_limiter
    assert copied.asdict() == llm.asdict()
    assert copied.policies == llm.policies
    assert copied.invoke("q").text == "It is 4."
    llm.close()
    assert copied.invoke("again").text == "It is 4."


def test_fields_of_a_copy_are_its_own() -> None:
    llm = scripted_chat("It is 4.", policies={"planner": "exact"})
    copied = copy.deepcopy(llm)
    copied.policies["planner"] = "off"
    assert llm.policies == {"planner": "exact"}


def test_pickle_makes_the_same_model_from_its_fields() -> None:
    mine = VerifierPolicy(name="mine", verifier="exact", depth=7)
    llm = ChatLookahead(
        policies={"planner": mine}, temperature=0.5, stop="END", judge_url="http://j/v1", judge_model="big"
    )
    again = pickle.loads(pickle.dumps(llm))
    assert again.asdict() == llm.asdict()
    assert again.policies == {"planner": mine}
    assert again.stop == ["END"]
    assert again.model_fields_set == llm.model_fields_set
    bound: Any = pickle.loads(pickle.dumps(llm.bind_tools([add])))
    assert bound.kwargs["tools"][0]["function"]["name"] == "add"
    secret = ChatLookahead(base_url="http://t/v1", api_key="hidden", policy="off")  # type: ignore[arg-type]
    key = pickle.loads(pickle.dumps(secret)).api_key
    assert key.get_secret_value() == "hidden"


@pytest.mark.parametrize(
    ("name", "llm"),
    [
        ("engines", lambda: scripted_chat("It is 4.")),
        ("rate_limiter", lambda: ChatLookahead(rate_limiter=InMemoryRateLimiter(requests_per_second=1))),
        ("custom_get_token_ids", lambda: ChatLookahead(custom_get_token_ids=lambda text: [len(text)])),
    ],
)
def test_pickle_says_what_it_cannot(name: str, llm: Callable[[], ChatLookahead]) -> None:
    for pickled in (llm(), llm().bind(stop=["END"]), [llm()]):
        with pytest.raises(ConfigurationError, match=f"{name} cannot be pickled.*pickle a model without it"):
            pickle.dumps(pickled)
