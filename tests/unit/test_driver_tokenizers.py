"""A draft whose tokenizer differs from the target's: the engines exchange the text of steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as HFBackend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lookahead_agent.decoding import DecodingSettings, ReplyRequest, lookahead
from lookahead_agent.engines import Sampling
from lookahead_agent.engines.protocol import Delta
from lookahead_agent.engines.tokenizer import HFTokenizer
from lookahead_agent.verifiers.model_free import ExactVerifier
from lookahead_agent.verifiers.results import PrefilterVerifier
from tests.unit.scripts import Pair, ScriptedVerifier
from tests.virtual_time import run_in_virtual_time

STEPS = ["First this.\n\n", "Then that.\n\n", "So it is 4.\n\n", "Done."]
OTHER = ["Firstly this.\n\n", "Then that.\n\n", "So it is 5.\n\n", "Done."]
ACCEPT_ALL = ScriptedVerifier(lambda draft, target: True)


def test_accepted_draft_steps_are_encoded_with_the_targets_tokenizer() -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    reply = pair.run(ACCEPT_ALL)
    assert reply.text == "".join(OTHER)
    assert pair.tokenizer.decode(reply.token_ids) == "".join(OTHER)
    assert reply.report.accepted == 4
    assert reply.report.draft_tokens.committed > 0


def test_each_engine_receives_only_tokens_of_its_own_tokenizer() -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    pair.run(ScriptedVerifier(lambda draft, target: "5" not in draft))
    assert pair.draft is not None
    for engine, tokenizer in ((pair.target, pair.tokenizer), (pair.draft, pair.draft_tokenizer)):
        for prompt, _ in engine.requests:
            assert tokenizer.decode(prompt).startswith("user: what is it?\nassistant: ")
            reply = tokenizer.decode(prompt).partition("assistant: ")[2]
            assert all(part in {*STEPS, *OTHER} for part in reply.replace("\n\n", "\n\n|").split("|") if part)


def test_exact_is_lossless_with_two_tokenizers() -> None:
    for draft in (STEPS, OTHER):
        pair = Pair(STEPS, draft, two_tokenizers=True)
        alone = Pair(STEPS, None).run()
        reply = pair.run(ExactVerifier())
        assert reply.text == alone.text
    assert reply.report.accepted > 0


def test_prefilter_refutes_a_step_with_another_number_early() -> None:
    long = ["It is 12 and then some more and more and more of it.\n\n", "Done."]
    pair = Pair(long, ["It is 11.\n\n", "Done."], target_seconds=20, two_tokenizers=True)
    reply = pair.run(PrefilterVerifier(ACCEPT_ALL))
    assert reply.report.refuted == 1
    assert reply.text == "".join(long)


@pytest.mark.parametrize("max_tokens", [1, 3, 5, 9, 12])
def test_max_tokens_counts_the_targets_tokens(max_tokens: int) -> None:
    pair = Pair(STEPS, OTHER, two_tokenizers=True)
    reply = pair.run(ACCEPT_ALL, sampling=Sampling(max_tokens=max_tokens))
    assert len(reply.token_ids) == max_tokens
    assert reply.finish_reason == "length"


def test_synchronous_and_tree_decoding_are_lossless_with_two_tokenizers() -> None:
    for settings in (DecodingSettings(synchronous=True), DecodingSettings(width=2)):
        pair = Pair(STEPS, OTHER, two_tokenizers=True, sampled=STEPS)
        assert pair.run(ExactVerifier(), settings).text == "".join(STEPS)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HFTokenizer:
    """A tokenizer with a token for each byte, so that most characters have several."""
    folder = tmp_path_factory.mktemp("bytes")
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = HFBackend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="!").save_pretrained(folder)
    return HFTokenizer(folder)


@pytest.mark.parametrize("prompt", ["", "a <stop>", "ééé"])
def test_a_stream_that_begins_within_a_character_repeats_nothing(byte_tokenizer: HFTokenizer, prompt: str) -> None:
    ids = byte_tokenizer.encode(f"{prompt}🪿 é.")
    begins = len(byte_tokenizer.encode(prompt))
    for inside, text in ((0, "🪿 é."), (1, "🪿 é."), (2, "🪿 é."), (3, "🪿 é."), (4, " é."), (5, "é."), (6, "é.")):
        stream = byte_tokenizer.stream(ids[: begins + inside])
        assert "".join([*map(stream.push, ids[begins + inside :]), stream.flush()]) == text


@pytest.mark.parametrize("decoding", [DecodingSettings(depth=2), DecodingSettings(depth=2, synchronous=True)])
@pytest.mark.parametrize("stop", ["<stop>", ".<"])
def test_a_stop_string_of_the_prompt_ends_no_step_that_begins_within_a_character(
    byte_tokenizer: HFTokenizer, decoding: DecodingSettings, stop: str
) -> None:
    prompt, reply = byte_tokenizer.encode("A bird.<stop>"), byte_tokenizer.encode("🪿 flies.\n\nThe end")
    reply.append(min(byte_tokenizer.eos_ids))

    class Fixed:
        tokenizer, context_length, healthy, in_flight = byte_tokenizer, 1000, True, 0

        async def generate(self, ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
            for token in reply[len(ids) - len(prompt) :][: sampling.max_tokens]:
                await asyncio.sleep(0.1)
                yield Delta((token,), None, "stop" if token in self.tokenizer.eos_ids else None)

    request = ReplyRequest(tuple(prompt), Sampling(max_tokens=100, stop=(stop,)))
    short = replace(decoding, max_step_tokens=3)  # the limit falls within the bird
    written = run_in_virtual_time(lookahead(request, Fixed(), Fixed(), ExactVerifier(), short))  # type: ignore[arg-type]
    assert written.text == "🪿 flies.\n\nThe end"
