"""Token counts of the target's tokenizer, the model profile, and other features of LangChain's base classes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import get_usage_metadata_callback
from langchain_core.messages import (
    AIMessage,
    HumanMessage,
    InvalidToolCall,
    SystemMessage,
    ToolCall,
    ToolMessage,
    trim_messages,
)
from langchain_core.tools import tool

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from tests.unit.chat import scripted_chat, scripted_engines
from tests.unit.test_messages import END, IN_TURN, STRICT, WHOLE, _tokenizer, chat_with

TOOLS = "{% for t in tools or [] %}tool {{ t | tojson }}|{% endfor %}"


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: counting must not load a model."""
    model_folder = tmp_path_factory.mktemp("model")
    _tokenizer(model_folder, TOOLS + WHOLE)
    (model_folder / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    return model_folder


@pytest.fixture
def tokenizer(model_folder: Path) -> HFTokenizer:
    return HFTokenizer(model_folder)


CALL = AIMessage("", tool_calls=[ToolCall(name="add", args={"a": 1, "b": 2}, id="1")])
CONVERSATIONS: list[list[Any]] = [
    [HumanMessage("größe 東京 12345678")],
    [SystemMessage("Be brief."), HumanMessage("hi")],
    [HumanMessage("hi"), CALL, ToolMessage("3", tool_call_id="1")],
    [HumanMessage("hi"), AIMessage("It is")],
    [HumanMessage("hi"), AIMessage("")],
    [HumanMessage("hi"), AIMessage("a", additional_kwargs={"reasoning_content": "Hm."}), HumanMessage("ho")],
    [
        HumanMessage("hi"),
        AIMessage("", invalid_tool_calls=[InvalidToolCall(name="add", args="{", id="1", error=None)]),
        ToolMessage("not JSON", tool_call_id="1"),
    ],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [add]])
def test_counted_tokens_equal_the_input_tokens_of_the_reply(
    tokenizer: HFTokenizer, messages: list[Any], tools: list[Any] | None
) -> None:
    llm, _ = chat_with(tokenizer)
    reply = (llm.bind_tools(tools) if tools else llm).invoke(messages)
    assert isinstance(reply, AIMessage)
    assert reply.usage_metadata is not None
    assert llm.get_num_tokens_from_messages(messages, tools=tools) == reply.usage_metadata["input_tokens"]


def test_counting_needs_neither_engines_nor_network(
    model_folder: Path, tokenizer: HFTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    text = "pandas.DataFrame.groupby(['größe'])  # 東京"
    for llm in (
        ChatLookahead(model=str(model_folder), policy="off", token_speculation="none"),
        ChatLookahead(model="served", base_url="http://127.0.0.1:1/v1", tokenizer=str(model_folder), policy="off"),
    ):
        assert llm.get_token_ids(text) == tokenizer.encode(text)
        assert llm.get_num_tokens(text) == len(tokenizer.encode(text))
        counted = llm.get_num_tokens_from_messages([HumanMessage(text)])
        assert counted == len(tokenizer.chat_prompt([{"role": "user", "content": text}]))
        assert llm.backend.running is None
    with pytest.raises(ConfigurationError, match="lone surrogate"):
        llm.get_num_tokens("\ud83d")


def test_custom_get_token_ids_takes_precedence() -> None:
    llm = scripted_chat("a", custom_get_token_ids=lambda text: [1] * len(text))
    assert llm.get_num_tokens("abc") == 3
    assert llm.get_num_tokens_from_messages([HumanMessage("abc")]) == len("Human: abc")


def test_trim_messages_counts_with_the_models_tokenizer(tokenizer: HFTokenizer) -> None:
    llm, _ = chat_with(tokenizer)
    messages: list[Any] = [
        SystemMessage("Be brief."),
        HumanMessage("a " * 50),
        AIMessage("b " * 50),
        CALL,
        ToolMessage("3", tool_call_id="1"),
        HumanMessage("c"),
        AIMessage("d"),
        HumanMessage("e"),
    ]
    total_tokens = llm.get_num_tokens_from_messages(messages)
    assert trim_messages(messages, max_tokens=total_tokens, token_counter=llm) == messages
    kept = trim_messages(messages, max_tokens=80, token_counter=llm, include_system=True, start_on="human")
    assert [message.text for message in kept] == ["Be brief.", "c", "d", "e"]
    assert llm.get_num_tokens_from_messages(kept) <= 80
    first = trim_messages(messages, max_tokens=150, token_counter=llm, strategy="first")
    assert [message.text for message in first[:2]] == ["Be brief.", "a " * 50]
    assert len(first) == 2


@pytest.mark.parametrize("template", [STRICT, IN_TURN, "{{ raise_exception('never') }}" + END])
def test_partial_conversations_are_counted_even_if_the_template_rejects_them(tmp_path: Path, template: str) -> None:
    llm, _ = chat_with(_tokenizer(tmp_path, template))
    parts: list[list[Any]] = [
        [SystemMessage("a" * 50)],
        [AIMessage("a" * 50)],
        [ToolMessage("a" * 50, tool_call_id="1")],
        [HumanMessage("a" * 50), HumanMessage("a")],
        [CALL, HumanMessage("a" * 50)],
    ]
    for part in parts:
        assert llm.get_num_tokens_from_messages(part) >= 50
    assert llm.get_num_tokens_from_messages([HumanMessage("a"), CALL]) > 0
    assert llm.get_num_tokens_from_messages([]) == 0
    shorthand: Any = [("user", "a" * 50), {"role": "assistant", "content": "b"}]
    assert llm.get_num_tokens_from_messages(shorthand) >= 50
    assert llm.get_num_tokens_from_messages([], tools=[add]) > 10


def test_profile_reports_context_length_and_capabilities(model_folder: Path) -> None:
    llm = ChatLookahead(model=str(model_folder), policy="off", max_tokens=100)
    assert llm.profile is not None
    assert llm.profile["max_input_tokens"] == 4096
    assert llm.profile["max_output_tokens"] == 100
    assert llm.profile["tool_calling"] is True
    assert llm.profile["structured_output"] is True
    assert llm.profile["image_inputs"] is False
    assert llm.profile["name"] == model_folder.name
    small = ChatLookahead(model=str(model_folder), policy="off", engine_args={"max_model_len": 512})
    assert small.profile is not None
    assert small.profile["max_input_tokens"] == 512
    custom = ChatLookahead(model=str(model_folder), policy="off", profile={"max_input_tokens": 7})
    assert custom.profile == {"max_input_tokens": 7}
    reasoning = ChatLookahead(model="qwen3-8b", base_url="http://t/v1", policy="off")
    assert reasoning.profile is not None
    assert reasoning.profile["reasoning_output"] is True
    assert reasoning.profile["max_input_tokens"] == 32768
    assert llm.backend.running is None


def test_profile_reads_the_config_from_the_hub_cache(model_folder: Path, tmp_path: Path) -> None:
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs/main").write_text("abc")
    shutil.copytree(model_folder, cached / "snapshots/abc")
    code = (
        "from lookahead_agent import ChatLookahead\n"
        "for model in ('org/name', 'org/other'):\n"
        "    profile = ChatLookahead(model='served', tokenizer=model, base_url='http://t/v1', policy='off').profile\n"
        "    print(profile.get('max_input_tokens'), profile['tool_calling'])\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.split("\n")[:2] == ["4096 True", "None True"]


def test_profile_of_passed_engines_reads_thinking_from_their_chat_template(tmp_path: Path) -> None:
    for template, reasoning in ((WHOLE, False), (TOOLS + WHOLE + "{# </think> #}", True)):
        llm, _ = chat_with(_tokenizer(tmp_path / str(reasoning), template))
        assert llm.profile is not None
        assert llm.profile["reasoning_output"] is reasoning


def test_summarization_middleware_triggers_at_a_fraction_of_the_context() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "SUMMARY" if "context" in prompt.lower() else "Yes."

    llm = ChatLookahead(engines=scripted_engines(reply, context_length=4000), policy="off")
    history = [HumanMessage("word " * 40), AIMessage("word " * 40), HumanMessage("word " * 40), AIMessage("b")]
    for fraction, summarized in ((0.025, True), (0.1, False)):
        summarization = SummarizationMiddleware(llm, trigger=("fraction", fraction), keep=("messages", 1))
        agent: Any = create_agent(llm, [], middleware=[summarization])
        state = agent.invoke({"messages": [*history, HumanMessage("And?")]})
        assert state["messages"][-1].text == "Yes."
        assert ("SUMMARY" in prompts[-1], "word" in prompts[-1]) == (summarized, not summarized)


# Other features of the base classes


def test_cache_key_includes_the_models_fields_and_stop_strings() -> None:
    llm = scripted_chat("First. END Second.", policy="off", cache=InMemoryCache())
    assert llm.invoke("q").text == "First. END Second."
    assert llm.model_copy(update={"max_tokens": 1}).invoke("q").text != "First. END Second."
    assert llm.invoke("q", stop="END").text == "First. "
    llm.stop = "END"  # type: ignore[assignment]
    assert llm.invoke("q").text == "First. "


async def test_usage_callback_receives_token_counts() -> None:
    llm = scripted_chat("It is 4.", policy="off")
    calls: list[Callable[[], Any]] = [lambda: llm.invoke("q"), lambda: list(llm.stream("q"))]
    for call in calls:
        with get_usage_metadata_callback() as callback:
            call()
        assert callback.usage_metadata[llm.model]["output_tokens"] > 0
    with get_usage_metadata_callback() as callback:
        await llm.ainvoke("q")
    assert callback.usage_metadata[llm.model]["total_tokens"] > 0


def test_invoke_accepts_stream_and_disable_streaming_yields_one_chunk() -> None:
    llm = scripted_chat("It is 4.", policy="off")
    assert llm.invoke("q", stream=True).text == "It is 4."
    assert llm.invoke("q", stream=False).text == "It is 4."
    assert len(list(scripted_chat("It is 4.", policy="off", disable_streaming=True).stream("q"))) == 1
