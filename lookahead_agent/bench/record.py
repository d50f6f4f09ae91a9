"""The prompts of a recording: questions, or those of an agent's node."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from langchain_core.messages import HumanMessage

from lookahead_agent.bench.config import TaskConfig
from lookahead_agent.bench.problems import Problem
from lookahead_agent.bench.runner import solve
from lookahead_agent.bench.samples import environment
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.chat.requests import matching_key
from lookahead_agent.decoding.request import Reply, ReplyRequest
from lookahead_agent.decoding.verifier import DraftVerifier
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.generation.backend import GenerateRequest
from lookahead_agent.generation.call_options import CallOptions
from lookahead_agent.generation.generator import ReplyGenerator, decoding_settings
from lookahead_agent.generation.tool_parsers import choose_tool_parser
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.replay.recorder import Recorder
from lookahead_agent.replay.recording import Recording
from lookahead_agent.runtime.engine_set import EngineSet


class _Asked(BaseException):
    """Ends a call at its request; no handler of an agent's errors catches it."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        self.request = request


class AskingModel(ChatLookahead):
    """A chat model whose calls in a node end with their request, before a reply is written."""

    asking_node: str  # the graph's node whose calls end with their request

    @classmethod
    def of(cls, llm: ChatLookahead, node: str) -> Self:
        """A model with the fields, and so the engines, of another."""
        return cls(**{name: getattr(llm, name) for name in llm.model_fields_set}, asking_node=node)

    def request(self, *args: Any, **options: Any) -> GenerateRequest:
        """Create the request of a call."""
        request = super().request(*args, **options)
        if matching_key((self.asking_node,), request.node) is not None:
            raise _Asked(request)
        return request

    def warm(self, *args: Any, **options: Any) -> None:
        """Leave the engines cold: what a graph warms is the beginning of a prompt, and not a call's."""


def request_of(llm: ChatLookahead, task: TaskConfig, problem: Problem) -> GenerateRequest:
    """The request of a question, or of the first call in the node of an `AskingModel`.

    Raises ConfigurationError if the task calls no model in the node.
    """
    if not isinstance(llm, AskingModel):
        return llm.request([HumanMessage(problem.question)], CallOptions())
    try:
        solve(task, llm, problem.question, llm.seed, {}, needs=problem.tools)
    except _Asked as asked:
        request: GenerateRequest = asked.request
        return request
    raise ConfigurationError(f"{task.task} calls no model in the node {llm.asking_node!r} on problem {problem.id}")


class _RequestReader(ReplyGenerator):
    """Creates the decoder's request of a call, without decoding it."""

    async def decoder_request(self) -> ReplyRequest:
        target = self.engines.target
        try:
            await self._generate(self._prompt(target.tokenizer, target.context_length), self.request.sampling)
        except _Asked as asked:
            request: ReplyRequest = asked.request
            return request
        raise AssertionError

    async def _decode(self, prompt: list[int], sampling: Any, regions: Any, *_: Any, **__: Any) -> Reply:
        raise _Asked(ReplyRequest(tuple(prompt), sampling, self.request.question, regions))


async def record_replies(llm: ChatLookahead, requests: Mapping[str, GenerateRequest], depth: int) -> list[Recording]:
    """Record what the chat model's pair writes to requests of one policy, by name, at once."""
    first = next(iter(requests.values()))
    async with llm.backend.engines(first.policy) as engines:
        if engines.draft is None:
            raise ConfigurationError("a recording needs a draft model")
        asked = {}
        for name, request in requests.items():
            parser = choose_tool_parser(request.tool_parser, engines.target.tokenizer)
            generator = _RequestReader(request, engines, llm.backend.thinking(engines), parser)
            asked[name] = await generator.decoder_request()
        settings = {
            "model": llm.model,
            "policy": first.policy.name,
            "depth": depth,
            "max_tokens": first.sampling.max_tokens,
        }
        return await _recorder(engines, first.policy, settings).record(asked)


def _recorder(engines: EngineSet, policy: VerifierPolicy, settings: dict[str, Any]) -> Recorder:
    verifier = engines.verifier(policy)
    if verifier is None or isinstance(verifier, DraftVerifier) or not isinstance(policy.delimiter, str):
        raise ConfigurationError(
            engines.explain_missing(policy)
            or f"the policy {policy.name} cannot be recorded: choose one that compares steps, and a text as delimiter"
        )
    decoding = replace(decoding_settings(policy), depth=settings["depth"])
    early = "exact" if policy.verifier == "exact" else "results" if policy.compares_results else None
    settings |= {
        "models": engines.names,
        "precision": engines.precision,
        "delimiter": decoding.delimiter,
        "max_step_tokens": decoding.max_step_tokens,
        "early": early,
    }
    return Recorder(
        engines.target,
        engines.draft or engines.target,
        verifier,
        decoding,
        settings=settings,
        environment=environment(),
    )


def check_settings(rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Raise ConfigurationError if a file has recordings of other settings."""
    for row in rows:
        recorded = row.get("settings") or {}
        if different := [name for name, value in settings.items() if recorded.get(name) != value]:
            raise ConfigurationError(
                f"the file has recordings with another {', '.join(different)}: choose another file (--out)"
            )
