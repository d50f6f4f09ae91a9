"""Prefix caching in growing conversations: an engine prefills only new tokens, also of interleaved conversations."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from lookahead_agent import ChatLookahead
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.server_backend import RUNTIME_DIR_VARIABLE
from lookahead_agent.server.daemon import private_dir
from lookahead_agent.system import background
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import WORDS
from tests.unit.serving import serving_private_api
from tests.waiting import wait_until

BLOCK = 32
"""Tokens in a block of vLLM's cache on a CPU; the engine reads a partial block again."""
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' %}<|user|>{{ message.content }}<eos>"
    "{% else %}<|assistant|>{{ message.content | trim }} <eos>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def pair(tiny_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The tiny pair with a template that closes each message, and with a likely end of reply."""
    from safetensors.torch import load_file, save_file

    folders = []
    for folder in tiny_pair:
        own = Path(shutil.copytree(folder, tmp_path_factory.mktemp("prefixes") / folder.name))
        (own / "chat_template.jinja").write_text(TEMPLATE)
        configured = own / "tokenizer_config.json"
        configured.write_text(json.dumps(json.loads(configured.read_text()) | {"chat_template": TEMPLATE}))
        weights = load_file(own / "model.safetensors")
        weights["lm_head.weight"][0] *= 3.0
        save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
        folders.append(str(own))
    return folders


@pytest.fixture(scope="module")
def fields(pair: list[str]) -> dict[str, Any]:
    """Fields of chat models that share one engine: the target, which reads prompts with its draft model."""
    # An operation other than the default one, which `test_vllm_engine.py` tests; it does not affect what is read.
    arguments = TINY_ENGINE | {"ir_op_priority": {"rms_norm": ["native"]}}
    return {
        "model": pair[0],
        "draft_model": pair[1],
        "policy": "off",
        "token_speculation": "draft_model",
        "max_tokens": 8,
        "temperature": 0,
        "engine_args": arguments,
    }


@pytest.fixture(scope="module", autouse=True)
def running(fields: dict[str, Any]) -> Iterator[ChatLookahead]:
    """Keeps the engine running."""
    with ChatLookahead(**fields) as llm:
        llm.start()
        yield llm


def test_argument_overrides_the_default_operation(running: ChatLookahead) -> None:
    engines = running.backend.running
    assert engines is not None
    assert isinstance(engines.target, VLLMEngine)
    assert engines.target._llm.vllm_config.kernel_config.ir_op_priority.rms_norm[0] == "native"


def test_interleaved_conversations_prefill_only_new_tokens(fields: dict[str, Any]) -> None:
    rng = random.Random(5)
    conversations: list[list[BaseMessage]] = [[] for _ in range(8)]
    known, ended = [0] * 8, [True] * 8
    read = new = turns = 0
    with ChatLookahead(**fields | {"temperature": 1.0, "max_tokens": 100}) as llm:
        tokenizer = llm.backend.tokenizer()
        # Only ASCII tokens, so that the text of a reply shows all of its tokens.
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.size)}
        letters = tuple(token for token, text in texts.items() if text and text.isascii())

        def reply_to(messages: list[BaseMessage], turn: int) -> AIMessage:
            request = llm.request(messages, CallOptions(seed=turn))
            request = replace(request, sampling=replace(request.sampling, allowed_token_ids=(0, *letters)))
            *_, reply = background.stream(partial(background.forward, llm.generate_events(request)))
            assert isinstance(reply, AIMessage)
            return reply

        for turn in range(4):
            for messages in conversations:
                messages.append(HumanMessage("".join(rng.choices(WORDS, k=120))))
            with ThreadPoolExecutor(len(conversations)) as threads:
                replies = list(threads.map(reply_to, conversations, repeat(turn)))
            for number, reply in enumerate(replies):
                usage = reply.usage_metadata
                assert usage is not None
                cached = usage["input_token_details"]["cache_read"]
                if ended[number]:
                    assert cached >= known[number] - BLOCK
                    read += usage["input_tokens"] - cached
                    new += usage["input_tokens"] - known[number]
                    turns += 1
                conversations[number].append(reply)
                known[number] = usage["total_tokens"] - 1  # the engine has not read the last token yet
                ended[number] &= reply.response_metadata["finish_reason"] == "stop"
    assert turns > 12
    assert read <= new + turns * BLOCK


def test_warmed_prompt_is_in_the_prefix_cache(fields: dict[str, Any]) -> None:
    """`test_template_prefixes.py` tests a draft with an engine of its own."""
    prefix = [SystemMessage("".join(random.Random(8).choices(WORDS, k=200))), HumanMessage("")]
    # The other context length is of no engine here, so this model has the running engine, and starts it itself.
    with ChatLookahead(**fields, draft_engine_args={"max_model_len": 512}) as llm:
        llm.warm(prefix)
        assert llm.backend.running is None, "`warm` starts no engine"
        llm.start()
        engines = llm.backend.running
        assert engines is not None
        warmer = engines.warmer
        background.run(wait_until(lambda: len(warmer.known) == 1 and warmer.prefill_task is None))
        usage = llm.invoke([prefix[0], HumanMessage(" apples")]).usage_metadata
        assert usage is not None
        least = usage["input_tokens"] - 2 * BLOCK
        assert least > 100
        assert usage["input_token_details"]["cache_read"] >= least


def test_engines_of_the_daemon_prefill_prompts_that_clients_warm(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUNTIME_DIR_VARIABLE, str(tmp_path / "run"))
    private_dir()
    (tmp_path / "config.json").write_text("{}")
    client = ChatLookahead(model=str(tmp_path), policy="off", temperature=0, max_tokens=8)  # its model cannot start
    assert client.backend.runtime is not None
    prefix = SystemMessage("".join(random.Random(10).choices(WORDS, k=200)))
    client.warm([prefix, HumanMessage("")])  # without a daemon this is no error
    with (
        ChatLookahead(**fields, draft_engine_args={"max_model_len": 256}, use_daemon=False) as llm,
        serving_private_api(llm, client.backend.runtime.spec.digest),
    ):
        engines = llm.backend.running
        assert engines is not None
        warmer, known_before = engines.warmer, len(engines.warmer.known)
        client.warm([prefix, HumanMessage("")])
        background.run(wait_until(lambda: len(warmer.known) == known_before + 1 and warmer.prefill_task is None))
        usage = client.invoke([prefix, HumanMessage(" apples")]).usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] >= usage["input_tokens"] - 2 * BLOCK > 100


def test_reply_during_warming_is_unchanged_and_the_prompt_is_cached_later(fields: dict[str, Any]) -> None:
    long = HumanMessage("".join(random.Random(9).choices(WORDS, k=900)))
    with ChatLookahead(**fields) as llm:
        expected = llm.invoke(" apples")
        engines = llm.backend.running
        assert engines is not None
        warmer = engines.warmer
        llm.warm([long])
        background.run(wait_until(lambda: warmer.prefill_task is not None))
        assert llm.invoke(" apples").content == expected.content
        background.run(wait_until(lambda: not warmer.waiting and warmer.prefill_task is None))
        usage = llm.invoke([long]).usage_metadata
        assert usage is not None
        assert usage["input_token_details"]["cache_read"] >= usage["input_tokens"] - 2 * BLOCK
