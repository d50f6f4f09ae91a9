"""The packaged 1.5B and 0.5B models."""

from __future__ import annotations

from contextlib import aclosing

import pytest
from langchain_core.messages import HumanMessage

from lookahead_agent import ChatLookahead
from lookahead_agent.chat.messages import template_messages
from lookahead_agent.decoding.step import Step, StepEnd
from lookahead_agent.decoding.verifier import StepPair
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.policy import as_policy
from lookahead_agent.system import background
from tests.ties import first_difference, gap_in_nats

PROBLEMS = [
    "A farmer has 14 crates with 36 apples each. He sells 5 crates and eats 7 apples. How many apples are left?",
    "Mia reads 28 pages a day for 6 days and 45 pages on Sunday. How many pages does she read in the week?",
]

# Two tokens whose bf16 logits are this close swap places when a batch rounds differently. Logits around 20 to 30 are
# multiples of 0.125 in bf16, and a few such rounding errors add up.
NEAR_TIE = 0.5


@pytest.mark.timeout(1200)
def test_exact_differs_from_off_at_most_by_a_near_tie(real: ChatLookahead) -> None:
    off, exact = (real.batch(PROBLEMS, policy=policy, max_tokens=64) for policy in ("off", "exact"))
    for problem, *messages in zip(PROBLEMS, off, exact, strict=True):
        off_ids, exact_ids = (message.response_metadata["token_ids"] for message in messages)
        at = first_difference(off_ids, exact_ids)
        if at is not None:
            assert gap_in_nats(real, problem, off_ids, exact_ids) < NEAR_TIE, f"token {at}"


@pytest.mark.timeout(1200)
def test_balanced_accepts_draft_steps(real: ChatLookahead) -> None:
    metadata = [message.response_metadata["lookahead"] for message in real.batch(PROBLEMS, max_tokens=120)]
    assert all(entry["policy"] == "balanced" for entry in metadata)
    assert all(entry["speculation_disabled"] is None for entry in metadata)
    assert sum(entry["accepted"] for entry in metadata) > 0
    assert sum(entry["verifier_calls"] for entry in metadata) > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sampling", [{"seed": 3}, {"seed": None}])
def test_sampled_reply_is_likely_under_the_target(real: ChatLookahead, sampling: dict[str, int | None]) -> None:
    """Samples at the vendor's temperature. Tokens of another distribution would be as unlikely as noise: e^-12 each."""
    message = real.invoke(PROBLEMS[0], policy="off", temperature=0.7, max_tokens=64, **sampling)
    ids, metadata = message.response_metadata["token_ids"], message.response_metadata["lookahead"]

    async def logprobs() -> list[float]:
        async with real.backend.engines(as_policy("off")) as engines:
            prompt = engines.target.tokenizer.chat_prompt(template_messages([HumanMessage(PROBLEMS[0])]))
            scoring = engines.target.generate([*prompt, *ids], Sampling(max_tokens=1, prompt_logprobs=True))
            async with aclosing(scoring) as deltas:
                async for delta in deltas:
                    assert delta.prompt_logprobs is not None
                    return [value for value in delta.prompt_logprobs[len(prompt) :] if value is not None]
        raise AssertionError

    found = background.run(logprobs())
    assert len(found) == len(ids)
    assert sum(found) / len(found) > -1.5
    if sampling["seed"] is None:
        assert metadata["target_forward_passes"] < len(ids), "draft tokens were accepted"


@pytest.mark.parametrize("policy", ["strict", "balanced"])
def test_verifier_rejects_other_numbers_and_accepts_a_paraphrase(real: ChatLookahead, policy: str) -> None:
    def step(text: str) -> Step:
        return Step((1,), text, StepEnd.DELIMITER)

    async def accepted(draft: str, target: str) -> bool:
        async with real.backend.engines(as_policy(policy)) as engines:
            verifier = engines.verifier(as_policy(policy))
            assert verifier is not None
            pair = StepPair("What is 12 × 5/6?", "", step(draft), step(target))
            return (await verifier.verify(pair)).accepted

    assert not background.run(accepted("12 × 5/6 = 6\n\n", "12 × 5/6 = 10\n\n"))
    assert background.run(accepted("Now we add the pets: 2 + 3 = 5.\n\n", "Now we add up all the pets: 2 + 3 = 5.\n\n"))
