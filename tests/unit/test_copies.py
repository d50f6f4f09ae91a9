"""Copies of a model share its engines, which stay open until the last copy closes."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.load import dumpd
from langchain_core.rate_limiters import InMemoryRateLimiter
from langchain_core.runnables import ConfigurableField
from langchain_core.tools import tool
from pydantic import ValidationError

from lookahead_agent import ChatLookahead, VerifierPolicy
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.errors import ConfigurationError, LookaheadError
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
    arguments = {"hf_token": "hidden", "max_model_len": 64}
    local = ChatLookahead(engine_args=arguments, judge_model="qwen3-8b", judge_engine_args=arguments)
    assert local.backend.runtime is not None
    assert local.backend.runtime.spec.target_arguments == local.model_copy().backend.runtime.spec.target_arguments  # type: ignore[union-attr]
    assert local.backend.runtime.spec.judge_arguments == arguments
    for text in (repr(local), repr(local.backend.runtime.spec), json.dumps(dumpd(local)), repr(local.bind(stop="a"))):
        assert "hidden" not in text
        assert "max_model_len" in text or "RuntimeSpec" in text
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


def assign(llm: ChatLookahead, fields: dict[str, Any]) -> ChatLookahead:
    copied = copy.copy(llm)
    for name, value in fields.items():
        setattr(copied, name, value)
    return copied


def configure(llm: ChatLookahead, fields: dict[str, Any]) -> ChatLookahead:
    configurable: Any = llm.configurable_fields(**{name: ConfigurableField(name) for name in fields})
    prepared: ChatLookahead = configurable.prepare({"configurable": fields})[0]
    return prepared


def pickled(llm: ChatLookahead, fields: dict[str, Any]) -> ChatLookahead:
    changed: ChatLookahead = pickle.loads(pickle.dumps(assign(llm, fields)))
    return changed


CHANGES: dict[str, Callable[[ChatLookahead, dict[str, Any]], ChatLookahead]] = {
    "assignment": assign,
    "model_copy": lambda llm, fields: llm.model_copy(update=fields),
    "deep model_copy": lambda llm, fields: llm.model_copy(update=fields, deep=True),
    "copy": lambda llm, fields: llm.copy(update=fields),
    "configurable_fields": configure,
    "pickle": pickled,
}
SERVER = RemoteModel("http://t/v1", "qwen2.5-coder-1.5b")


@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize(
    ("fields", "value_of", "expected"),
    [
        ({"model": "qwen3-8b"}, lambda spec: spec.models.target.name, "Qwen/Qwen3-8B"),
        ({"draft_model": "some/draft"}, lambda spec: spec.models.draft.name, "some/draft"),
        ({"judge_model": "some/judge"}, lambda spec: spec.models.judge.name, "some/judge"),
        ({"embedding_model": "some/words"}, lambda spec: spec.models.embedding.name, "some/words"),
        ({"base_url": "http://t/v1"}, lambda spec: spec.remote["target"], SERVER),
        ({"draft_url": "http://d/v1"}, lambda spec: spec.remote["draft"].url, "http://d/v1"),
        ({"timeout": 5.0, "base_url": "http://t/v1"}, lambda spec: spec.remote["target"].timeout, 5.0),
        ({"base_url": "http://t/v1", "max_retries": 7}, lambda spec: spec.remote["target"].max_retries, 7),
        ({"base_url": "http://t/v1", "api_key": "k"}, lambda spec: spec.remote["target"].api_key, "k"),
        ({"token_speculation": "ngram"}, lambda spec: spec.token_speculation, "ngram"),
        ({"precision": "bf16"}, lambda spec: spec.precision, "bf16"),
        ({"draft_precision": "fp32"}, lambda spec: spec.draft_precision, "fp32"),
        ({"engine_args": {"max_num_seqs": 3}}, lambda spec: spec.target_arguments, {"max_num_seqs": 3}),
        ({"draft_engine_args": {"max_num_seqs": 3}}, lambda spec: spec.draft_arguments, {"max_num_seqs": 3}),
        ({"cores": ("0", "1")}, lambda spec: spec.cores, ("0", "1")),
    ],
)
def test_a_changed_field_of_the_engines_selects_those_engines(
    kind: str, fields: dict[str, Any], value_of: Callable[[Any], Any], expected: Any
) -> None:
    llm = ChatLookahead()
    changed = CHANGES[kind](llm, fields)
    runtime, before = changed.backend.runtime, llm.backend.runtime
    assert runtime is not None
    assert before is not None
    assert value_of(runtime.spec) == expected
    assert runtime is ChatLookahead(**fields).backend.runtime
    assert before is ChatLookahead().backend.runtime, "the original keeps its engines"


@pytest.mark.parametrize("kind", CHANGES)
def test_a_changed_field_of_calls_keeps_the_engines_and_updates_the_profile(kind: str) -> None:
    llm = ChatLookahead()
    changed = CHANGES[kind](llm, {"max_tokens": 77, "policy": "exact"})
    assert changed.backend.runtime is llm.backend.runtime
    assert changed.policy_for().name == "exact"
    assert llm.policy_for().name == "balanced"
    assert changed.profile is not None
    assert changed.profile["max_output_tokens"] == 77
    named = CHANGES[kind](llm, {"model": "qwen3-8b"}).profile
    assert named is not None
    assert named["name"] == "Qwen/Qwen3-8B"
    own = CHANGES[kind](ChatLookahead(profile={"max_input_tokens": 9}), {"max_tokens": 77})
    assert own.profile == {"max_input_tokens": 9}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_tokens", -5), ("policy", "nonsense"), ("policies", {"planner": "nonsense"}), ("depth", 99)],
        *[("model", "no such model"), ("precision", "int3"), ("cores", ("0",)), ("timeout", 0), ("audit_rate", 2)],
        *[("base_url", "ftp://x"), ("draft_url", "x"), ("api_key", "k"), ("stop", "")],
    ],
)
def test_an_invalid_change_is_refused_by_name_and_changes_nothing(name: str, value: Any) -> None:
    llm = ChatLookahead()
    fields, runtime = llm.asdict(), llm.backend.runtime
    with pytest.raises(LookaheadError, match=name.replace("policies", "policy").replace("_", "[_ ]")):
        setattr(llm, name, value)
    with pytest.raises(LookaheadError):
        llm.model_copy(update={name: value})
    with pytest.raises(ConfigurationError, match="nope"):
        llm.model_copy(update={"nope": value})
    assert (llm.asdict(), llm.backend.runtime) == (fields, runtime)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_retries": 3},
        {"base_url": "http://t/v1", "precision": "bf16"},
        {"draft_url": "http://d/v1", "draft_precision": "bf16"},
        {"base_url": "http://t/v1", "draft_url": "http://d/v1", "cores": ("0", "1")},
        {"judge_engine_args": {"max_num_seqs": 3}},
        {"model": "some/model", "policy": "off", "draft_engine_args": {"max_num_seqs": 3}},
    ],
)
def test_a_field_that_no_engine_of_the_configuration_reads_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=list(fields)[-1]):
        ChatLookahead(**fields)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", " ", "\t"])
def test_white_space_around_a_key_is_removed(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOKAHEAD_API_KEY", f"from-env{end}")
    urls = {"base_url": "http://t/v1", "draft_url": "http://d/v1", "draft_api_key": f"own{end}"}
    for llm in (ChatLookahead(**urls), ChatLookahead(**urls, api_key=f"from-env{end}")):
        runtime = llm.backend.runtime
        assert runtime is not None
        assert {role: remote.api_key for role, remote in runtime.spec.remote.items()} == {
            "target": "from-env",
            "draft": "own",
        }
    monkeypatch.setenv("LOOKAHEAD_API_KEY", end)
    assert ChatLookahead(base_url="http://t/v1").backend.runtime.spec.remote["target"].api_key is None  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "fields",
    [
        *[{"base_url": "http://t/v1", "api_key": f"SECRET{part}KEY"} for part in ("\n", " ", "É", "\0", "\ud83d")],
        {"draft_url": "http://d/v1", "draft_api_key": "SECRET\rKEY"},
        {"judge_url": "http://d/v1", "judge_model": "m", "judge_api_key": "SECRET KEY"},
        {"embedding_url": "http://d/v1", "embedding_model": "m", "embedding_api_key": "SECRET KEY"},
        {"api_key": "SECRET"},
        {"base_url": "http://t/v1", "api_key": ["SECRET"]},
        {"openai_api_key": "SECRET"},
        {"base_url": "http://SECRET@t/v1"},
        {"base_url": "http://user:SECRET@t/v1"},
        {"base_url": "http://t/v1?api-key=SECRET"},
        {"draft_url": "http://t/v1#SECRET"},
    ],
)
def test_no_error_of_a_field_has_a_key(fields: dict[str, Any]) -> None:
    builds: list[Callable[[], ChatLookahead]] = [
        lambda: ChatLookahead(**fields),
        lambda: ChatLookahead().model_copy(update=fields),
    ]
    for build in builds:
        with pytest.raises((ConfigurationError, ValidationError)) as error:
            build()
        assert "SECRET" not in str(error.value)
