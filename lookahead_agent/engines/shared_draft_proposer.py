"""Proposes what a shared draft has written; vLLM asks for it at every forward pass (method `custom_class`)."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead_agent.engines.shared_draft import Ids, checksum, open_buffer

BUFFER = "lookahead_shared_draft"  # entry of vLLM's `additional_config`: the buffer's file
COSTS = "lookahead_pass_costs"  # another entry of it: the cost of a pass by its number of tokens, as pairs
PATH = f"{__name__}.SharedDraftProposer"

# A pass of few tokens costs about as much as one of a single token, until arithmetic takes longer than reading the
# weights does: what is assumed of a machine that was not measured.
UNMEASURED = {1: 1.0, 8: 1.3, 32: 2.5, 64: 4.5}
SURE = 4  # tokens that must agree with a line where it should be, or elsewhere in it, for any number of proposals
LEAST = 2  # tokens that must agree elsewhere in a line: one is met everywhere


class SharedDraftProposer:
    """Proposes what the draft has written already, by vLLM's configuration with `BUFFER` and possibly `COSTS`."""

    def __init__(self, vllm_config: Any) -> None:
        given = vllm_config.additional_config
        self._buffer = open_buffer(Path(given[BUFFER]))
        self._context = int(vllm_config.model_config.max_model_len)
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())
        costs = dict(given.get(COSTS) or UNMEASURED)
        self._count = DraftLength(int(vllm_config.speculative_config.num_speculative_tokens), costs)
        self._proposed: list[int] = []

    def load_model(self, *_: Any, **__: Any) -> None:
        """Nothing is to be loaded; vLLM's CPU runner calls it."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Ids, token_ids_cpu: Ids, **_: Any
    ) -> list[list[int]]:
        """Draft tokens by reply; vLLM calls it.

        Args:
            sampled_token_ids: The tokens that each reply won in the last pass; none while its prompt is read.
            num_tokens_no_spec: Tokens of prompt and reply, those included, shape (replies,).
            token_ids_cpu: They themselves, shape (replies, context).
        """
        for proposed, won in zip(self._proposed, sampled_token_ids, strict=False):
            self._count.learn(proposed, max(len(won) - 1, 0))
        writing = [index for index, won in enumerate(sampled_token_ids) if len(won)]
        most = self._count.best(len(writing)) if writing else 0
        proposals: list[list[int]] = [[] for _ in sampled_token_ids]
        lines = read_lines(self._buffer) if most else []
        for index in writing if lines else ():
            length = int(num_tokens_no_spec[index])
            room = self._context - length - 1
            written = token_ids_cpu[index, :length]
            found = propose(written, _of_reply(written, lines), min(most, room)) if room > 0 else []
            # The buffer may be written to at this very moment; a number that is no token would be one to vLLM.
            proposals[index] = found if all(0 <= token < self._vocabulary for token in found) else []
        self._proposed = [len(found) for found in proposals]
        return proposals


class ReadLine(NamedTuple):
    """A line of a buffer as it was at one moment: see `shared_draft._LINE`; token ids have the shape (m,)."""

    prompt_length: int
    prompt_sum: int
    origin: int
    token_ids: Ids


def read_lines(buffer: Any) -> list[ReadLine]:
    """The lines that are in a buffer, newest last."""
    used = buffer[buffer["length"] > 0]  # a copy
    return [
        ReadLine(int(line["prompt_length"]), int(line["prompt_sum"]), int(line["origin"]), line["token_ids"][:length])
        for line in used[np.argsort(used["age"])]
        if (length := int(line["length"])) > 0
    ]


def _of_reply(written: Ids, lines: Sequence[ReadLine]) -> list[ReadLine]:
    """The lines that were begun for the prompt with which `written` begins."""
    lengths = {line.prompt_length for line in lines if line.prompt_length <= len(written)}
    sums = {length: checksum(written[:length]) for length in lengths}
    return [line for line in lines if sums.get(line.prompt_length) == line.prompt_sum]


def propose(written: Ids, lines: Sequence[ReadLine], most: int) -> list[int]:
    """The tokens that most likely follow, as far as one of the lines knows, at most `most`.

    A line that goes on from just after prompt and reply, shape (n,), is believed. Where the target has left every line,
    the place with its last words is looked for: the more words agree, the more tokens are proposed.
    """
    found: list[int] = []
    for line in lines:
        at = len(written) - line.origin
        begin = max(0, at - SURE)
        if 0 < at <= len(line.token_ids) and np.array_equal(written[line.origin + begin :], line.token_ids[begin:at]):
            ahead = line.token_ids[at : at + most]
            if len(ahead) >= len(found):
                found = ahead.tolist()
    return found or _met_again(written, lines, most)


def _met_again(written: Ids, lines: Sequence[ReadLine], most: int) -> list[int]:
    best: tuple[int, float] = (LEAST - 1, 0.0)
    found: list[int] = []
    for line in lines:
        tokens = line.token_ids
        if len(tokens) <= LEAST or len(written) < LEAST:
            continue
        # Ends (exclusive) of places where the last token was met and something follows.
        ends = np.flatnonzero(tokens[:-1] == written[-1]) + 1
        for end in ends.tolist():
            agreed = 1
            while agreed < SURE and agreed < end and tokens[end - 1 - agreed] == written[-1 - agreed]:
                agreed += 1
            near = -abs(end - (len(written) - line.origin))
            if (agreed, near) > best and agreed >= LEAST:
                best = agreed, near
                found = tokens[end : end + min(most, 2 * agreed)].tolist()
    return found


def cost_at(costs: Mapping[int, float], tokens: float) -> float:
    """The cost of a pass of so many tokens, by measured ones: between them on a straight line, beyond them too."""
    sizes = sorted(costs)
    if len(sizes) == 1:
        return costs[sizes[0]]
    low, high = next(((low, high) for low, high in pairwise(sizes) if tokens <= high), (sizes[-2], sizes[-1]))
    return costs[low] + (costs[high] - costs[low]) * (tokens - low) / (high - low)


class DraftLength:
    """As many draft tokens for each reply as pay, at most `most`, by costs of passes and by what is accepted.

    Of k draft tokens that are each accepted with probability p, a pass gains (1-p^(k+1))/(1-p) tokens and costs what a
    batch of k+1 tokens for each reply costs.
    """

    _MEMORY = 64.0  # draft tokens that are remembered: older ones fade
    _TRY_AGAIN = 24  # Passes without draft tokens after which one is tried again: what follows may be easier

    def __init__(self, most: int, costs: Mapping[int, float]) -> None:
        self._most = most
        self._costs = dict(costs)
        self._accepted, self._rejected = 0.8 * 8, 0.2 * 8  # what is assumed before anything is known
        self._without = 0

    @property
    def acceptance_rate(self) -> float:
        """Acceptance rate of the draft tokens that were checked."""
        return self._accepted / (self._accepted + self._rejected)

    def learn(self, proposed: int, accepted: int) -> None:
        """Count one reply's draft tokens: those after the first rejected one were not checked."""
        if not proposed:
            return
        fade = 1 - (accepted + 1) / self._MEMORY
        self._accepted = self._accepted * fade + accepted
        self._rejected = self._rejected * fade + (accepted < proposed)

    def best(self, replies: int) -> int:
        """Draft tokens for each of so many replies at once; 0 if none pay, but for a try now and then."""
        p = min(self.acceptance_rate, 0.999)
        gains = [
            (1 - p ** (count + 1)) / (1 - p) / cost_at(self._costs, replies * (count + 1))
            for count in range(self._most + 1)
        ]
        count = int(np.argmax(gains))
        self._without = 0 if count or self._without >= self._TRY_AGAIN else self._without + 1
        return count or (1 if self._without == self._TRY_AGAIN else 0)
