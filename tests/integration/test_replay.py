"""A recording of a tiny pair, replayed on tiny engines of another shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from langchain_core.messages import HumanMessage

from lookahead_agent import ChatLookahead
from lookahead_agent.bench.record import record_replies
from lookahead_agent.bench.replay import REPLAYED
from lookahead_agent.bench.samples import read_results
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.replay.recording import Recording
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.verifiers.model_free import hash_to_unit_interval
from tests.integration.command_line import run_in_process
from tests.integration.conftest import TINY_ENGINE
from tests.integration.tiny_models import questions

SHAPE = {
    "vocab_size": 16_384,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


def shape(folder: Path, kind: str, **changes: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(SHAPE | {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"]} | changes)
    )
    return folder


class Lenient:
    """Accepts equal steps, and about half of the others."""

    async def verify(self, pair: StepPair) -> Verdict:
        drawn = hash_to_unit_interval(pair.before, pair.draft.text)
        return Verdict(pair.same_text or drawn < 0.5, "drawn", drawn)


def record(llm: ChatLookahead, count: int) -> list[Recording]:
    policy = VerifierPolicy(name="balanced", verifier=Lenient(), depth=3)
    requests = {
        f"question {number}": llm.request([HumanMessage(text)], CallOptions(policy=policy))
        for number, text in enumerate(questions(count))
    }
    return background.run(record_replies(llm, requests, 3))


@pytest.mark.timeout(900)
def test_replay_writes_recorded_tokens_in_every_mode(
    tiny: ChatLookahead, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recordings = record(tiny, 3)
    assert any(0 < each.lookahead.accepted < each.lookahead.steps for each in recordings)
    assert any(each.lookahead.ids != each.target_alone.ids for each in recordings)
    file, out = tmp_path / "recordings.jsonl", tmp_path / "replay.jsonl"
    rows = RowFile(file)
    with rows.open_for_writing():
        for recording in recordings:
            rows.append(recording.model_dump(mode="json"))
    shapes = shape(tmp_path / "a", "qwen2", num_hidden_layers=3), shape(tmp_path / "b", "qwen3")
    command = ["lookahead-agent", "bench", "replay", str(file), "--out", str(out)]
    command += ["--target-shape", str(shapes[0]), "--draft-shape", str(shapes[1])]
    for name in ("kv_cache_memory_bytes", "max_model_len"):
        command += ["--engine-arg", f"{name}={TINY_ENGINE[name]}"]
    with_head = [*command, "--modes", "sd", "--head", "0.9,0.8", "--out", str(tmp_path / "head.jsonl")]
    command += ["--depths", "3"]
    done = run_in_process(command, capsys)
    differing = [line for line in done.stdout.splitlines() if line.endswith("other tokens than recorded")]
    assert all(", lr" in line for line in differing), "speeds decide which steps a reply with draft steps has"
    assert done.returncode == bool(differing), done.stderr + done.stdout
    samples = read_results(RowFile(out).rows)
    assert len(samples) == len(REPLAYED) * len(recordings)
    by_name = {recording.name: recording for recording in recordings}
    for sample in samples:
        recorded, (call,) = by_name[sample.problem], sample.calls
        assert call.speculation_disabled is None
        if not sample.mode.startswith("lr"):
            assert (call.output_tokens, call.steps) == (len(recorded.target_alone.ids), recorded.target_alone.steps)
    assert sum(sample.calls[0].accepted for sample in samples if sample.mode.startswith("lr"))
    passes = {mode: sum(sample.calls[0].passes for sample in samples if sample.mode == mode) for mode in ("off", "sd")}
    assert passes["sd"] < passes["off"], "vLLM accepts draft tokens"
    assert run_in_process(with_head, capsys).returncode == 0, "the target accepts its own tokens only"
    samples_of_head = [each for each in read_results(RowFile(tmp_path / "head.jsonl").rows) if each.mode == "sd"]
    taken = sum(each.calls[0].passes for each in samples_of_head)
    assert 2 * taken < passes["off"] < 3 * taken, "a pass writes 1 + 0.9 + 0.9 * 0.8 tokens"
    again = run_in_process(command, capsys)
    assert again.returncode == done.returncode
    assert f"{len(samples)} of {len(samples)} samples are in" in again.stderr, "the same command continues"
