"""Messages become prompts: none is lost, unfinished replies are continued, and own replies are accepted again."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AnyMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    InvalidToolCall,
    RemoveMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.messages import conversation, from_openai, template_messages
from lookahead_agent.engines import ScriptedEngine, ScriptedStep
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import reply_script, scripted_chat
from tests.unit.serving import serving

SECRET = "SECRETWORD"
END = "{% if add_generation_prompt %}assistant: {% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
WHOLE = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + CALLS + "|{% endfor %}" + END
# Like the default model's template, it leaves out messages of unknown roles.
QUIET = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}{{ m.role }}: {{ m.content }}<end>"
    "{% endif %}{% endfor %}" + END
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}{{ m.role }}: {{ m.content }}|{% endif %}"
    "{% endfor %}" + END
)
STRICT = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + (
    "{{ m.role }}: {{ m.content }}{% endfor %}" + END
)
# Mistral's: user and assistant messages alternate, apart from those with tool calls.
IN_TURN = (
    "{% set ns = namespace(user=true) %}{% for m in messages %}"
    "{% if m.role in ['user', 'assistant'] and not m.tool_calls %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.user = not ns.user %}{% endif %}{{ m.role }}: {{ m.content }}" + CALLS + "{% endfor %}" + END
)
# DeepSeek's: concatenates arguments as text.
JOINED = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}|{% endfor %}" + END
)
CAPITALS = "{% for m in messages %}{{ m.role }}: {{ m.content | upper }}{% endfor %}" + END
BROKEN = "{% for m in messages %}{{ 1 + m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], HFTokenizer]:
    tokenizers: dict[str, HFTokenizer] = {}

    def tokenizer(template: str) -> HFTokenizer:
        if template not in tokenizers:
            tokenizers[template] = _tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
        return tokenizers[template]

    return tokenizer


def _tokenizer(folder: Path, template: str) -> HFTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(["<eos>", *alphabet])}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return HFTokenizer(folder)


def chat_with(tokenizer: HFTokenizer, reply: str = "Yes.", **fields: Any) -> tuple[ChatLookahead, list[str]]:
    """A chat model with a Hugging Face tokenizer, and the prompts that its engine receives."""
    prompts: list[str] = []

    class RecordingEngine(ScriptedEngine):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Any:  # type: ignore[override]
            prompts.append(tokenizer.decode(prompt_ids))
            async for delta in super().generate(prompt_ids, sampling):
                yield delta

    engine = RecordingEngine(tokenizer, reply_script(lambda _: reply))
    return ChatLookahead(engines=EngineSet(engine), policy="off", **fields), prompts


@pytest.mark.parametrize(
    "message",
    [
        SystemMessage(SECRET),
        SystemMessage(SECRET, additional_kwargs={"__openai_role__": "developer"}),
        HumanMessage(SECRET),
        ChatMessage(SECRET, role="developer"),
        ChatMessage(SECRET, role="System"),
        ChatMessage(SECRET, role="user"),
        ChatMessage(SECRET, role="assistant"),
        AIMessage(SECRET),
        AIMessage("", additional_kwargs={"refusal": SECRET}),
        AIMessage([{"type": "refusal", "refusal": SECRET}]),
        AIMessage([{"type": "text", "text": SECRET, "cache_control": {"type": "ephemeral"}}]),
        ToolMessage(SECRET, tool_call_id="1"),
        ToolMessage([{"type": "text", "text": SECRET}], tool_call_id="1"),
        ToolMessage([{"json": {"a": SECRET}}], tool_call_id="1"),
        FunctionMessage(SECRET, name="f"),
        HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": SECRET}]),
        HumanMessage([{"type": "text", "text": SECRET, "cache_control": {"type": "ephemeral"}}]),
        AIMessage("", tool_calls=[ToolCall(name="f", args={"x": SECRET}, id="1")]),
        AIMessage([{"type": "tool_use", "id": "1", "name": "f", "input": {"x": SECRET}}]),
        AIMessage([{"type": "function_call", "call_id": "1", "name": "f", "arguments": f'{{"x": "{SECRET}"}}'}]),
        AIMessage([{"type": "function_call", "call_id": "1", "name": "f", "arguments": f'{{"x": "{SECRET}'}]),
        AIMessage([{"type": "tool_call", "id": "1", "name": "f", "args": {"x": SECRET}}]),
        AIMessage("", additional_kwargs={"function_call": {"name": "f", "arguments": f'{{"x": "{SECRET}"}}'}}),
        AIMessage("", invalid_tool_calls=[InvalidToolCall(name=None, args=SECRET, id="1", error=None)]),
        AIMessage("", invalid_tool_calls=[InvalidToolCall(name=SECRET, args=None, id="1", error=None)]),
    ],
)
def test_every_message_is_in_the_prompt_or_rejected(
    tokenizer_of: Callable[[str], HFTokenizer], message: AnyMessage
) -> None:
    llm, prompts = chat_with(tokenizer_of(WHOLE))
    llm.invoke([HumanMessage("hi"), message, HumanMessage("ho")])
    assert SECRET in prompts[0]
    for template in (QUIET, SYSTEM_FIRST, STRICT, IN_TURN, JOINED, CAPITALS, BROKEN):
        llm, prompts = chat_with(tokenizer_of(template))
        try:
            llm.invoke([HumanMessage("hi"), message, HumanMessage("ho")])
        except ConfigurationError:
            assert prompts == []
        else:
            assert SECRET in prompts[0]


@pytest.mark.parametrize(
    ("message", "pattern"),
    [
        (ChatMessage(SECRET, role="critic"), "message 2 has the role 'critic'"),
        (ChatMessage(SECRET, role="tool"), "the role 'tool'"),
        (RemoveMessage(id="1"), "the type RemoveMessage"),
        (HumanMessage([{"type": "image_url", "image_url": {"url": "https://x/cat.png"}}]), "only text.*image_url"),
        (
            HumanMessage([{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}]),
            "only text.*audio",
        ),
        (HumanMessage([{"type": "image", "source": {"type": "base64"}}]), "only text.*image"),
        (HumanMessage([{"type": "text", "text": "a"}, {"type": "file", "file_id": "1"}]), "only text.*file"),
        (HumanMessage([{"type": "reasoning", "reasoning": SECRET}]), "only text.*reasoning"),
        (HumanMessage([{"type": "text"}]), "only text"),
        (SystemMessage([{"type": "image", "url": "x"}]), "message 2.*image"),
    ],
)
def test_unsupported_roles_and_content_are_rejected(message: AnyMessage, pattern: str) -> None:
    llm = scripted_chat("Yes.", policy="off")
    for call in (llm.invoke, lambda messages: list(llm.stream(messages))):
        with pytest.raises(ConfigurationError, match=pattern):
            call([HumanMessage("hi"), message])


PICTURE: dict[str, Any] = {"type": "image", "base64": "AAAA", "mime_type": "image/png"}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (PICTURE, "[image (image/png) left out: this model reads only text]"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "[image_url left out: this model"),
        (
            {"type": "image", "source": {"type": "base64", "media_type": "image/gif", "data": "AAAA"}},
            "(image/gif) left",
        ),
        ({"type": "file", "base64": "AAAA", "filename": "a.pdf", "mime_type": "application/pdf"}, "pdf, a.pdf) left"),
        ({"type": "audio", "url": "x"}, "[audio left out"),
        ({"type": "video", "url": "x"}, "[video left out"),
        ({"type": "no such type"}, "[no such type left out"),
        ({"type": "text-plain", "text": "words", "mime_type": "text/plain"}, "words"),
        ({"type": "json", "json": {"a": "é"}}, '{"a": "é"}'),
        ({"type": "json", "data": [1]}, '{"data": [1]}'),
        ({"degrees": 17}, '{"degrees": 17}'),
        (
            {"type": "search_result", "title": "T", "content": [{"type": "text", "text": "found"}, PICTURE]},
            "T\nfound\n[",
        ),
    ],
)
def test_a_result_that_is_not_text_is_named_in_the_prompt_and_the_thread_goes_on(
    block: dict[str, Any], text: str
) -> None:
    call = AIMessage("", tool_calls=[ToolCall(name="f", args={}, id="1")])
    blocks: list[Any] = ["sales rise", block]
    histories: list[list[AnyMessage]] = [
        [HumanMessage("q"), call, ToolMessage(blocks, tool_call_id="1")],
        [HumanMessage("q"), call, ToolMessage(blocks, tool_call_id="1"), AIMessage("It rises."), HumanMessage("again")],
        [HumanMessage(blocks), AIMessage("It rises."), HumanMessage("again")],
        [HumanMessage(blocks), HumanMessage("Then without it.")],
        [HumanMessage(blocks), call, ToolMessage("done", tool_call_id="1")],
        [HumanMessage("q"), AIMessage(blocks), HumanMessage("again")],
        [HumanMessage([{"type": "tool_result", "tool_use_id": "1", "content": blocks}])],
    ]
    for history in histories:
        whole = "\n".join(message["content"] for message in template_messages(history))
        assert "sales rise" in whole
        assert text.replace("\n", "") in whole.replace("\n", "")
        assert "AAAA" not in whole


@pytest.mark.parametrize("after", [[], [AIMessage("It shows")]])
def test_a_picture_in_the_question_is_an_error(after: list[AnyMessage]) -> None:
    with pytest.raises(ConfigurationError, match="reads only text; message 2 has content of the type image"):
        template_messages([HumanMessage("hi"), HumanMessage(["What is it?", PICTURE]), *after])


@pytest.mark.parametrize(
    ("template", "messages", "pattern"),
    [
        (QUIET, [("user", "a"), ToolMessage("b", tool_call_id="1")], "leaves out message 2.*'tool'"),
        (SYSTEM_FIRST, [("user", "a"), ("system", "b")], "leaves out message 2.*'system'.*first"),
        (SYSTEM_FIRST, [("system", "a"), ("system", "b"), ("user", "c")], "leaves out message 2"),
        (
            QUIET,
            [("user", "a"), AIMessage("", tool_calls=[ToolCall(name="f", args={}, id="1")]), ("user", "c")],
            "leaves out the tool calls of message 2",
        ),
        (STRICT, [("system", "a"), ("user", "b")], "refuses.*no system role"),
        (IN_TURN, [("user", "a"), ("user", "b")], "refuses.*alternate"),
        (BROKEN, [("user", "a")], "refuses"),
        ("", [("user", "a")], "leaves out message 1"),
    ],
)
def test_error_names_the_template_that_drops_or_rejects_a_message(
    tokenizer_of: Callable[[str], HFTokenizer], template: str, messages: Any, pattern: str
) -> None:
    llm, _ = chat_with(tokenizer_of(template))
    for call in (llm.invoke, lambda history: list(llm.stream(history))):
        with pytest.raises(ConfigurationError, match="chat template of tokenizer") as error:
            call(messages)
        assert error.match(pattern)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (AIMessage("So.", response_metadata={"finish_reason": ["stop"]}), "So."),
        (AIMessage([{"type": ["a"], "title": "b"}]), "[unknown (b) left out: this model reads only text]"),
        (AIMessage(["So.", {"type": "tool_use", "id": {}, "call_id": [1], "name": "f", "input": {}}]), "So."),
        (HumanMessage([{"type": "tool_result", "content": 1.5}]), "1.5"),
        (HumanMessage([{"type": "tool_result", "content": {"type": "text", "text": "17"}}]), "17"),
        (HumanMessage([{"type": "tool_result", "content": {"degrees": 17}}]), '{"degrees": 17}'),
    ],
)
def test_values_of_other_types_in_a_history_fail_no_later_run(message: BaseMessage, text: str) -> None:
    assert conversation([message, HumanMessage("And now?")])[0]["content"] == text


def test_warning_about_names_that_the_template_drops_is_logged_once(
    tokenizer_of: Callable[[str], HFTokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = _tokenizer(Path(tokenizer_of(WHOLE).backend.name_or_path), WHOLE)
    llm, prompts = chat_with(tokenizer)
    for text in ("a", "b"):
        llm.invoke([HumanMessage(text, name="Ann"), AIMessage("c", name="agent"), HumanMessage(text)])
    assert len(prompts) == 2
    assert caplog.text.count("leaves out the names of users") == 1


@pytest.mark.parametrize("start", ["The answer is", "The answer is ", "Line 1\n\n", "  indented", "{"])
async def test_unfinished_reply_is_continued(tokenizer_of: Callable[[str], HFTokenizer], start: str) -> None:
    llm, prompts = chat_with(tokenizer_of(WHOLE), start + " 4.")
    for message in (AIMessage(start), ChatMessage(start, role="assistant"), {"role": "assistant", "content": start}):
        reply = llm.invoke([("user", "2 + 2?"), message])
        assert reply.text == " 4."
        assert prompts[-1] == f"user: 2 + 2?|assistant: {start}"
        assert reply.usage_metadata is not None
        assert reply.usage_metadata["input_tokens"] == len(prompts[-1])
    assert "".join(chunk.text for chunk in llm.stream([("user", "2 + 2?"), ("ai", start)])) == " 4."
    assert (await llm.ainvoke([("user", "2 + 2?"), ("ai", start)])).text == " 4."
    assert scripted_chat(start + " 4.", policy="off").invoke([("user", "2 + 2?"), ("ai", start)]).text == " 4."


def test_truncated_reply_is_continued_and_a_finished_one_is_not(tokenizer_of: Callable[[str], HFTokenizer]) -> None:
    """In a graph of several agents, the last message is often another agent's finished reply."""
    llm, prompts = chat_with(tokenizer_of(WHOLE), "Yes, 4.")
    finished = llm.invoke([("user", "2 + 2?")])
    assert finished.response_metadata["finish_reason"] == "stop"
    history = [HumanMessage("2 + 2?"), finished]
    reply = llm.invoke(history)
    assert prompts[-1] == "user: 2 + 2?|assistant: Yes, 4.|assistant: "
    assert llm.get_num_tokens_from_messages(history) == len(prompts[-1])
    assert reply.text == "Yes, 4."
    with pytest.raises(ConfigurationError, match="begins anew"):
        llm.bind_tools([add], tool_choice="any").invoke([*history, AIMessage("So")])
    llm.bind_tools([add], tool_choice="any").invoke(history)
    truncated = llm.invoke([("user", "2 + 2?")], max_tokens=1)
    assert truncated.response_metadata["finish_reason"] == "length"
    llm.invoke([("user", "2 + 2?"), truncated])
    assert prompts[-1] == f"user: 2 + 2?|assistant: {truncated.text}"


def test_empty_last_reply_starts_a_new_turn(tokenizer_of: Callable[[str], HFTokenizer]) -> None:
    llm, prompts = chat_with(tokenizer_of(WHOLE))
    llm.invoke([("user", "2 + 2?"), ("ai", "")])
    assert prompts[-1] == "user: 2 + 2?|assistant: "
    with pytest.raises(ConfigurationError, match="no message"):
        llm.invoke([("ai", "")])


@pytest.mark.parametrize(
    "last",
    [
        AIMessage("", tool_calls=[ToolCall(name="f", args={}, id="1")]),
        AIMessage("Hm.", tool_calls=[ToolCall(name="f", args={}, id="1")]),
        AIMessage("", invalid_tool_calls=[InvalidToolCall(name="f", args="{", id="1", error=None)]),
        AIMessage([{"type": "tool_use", "id": "1", "name": "f", "input": {}}]),
        AIMessage("", additional_kwargs={"function_call": {"name": "f", "arguments": "{}"}}),
    ],
)
def test_tool_calls_without_results_are_rejected(last: AIMessage) -> None:
    with pytest.raises(ConfigurationError, match="calls tools"):
        scripted_chat("Yes.", policy="off").invoke([("user", "a"), last])


def test_unfinished_reply_is_rejected_with_constrained_output_or_only_thinking() -> None:
    llm = scripted_chat('{"a": 1}', policy="off")
    unfinished = [("user", "a"), ("ai", "{")]
    with pytest.raises(ConfigurationError, match="begins anew"):
        llm.invoke(unfinished, response_format={"type": "json_object"})
    with pytest.raises(ConfigurationError, match="begins anew"):
        llm.bind_tools([add], tool_choice="any").invoke(unfinished)
    with pytest.raises(ConfigurationError, match="all thinking"):
        llm.invoke([("user", "a"), AIMessage("", additional_kwargs={"reasoning_content": "Hm."})])


def test_template_error_of_the_draft_disables_speculation(tokenizer_of: Callable[[str], HFTokenizer]) -> None:
    target = ScriptedEngine(tokenizer_of(WHOLE), [ScriptedStep("Yes.")])
    draft = ScriptedEngine(tokenizer_of(STRICT).copy_for_text_exchange(), [ScriptedStep("Yes.")])
    llm = ChatLookahead(engines=EngineSet(target, draft), policy="exact")
    reply = llm.invoke([("system", "a"), ("user", "b")])
    assert reply.text == "Yes."
    assert "no system role" in reply.response_metadata["lookahead"]["speculation_disabled"]


@pytest.mark.parametrize("text", ["a \ud83d b", "\udcff", "😀\ud800"])
def test_lone_surrogate_is_rejected_with_the_number_of_its_message(text: str) -> None:
    llm = scripted_chat("Yes.", policy="off")
    cases: list[Any] = [
        text,
        [("system", text), ("user", "a")],
        [("user", "a"), ("ai", text), ("user", "b")],
        [("user", "a"), ToolMessage(text, tool_call_id="1")],
        [HumanMessage("a", name=text)],
        [HumanMessage([{"type": "text", "text": text}])],
        [("user", "a"), AIMessage("b", additional_kwargs={"reasoning_content": text}), ("user", "c")],
    ]
    for messages in cases:
        for call in (llm.invoke, lambda history: list(llm.stream(history))):
            with pytest.raises(ConfigurationError, match=r"message \d.*lone surrogate") as error:
                call(messages)
            assert str(error.value).encode()
    with serving(llm) as (url, _):
        for path, body in (
            ("chat/completions", {"messages": [{"role": "user", "content": text}]}),
            ("completions", {"prompt": text}),
        ):
            headers = {"content-type": "application/json"}
            reply = httpx.post(f"{url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=60)
            assert reply.status_code == 400
            assert "lone surrogate" in reply.json()["error"]["message"]


# Replies that clients, and this library, send back


@tool
def add(a: int, b: int) -> int:
    """Add."""
    return a + b


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
INVALID_ARGUMENTS = ["null", "[1]", '"a"', "3", '{"x": "a', "{oops", '{"x": "\\ud83d"}', "\x00", "}{"]
VALID_ARGUMENTS = {"": "{}", " ": "{}", None: "{}", "{}": "{}", '{"x": 1}': '{"x": 1}', '{"x": NaN}': '{"x": NaN}'}


@pytest.mark.parametrize("name", ["add", "", None])
@pytest.mark.parametrize("arguments", [*INVALID_ARGUMENTS, *VALID_ARGUMENTS])
async def test_tool_call_with_any_arguments_is_accepted_in_the_history(
    tokenizer_of: Callable[[str], HFTokenizer], name: str | None, arguments: str | None
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "error: not JSON"},
    ]
    for template in (WHOLE, IN_TURN, JOINED):
        llm, prompts = chat_with(tokenizer_of(template))
        assert llm.invoke(history).text == "Yes."
        assert (await llm.ainvoke(history)).text == "Yes."
        assert "error: not JSON" in prompts[-1]
        valid = f"{name} {VALID_ARGUMENTS[arguments]}" if name and arguments in VALID_ARGUMENTS else None
        for shown in [valid] if valid else [name, (arguments or "").strip("\x00")]:
            assert (shown or "") in prompts[-1]
        # The next turn works, too.
        assert llm.invoke([*history, {"role": "assistant", "content": "Sorry."}, {"role": "user", "content": "?"}]).text


@given(st.text(), st.one_of(st.none(), st.text(max_size=5)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_tool_call_arguments_of_any_text_convert_to_a_prompt(arguments: str, name: str | None, has_id: bool) -> None:
    call = {"id": "1" if has_id else None, "function": {"name": name, "arguments": arguments}}
    reply = from_openai({"role": "assistant", "content": None, "tool_calls": [call]})
    assert isinstance(reply, AIMessage)
    history: list[BaseMessage] = [HumanMessage("q"), reply, ToolMessage("no", tool_call_id="1")]
    converted = template_messages(history)
    assert len(converted) == 3
    if reply.tool_calls:
        parsed = json.loads(arguments) if arguments.strip() else {}
        assert converted[1]["tool_calls"][0]["function"] == {"name": name, "arguments": parsed}
    else:
        assert arguments in converted[1]["content"]
    json.dumps(converted, ensure_ascii=False).encode()


WORDS = st.sampled_from(
    [
        *("type", "text", "tool_use", "tool_result", "image_url", "refusal", "function", "name", "arguments", "id"),
        *("input", "content", "json", "reasoning", "function_call", "tool_call", "\ud83d", "", "add"),
    ]
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
ROLES = st.sampled_from(["assistant", "user", "tool", "function", "system", "developer", "critic"])
FIELDS = ("content", "tool_calls", "name", "tool_call_id", "refusal", "function_call", "reasoning")


@given(
    st.lists(
        st.builds(
            lambda role, fields: {"role": role, **fields},
            ROLES,
            st.dictionaries(st.sampled_from(FIELDS), JSON_VALUES, max_size=4),
        ),
        max_size=3,
    )
)
@settings(max_examples=300, deadline=None)
def test_any_message_converts_or_raises_configuration_error(messages: list[dict[str, Any]]) -> None:
    try:
        prompt = conversation([from_openai(message) for message in messages])
    except ConfigurationError as error:
        str(error).encode()
    else:
        assert all(isinstance(message["content"], str) for message in prompt)
        json.dumps(prompt, ensure_ascii=False).encode()


@given(st.text(alphabet='{}[]",:ax\\ \n<>/tol_c', max_size=60))
@settings(max_examples=80, deadline=None)
def test_reply_with_any_tool_call_text_is_accepted_in_the_history(text: str) -> None:
    written = f"Hm. <tool_call>{text}</tool_call>"
    llm = scripted_chat(lambda prompt: written if "tool:" not in prompt else "Sorry.", policy="off").bind_tools([add])
    reply = llm.invoke("q")
    calls = [*reply.tool_calls, *reply.invalid_tool_calls]
    results = [ToolMessage("no", tool_call_id=call["id"] or "") for call in calls]
    if results:
        assert llm.invoke([HumanMessage("q"), reply, *results]).text == "Sorry."
    converted = template_messages([reply])
    for call in reply.invalid_tool_calls:
        assert (call["args"] or "") in converted[0]["content"]


def test_from_openai_keeps_id_metadata_and_additional_fields_of_a_reply() -> None:
    message = from_openai(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": "{"}}],
            "reasoning_content": "Hm.",
            "response_metadata": {"finish_reason": "stop"},
            "additional_kwargs": {"refusal": "No."},
            "id": "a",
        }
    )
    assert isinstance(message, AIMessage)
    assert (message.id, message.response_metadata) == ("a", {"finish_reason": "stop"})
    assert message.additional_kwargs == {"refusal": "No.", "reasoning_content": "Hm."}
    assert message.invalid_tool_calls[0]["args"] == "{"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        from_openai({"role": "assistant", "content": 3})
    with pytest.raises(ConfigurationError, match="cannot be read"):
        from_openai({"role": "tool", "content": "a"})


INVALID_CALL = '<tool_call>\n{"name": "add", "arguments": {"x": "he said "hi""}}\n</tool_call>'


def reply_with_invalid_call(prompt: str) -> str:
    return INVALID_CALL if "tool: " not in prompt else "Sorry."


def test_prompt_contains_the_invalid_call_and_its_error() -> None:
    prompts: list[str] = []

    def write(prompt: str) -> str:
        prompts.append(prompt)
        return reply_with_invalid_call(prompt)

    llm = scripted_chat(write, policy="off").bind_tools([add])
    reply = llm.invoke("q")
    (call,) = reply.invalid_tool_calls
    assert llm.invoke([HumanMessage("q"), reply, ToolMessage("not JSON", tool_call_id=call["id"] or "")]).text
    assert '"arguments": {"x": "he said "hi""}' in prompts[-1]
    assert "tool: not JSON" in prompts[-1]


@pytest.mark.parametrize("streamed", [False, True])
def test_server_accepts_its_own_reply_in_the_history(streamed: bool) -> None:
    with serving(scripted_chat(reply_with_invalid_call, policy="off")) as (url, _):
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "q"}], "tools": [TOOL]}
        if streamed:
            response = httpx.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60).text
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            for line in response.split("\n"):
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        message["tool_calls"] = choice["delta"].get("tool_calls") or message.get("tool_calls")
        else:
            response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            message = response["choices"][0]["message"]  # type: ignore[index]
        (call,) = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "not JSON"}
        body["messages"] += [message, result]
        second_response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        assert second_response.status_code == 200, second_response.text
        assert second_response.json()["choices"][0]["message"]["content"] == "Sorry."


def test_server_accepts_replies_sent_back_by_langchains_client() -> None:
    with serving(scripted_chat(reply_with_invalid_call, policy="off")) as (url, _):
        client = ChatOpenAI(base_url=f"{url}/v1", api_key="x", model="qwen2.5-coder-1.5b", max_retries=0)  # type: ignore[arg-type]
        bound = client.bind_tools([add])
        merged: Any = None
        for chunk in bound.stream("q"):
            merged = chunk if merged is None else merged + chunk
        for message in (bound.invoke("q"), merged):
            calls = [*message.tool_calls, *message.invalid_tool_calls]
            results = [ToolMessage("not JSON", tool_call_id=call["id"] or "") for call in calls]
            assert results
            assert bound.invoke([HumanMessage("q"), message, *results]).text == "Sorry."


USER = {"role": "user", "content": "q"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {"role": "assistant", "content": [], "tool_calls": [CALL]}, RESULT],
        [USER, {"role": "assistant", "content": "a", "tool_calls": []}, USER],
        [USER, {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "refusal": None}, USER],
        [USER, {"role": "assistant", "content": "", "reasoning": "Hm."}, USER],
        [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
        [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "content": None}],
        [USER, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "content": [{"type": "text", "text": "3"}]}],
        [USER, {"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}, RESULT],
        [
            USER,
            {"role": "assistant", "content": None, "function_call": CALL["function"]},
            {"role": "function", "name": "add", "content": "3"},
        ],
        [{"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "developer", "content": "Be brief."}, USER],
        [USER, {"role": "assistant", "content": "It is"}],
    ],
)
def test_server_accepts_common_histories(messages: list[dict[str, Any]]) -> None:
    with serving(scripted_chat("Yes.", policy="off")) as (url, _):
        reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages}, timeout=60)
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("messages", "pattern"),
    [
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "reads only text.*image_url",
        ),
        ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "reads only text.*input_audio"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages.0.content.*text"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([USER, {"role": "assistant", "tool_calls": [CALL]}], "calls tools"),
        ([{"role": "critic", "content": "a"}], "messages.0.role"),
    ],
)
def test_server_error_names_the_unsupported_message(messages: list[dict[str, Any]], pattern: str) -> None:
    with serving(scripted_chat("Yes.", policy="off")) as (url, _):
        reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages}, timeout=60)
    assert reply.status_code == 400
    with pytest.raises(AssertionError, match=pattern):
        raise AssertionError(reply.json()["error"]["message"])


def test_server_continues_an_unfinished_reply() -> None:
    with serving(scripted_chat("It is 4.", policy="off")) as (url, _):
        body = {"messages": [USER, {"role": "assistant", "content": "It is"}]}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    assert reply["choices"][0]["message"]["content"] == " 4."
