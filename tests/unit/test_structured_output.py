from __future__ import annotations

from typing import Any, TypedDict

import pytest
from langchain_core.exceptions import OutputParserException
from pydantic import BaseModel

from lookahead_agent import ChatLookahead
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.models.thinking_tags import ThinkingTags
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import SameText, replying, scripted_chat


class Answer(BaseModel):
    """An answer."""

    number: int
    unit: str = "m"


class AnswerDict(TypedDict):
    """An answer."""

    number: int


JSON_SCHEMA = {
    "title": "answer",
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
}
FUNCTION = {"name": "answer", "description": "An answer.", "parameters": JSON_SCHEMA}
CALL = '{"name": "%s", "arguments": {"number": 4}}'


def requested(llm: ChatLookahead) -> list[Any]:
    assert llm.engines is not None
    assert isinstance(llm.engines.target, ScriptedEngine)
    return [sampling.structured for _, sampling in llm.engines.target.requests]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [(Answer, Answer(number=4)), (AnswerDict, {"number": 4}), (JSON_SCHEMA, {"number": 4}), (FUNCTION, {"number": 4})],
)
def test_schemas(schema: Any, expected: Any) -> None:
    llm = scripted_chat('{"number": 4}')
    for method in ("json_schema", "json_mode"):
        structured = llm.with_structured_output(schema, method=method)  # type: ignore[arg-type]
        assert structured.invoke("?") == expected
        assert list(structured.stream("?"))[-1] == expected
    by_schema, _, in_mode, _ = requested(llm)
    assert by_schema["json"]["properties"]["number"]["type"] == "integer"
    assert in_mode == {"json_object": True}
    name = {"Answer": "Answer", "AnswerDict": "AnswerDict"}.get(getattr(schema, "__name__", ""), "answer")
    called = scripted_chat(CALL % name).with_structured_output(schema, method="function_calling")
    assert called.invoke("?") == expected


def test_the_reply_is_the_targets_alone() -> None:
    llm = scripted_chat('{"number": 4}')
    llm.with_structured_output(Answer).invoke("?")
    assert llm.engines is not None
    assert isinstance(llm.engines.draft, ScriptedEngine)
    assert llm.engines.draft.requests == []


def test_what_does_not_fit() -> None:
    llm = scripted_chat('{"number": "four"}')
    with pytest.raises(OutputParserException):
        llm.with_structured_output(Answer).invoke("?")
    result: Any = llm.with_structured_output(Answer, include_raw=True).invoke("?")
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], OutputParserException)
    assert result["raw"].text == '{"number": "four"}'
    fine: Any = scripted_chat('{"number": 4}').with_structured_output(Answer, include_raw=True).invoke("?")
    assert (fine["parsed"], fine["parsing_error"]) == (Answer(number=4), None)


@pytest.mark.parametrize("schema", [Answer, {"title": "a", "type": "object", "properties": {}}, None])
def test_half_a_reply_is_not_completed(schema: Any) -> None:
    """LangChain's parsers would make 4 of 4711 here."""
    structured = scripted_chat('{"number": 4711, "more": 1}', max_tokens=2)
    method: Any = "json_schema" if schema else "json_mode"
    with pytest.raises(OutputParserException, match="max_tokens"):
        structured.with_structured_output(schema, method=method).invoke("?")
    with pytest.raises(OutputParserException, match="not JSON"):
        scripted_chat('{"number": 4').with_structured_output(schema, method=method).invoke("?")
    fenced = scripted_chat('```json\n{"number": 4}\n```').with_structured_output(schema, method=method).invoke("?")
    assert fenced in ({"number": 4}, Answer(number=4))


def test_bad_arguments() -> None:
    llm = scripted_chat("{}")
    with pytest.raises(ConfigurationError, match="needs a schema"):
        llm.with_structured_output(None)
    with pytest.raises(ConfigurationError, match="not a schema"):
        llm.with_structured_output({"nonsense": 1})
    with pytest.raises(ConfigurationError, match="method is"):
        llm.with_structured_output(Answer, method="xml")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="response_format"):
        llm.invoke("?", response_format={"type": "xml"})
    with pytest.raises(ConfigurationError, match="at once"):
        llm.bind_tools([Answer], tool_choice="any").invoke("?", response_format={"type": "json_object"})
    assert llm.with_structured_output(None, method="json_mode").invoke("?") == {}


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("forced", [True, False])
def test_a_model_that_thinks_first_thinks_freely_and_then_keeps_to_the_form(opened: bool, forced: bool) -> None:
    tokenizer = ScriptedTokenizer(ThinkingTags(), opens_thinking=opened)
    answer = CALL % "Answer" if forced else '{"number": 4}'
    reply = f"I think.\n\nSo I do.\n</think>{answer}"

    def script(_: str) -> str:
        return f"<think>\n{reply}"  # the part of it that the prompt has already is not written again

    target = ScriptedEngine(tokenizer, replying(script, seconds=0.2))
    draft = ScriptedEngine(tokenizer, replying(script))
    llm = ChatLookahead(engines=EngineSet(target, draft, SameText()))
    method: Any = "function_calling" if forced else "json_schema"
    result: Any = llm.with_structured_output(Answer, method=method, include_raw=True).invoke("?")
    assert result["parsed"] == Answer(number=4)
    figures = result["raw"].response_metadata["lookahead"]
    assert figures["accepted"] > 0, "thoughts are speculated on"
    assert result["raw"].content_blocks[0] == {"type": "reasoning", "reasoning": "I think.\n\nSo I do."}
    constrained = [prompt for prompt, sampling in target.requests if sampling.structured]
    assert tokenizer.decode(constrained[-1]).endswith("</think>")
    assert all(sampling.structured is None for _, sampling in draft.requests)


def test_thinking_that_never_ends_has_no_answer() -> None:
    tokenizer = ScriptedTokenizer(thinking=ThinkingTags())
    target = ScriptedEngine(tokenizer, replying(lambda _: "<think>\nI think. " + "And so on. " * 50))
    llm = ChatLookahead(engines=EngineSet(target), policy="off", max_tokens=20)
    message = llm.invoke("?", response_format={"type": "json_object"})
    assert (message.text, message.response_metadata["finish_reason"]) == ("", "length")
    assert message.additional_kwargs["reasoning_content"].startswith("I think.")
