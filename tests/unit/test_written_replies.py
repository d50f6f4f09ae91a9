"""A prompt repeats earlier replies in their own tokens, so that an engine's prefix cache holds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.engines.written_replies import WrittenReplies
from tests.unit.test_messages import _tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content | trim }}{% for c in m.tool_calls or [] %}"
    '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}{% endfor %}'
    "<eos>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
ASKED = [{"role": "user", "content": "How many?"}]
MORE = {"role": "user", "content": "And pears?"}
CALL = [{"type": "function", "id": "1", "function": {"name": "count", "arguments": {"of": "apples"}}}]
RESULT = {"role": "tool", "content": "Five.", "tool_call_id": "1"}
CALLED = '<call>{"name": "count", "arguments": {"of": "apples"}}\n'


@pytest.fixture
def tokenizer(tmp_path: Path) -> HFTokenizer:
    return _tokenizer(tmp_path, TEMPLATE)


def said(text: str, calls: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "tool_calls": calls or [], "finished": True, **more}


def remembered(tokenizer: HFTokenizer, written: str, chat: Any = None) -> list[int]:
    """The prompt, and a reply's tokens after it."""
    prompt, ids = tokenizer.chat_prompt(chat or ASKED), [*tokenizer.encode(written), 0]
    tokenizer.remember_reply(prompt, ids)
    return prompt + ids


def test_a_reply_is_repeated_in_its_own_tokens(tokenizer: HFTokenizer) -> None:
    chat = [*ASKED, said("", CALL), RESULT]
    as_template = tokenizer.chat_prompt(chat)
    before = remembered(tokenizer, CALLED)
    after = tokenizer.chat_prompt(chat)
    assert after[: len(before)] == before
    assert after != as_template
    rest = after[len(before) :]
    assert rest == as_template[-len(rest) :], "it is the template's"
    longer = remembered(tokenizer, " Five \n", chat)
    assert longer[: len(after)] == after
    assert tokenizer.chat_prompt([*chat, said("Five"), MORE])[: len(longer)] == longer
    fork = [*ASKED, said("", CALL), {**RESULT, "content": "Six."}]
    assert tokenizer.chat_prompt(fork)[: len(before)] == before, "the earlier reply is remembered too"


@pytest.mark.parametrize(
    ("written", "chat"),
    [
        ('```json\n{"name":"count","arguments":{"of":"apples"}}\n```', [*ASKED, said("", CALL), RESULT]),
        ("<think>it may be</think>Yes. ", [*ASKED, said("Yes."), MORE]),
        ("Yes, five. ", [*ASKED, said("Yes, six."), MORE]),
        ("Yes, five. ", [{"role": "user", "content": "How much?"}, said("Yes, five."), MORE]),
        ("Yes, five. ", ASKED),
        ("if a:\n    b ", [*ASKED, said("if a:\n  b"), MORE]),
    ],
    ids=["another form", "dropped thinking", "another reply", "another question", "no reply", "other white space"],
)
def test_all_else_is_as_the_template_has_it(tokenizer: HFTokenizer, written: str, chat: list[dict[str, Any]]) -> None:
    as_template = tokenizer.chat_prompt(chat)
    remembered(tokenizer, written)
    assert tokenizer.chat_prompt(chat) == as_template


def test_thinking_that_is_shown_is_repeated(tokenizer: HFTokenizer) -> None:
    before = remembered(tokenizer, "<think>it may be</think>Yes. ")
    asked = [*ASKED, said("Yes.", reasoning_content="it may be"), MORE]
    assert tokenizer.chat_prompt(asked)[: len(before)] == before


def test_a_reply_that_was_cut_off_is_not_remembered(tokenizer: HFTokenizer) -> None:
    chat = [*ASKED, said("Half of it"), MORE]
    as_template = tokenizer.chat_prompt(chat)
    tokenizer.remember_reply(tokenizer.chat_prompt(ASKED), tokenizer.encode("Half  of it"))
    assert tokenizer.chat_prompt(chat) == as_template


def test_the_latest_are_remembered() -> None:
    replies = WrittenReplies(max_characters=20)
    for number in range(4):
        replies.add(f"prompt {number}.", [number], "Yes.", [9], "<eos>")
        replies.add(f"prompt {number}.", [number], "Yes.", [9], "<eos>")
    known = [replies.ids_of(f"prompt {number}.Yes.<eos>", lambda text: [len(text)]) for number in range(4)]
    assert known == [None, None, [2, 9, 5], [3, 9, 5]]
