"""Speculation must not change an agent's actions; `bench --parity` reports each difference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from typer.testing import CliRunner

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.config import BenchConfig, TaskConfig, TaskConfiguration
from lookahead_agent.bench.parity import Parity, actions_of, parity
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import CallRecord, CallRecorder, Sample, ToolRecord, action_of
from lookahead_agent.cli.app import CHAT_CLASS, app
from lookahead_agent.decoding.verifier import StepPair, Verdict, Verifier
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import scripted_chat

THOUGHT, DRAFT_THOUGHT = "We multiply by 2.\n\n", "We multiply by 3.\n\n"


@tool
def multiply(first: int, second: int) -> int:
    """Multiply."""
    return first * second


class AcceptingVerifier:
    """A wrong verifier: it accepts every draft step."""

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(True, "trust")


class AcceptingEngines(EngineSet):
    """Engines whose verifier accepts every draft step, even under the policy `exact`."""

    def verifier(self, policy: VerifierPolicy) -> Verifier | None:
        return AcceptingVerifier() if policy.speculates else None


def script(
    thought: str, argument: Callable[[str], str] = lambda number: number
) -> Callable[..., Sequence[ScriptedStep]]:
    """A thought with a number, then a call that multiplies by the reply's number, as formatted by `argument`."""

    def steps(prompt: str, written: str) -> Sequence[ScriptedStep]:
        if "tool: " in prompt:
            return [ScriptedStep(f"It is {prompt.rpartition('tool: ')[2].split()[0]}."[len(written) :])]
        number = re.search(r"by (\d)", written or thought)
        assert number is not None
        arguments = f'{{"first": 12, "second": {argument(number[1])}}}'
        call = f'<tool_call>{{"name": "multiply", "arguments": {arguments}}}</tool_call>'
        return [ScriptedStep(call, 0.01)] if written else [ScriptedStep(thought, 0.01), ScriptedStep(call, 0.01)]

    return steps


def chat_factory(kind: type[EngineSet] = EngineSet, argument: Callable[[str], str] = lambda number: number) -> Any:
    """A factory of chat models: with speculation on `kind`, or for "off" with the target alone and unchanged."""

    def make(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        is_baseline = configuration.mode == "off"
        tokenizer = ScriptedTokenizer()
        target = ScriptedEngine(tokenizer, script(THOUGHT) if is_baseline else script(THOUGHT, argument))
        engines = (EngineSet if is_baseline else kind)(target, ScriptedEngine(tokenizer, script(DRAFT_THOUGHT)))
        default, nodes = configuration.policies({"model": "balanced"})
        policies = {"model": nodes.get("model", default)}
        return ChatLookahead(
            engines=engines, policy=default, policies=policies, temperature=0, return_token_ids=True, streaming=True
        )

    return make


def solve(task: TaskConfig, llm: ChatLookahead, question: str, seed: int | None, config: Any, **_: Any) -> str:
    return str(create_agent(llm, [multiply]).invoke({"messages": [("user", question)]}, config)["messages"][-1].text)


def run_parity(tmp_path: Path, make: Any, **task_fields: Any) -> list[Parity]:
    config = BenchConfig(tasks=(TaskConfig(limit=2, **{"parity": True, **task_fields}),))
    return parity(Bench(config, tmp_path / "rows.jsonl", make, solve).run())


def test_exact_policy_keeps_every_action_of_the_target(tmp_path: Path) -> None:
    (found,) = run_parity(tmp_path, chat_factory())
    assert (found.configuration, found.runs, found.promised, found.differences) == ("auto", 2, 2, [])
    assert found.acts == 4, "each run has a reply with a call, and a tool run"
    assert found.holds


def test_verifier_that_accepts_wrong_steps_breaks_parity(tmp_path: Path) -> None:
    (found,) = run_parity(tmp_path, chat_factory(AcceptingEngines))
    assert not found.holds
    assert len(found.differences) == 2
    for difference in found.differences:
        assert difference.promised
        assert difference.place == "replies of model, number 1"
        assert '"second": 2}' in difference.off
        assert '"second": 3}' in difference.on


def test_different_formatting_of_an_argument_breaks_parity(tmp_path: Path) -> None:
    (found,) = run_parity(tmp_path, chat_factory(argument=lambda number: f" {number}"))
    assert [difference.on for difference in found.differences] == [
        '<tool_call>{"name": "multiply", "arguments": {"first": 12, "second":  2}}</tool_call>'
    ] * 2, "the same call, but not byte for byte"
    assert not found.holds


class LossyEngines(EngineSet):
    """Engines whose verifier accepts every draft step under `balanced`, as one that compares meanings may."""

    def verifier(self, policy: VerifierPolicy) -> Verifier | None:
        return AcceptingVerifier() if policy.name == "balanced" else None


def test_difference_under_a_lossy_policy_is_reported_and_parity_holds(tmp_path: Path) -> None:
    (found,) = run_parity(tmp_path, chat_factory(LossyEngines), parity=False)
    assert found.promised == 0
    assert [difference.promised for difference in found.differences] == [False, False]
    assert found.holds


def reply(step: int | None, started: float, action: str | None, **fields: Any) -> CallRecord:
    return CallRecord(
        path="a", step=step, started=started, policy="off", seconds=1, output_tokens=1, steps=1, accepted=0, tokens={},
        action=action, **fields,
    )  # fmt: skip


def tool_run(name: str, step: int | None, started: float) -> ToolRecord:
    return ToolRecord(path="tools", step=step, name=name, arguments="{}", started=started, seconds=1)


def sample(configuration: str, *records: CallRecord | ToolRecord, error: str | None = None) -> Sample:
    return Sample(
        task="t", problem="1", mode="off" if configuration == "off" else "auto", configuration=configuration, seconds=1,
        correct=None, error=error,
        calls=[each for each in records if isinstance(each, CallRecord)],
        tools=[each for each in records if isinstance(each, ToolRecord)],
    )  # fmt: skip


def test_concurrent_calls_may_finish_in_any_order_and_sequential_ones_keep_theirs() -> None:
    concurrent = sample("off", tool_run("a", 2, 1.0), tool_run("b", 2, 0.9), reply(1, 0.5, "both"), reply(3, 4, None))
    assert actions_of(concurrent) == {"replies of a": ["both"], "tools of tools": ["a({})", "b({})"]}
    swapped = sample("auto", tool_run("b", 2, 1.0), tool_run("a", 2, 1.1), reply(1, 0.5, "both"))
    assert parity([concurrent, swapped])[0].differences == []
    sequential = sample("auto", tool_run("b", 2, 1.0), tool_run("a", 4, 3.0), reply(1, 0.5, "both"))
    (difference,) = parity([concurrent, sequential])[0].differences
    assert (difference.place, difference.off, difference.on) == ("tools of tools, number 1", "a({})", "b({})")
    without_steps = [tool_run("a", None, 2.0), tool_run("b", None, 1.0)]
    assert actions_of(sample("off", *without_steps))["tools of tools"] == ["b({})", "a({})"]


def test_additional_call_and_failed_run_are_differences() -> None:
    off, longer = sample("off", tool_run("a", 2, 1)), sample("auto", tool_run("a", 2, 1), tool_run("b", 4, 2))
    assert parity([off, longer])[0].differences[0].off == ""
    failed = sample("auto", tool_run("a", 2, 1), error="EngineError: gone")
    (difference,) = parity([off, failed])[0].differences
    assert (difference.place, difference.on) == ("the run", "EngineError: gone")
    custom = CallRecord(policy="mine", seconds=1, output_tokens=1, steps=2, accepted=1, tokens={})
    assert parity([off, sample("auto", tool_run("a", 2, 1), custom)])[0].promised == 0, "its promises are unknown"


def test_action_of_a_reply_is_its_raw_text_with_the_call() -> None:
    call = [{"name": "f", "args": {"a": 1}, "id": "1"}]
    plain = AIMessage("I call.", tool_calls=call)
    assert action_of('I call.\n{"a":  1}', plain) == '{"a":  1}'
    thinking = AIMessage("", tool_calls=call, additional_kwargs={"reasoning_content": "Hm."})
    assert action_of('<think>Hm.</think>{"a": 1}', thinking) == '</think>{"a": 1}'
    assert action_of("It is 4.", AIMessage("It is 4.")) is None
    assert action_of("So.\nPlan:\n1. f(2)", AIMessage("…"), ("Plan:",)) == "Plan:\n1. f(2)"
    invalid = AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{", "id": "1", "error": "cut off"}])
    assert action_of('{"name": "f", "arguments": {', invalid) == '{"name": "f", "arguments": {'


def test_plan_after_an_action_marker_is_an_action() -> None:
    llm = scripted_chat("We need two.\n\nPlan:\n1. f(2)", return_token_ids=True, policy="off")
    recorder = CallRecorder(llm.backend.tokenizer().decode)
    llm.invoke("?", {"callbacks": [recorder]}, action_markers=("Plan:",))
    llm.invoke("?", {"callbacks": [recorder]})
    assert [call.action for call in recorder.calls] == ["Plan:\n1. f(2)", None]


def test_parity_of_sampled_replies_is_rejected() -> None:
    with pytest.raises(ValueError, match="parity needs temperature 0"):
        BenchConfig(temperature=0.5, tasks=(TaskConfig(parity=True),))


@pytest.mark.parametrize(("kind", "code"), [(EngineSet, 0), (AcceptingEngines, 1)])
def test_exit_status_of_bench_reports_broken_parity(tmp_path: Path, kind: type[EngineSet], code: int) -> None:
    policies: list[str] = []

    def chat(**fields: Any) -> ChatLookahead:
        policies.append(fields["policy"])
        is_baseline = fields["policy"] == "off"
        tokenizer = ScriptedTokenizer()
        engines = (EngineSet if is_baseline else kind)(
            ScriptedEngine(tokenizer, script(THOUGHT)), ScriptedEngine(tokenizer, script(DRAFT_THOUGHT))
        )
        return ChatLookahead(engines=engines, policy=fields["policy"], temperature=0, return_token_ids=True)

    context = copy_context()
    context.run(CHAT_CLASS.set, chat)
    arguments = ["bench", "--parity", "--task", "questions", "--limit", "1", "--out", str(tmp_path / "rows.jsonl")]
    result = context.run(CliRunner().invoke, app, arguments)
    assert result.exit_code == code, result.output
    assert policies == ["off", "exact"]
