"""Generates one reply on the engines of this process: its prompt, speculation mode, decoding and metadata."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyReport, ReplyRequest, lookahead
from lookahead_agent.decoding.request import PROMPT_TAIL, OnStep, Regions
from lookahead_agent.decoding.thinking import ThinkingState, closing_tokens
from lookahead_agent.engines.affinity import AFFINITY, Affinity
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.tokenizer import ChatPrompt, Tokenizer
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConfigurationError, ContextLengthError
from lookahead_agent.generation.backend import ChatReply, GenerateRequest, TextDelta
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.reader import ReadReply, ReplyReader
from lookahead_agent.generation.tool_calls import ParsedReply, is_json, parse_constrained
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 16  # tokens in which a reply that may be a call shows that it is one
_REPORT_FIELDS = (
    *("steps", "accepted", "acceptance_rate", "verifier_calls", "judge_calls", "refuted"),
    *("target_forward_passes", "proposed_tokens", "accepted_tokens", "resumptions"),
)

Emit = Callable[[TextDelta], None]
Generated = tuple[ReadReply, list[Reply]]
"""The parsed reply, and the decoder's reply for each of its parts."""


def ignore(_: object) -> None:
    """Discard text that is emitted when it is complete, or never."""


@dataclass(eq=False)
class ReplyGenerator:
    """Generates one reply without constraints, which may have tool calls."""

    request: GenerateRequest
    engines: EngineSet
    thinking: ThinkingTags | None
    parser: ToolParser
    emit: Emit = ignore
    on_step: OnStep | None = None

    def __post_init__(self) -> None:
        request, engines = self.request, self.engines
        policy, certificate, self._certificate = engines.resolve_certificate(request.policy)
        self.request = request if policy is request.policy else replace(request, policy=policy)
        self.thinking = self.thinking if request.messages is not None else None
        silence = engines.silence(policy)
        self._missing = silence or engines.explain_missing(policy)  # why there is no verifier
        self._verifier = engines.verifier(policy) if silence is None else None
        if certificate is not None and self._verifier is not None:
            self._verifier = engines.drift_monitor.wrap(self._verifier, certificate, request.audit_rate)
        self._group = f"{request.node}|{policy.name}"  # replies of comparable speed: one node under one policy
        self._choice = engines.choose_mode(
            self._group, policy, verifies=self._verifier is not None, missing=self._missing
        )
        self._skips_thinking = False  # whether the prompt closes the thinking, since the budget is 0

    async def reply(self) -> ChatReply:
        """Generate the reply; raises the errors of `LocalBackend.emit_reply`."""
        request = self.request
        affinity = Affinity(request.thread, request.messages, request.prompt, request.sampling.cache_salt)
        token = AFFINITY.set(affinity)
        try:
            return await self._reply()
        finally:
            AFFINITY.reset(token)

    async def _reply(self) -> ChatReply:
        engines = self.engines
        engines.replies_at_once += 1
        try:
            if engines.warmer.prefill_task is not None:
                await engines.warmer.stop()
            began = engines.begin_measurement()
            context = engines.target.context_length
            prompt = await asyncio.to_thread(self._prompt, engines.target.tokenizer, context)
            room = context - len(prompt)
            sampling = replace(self.request.sampling, max_tokens=min(self.request.sampling.max_tokens, room))
            read, parts = await self._generate(prompt, sampling)
            report = ReplyReport()
            for part in parts:
                report.add(part.report)
            tokens = [token for part in parts for token in part.token_ids]
            if isinstance(prompt, ChatPrompt):
                await asyncio.to_thread(engines.target.tokenizer.remember_reply, prompt, tokens)
            engines.warmer.known.append((engines.target, [*prompt, *tokens]))
            untypical = report.speculation_disabled or sampling.is_seeded or self.request.policy.forces_speculation
            await engines.learn(self._group, self._choice.mode, report, len(tokens), None if untypical else began)
        finally:
            engines.replies_at_once -= 1
            if engines.warmer.waiting:
                engines.warmer.resume()
        if engines.drift_monitor.waiting:
            engines.drift_monitor.audit_waiting()
        finish_reason = parts[-1].finish_reason
        return ChatReply(
            read.parsed.content,
            read.thinking,
            read.parsed.tool_calls,
            read.parsed.invalid_tool_calls,
            "tool_calls" if finish_reason == "stop" and read.parsed.tool_calls else finish_reason,
            len(prompt),
            read.thinking_tokens(parts[0].text_ends),
            tokens,
            self._metadata(report),
        )

    async def warm(self) -> None:
        """Queue the prompt for prefill on the local engines that the reply's mode needs."""
        engines, mode = self.engines, self._choice.mode
        drafts = mode in ("lr", "lr+sd") or (mode == "sd" and engines.shared_draft)
        for engine in (engines.target, engines.draft if drafts else None):
            if isinstance(engine, VLLMEngine):  # prefill on a server may cost money
                ids = await asyncio.to_thread(self._prompt, engine.tokenizer, engine.context_length)
                engines.warmer.add(engine, ids, drafted=mode != "off")

    def _prompt(self, tokenizer: Tokenizer, longest: int | None = None) -> list[int]:
        request, target = self.request, self.engines.target.tokenizer
        if request.messages is not None:
            arguments, whole = request.template_arguments, tokenizer is target
            if not whole:  # the draft's template may not have the target's variables
                arguments = {name: arguments[name] for name in arguments.keys() & tokenizer.template_variables}
            ids: list[int] = tokenizer.chat_prompt(request.messages, request.tools, arguments, longest, whole=whole)
        elif isinstance(request.prompt, str):
            ids = tokenizer.encode(request.prompt, longest)
        else:
            ids = list(request.prompt)
            if any(not 0 <= token < target.size for token in ids):
                raise ConfigurationError(f"the prompt has token ids outside of 0 … {target.size - 1}")
            if tokenizer is not target:
                ids = tokenizer.encode(target.decode(ids))
        if not ids:
            raise ConfigurationError("the prompt is empty")
        tags = self.thinking
        if (
            request.thinking_tokens == 0
            and tags is not None
            and tags.is_opened_by(tokenizer.decode(ids[-PROMPT_TAIL:]))
        ):
            ids += closing_tokens(tokenizer, ThinkingState(tags))
            if isinstance(ids, ChatPrompt) and ids.text is not None:
                ids.text += tags.close + tags.separator
            self._skips_thinking = True
        if longest is not None and len(ids) >= longest:
            raise ContextLengthError(
                f"the messages are {len(ids)} tokens long and the context {longest}: "
                "shorten them, or raise max_model_len in engine_args"
            )
        return ids

    async def _generate(self, prompt: list[int], sampling: Sampling) -> Generated:
        markers = self.parser.markers if self.request.tools else ()
        actions = (*(markers or ()), *self.request.action_markers)
        regions = Regions(actions, self.thinking, self.request.policy.answer_from_target or markers is None)
        # Without known markers, any text may be a call: only the target writes after the thinking.
        speculate = markers is not None or self.thinking is not None
        reader = self._reader(prompt, with_calls=True)
        decoded = await self._decode_into(reader, prompt, sampling, regions, speculate=speculate)
        # This runs in a thread: vLLM's parsers start slowly.
        read = await asyncio.to_thread(reader.finish, decoded.truncated)
        if self.request.parallel_tool_calls is False:
            read.parsed.keep_one_call()
        for piece in read.pieces:
            self.emit(piece)
        return read, [decoded]

    def _reader(self, prompt: list[int], *, with_calls: bool) -> ReplyReader:
        end, tags = self._prompt_tail(prompt), self.thinking
        return ReplyReader(
            tags,
            inside=tags is not None and tags.is_opened_by(end),
            after=tags is not None and tags.is_closed_by(end),
            parser=self.parser if with_calls and self.request.tools else None,
            tools=self.request.tools,
            emit=self.emit,
        )

    def _prompt_tail(self, prompt: list[int]) -> str:
        return self.engines.target.tokenizer.decode(prompt[-PROMPT_TAIL:])

    async def _decode_into(
        self, reader: ReplyReader, prompt: list[int], sampling: Sampling, regions: Regions, *, speculate: bool
    ) -> Reply:
        """Run the decoder and pass its text to a reader, piece by piece only if text is emitted."""
        emits = self.emit is not ignore
        decoded = await self._decode(prompt, sampling, regions, reader.push if emits else None, speculate=speculate)
        if not emits:
            reader.push(decoded.text)
        return decoded

    async def _decode(
        self,
        prompt: list[int],
        sampling: Sampling,
        regions: Regions,
        on_text: Callable[[str], None] | None,
        *,
        speculate: bool,
    ) -> Reply:
        """Run the decoder for a reply or a part of one."""
        request, engines = self.request, self.engines
        verifier = self._verifier if speculate and self._choice.mode in ("lr", "lr+sd") else None
        draft_prompt, draft_problem, draft = None, None, engines.draft
        if verifier is not None and draft and draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint:
            try:
                draft_prompt = tuple(await asyncio.to_thread(self._prompt, draft.tokenizer))
            except ConfigurationError as error:  # a reply never fails because of its draft
                verifier, draft_problem = None, f"the draft cannot take the prompt: {error}"
        sampling = replace(sampling, drafted=self._choice.mode != "off")
        settings = replace(
            decoding_settings(request.policy),
            target_timeout=request.target_timeout,
            stall_timeout=request.stall_timeout,
            shared_draft=self._choice.mode in ("sd", "lr+sd"),
        )
        decoder_request = ReplyRequest(
            tuple(prompt), sampling, request.question, regions, draft_prompt, request.thinking_tokens
        )
        reply = await lookahead(decoder_request, engines.target, draft, verifier, settings, on_text, self.on_step)
        reply.report.speculation_disabled = reply.report.speculation_disabled or draft_problem
        if (part := reply.report.silent) is not None:
            engines.remember_silence(part, request.policy, reply.report.speculation_disabled or "")
        return reply

    def _metadata(self, report: ReplyReport) -> dict[str, Any]:
        """Return `response_metadata["lookahead"]`, as the reference documents it."""
        request, engines, setup = self.request, self.engines, self.engines.engine_setup
        disabled = report.speculation_disabled
        if request.policy.speculates and self._verifier is None and not request.must_call:
            # Without a draft, and without a problem, there is nothing to disable.
            disabled = self._missing if engines.draft is not None or "draft" in engines.problems else None
        return {
            "call": request.id,
            "policy": request.policy.name,
            "selection_rule": request.selection_rule,
            "certificate": self._certificate,
            "audit": asdict(engines.drift_monitor.counts),
            "node": request.node.rpartition(":")[2] or None,
            "path": request.node or None,
            "mode": self._choice.mode,
            "mode_reason": self._choice.reason,
            "engines": {
                "speculation_method": setup.speculation_method,
                "precision": dict(setup.precision),
                "reason": setup.reason,
            }
            if setup is not None
            else {},
            **{name: getattr(report, name) for name in _REPORT_FIELDS},
            "tokens": {"target": asdict(report.target_tokens), "draft": asdict(report.draft_tokens)},
            "prompt_tokens": {"target": asdict(report.target_prompt), "draft": asdict(report.draft_prompt)},
            "seconds": report.seconds,
            "thinking_tokens": request.thinking_tokens,
            "thinking_ended_by_budget": self._skips_thinking or report.closing_tokens > 0,
            "speculation_disabled": disabled,
        }


class ConstrainedGenerator(ReplyGenerator):
    """Generates a reply under the constraint `Sampling.structured`."""

    async def _generate(self, prompt: list[int], sampling: Sampling) -> Generated:
        # A stop string may occur within a JSON string: the form would be incomplete if it ended there.
        sampling = replace(sampling, stop=())
        target, tags = self.engines.target, self.thinking
        calls = self.request.must_call
        thinks = tags is not None and not tags.is_closed_by(self._prompt_tail(prompt))
        if isinstance(target, VLLMEngine) and (thinks or (self.request.tools and not calls)):
            for structured in filter(None, (sampling.structured, self.request.form)):
                # An invalid constraint must fail before tokens are generated in vain.
                await target.check(replace(sampling, structured=structured))
        read, parts = ReadReply(), list[Reply]()
        if tags is not None and thinks:
            opened = list(prompt)
            if not tags.is_opened_by(self._prompt_tail(prompt)):
                opened += target.tokenizer.encode(f"{tags.open}\n")
            if self.request.thinking_tokens == 0:
                opened += closing_tokens(target.tokenizer, ThinkingState(tags))
                prompt, self._skips_thinking, thinks = opened, True, False
        if tags is not None and thinks:
            reader = self._reader(opened, with_calls=False)
            free = replace(sampling, structured=None, stop=(tags.close,))
            thought = await self._decode_into(reader, opened, free, Regions(thinking=tags), speculate=True)
            read = reader.finish(thought.truncated)
            for piece in read.pieces:
                self.emit(piece)
            remaining = sampling.max_tokens - len(thought.token_ids)
            if remaining < 1 or not tags.is_closed_by(target.tokenizer.decode(thought.token_ids)):
                # The model may have ended the reply within its thinking.
                return read, [replace(thought, finish_reason="length")]
            parts.append(thought)
            prompt = [*opened, *thought.token_ids]
            sampling = replace(sampling, max_tokens=remaining, in_reply=True)
        if self.request.tools and not calls:
            calls = await self._decide_call(prompt, sampling, parts)
            if not calls:
                sampling = replace(sampling, structured=self.request.form)
        # Text that may be a call is emitted when it is complete.
        show = None if self.request.tools else self._emit_answer
        decoded = await self._decode(prompt, sampling, Regions(), show, speculate=False)
        if self.request.tools:
            read.parsed = await asyncio.to_thread(self._parse_constrained, decoded, calls)
            if read.parsed.content:
                self._emit_answer(read.parsed.content)
        else:
            read.parsed = ParsedReply(decoded.text)
        # The grammar has one call, of the required tool, but an engine may not hold to it.
        if self.request.must_call and len(self.request.tools) == 1:
            read.parsed.reject_other_tools(self.request.tools[0])
        if self.request.parallel_tool_calls is False:
            read.parsed.keep_one_call()
        if not read.parsed.tool_calls and decoded.finish_reason == "stop" and not is_json(decoded.text):
            logger.warning("the target ended a reply before its form was complete: its engine does not hold to forms")
            decoded = replace(decoded, finish_reason="length")
        return read, [*parts, decoded]

    async def _decide_call(self, prompt: list[int], sampling: Sampling, parts: list[Reply]) -> bool:
        """Decide by the model's first words, without a constraint, whether the reply is a tool call or in the form.

        Under a grammar of both, a model that does not know the form would begin the same call again and again.
        """
        free = replace(sampling, structured=None, max_tokens=min(_PROBE_TOKENS, sampling.max_tokens))
        probe = await self._decode(prompt, free, Regions(), None, speculate=False)
        probe.report.not_part_of_reply()
        parts.append(replace(probe, token_ids=()))
        return (await asyncio.to_thread(self._parse_own_format, probe)).count > 0

    def _parse_constrained(self, decoded: Reply, calls: bool) -> ParsedReply:
        """Parse a constrained reply: a call if `calls`, else the form; other text by the model's own format."""
        if not calls:
            return ParsedReply(decoded.text) if is_json(decoded.text) else self._parse_own_format(decoded)
        parsed = parse_constrained(decoded.text, self.request.tools)
        if parsed.tool_calls:
            return parsed
        # A server without constrained decoding lets the model use its own format.
        native = self._parse_own_format(decoded)
        return ParsedReply("", native.tool_calls, native.invalid_tool_calls) if native.tool_calls else parsed

    def _parse_own_format(self, decoded: Reply) -> ParsedReply:
        """Parse a reply without thinking in the model's own tool format."""
        reader = ReplyReader(None, inside=False, after=False, parser=self.parser, tools=self.request.tools, emit=ignore)
        reader.push(decoded.text)
        return reader.finish(decoded.truncated).parsed

    def _emit_answer(self, text: str) -> None:
        self.emit(TextDelta("answer", text))


def decoding_settings(policy: VerifierPolicy) -> DecodingSettings:
    """Return the settings of a policy that the decoder uses."""
    fields = DecodingSettings.__dataclass_fields__.keys() & VerifierPolicy.model_fields.keys()
    return DecodingSettings(**{field: getattr(policy, field) for field in fields} | {"depth": policy.steps_ahead})
