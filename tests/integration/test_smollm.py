"""SmolLM2-135M, of another model family than the target, as judge; `test_two_tokenizers.py` tests such a draft."""

from __future__ import annotations

import pytest

from lookahead_agent import ChatLookahead
from lookahead_agent.models.catalogue import SMOLLM2_135M
from tests.integration.test_real_pair import PROBLEMS

JUDGE_ENGINE = {"max_model_len": 2048, "kv_cache_memory_bytes": 1 << 28, "dtype": "float32"}


@pytest.mark.timeout(1200)
def test_third_model_judges_draft_steps(real: ChatLookahead) -> None:
    with ChatLookahead(
        judge_model=SMOLLM2_135M.hub_id,
        judge_engine_args=JUDGE_ENGINE,
        policy="judge",
        depth=real.depth,
        token_speculation=real.token_speculation,
        temperature=0,
        max_tokens=60,
    ) as llm:
        policy = {"verifier": "judge", "same_numbers": False, "p_aligned": 0.0}
        metadata = llm.invoke(PROBLEMS[0], policy=policy).response_metadata["lookahead"]
        assert metadata["speculation_disabled"] is None
        assert metadata["judge_calls"] > 0
        assert llm.backend.runtime is not None
        assert len(llm.backend.runtime.launcher.held) == 3
