"""Judges in this process and behind a server: their prompts, answers and failures."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import httpx
import pytest

from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.engines import ScriptedEngine, ScriptedTokenizer
from lookahead_agent.engines.servers import RemoteModel
from lookahead_agent.errors import EngineError
from lookahead_agent.policy import as_policy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.verifiers.judge import EngineJudge, JudgeVerifier, RemoteJudge
from lookahead_agent.verifiers.model_free import RandomVerifier

PAIR = StepPair(
    "What is it?",
    "First.\n\n",
    Step((1,), "So it is 4.\n\n", StepEnd.DELIMITER),
    Step((2,), "It is 4.\n\n", StepEnd.DELIMITER),
)


def judge_response(*probabilities: tuple[str, float]) -> httpx.Response:
    return answer_of(*({"token": word, "logprob": math.log(probability)} for word, probability in probabilities))


def answer_of(*entries: object) -> httpx.Response:
    return httpx.Response(200, json={"choices": [{"logprobs": {"content": [{"top_logprobs": entries}]}}]})


def remote_judge(answer: Callable[[httpx.Request], httpx.Response]) -> RemoteJudge:
    model = RemoteModel("http://judge/v1/", "big", "secret", max_retries=0)
    return RemoteJudge(model, httpx.MockTransport(answer))


async def test_remote_judge_sends_openai_requests_and_scores_the_probability_of_yes() -> None:
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return judge_response(("Yes", 0.5), (" yes", 0.1), ("No", 0.2), ("I", 0.1))

    judge = remote_judge(answer)
    verdict = await JudgeVerifier(judge, 0.75).verify(PAIR)
    assert verdict.score == pytest.approx(0.75)
    assert verdict.judge_calls == 1
    (request,) = requests
    body = json.loads(request.content)
    assert str(request.url) == "http://judge/v1/chat/completions"
    assert request.headers["Authorization"] == "Bearer secret"
    assert (body["model"], body["max_tokens"], body["logprobs"]) == ("big", 1, True)
    assert "So it is 4." in body["messages"][1]["content"]


@pytest.mark.parametrize("knows_salts", [True, False])
async def test_a_remote_judge_is_told_the_salt_of_the_reply_unless_its_server_refuses_it(knows_salts: bool) -> None:
    salts: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        salts.append(json.loads(request.content).get("cache_salt"))
        if salts[-1] is not None and not knows_salts:
            return httpx.Response(400, json={"error": {"message": "Unrecognized request argument: cache_salt"}})
        return judge_response(("yes", 0.9), ("no", 0.1))

    judge = JudgeVerifier(remote_judge(answer), 0.75, both_orders=True)
    for salt in ("client 1", "client 2", None):
        assert (await judge.verify(replace(PAIR, cache_salt=salt))).accepted
    first, second = ["client 1"] * 2, ["client 2"] * 2
    assert salts == ([*first, *second, None, None] if knows_salts else ["client 1", *[None] * 6])


@pytest.mark.parametrize(("p_swapped", "accepted"), [(0.6, False), (0.8, True)])
async def test_the_lower_of_both_orders_decides(p_swapped: float, accepted: bool) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        prompt = json.loads(request.content)["messages"][1]["content"]
        draft_comes_second = prompt.index("So it is 4.") > prompt.index("Version B")
        p = 0.9 if draft_comes_second else p_swapped
        return judge_response(("yes", p), ("no", 1 - p))

    verdict = await JudgeVerifier(remote_judge(answer), 0.75, both_orders=True).verify(PAIR)
    assert (verdict.accepted, verdict.judge_calls) == (accepted, 2)
    assert verdict.score == pytest.approx(p_swapped)
    single_call = await JudgeVerifier(remote_judge(answer), 0.95, both_orders=True).verify(PAIR)
    assert (single_call.accepted, single_call.judge_calls) == (False, 1), "a second order cannot raise the score"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: httpx.Response(500, text="no memory"), "answered 500: no memory"),
        (lambda _: httpx.Response(200, json={"choices": []}), "no log-probabilities"),
        *(
            (partial(lambda entry, _: answer_of(entry), entry), "no log-probabilities")
            for entry in ({"token": "yes", "logprob": 1e9}, {"token": "yes", "logprob": "x"}, {"logprob": 1}, 7, None)
        ),
        (lambda _: httpx.Response(200, text="<html>"), "not JSON"),
        (lambda _: judge_response(("maybe", 0.9)), "neither yes nor no"),
    ],
)
async def test_remote_judge_errors_are_raised(answer: Callable[[httpx.Request], httpx.Response], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await JudgeVerifier(remote_judge(answer), 0.5).verify(PAIR)


async def test_unreachable_remote_judge_raises_engine_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(EngineError, match="cannot be reached: refused"):
        await JudgeVerifier(remote_judge(refuse), 0.5).verify(PAIR)


async def test_remote_judge_retries_with_a_shorter_question_and_rejects_steps_beyond_its_context() -> None:
    lengths: list[int] = []

    def answer(request: httpx.Request) -> httpx.Response:
        lengths.append(len(request.content))
        too_long = len(request.content) > 3000
        return httpx.Response(400, text="maximum context length") if too_long else judge_response(("yes", 0.9))

    long_question = StepPair("What is it? " * 1000, "", PAIR.draft, PAIR.target)
    assert (await JudgeVerifier(remote_judge(answer), 0.5).verify(long_question)).accepted
    assert len(lengths) == 2
    long_step = StepPair("What?", "", Step((1,), "and so on " * 1000, StepEnd.DELIMITER), PAIR.target)
    verdict = await JudgeVerifier(remote_judge(answer), 0.5).verify(long_step)
    assert (verdict.accepted, verdict.reason) == (False, "too long for the judge")


async def test_engine_judge_shortens_the_question_and_rejects_steps_beyond_its_context() -> None:
    tokenizer = ScriptedTokenizer()
    engine = ScriptedEngine(tokenizer, [], logprobs={"yes": -0.1}, context_length=400)
    judge = JudgeVerifier(EngineJudge(engine), 0.5)
    assert (await judge.verify(PAIR)).accepted
    assert (await judge.verify(StepPair("What is it? " * 500, "", PAIR.draft, PAIR.target))).accepted
    long_step = StepPair("What?", "", Step((1,), "and so on " * 500, StepEnd.DELIMITER), PAIR.target)
    assert (await judge.verify(long_step)).reason == "too long for the judge"


async def test_policy_with_both_orders_judges_a_pair_twice() -> None:
    tokenizer = ScriptedTokenizer()
    engine = ScriptedEngine(tokenizer, [], logprobs={"yes": -0.1, "no": -3.0})
    policy = as_policy({"verifier": "judge", "both_orders": True})
    await EngineSet(engine, ScriptedEngine(tokenizer, [])).verifier(policy).verify(PAIR)  # type: ignore[union-attr]
    first, second = (tokenizer.decode(prompt) for prompt, _ in engine.requests)
    assert "Version A:\n\nIt is 4.\n\nVersion B:\n\nSo it is 4." in re.sub(r"\n+", "\n\n", first)
    assert "Version A:\n\nSo it is 4.\n\nVersion B:\n\nIt is 4." in re.sub(r"\n+", "\n\n", second)
    assert "in both orders" in policy.explain()


async def test_separate_judge_is_asked_in_place_of_the_target() -> None:
    tokenizer = ScriptedTokenizer()
    target = ScriptedEngine(tokenizer, [], logprobs={"yes": -0.1})
    judge_engine = ScriptedEngine(tokenizer, [], logprobs={"no": -0.1})
    engines = EngineSet(target, ScriptedEngine(tokenizer, []), judge=EngineJudge(judge_engine))
    verdict = await engines.verifier(as_policy("judge")).verify(PAIR)  # type: ignore[union-attr]
    assert not verdict.accepted
    assert not target.requests


async def test_random_verifier_keeps_its_rate_and_repeats_its_verdicts_per_seed() -> None:
    pairs = [StepPair("", "", Step((n,), str(n), StepEnd.DELIMITER), PAIR.target) for n in range(4000)]
    verdicts = [(await RandomVerifier(0.3, seed=1).verify(pair)).accepted for pair in pairs]
    assert sum(verdicts) / len(verdicts) == pytest.approx(0.3, abs=0.03)
    assert verdicts == [(await RandomVerifier(0.3, seed=1).verify(pair)).accepted for pair in pairs]
    assert verdicts != [(await RandomVerifier(0.3, seed=2).verify(pair)).accepted for pair in pairs]
