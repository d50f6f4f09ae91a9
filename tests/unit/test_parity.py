"""Speculation may not change what an agent does; where it does, `bench --parity` shows it."""

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
from lookahead_agent.bench.config import BenchConfig, Configuration, TaskConfig
from lookahead_agent.bench.parity import Parity, actions_of, parity
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import CallRecord, CallRecorder, Sample, ToolRecord, action_of
from lookahead_agent.cli.app import CHAT_CLASS, app
from lookahead_agent.decoding.verifier import StepPair, Verdict, Verifier
from lookahead_agent.engines.scripted import ScriptedEngine, ScriptedStep, ScriptedTokenizer
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from tests.unit.chat import scripted_chat

THOUGHT, DRAFTED = "We multiply by 2.\n\n", "We multiply by 3.\n\n"


@tool
def multiply(first: int, second: int) -> int:
    """Multiply."""
    return first * second


class Credulous:
    """A verifier that lies: to it, any two steps are the same."""

    async def verify(self, pair: StepPair) -> Verdict:
        return Verdict(True, "trust")


class LyingEngines(EngineSet):
    """Engines whose verifier accepts all, also under the policy `exact`."""

    def verifier(self, policy: VerifierPolicy) -> Verifier | None:
        return Credulous() if policy.speculates else None


def script(
    thought: str, argument: Callable[[str], str] = lambda number: number
) -> Callable[..., Sequence[ScriptedStep]]:
    """Thinks of a number, and multiplies by that which the reply then has; `argument` is how it writes it."""

    def steps(prompt: str, begun: str) -> Sequence[ScriptedStep]:
        if "tool: " in prompt:
            return [ScriptedStep(f"It is {prompt.rpartition('tool: ')[2].split()[0]}."[len(begun) :])]
        number = re.search(r"by (\d)", begun or thought)
        assert number is not None
        arguments = f'{{"first": 12, "second": {argument(number[1])}}}'
        call = f'<tool_call>{{"name": "multiply", "arguments": {arguments}}}</tool_call>'
        return [ScriptedStep(call, 0.01)] if begun else [ScriptedStep(thought, 0.01), ScriptedStep(call, 0.01)]

    return steps


def agent(kind: type[EngineSet] = EngineSet, argument: Callable[[str], str] = lambda number: number) -> Any:
    """Makes chat models with speculation on such engines, and the target alone as it is."""

    def make(config: BenchConfig, task: TaskConfig, configuration: Configuration) -> ChatLookahead:
        alone = configuration.mode == "off"
        tokenizer = ScriptedTokenizer()
        target = ScriptedEngine(tokenizer, script(THOUGHT) if alone else script(THOUGHT, argument))
        engines = (EngineSet if alone else kind)(target, ScriptedEngine(tokenizer, script(DRAFTED)))
        default, nodes = configuration.policies({"model": "balanced"})
        policies = {"model": nodes.get("model", default)}
        return ChatLookahead(
            engines=engines, policy=default, policies=policies, temperature=0, return_token_ids=True, streaming=True
        )

    return make


def solve(task: TaskConfig, llm: ChatLookahead, question: str, seed: int | None, config: Any, **_: Any) -> str:
    return str(create_agent(llm, [multiply]).invoke({"messages": [("user", question)]}, config)["messages"][-1].text)


def compared(tmp_path: Path, make: Any, **of_task: Any) -> list[Parity]:
    config = BenchConfig(tasks=(TaskConfig(limit=2, **{"parity": True, **of_task}),))
    return parity(Bench(config, tmp_path / "rows.jsonl", make, solve).run())


def test_under_exact_every_call_is_that_of_the_target_alone(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, agent())
    assert (found.configuration, found.runs, found.promised, found.differences) == ("auto", 2, 2, [])
    assert found.acts == 4, "of each run the reply that calls, and the run of its tool"
    assert found.holds


def test_a_lying_verifier_is_caught(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, agent(LyingEngines))
    assert not found.holds
    assert len(found.differences) == 2
    for difference in found.differences:
        assert difference.promised
        assert difference.place == "replies of model, number 1"
        assert '"second": 2}' in difference.off
        assert '"second": 3}' in difference.on


def test_a_target_that_writes_an_argument_in_another_way_is_caught(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, agent(argument=lambda number: f" {number}"))
    assert [difference.on for difference in found.differences] == [
        '<tool_call>{"name": "multiply", "arguments": {"first": 12, "second":  2}}</tool_call>'
    ] * 2, "the same call, but not byte for byte"
    assert not found.holds


class Accepting(EngineSet):
    """Engines whose verifier finds the draft's step as good, as one that goes by meaning may."""

    def verifier(self, policy: VerifierPolicy) -> Verifier | None:
        return Credulous() if policy.name == "balanced" else None


def test_where_a_policy_promises_nothing_a_difference_is_shown_and_breaks_nothing(tmp_path: Path) -> None:
    (found,) = compared(tmp_path, agent(Accepting), parity=False)
    assert found.promised == 0
    assert [difference.promised for difference in found.differences] == [False, False]
    assert found.holds


def record(step: int | None, started: float, text: str | None, **more: Any) -> CallRecord:
    return CallRecord(
        path="a", step=step, started=started, policy="off", seconds=1, output_tokens=1, steps=1, accepted=0, tokens={},
        action=text, **more,
    )  # fmt: skip


def run_of(name: str, step: int | None, started: float) -> ToolRecord:
    return ToolRecord(path="tools", step=step, name=name, arguments="{}", started=started, seconds=1)


def sample(configuration: str, *records: CallRecord | ToolRecord, error: str | None = None) -> Sample:
    return Sample(
        task="t", problem="1", mode="off" if configuration == "off" else "auto", configuration=configuration, seconds=1,
        correct=None, error=error,
        calls=[each for each in records if isinstance(each, CallRecord)],
        tools=[each for each in records if isinstance(each, ToolRecord)],
    )  # fmt: skip


def test_what_ran_at_once_has_no_order_and_what_ran_in_turn_has() -> None:
    at_once = sample("off", run_of("a", 2, 1.0), run_of("b", 2, 0.9), record(1, 0.5, "both"), record(3, 4, None))
    assert actions_of(at_once) == {"replies of a": ["both"], "tools of tools": ["a({})", "b({})"]}
    swapped = sample("auto", run_of("b", 2, 1.0), run_of("a", 2, 1.1), record(1, 0.5, "both"))
    assert parity([at_once, swapped])[0].differences == []
    in_turn = sample("auto", run_of("b", 2, 1.0), run_of("a", 4, 3.0), record(1, 0.5, "both"))
    (difference,) = parity([at_once, in_turn])[0].differences
    assert (difference.place, difference.off, difference.on) == ("tools of tools, number 1", "a({})", "b({})")
    outside = [run_of("a", None, 2.0), run_of("b", None, 1.0)]
    assert actions_of(sample("off", *outside))["tools of tools"] == ["b({})", "a({})"]


def test_a_call_more_and_another_end_are_differences() -> None:
    off, more = sample("off", run_of("a", 2, 1)), sample("auto", run_of("a", 2, 1), run_of("b", 4, 2))
    assert parity([off, more])[0].differences[0].off == ""
    failed = sample("auto", run_of("a", 2, 1), error="EngineError: gone")
    (difference,) = parity([off, failed])[0].differences
    assert (difference.place, difference.on) == ("the run", "EngineError: gone")
    own = CallRecord(policy="mine", seconds=1, output_tokens=1, steps=2, accepted=1, tokens={})
    assert parity([off, sample("auto", run_of("a", 2, 1), own)])[0].promised == 0, "nobody knows what it promises"


def test_the_action_of_a_reply_is_what_the_model_wrote() -> None:
    call = [{"name": "f", "args": {"a": 1}, "id": "1"}]
    plain = AIMessage("I call.", tool_calls=call)
    assert action_of('I call.\n{"a":  1}', plain) == '{"a":  1}'
    thinking = AIMessage("", tool_calls=call, additional_kwargs={"reasoning_content": "Hm."})
    assert action_of('<think>Hm.</think>{"a": 1}', thinking) == '</think>{"a": 1}'
    assert action_of("It is 4.", AIMessage("It is 4.")) is None
    assert action_of("So.\nPlan:\n1. f(2)", AIMessage("…"), ("Plan:",)) == "Plan:\n1. f(2)"
    broken = AIMessage("", invalid_tool_calls=[{"name": "f", "args": "{", "id": "1", "error": "cut off"}])
    assert action_of('{"name": "f", "arguments": {', broken) == '{"name": "f", "arguments": {'


def test_a_plan_behind_an_action_marker_is_an_action() -> None:
    llm = scripted_chat("We need two.\n\nPlan:\n1. f(2)", return_token_ids=True, policy="off")
    recorder = CallRecorder(llm.backend.tokenizer().decode)
    llm.invoke("?", {"callbacks": [recorder]}, action_markers=("Plan:",))
    llm.invoke("?", {"callbacks": [recorder]})
    assert [call.action for call in recorder.calls] == ["Plan:\n1. f(2)", None]


def test_sampled_replies_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="parity needs temperature 0"):
        BenchConfig(temperature=0.5, tasks=(TaskConfig(parity=True),))


@pytest.mark.parametrize(("kind", "code"), [(EngineSet, 0), (LyingEngines, 1)])
def test_the_command_says_so_by_its_exit_status(tmp_path: Path, kind: type[EngineSet], code: int) -> None:
    made: list[str] = []

    def chat(**fields: Any) -> ChatLookahead:
        made.append(fields["policy"])
        alone = fields["policy"] == "off"
        tokenizer = ScriptedTokenizer()
        engines = (EngineSet if alone else kind)(
            ScriptedEngine(tokenizer, script(THOUGHT)), ScriptedEngine(tokenizer, script(DRAFTED))
        )
        return ChatLookahead(engines=engines, policy=fields["policy"], temperature=0, return_token_ids=True)

    context = copy_context()
    context.run(CHAT_CLASS.set, chat)
    arguments = ["bench", "--parity", "--task", "questions", "--limit", "1", "--out", str(tmp_path / "rows.jsonl")]
    done = context.run(CliRunner().invoke, app, arguments)
    assert done.exit_code == code, done.output
    assert made == ["off", "exact"]
