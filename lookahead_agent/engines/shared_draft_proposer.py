"""Proposes what a shared draft has written; vLLM asks for it at every forward pass (method `custom_class`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lookahead_agent.engines.draft_length import DraftLength, propose
from lookahead_agent.engines.shared_draft import Ids, ReadLine, SharedDraftReader, checksum

BUFFER = "lookahead_shared_draft"
"""Entry of vLLM's `additional_config`: the buffer's file."""
COSTS = "lookahead_pass_costs"
"""Entry of vLLM's `additional_config`: the cost of a pass by its number of tokens, as pairs."""
PATH = f"{__name__}.SharedDraftProposer"

# A pass of few tokens costs about as much as one of a single token, until arithmetic takes longer than reading the
# weights does: what is assumed of a machine that was not measured.
UNMEASURED = {1: 1.0, 8: 1.3, 32: 2.5, 64: 4.5}


class SharedDraftProposer:
    """Proposes what the draft has written already, which costs no time of a model.

    Args:
        vllm_config: The target engine's configuration, with the entries `BUFFER` and possibly `COSTS`.
    """

    def __init__(self, vllm_config: Any) -> None:
        given = vllm_config.additional_config
        self._buffer = SharedDraftReader(Path(given[BUFFER]))
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
        """Propose what follows each reply.

        Args:
            sampled_token_ids: The tokens that each reply won in the last pass; none while its prompt is read.
            num_tokens_no_spec: Tokens of prompt and reply, those included, shape (replies,).
            token_ids_cpu: They themselves, shape (replies, context).

        Returns:
            Draft tokens by reply.
        """
        for proposed, won in zip(self._proposed, sampled_token_ids, strict=False):
            self._count.learn(proposed, max(len(won) - 1, 0))
        writing = [index for index, won in enumerate(sampled_token_ids) if len(won)]
        most = self._count.best(len(writing)) if writing else 0
        proposals: list[list[int]] = [[] for _ in sampled_token_ids]
        lines = self._buffer.lines() if most else []
        for index in writing if lines else ():
            length = int(num_tokens_no_spec[index])
            room = self._context - length - 1
            written = token_ids_cpu[index, :length]
            found = propose(written, _of_reply(written, lines), min(most, room)) if room > 0 else []
            # The buffer may be written to at this very moment; a number that is no token would be one to vLLM.
            proposals[index] = found if all(0 <= token < self._vocabulary for token in found) else []
        self._proposed = [len(found) for found in proposals]
        return proposals


def _of_reply(written: Ids, lines: Sequence[ReadLine]) -> list[ReadLine]:
    """The lines that were begun for the prompt with which `written` begins."""
    sums: dict[int, int] = {}
    found = []
    for line in lines:
        length = line.prompt_length
        if length > len(written):
            continue
        if length not in sums:
            sums[length] = checksum(written[:length])
        if sums[length] == line.prompt_sum:
            found.append(line)
    return found
