"""Recordings as problems of a benchmark, and chat models whose replies they are."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from lookahead_agent.bench.config import BenchConfig, ModeName, TaskConfig, TaskConfiguration, chat_model, make_config
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import Sample
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.engines.vllm_config import runs_on_cpu
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.backend import GenerateRequest
from lookahead_agent.hardware.gpus import kv_cache_bytes_per_token
from lookahead_agent.modes.table import LOOKAHEAD, defaults_of
from lookahead_agent.policy import VerifierPolicy, as_policy
from lookahead_agent.replay.ids import UNRECORDED, ReplayIds
from lookahead_agent.replay.recording import Recording
from lookahead_agent.replay.verdicts import RecordedVerifier
from lookahead_agent.system.files import write_atomically
from lookahead_agent.verifiers.results import PrefilterVerifier

REPLAYED: tuple[ModeName, ...] = ("off", "sd", "shared_draft", "lr", "lr+sd", "lr+shared_draft")
_MODEL_FREE = ("exact", "random")  # verifiers that take no time, and so decide a replay too
_SLACK = 64  # tokens of an engine's context beyond the longest reply, for draft tokens


class ReplayingModel(ChatLookahead):
    """A chat model that answers the name of a recording by its reply, from the recorded prompt."""

    ids: ReplayIds

    @classmethod
    def of(cls, llm: ChatLookahead, ids: ReplayIds) -> Self:
        """A model with the fields, and so the engines, of another."""
        return cls(**{name: getattr(llm, name) for name in llm.model_fields_set}, ids=ids)

    def request(self, *args: Any, **options: Any) -> GenerateRequest:
        """Create the request of a call; another text than a name has a prompt that nothing recorded follows."""
        request = super().request(*args, **options)
        if (reply := self.ids.replies.get(request.question)) is None:
            return replace(request, messages=None, prompt=[UNRECORDED])
        recording = reply.recording
        return replace(
            request,
            messages=None,
            prompt=list(reply.prompt),
            question=recording.question,
            action_markers=recording.regions.action_markers,
            sampling=replace(request.sampling, max_tokens=recording.max_tokens),
        )


class ReplayBench:
    """A benchmark of recordings on engines of any shape.

    With `head`, an EAGLE-3 head of these acceptance rates by position drafts in the modes "sd" and "lr+sd".
    The folders of its models lie beside the results. Raises ConfigurationError for recordings of several settings, and
    the errors of `ReplayIds`.
    """

    def __init__(
        self,
        recordings: Sequence[Recording],
        shapes: tuple[Path, Path],
        out: Path,
        *,
        task: dict[str, Any],
        engine_args: dict[str, Any],
        real_verifier: bool = False,
        judge: str | None = None,
        head: Sequence[float] = (),
        make: Callable[..., ChatLookahead] = ChatLookahead,
        on_cpu: bool | None = None,
    ) -> None:
        self._on_cpu = runs_on_cpu() if on_cpu is None else on_cpu
        self._ids = ReplayIds(recordings)
        self._settings = recordings[0].settings
        if any(recording.settings != self._settings for recording in recordings):
            raise ConfigurationError("the recordings have different settings: replay each file alone")
        self._real_verifier = real_verifier
        self._judge = judge
        self._make = make
        folder = out.with_name(f"{out.stem}-models")
        target, draft, problems = folder / "target", folder / "draft", folder / "problems.jsonl"
        self._precision = self._settings.get("precision", {}) if self._on_cpu else {}
        self._ids.write_model("target", shapes[0], target, int8=self._precision.get("target") == "int8")
        self._ids.write_model("draft", shapes[1], draft, int8=self._precision.get("draft") == "int8")
        rows = [{"id": name, "question": name} for name in self._ids.replies]
        write_atomically(problems, "".join(f"{json.dumps(row)}\n" for row in rows))
        token_speculation: str | dict[str, Any] = "draft_model"
        if head:
            token_speculation = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": len(head)}
            self._ids.write_head(shapes[0], folder / "head", head)
        task = {"policies": [self._settings.get("policy", "balanced")], **task} if _speculates(task) else task
        config = make_config(
            {
                "model": str(target),
                "draft_model": str(draft),
                "judge_model": judge,
                "token_speculation": token_speculation,
                "engine_args": self._engine_args([target, draft], engine_args, task),
                "draft_engine_args": self._engine_args([draft], engine_args, task),
                "tasks": [{"name": "replay", "dataset": str(problems), **task}],
            }
        )
        self.bench = Bench(config, out, self.chat_model)

    def find_differences(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with tokens that no recording has, or other tokens than the target's own reply without steps.

        With steps, the decoder rejects a draft step that comes after the target's step. So speeds decide which recorded
        steps a reply has.
        """
        return [sample for sample in samples if self._differs(sample)]

    def _differs(self, sample: Sample) -> bool:
        reply = self._ids.replies.get(sample.problem)
        if reply is None:  # the sample is of an earlier run with more recordings
            return False
        written = sample.calls[-1].token_ids if sample.calls else None
        if sample.mode not in LOOKAHEAD:
            return written != list(reply.target_alone)
        return not written or UNRECORDED in written

    def _engine_args(self, folders: Sequence[Path], given: dict[str, Any], task: dict[str, Any]) -> dict[str, Any]:
        """The arguments of an engine; on a GPU with room for these replies, so that all engines fit beside others."""
        arguments = {"load_format": "dummy", **given}
        if self._on_cpu:
            return {"dtype": defaults_of().dtype_of(self._precision.get("target", "bf16"))} | arguments
        replies = [(len(reply.prompt) + reply.recording.max_tokens) for reply in self._ids.replies.values()]
        context = arguments.setdefault("max_model_len", max(replies) + _SLACK)
        # A reply, and as much again for the steps ahead of it.
        tokens = 2 * int(task.get("concurrency", 1)) * context
        size = tokens * sum(kv_cache_bytes_per_token(folder, arguments) for folder in folders)
        return {"gpu_memory_utilization": 0.01, "kv_cache_memory_bytes": size} | arguments

    def chat_model(self, config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        """Create the chat model of a configuration, whose problems are names of recordings; nothing is loaded yet."""

        def make(**fields: Any) -> ChatLookahead:
            fields["policy"] = self._policy(fields["policy"])
            if fields["draft_model"] is not None:  # also inside the target's engine, it has no weights to convert
                fields["draft_engine_args"] = config.draft_engine_args
            return ReplayingModel.of(self._make(**fields), self._ids)

        return chat_model(config, task, configuration, make=make, on_cpu=self._on_cpu)

    def _policy(self, name: str) -> VerifierPolicy:
        """A policy with the recorded rules of steps, and with the recorded verdicts unless the real verifier runs."""
        policy = as_policy(name)
        if not policy.speculates:
            return policy
        changes: dict[str, Any] = {
            rule: self._settings[rule] for rule in ("delimiter", "max_step_tokens") if rule in self._settings
        }
        if self._real_verifier and policy.asks_judge and self._judge is None:
            raise ConfigurationError(f"the policy {name} asks a judge, and a replayed target cannot judge: add --judge")
        policy = policy.model_copy(update=changes)
        if policy.verifier in _MODEL_FREE or self._real_verifier:
            return policy
        recorded = RecordedVerifier(self._ids.replies.values())
        same_results = self._settings.get("early") == "results"
        return policy.with_verifier({"verifier": PrefilterVerifier(recorded, same_results=same_results)})


def _speculates(task: dict[str, Any]) -> bool:
    return any(mode in LOOKAHEAD for mode in task["modes"])
