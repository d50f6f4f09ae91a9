"""Proposes the tokens of a shared draft; vLLM asks for them at every forward pass (method `custom_class`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lookahead_agent.engines.shared_draft import Ids, checksum, open_buffer
from lookahead_agent.system.passes import cost_at, tokens_per_pass

BUFFER = "lookahead_shared_draft"  # key in vLLM's `additional_config`: the path of the buffer's file
COSTS = "lookahead_pass_costs"  # another key there: the cost of a pass by its number of tokens, as pairs
ACCEPTANCE = "lookahead_acceptance_rate"  # and another: the expected acceptance rate of draft tokens
PATH = f"{__name__}.SharedDraftProposer"

# The costs assumed for an unmeasured machine. A pass of few tokens costs about as much as one of a single token, until
# arithmetic takes longer than reading the weights.
UNMEASURED = {1: 1.0, 8: 1.3, 32: 2.5, 64: 4.5}
UNMEASURED_RATE = 0.8  # the acceptance rate assumed likewise
FULL_MATCH = 4  # most tokens that are compared with a line, at the expected position or elsewhere in it
MIN_MATCH = 2  # tokens that must match elsewhere in a line: a single token occurs everywhere


class SharedDraftProposer:
    """Proposes the tokens that the draft has written; vLLM's configuration has `BUFFER`, and may have other keys."""

    def __init__(self, vllm_config: Any) -> None:
        config = vllm_config.additional_config
        self._buffer = open_buffer(Path(config[BUFFER]))
        self._context_length = int(vllm_config.model_config.max_model_len)
        self._vocabulary_size = int(vllm_config.model_config.get_vocab_size())
        costs = dict(config.get(COSTS) or UNMEASURED)
        limit = int(vllm_config.speculative_config.num_speculative_tokens)
        self._draft_length = DraftLength(limit, costs, float(config.get(ACCEPTANCE, UNMEASURED_RATE)))
        self._proposed: list[int] = []

    def load_model(self, *_: Any, **__: Any) -> None:
        """Do nothing, since there is no model to load; vLLM's CPU runner calls this."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Ids, token_ids_cpu: Ids, **_: Any
    ) -> list[list[int]]:
        """Return the draft tokens of each reply; vLLM calls this.

        Args:
            sampled_token_ids: The tokens that each reply gained in the last pass; none during its prefill.
            num_tokens_no_spec: Tokens of prompt and reply, including those, shape (replies,).
            token_ids_cpu: The token ids of prompt and reply, shape (replies, context).
        """
        for proposed, sampled in zip(self._proposed, sampled_token_ids, strict=False):
            self._draft_length.learn(proposed, max(len(sampled) - 1, 0))
        decoding = [index for index, sampled in enumerate(sampled_token_ids) if len(sampled)]
        limit = self._draft_length.best(len(decoding)) if decoding else 0
        proposals: list[list[int]] = [[] for _ in sampled_token_ids]
        lines = read_lines(self._buffer) if limit else []
        for index in decoding if lines else ():
            length = int(num_tokens_no_spec[index])
            room = self._context_length - length - 1
            written = token_ids_cpu[index, :length]
            proposal = propose(written, _lines_of_reply(written, lines), min(limit, room)) if room > 0 else []
            # A concurrent write may leave numbers in the buffer that are not token ids; vLLM would use them as such.
            proposals[index] = proposal if all(0 <= token < self._vocabulary_size for token in proposal) else []
        self._proposed = [len(proposal) for proposal in proposals]
        return proposals


class ReadLine(NamedTuple):
    """A snapshot of a buffer's line: see `shared_draft._LINE`; token ids have the shape (m,)."""

    prompt_length: int
    prompt_sum: int
    origin: int
    token_ids: Ids


def read_lines(buffer: Any) -> list[ReadLine]:
    """The lines in use in a buffer, newest last."""
    used = buffer[buffer["length"] > 0]  # a copy
    return [
        ReadLine(int(line["prompt_length"]), int(line["prompt_sum"]), int(line["origin"]), line["token_ids"][:length])
        for line in used[np.argsort(used["age"])]
        if (length := int(line["length"])) > 0
    ]


def _lines_of_reply(written: Ids, lines: Sequence[ReadLine]) -> list[ReadLine]:
    """The lines whose prompt is the beginning of `written`."""
    lengths = {line.prompt_length for line in lines if line.prompt_length <= len(written)}
    sums = {length: checksum(written[:length]) for length in lengths}
    return [line for line in lines if sums.get(line.prompt_length) == line.prompt_sum]


def propose(written: Ids, lines: Sequence[ReadLine], limit: int) -> list[int]:
    """The most likely next tokens, as far as a line contains them, at most `limit`.

    A line that agrees with the end of prompt and reply, shape (n,), is followed. If the target has left every line, the
    longest match of its last tokens is followed: the more tokens match, the more are proposed.
    """
    proposal: list[int] = []
    for line in lines:
        at = len(written) - line.origin
        begin = max(0, at - FULL_MATCH)
        if 0 < at <= len(line.token_ids) and np.array_equal(written[line.origin + begin :], line.token_ids[begin:at]):
            ahead = line.token_ids[at : at + limit]
            if len(ahead) >= len(proposal):
                proposal = ahead.tolist()
    return proposal or _match_elsewhere(written, lines, limit)


def _match_elsewhere(written: Ids, lines: Sequence[ReadLine], limit: int) -> list[int]:
    best: tuple[int, float] = (MIN_MATCH - 1, 0.0)
    proposal: list[int] = []
    for line in lines:
        tokens = line.token_ids
        if len(tokens) <= MIN_MATCH or len(written) < MIN_MATCH:
            continue
        # Ends (exclusive) of matches of the last token that another token follows.
        ends = np.flatnonzero(tokens[:-1] == written[-1]) + 1
        for end in ends.tolist():
            matched = 1
            while matched < FULL_MATCH and matched < end and tokens[end - 1 - matched] == written[-1 - matched]:
                matched += 1
            closeness = -abs(end - (len(written) - line.origin))
            if (matched, closeness) > best and matched >= MIN_MATCH:
                best = matched, closeness
                proposal = tokens[end : end + min(limit, 2 * matched)].tolist()
    return proposal


class DraftLength:
    """Chooses how many draft tokens per reply pay, at most `limit`, from pass costs and the acceptance rate.

    With k draft tokens, a pass yields `tokens_per_pass`. It costs as much as a batch of k+1 tokens for each reply. The
    `acceptance_rate` counts as some draft tokens.
    """

    _MEMORY = 64.0  # draft tokens that are remembered: older counts decay
    _PRIOR_TOKENS = 8  # draft tokens for which the expected acceptance rate counts
    _TRIAL_INTERVAL = 24  # passes without draft tokens before one is tried again: the text may have become easier

    def __init__(self, limit: int, costs: Mapping[int, float], acceptance_rate: float = UNMEASURED_RATE) -> None:
        self._limit = limit
        self._costs = dict(costs)
        self._accepted = acceptance_rate * self._PRIOR_TOKENS
        self._rejected = self._PRIOR_TOKENS - self._accepted
        self._skipped_passes = 0

    @property
    def acceptance_rate(self) -> float:
        """The acceptance rate of the verified draft tokens."""
        return self._accepted / (self._accepted + self._rejected)

    def learn(self, proposed: int, accepted: int) -> None:
        """Count one reply's draft tokens: those after the first rejected one were not verified."""
        if not proposed:
            return
        fade = 1 - (accepted + 1) / self._MEMORY
        self._accepted = self._accepted * fade + accepted
        self._rejected = self._rejected * fade + (accepted < proposed)

    def best(self, replies: int) -> int:
        """The number of draft tokens for each of `replies` concurrent replies; 0 if none pay, except for trials."""
        p = min(self.acceptance_rate, 0.999)
        gains = [
            tokens_per_pass(count, p) / cost_at(self._costs, replies * (count + 1)) for count in range(self._limit + 1)
        ]
        count = int(np.argmax(gains))
        self._skipped_passes = 0 if count or self._skipped_passes >= self._TRIAL_INTERVAL else self._skipped_passes + 1
        return count or (1 if self._skipped_passes == self._TRIAL_INTERVAL else 0)
