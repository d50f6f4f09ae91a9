"""The control flow of the reflection and self-consistency templates on a scripted model."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessageChunk
from langgraph.checkpoint.memory import InMemorySaver

from graphs.reflection import build_reflection
from graphs.self_consistency import answer_of, build_self_consistency, is_decided
from lookahead_agent import ChatLookahead
from lookahead_agent.agents.checkpoints import checkpointer
from lookahead_agent.engines import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.errors import LookaheadError
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.testing import scripted_replies
from tests.unit.chat import scripted_chat
from tests.waiting import wait_until
from tools.calculator import calculator

Script = dict[str, list[str] | str]


def model(script: Script, **fields: Any) -> ChatLookahead:
    return scripted_chat(scripted_replies(**script), **fields)


def verdict(word: str) -> str:
    return json.dumps({"verdict": word})


REVIEWS: Script = {
    "You carry out": "A poem.",
    "strict but fair": ["The rhyme is missing.", "Nothing has to change."],
    "You read what": [verdict("revise"), verdict("good")],
    "You improve": "A better poem.",
}
METHODS = ["invoke", "ainvoke"]


async def ask(graph: Any, question: str, method: str, config: Any = None) -> Any:
    inputs = {"messages": [("human", question)]}
    return await graph.ainvoke(inputs, config) if method == "ainvoke" else graph.invoke(inputs, config)


@pytest.mark.parametrize("method", METHODS)
async def test_reflection_revises_until_the_verdict_is_good(method: str) -> None:
    llm = model(REVIEWS, policies={"critic": "exact", "writer": "off", "reviser": "off"})
    graph = build_reflection(llm)
    llm.check_policies(graph)
    state = await ask(graph, "Write a poem.", method)
    assert [message.text for message in state["messages"]] == ["Write a poem.", "A better poem."]
    assert (state["revisions"], state["good"]) == (1, True)
    assert state["messages"][-1].response_metadata["lookahead"]["node"] == "reviser"


@pytest.mark.parametrize("method", METHODS)
async def test_reflection_stops_at_max_revisions(method: str) -> None:
    script: Script = {**REVIEWS, "strict but fair": "The rhyme is missing.", "You read what": "no json"}
    script["You improve"] = ["Better.", "Best.", "Never."]
    state = await ask(build_reflection(model(script), max_revisions=2), "Write.", method)
    assert (state["messages"][-1].text, state["revisions"], state["good"]) == ("Best.", 2, False)
    state = await ask(build_reflection(model(script), max_revisions=0), "Write.", method)
    assert state["messages"][-1].text == "A poem."
    with pytest.raises(ValueError, match="max_revisions"):
        build_reflection(model(script), max_revisions=-1)


@pytest.mark.parametrize("revised", ["A poem.", " "])
async def test_reflection_ends_if_a_revision_changes_nothing(revised: str) -> None:
    script: Script = {**REVIEWS, "You read what": verdict("revise"), "You improve": revised}
    state = await ask(build_reflection(model(script), max_revisions=5), "Write.", "invoke")
    assert (state["messages"][-1].text, state["revisions"], state["good"]) == ("A poem.", 1, False)


async def test_reflection_decider_sees_the_critique_without_the_draft() -> None:
    prompts: list[str] = []
    answers = scripted_replies(
        **{**REVIEWS, "strict but fair": "Nothing has to change.", "You read what": verdict("good")}
    )

    def record(prompt: str) -> str:
        prompts.append(prompt)
        return answers(prompt)

    assert (await ask(build_reflection(scripted_chat(record)), "Write.", "invoke"))["good"]
    assert "Nothing has to change." in prompts[-1]
    assert "A poem." not in prompts[-1]


@pytest.mark.parametrize("method", METHODS)
async def test_reflection_resets_its_state_for_a_threads_second_task(method: str) -> None:
    prompts: list[str] = []
    script: Script = {**REVIEWS, "You carry out": ["A poem.", "A song."], "You improve": ["A better poem.", "Never."]}
    answers = scripted_replies(**script)

    def record(prompt: str) -> str:
        prompts.append(prompt)
        return answers(prompt)

    graph = build_reflection(scripted_chat(record), (), InMemorySaver(), max_revisions=1)
    config: Any = {"configurable": {"thread_id": "1"}}
    await ask(graph, "Write a poem.", method, config)
    state = await ask(graph, "Now a song.", method, config)
    assert (state["messages"][-1].text, state["revisions"]) == ("A song.", 0)
    assert len(state["messages"]) == 4
    assert "A better poem." in next(prompt for prompt in prompts if "You carry out" in prompt and "song" in prompt)
    assert "A poem." not in [prompt for prompt in prompts if "strict but fair" in prompt][-1]


async def test_reflection_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    failing = {"now": True}
    answers = scripted_replies(**REVIEWS)

    def reply(prompt: str) -> str:
        if "You read what" in prompt and failing["now"]:
            raise RuntimeError("the process ended")
        return answers(prompt)

    config: Any = {"configurable": {"thread_id": "1"}}
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        with pytest.raises(LookaheadError):
            await ask(build_reflection(scripted_chat(reply), (), saver), "Write.", "invoke", config)
        failing["now"] = False
    with checkpointer(tmp_path / "checkpoints.sqlite") as saver:
        state = build_reflection(scripted_chat(reply), (), saver).invoke(None, config)
    assert state["messages"][-1].text == "A better poem."


@pytest.mark.parametrize(("build", "answer"), [(build_reflection, "A better poem."), (build_self_consistency, "So.")])
async def test_templates_stream_their_final_message(build: Any, answer: str) -> None:
    graph = build(model({**REVIEWS, "You answer a question": "So."}, temperature=0.5))
    texts: dict[str | None, str] = {}
    async for message, _ in graph.astream({"messages": [("human", "Write.")]}, stream_mode="messages"):
        if isinstance(message, AIMessageChunk):
            texts[message.id] = texts.get(message.id, "") + message.text
    assert answer in texts.values()
    final = (await ask(graph, "Write.", "ainvoke"))["messages"][-1]
    assert final.text == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So.\n\nAnswer: 42", "42"),
        ("**Answer:** $1,234.50.", "1234.5"),
        ("answer = 7 apples", "7"),
        ("Answer: Paris.", "paris"),
        ("Answer: 1\nAnswer: 2.00", "2"),
        ("I do not know.", None),
    ],
)
def test_answer_of_extracts_and_normalises_answers(text: str, answer: str | None) -> None:
    assert answer_of(text) == answer


def test_vote_is_decided_if_open_replies_cannot_change_the_winner() -> None:
    assert is_decided(Counter({"a": 3, "b": 1}), 1)
    assert not is_decided(Counter({"a": 2, "b": 1}), 1)
    assert is_decided(Counter({"a": 1}), 0)
    assert not is_decided(Counter(), 3)


def voting(replies: dict[int, tuple[str, float]]) -> ChatLookahead:
    """Return a model that cycles through replies, each with a delay in seconds."""
    tokenizer = ScriptedTokenizer()

    class CyclingEngine(ScriptedEngine):
        async def generate(self, prompt_ids: Any, sampling: Any) -> Any:  # type: ignore[override]
            number = len(self.requests) % len(replies)
            text, seconds = list(replies.values())[number]
            self._script = lambda *_: [ScriptedStep(text, seconds)]
            async with aclosing(super().generate(prompt_ids, sampling)) as deltas:
                async for delta in deltas:
                    yield delta

    return ChatLookahead(engines=EngineSet(CyclingEngine(tokenizer, [])), policy="off", temperature=0.7)


async def test_self_consistency_stops_when_the_vote_is_decided() -> None:
    llm = voting({n: (f"So.\n\nAnswer: {4 if n < 3 else 5}", 0.01 if n < 3 else 60.0) for n in range(5)})
    state = await ask(build_self_consistency(llm), "2 + 2?", "ainvoke")
    assert (state["messages"][-1].text, state["votes"]) == ("So.\n\nAnswer: 4", {"4": 3})
    assert len(state["replies"]) == 3
    assert llm.engines is not None
    target = llm.engines.target
    await wait_until(lambda: target.in_flight == 0)  # the open requests are aborted


@pytest.mark.parametrize("method", METHODS)
async def test_self_consistency_takes_the_majority_answer(method: str) -> None:
    """Includes `invoke` inside a running event loop."""
    llm = voting({n: (f"Answer: {n // 2}", 0.01) for n in range(3)})
    state = await ask(build_self_consistency(llm, samples=3), "?", method)
    assert (state["messages"][-1].text, state["votes"]["0"]) == ("Answer: 0", 2)


def test_self_consistency_runs_without_an_event_loop() -> None:
    llm = voting(dict.fromkeys(range(3), ("Answer: 1", 0.01)))
    state = build_self_consistency(llm, samples=3).invoke({"messages": [("human", "?")]})
    assert state["messages"][-1].text == "Answer: 1"


async def test_self_consistency_returns_a_reply_if_no_answer_can_be_parsed() -> None:
    state = await ask(build_self_consistency(model({"You answer": "Hm."}, temperature=0.5), samples=2), "?", "invoke")
    assert (state["messages"][-1].text, state["votes"], state["replies"]) == ("Hm.", {}, ["Hm.", "Hm."])


async def test_self_consistency_resets_its_votes_for_a_threads_second_question() -> None:
    prompts: list[str] = []

    def reply(prompt: str) -> str:
        prompts.append(prompt)
        return "Answer: Rome" if "And of Italy?" in prompt else "Answer: Paris"

    graph = build_self_consistency(scripted_chat(reply, temperature=0.5), (), InMemorySaver(), samples=3)
    config: Any = {"configurable": {"thread_id": "1"}}
    await ask(graph, "What is the capital of France?", "ainvoke", config)
    state = await ask(graph, "And of Italy?", "ainvoke", config)
    assert state["messages"][-1].text == "Answer: Rome"
    assert set(state["votes"]) == {"rome"}
    assert "capital of France" in prompts[-1]


async def test_cancelled_self_consistency_leaves_no_request() -> None:
    llm = voting({0: ("Answer: 1", 60.0)})
    assert llm.engines is not None
    target = llm.engines.target
    task = asyncio.ensure_future(ask(build_self_consistency(llm, samples=2), "?", "ainvoke"))
    await wait_until(lambda: target.in_flight == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await wait_until(lambda: target.in_flight == 0)


@pytest.mark.parametrize("build", [build_reflection, build_self_consistency])
def test_templates_without_tools_refuse_them(build: Any) -> None:
    with pytest.raises(ValueError, match="uses no tools"):
        build(scripted_chat("x"), [calculator])
