"""Proposes the tokens of a shared draft in a replay, where equal tokens after different prefixes have different ids."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from lookahead_agent.engines.shared_draft import Ids
from lookahead_agent.engines.shared_draft_proposer import ReadLine, SharedDraftProposer
from lookahead_agent.replay.replies import EOS, TABLE, UNRECORDED


class ReplayProposer(SharedDraftProposer):
    """Compares recorded tokens, so that a draft finds its place again as in the recorded run."""

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        with np.load(vllm_config.additional_config[TABLE]) as file:
            self._tokens: Ids = file["tokens"]
            ids = zip(file["prefixes"].tolist(), self._tokens.tolist(), strict=True)
        self._ids = {key: number for number, key in enumerate(ids)}

    def propose_for_reply(self, written: Ids, lines: Sequence[ReadLine], limit: int) -> list[int]:
        """Propose recorded tokens, as ids after the reply's own prefix; see `SharedDraftProposer`."""
        recorded = [line._replace(token_ids=self._tokens[line.token_ids]) for line in lines]
        last, ids = int(written[-1]), []
        for token in super().propose_for_reply(self._tokens[written], recorded, limit):
            last = EOS if token == self._tokens[EOS] else self._ids.get((last, token), UNRECORDED)
            ids.append(last)
        return ids
