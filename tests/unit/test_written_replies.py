"""Prompts repeat earlier replies in their own tokens, so that they hit the engine's prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.written_replies import ReplyTokenCache
from tests.unit.test_messages import _tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    "<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
QUESTION = [{"role": "user", "content": "How many?"}]
FOLLOW_UP = {"role": "user", "content": "And pears?"}
CALLS = [{"type": "function", "id": "1", "function": {"name": "count", "arguments": {"of": "apples"}}}]
RESULT = {"role": "tool", "content": "Five.", "tool_call_id": "1"}
CALL_TEXT = '<call>{"name": "count", "arguments": {"of": "apples"}}\n'


@pytest.fixture
def tokenizer(tmp_path: Path) -> HFTokenizer:
    return _tokenizer(tmp_path, TEMPLATE)


def assistant(text: str, calls: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": calls or [], "finished": True, **fields}


def remember(tokenizer: HFTokenizer, reply: str, chat: Any = None) -> list[int]:
    """Remember a reply; returns the tokens of its prompt and of the reply."""
    prompt, ids = tokenizer.chat_prompt(chat or QUESTION), [*tokenizer.encode(reply), 0]
    tokenizer.remember_reply(prompt, ids)
    return prompt + ids


def test_prompt_repeats_a_reply_in_its_own_tokens(tokenizer: HFTokenizer) -> None:
    chat = [*QUESTION, assistant("", CALLS), RESULT]
    as_template = tokenizer.chat_prompt(chat)
    before = remember(tokenizer, CALL_TEXT)
    after = tokenizer.chat_prompt(chat)
    assert after[: len(before)] == before
    assert after != as_template
    rest = after[len(before) :]
    assert rest == as_template[-len(rest) :], "the rest equals the template's"
    longer = remember(tokenizer, " Five \n", chat)
    assert longer[: len(after)] == after
    assert tokenizer.chat_prompt([*chat, assistant("Five"), FOLLOW_UP])[: len(longer)] == longer
    fork = [*QUESTION, assistant("", CALLS), {**RESULT, "content": "Six."}]
    assert tokenizer.chat_prompt(fork)[: len(before)] == before, "the earlier reply is remembered too"


@pytest.mark.parametrize(
    ("reply", "chat"),
    [
        ('```json\n{"name":"count","arguments":{"of":"apples"}}\n```', [*QUESTION, assistant("", CALLS), RESULT]),
        ("<think>it may be</think>Yes. ", [*QUESTION, assistant("Yes."), FOLLOW_UP]),
        ("Yes, five. ", [*QUESTION, assistant("Yes, six."), FOLLOW_UP]),
        ("Yes, five. ", [{"role": "user", "content": "How much?"}, assistant("Yes, five."), FOLLOW_UP]),
        ("Yes, five. ", QUESTION),
        ("if a:\n    b ", [*QUESTION, assistant("if a:\n  b"), FOLLOW_UP]),
    ],
    ids=["another form", "dropped thinking", "another reply", "another question", "no reply", "other white space"],
)
def test_template_renders_unmatched_replies(tokenizer: HFTokenizer, reply: str, chat: list[dict[str, Any]]) -> None:
    as_template = tokenizer.chat_prompt(chat)
    remember(tokenizer, reply)
    assert tokenizer.chat_prompt(chat) == as_template


def test_thinking_that_the_template_renders_is_repeated(tokenizer: HFTokenizer) -> None:
    before = remember(tokenizer, "<think>it may be</think>Yes. ")
    chat = [*QUESTION, assistant("Yes.", reasoning_content="it may be"), FOLLOW_UP]
    assert tokenizer.chat_prompt(chat)[: len(before)] == before


def test_truncated_reply_is_not_remembered(tokenizer: HFTokenizer) -> None:
    chat = [*QUESTION, assistant("Half of it"), FOLLOW_UP]
    as_template = tokenizer.chat_prompt(chat)
    tokenizer.remember_reply(tokenizer.chat_prompt(QUESTION), tokenizer.encode("Half  of it"))
    assert tokenizer.chat_prompt(chat) == as_template


def test_oldest_replies_are_evicted_at_the_size_limit() -> None:
    replies = ReplyTokenCache(max_characters=20)
    for number in range(4):
        replies.add(f"prompt {number}.", [number], "Yes.", [9], "<eos>")
        replies.add(f"prompt {number}.", [number], "Yes.", [9], "<eos>")
    remembered = [replies.ids_of(f"prompt {number}.Yes.<eos>", lambda text: [len(text)]) for number in range(4)]
    assert remembered == [None, None, [2, 9, 5], [3, 9, 5]]
