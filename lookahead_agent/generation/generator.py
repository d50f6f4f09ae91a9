"""Generates one reply on engines of this process: its prompt, its speculation mode, and the decoder's figures."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyReport, ReplyRequest, StepEvent, lookahead
from lookahead_agent.decoding.request import PROMPT_TAIL, Regions
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.tokenizer import ChatPrompt, Tokenizer
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.errors import ConfigurationError, ContextLengthError
from lookahead_agent.generation.backend import ChatReply, GenerateRequest, TextDelta
from lookahead_agent.generation.json_tool_parsers import ToolParser
from lookahead_agent.generation.reader import ReadReply, ReplyReader
from lookahead_agent.generation.tool_calls import ParsedReply, is_json, parse_constrained
from lookahead_agent.hardware.choice import acceptance_rate_of
from lookahead_agent.hardware.reply_speeds import CPUTime, ReplySpeeds
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.modes import Mode, ModeChoice

logger = logging.getLogger(__name__)

_LEAST_TOKENS = 24  # of a reply whose pace says something
_OTHERS = 0.1  # share of the cores' time from which other programs make a reply's pace say nothing of the machine
_LEAST_PASSES = 12  # of a reply whose tokens tell the acceptance rate of draft tokens

_FIRST_TOKENS = 16  # in which a reply that may be a call shows that it is one
_REPORTED = (
    *("steps", "accepted", "acceptance_rate", "verifier_calls", "judge_calls", "refuted"),
    "target_forward_passes",
)

Emit = Callable[[TextDelta | StepEvent], None]
Generated = tuple[ReadReply, list[Reply]]
"""A reply as it was read, and as the decoder wrote it: in one part, or several."""


def _ignore(_: object) -> None:
    """For text that is shown when it is complete, or not at all."""


@dataclass(eq=False)
class ReplyGenerator:
    """Generates one reply in the model's own words, with tool calls if the model likes."""

    request: GenerateRequest
    engines: EngineSet
    thinking: ThinkingTags | None
    parser: ToolParser
    emit: Emit = _ignore

    def __post_init__(self) -> None:
        request, engines = self.request, self.engines
        policy, certificate, self._certificate = engines.certified(request.policy)
        self.request = request if policy is request.policy else replace(request, policy=policy)
        self.thinking = self.thinking if request.messages is not None else None
        self._verifier = engines.verifier(policy)
        if certificate is not None and self._verifier is not None:
            self._verifier = engines.drift_monitor.audited(self._verifier, certificate, request.audit_rate)
        self._kind = f"{request.node}|{policy.name}"  # the replies of like speed: those of one node under one policy
        self._chosen = self._mode()

    def _mode(self) -> ModeChoice:
        """The speculation mode: as the policy forces, else the fastest in this node."""
        engines, policy = self.engines, self.request.policy
        tokens: Mode = "sd" if engines.speculates_on_tokens else "off"
        both: Mode = "lr+sd" if engines.speculates_on_tokens else "lr"
        if self._verifier is None:
            setup = engines.engine_setup
            if setup is not None and setup.may_leave_out_draft and (alone := engines.modes.without_draft(self._kind)):
                return alone
            return ModeChoice(tokens, "the policy allows no draft step" if not policy.speculates else "no draft engine")
        if policy.forces_speculation:
            return ModeChoice(both, "the policy says how steps are speculated on")
        if engines.engine_setup is None:
            return ModeChoice(both, "engines were given")
        modes: tuple[Mode, ...] = ("sd", "lr+sd", "off") if engines.shared_draft else (tokens, both)
        busy: Mode = "off" if engines.engine_setup.alone_when_busy else "sd"
        return engines.modes.choose(self._kind, modes, max(engines.target.in_flight, engines.replies_at_once), busy)

    async def reply(self) -> ChatReply:
        """Generate the reply; raises what `LocalBackend.generate` raises."""
        engines = self.engines
        engines.replies_at_once += 1
        try:
            if engines.warmer.reading is not None:
                await engines.warmer.stop()
            # Only a reply beside which no other is written says by its pace what the engines can do.
            alone = engines.replies_at_once == 1 and engines.target.in_flight == 0
            engines.replies += 1
            number, measured = engines.replies, alone and self._speeds is not None
            began = asyncio.create_task(asyncio.to_thread(engines.cpu_time)) if measured else None
            context = engines.target.context_length
            prompt = await asyncio.to_thread(self._prompt, engines.target.tokenizer, context)
            room = context - len(prompt)
            sampling = replace(self.request.sampling, max_tokens=min(self.request.sampling.max_tokens, room))
            read, written = await self._generate(prompt, sampling)
            report = ReplyReport()
            for part in written:
                report.add(part.report)
            tokens = [token for part in written for token in part.token_ids]
            if isinstance(prompt, ChatPrompt):
                await asyncio.to_thread(engines.target.tokenizer.remember_reply, prompt, tokens)
            engines.warmer.known.append((engines.target, [*prompt, *tokens]))
            if (seen := report.target_prompt).cached is not None and tokens:
                engines.modes.learn_tokens(self._kind, seen.total - seen.cached, len(tokens))
            if alone and engines.replies == number and engines.target.in_flight == 0:
                await self._learn(report, len(tokens), await began if began is not None else None)
        finally:
            engines.replies_at_once -= 1
            if engines.warmer.waiting:
                engines.warmer.go_on()
        if engines.drift_monitor.waiting:
            engines.drift_monitor.audit_waiting()
        finish = written[-1].finish_reason
        return ChatReply(
            read.parsed.content,
            read.thinking,
            read.parsed.tool_calls,
            read.parsed.invalid_tool_calls,
            "tool_calls" if finish == "stop" and read.parsed.tool_calls else finish,
            len(prompt),
            read.thinking_tokens(written[0].text_ends),
            tokens,
            self._figures(report),
        )

    async def warm(self) -> None:
        """Have the engines of this machine that the reply's mode needs read the prompt ahead."""
        engines, mode = self.engines, self._chosen.mode
        drafts = mode in ("lr", "lr+sd") or (mode == "sd" and engines.shared_draft)
        for engine in (engines.target, engines.draft if drafts else None):
            if isinstance(engine, VLLMEngine):  # reading costs money elsewhere
                ids = await asyncio.to_thread(self._prompt, engine.tokenizer, engine.context_length)
                engines.warmer.add(engine, ids, drafted=mode != "off")

    @property
    def _speeds(self) -> ReplySpeeds | None:
        """Where the pace of such a reply is kept for later runs; None: nowhere."""
        setup = self.engines.engine_setup
        if setup is None or setup.configuration is None:
            return None
        return setup.speeds if self._chosen.mode == ("off" if setup.speculation_method == "none" else "sd") else None

    async def _learn(self, report: ReplyReport, tokens: int, began: CPUTime | None) -> None:
        """Remember the pace of a reply beside which no other was generated, for this node and for later runs."""
        setup, mode = self.engines.engine_setup, self._chosen.mode
        if tokens < _LEAST_TOKENS or report.speculation_disabled is not None or self.request.sampling.seeded:
            return
        # Without the prompt: what it takes depends on its length, and on how much of it the engine has seen before.
        pace = report.pace(tokens)
        if not self.request.policy.forces_speculation:
            self.engines.modes.learn(self._kind, mode, pace)
        if setup is None or setup.configuration is None or (speeds := self._speeds) is None or began is None:
            return
        others = (await asyncio.to_thread(self.engines.cpu_time)).share_of_others(began)
        if others >= _OTHERS:
            logger.debug("other programs had %.0f %% of the cores: a reply's pace is not kept", 100 * others)
            return
        rate, passes = None, report.target_forward_passes
        if setup.draft_tokens and passes >= _LEAST_PASSES and mode == "sd":
            rate = acceptance_rate_of((tokens - 1) / (passes - 1), setup.draft_tokens)
        await asyncio.to_thread(speeds.add, setup.configuration.name, pace, rate)

    def _prompt(self, tokenizer: Tokenizer, longest: int | None = None) -> list[int]:
        request, target = self.request, self.engines.target.tokenizer
        if request.messages is not None:
            arguments, whole = request.template_arguments, tokenizer is target
            if not whole:  # its template may not have the target's variables
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
        # In a format whose beginning nobody knows, all may be a call: what comes after the thinking is the target's.
        speculate = markers is not None or self.thinking is not None
        reader = self._reader(prompt, with_calls=True)
        written = await self._write(prompt, sampling, regions, reader.push, speculate=speculate)
        # vLLM's parsers are slow to start.
        read = await asyncio.to_thread(reader.finish, written.cut)
        if self.request.parallel_tool_calls is False:
            del read.parsed.tool_calls[1:]
        for piece in read.pieces:
            self.emit(piece)
        return read, [written]

    def _reader(self, prompt: list[int], *, with_calls: bool) -> ReplyReader:
        end, tags = self._end_of(prompt), self.thinking
        return ReplyReader(
            tags,
            inside=tags is not None and tags.opened_by(end),
            after=tags is not None and tags.closed_by(end),
            parser=self.parser if with_calls and self.request.tools else None,
            tools=self.request.tools,
            emit=self.emit,
        )

    def _end_of(self, prompt: list[int]) -> str:
        return self.engines.target.tokenizer.decode(prompt[-PROMPT_TAIL:])

    async def _write(
        self, prompt: list[int], sampling: Sampling, regions: Regions, on_text: Callable[[str], None], speculate: bool
    ) -> Reply:
        """Have the decoder write a reply, or a part of one."""
        request, engines = self.request, self.engines
        verifier = self._verifier if speculate and self._chosen.mode in ("lr", "lr+sd") else None
        draft_prompt, refused, draft = None, None, engines.draft
        if verifier is not None and draft and draft.tokenizer.fingerprint != engines.target.tokenizer.fingerprint:
            try:
                draft_prompt = tuple(await asyncio.to_thread(self._prompt, draft.tokenizer))
            except ConfigurationError as error:  # never worse than the target alone
                verifier, refused = None, f"the draft cannot take the prompt: {error}"
        sampling = replace(sampling, drafted=self._chosen.mode != "off")
        settings = replace(
            decoding_settings(request.policy),
            target_timeout=request.target_timeout,
            shared_draft=self._chosen.mode in ("sd", "lr+sd"),
        )
        asked = ReplyRequest(tuple(prompt), sampling, request.question, regions, draft_prompt)
        reply = await lookahead(asked, engines.target, draft, verifier, settings, on_text, self.emit)
        reply.report.speculation_disabled = reply.report.speculation_disabled or refused
        return reply

    def _figures(self, report: ReplyReport) -> dict[str, Any]:
        """`response_metadata["lookahead"]`, as `ChatLookahead` documents it."""
        request, engines, setup = self.request, self.engines, self.engines.engine_setup
        lacks_draft = request.policy.speculates and self._verifier is None and not request.must_call
        return {
            "call": request.id,
            "policy": request.policy.name,
            "selection_rule": request.selection_rule,
            "certificate": self._certificate,
            "audit": asdict(engines.drift_monitor.counts),
            "node": request.node.rpartition(":")[2] or None,
            "path": request.node or None,
            "mode": self._chosen.mode,
            "mode_reason": self._chosen.reason,
            "engines": {
                "speculation_method": setup.speculation_method,
                "precision": dict(setup.precision),
                "reason": setup.reason,
            }
            if setup is not None
            else {},
            **{name: getattr(report, name) for name in _REPORTED},
            "tokens": {"target": asdict(report.target_tokens), "draft": asdict(report.draft_tokens)},
            "prompt_tokens": {"target": asdict(report.target_prompt), "draft": asdict(report.draft_prompt)},
            "seconds": report.seconds,
            "speculation_disabled": engines.problem if lacks_draft else report.speculation_disabled,
        }


class ConstrainedGenerator(ReplyGenerator):
    """Generates a reply under the constraint of `Sampling.structured`."""

    async def _generate(self, prompt: list[int], sampling: Sampling) -> Generated:
        # A text that ends replies may be in a string of the form, which would be no form without its end.
        sampling = replace(sampling, stop=())
        target, tags = self.engines.target, self.thinking
        calls = self.request.must_call
        thinks = tags is not None and not tags.closed_by(self._end_of(prompt))
        if isinstance(target, VLLMEngine) and (thinks or (self.request.tools and not calls)):
            for structured in filter(None, (sampling.structured, self.request.form)):
                # Or what is written before would be for nothing.
                await target.check(replace(sampling, structured=structured))
        read, parts = ReadReply(), list[Reply]()
        if tags is not None and thinks:
            opened = list(prompt)
            if not tags.opened_by(self._end_of(prompt)):
                opened += target.tokenizer.encode(f"{tags.open}\n")
            reader = self._reader(opened, with_calls=False)
            free = replace(sampling, structured=None, stop=(tags.close,))
            thought = await self._write(opened, free, Regions(thinking=tags), reader.push, speculate=True)
            read = reader.finish(thought.cut)
            for piece in read.pieces:
                self.emit(piece)
            left = sampling.max_tokens - len(thought.token_ids)
            if left < 1 or not tags.closed_by(target.tokenizer.decode(thought.token_ids)):
                # Also where the model itself ended its thinking.
                return read, [replace(thought, finish_reason="length")]
            parts.append(thought)
            prompt, sampling = [*opened, *thought.token_ids], replace(sampling, max_tokens=left)
        if self.request.tools and not calls:
            calls = await self._decide(prompt, sampling, parts)
            if not calls:
                sampling = replace(sampling, structured=self.request.form)
        # What may be a call is shown when it is complete.
        show = _ignore if self.request.tools else self._emit_answer
        written = await self._write(prompt, sampling, Regions(), show, speculate=False)
        if self.request.tools:
            read.parsed = await asyncio.to_thread(self._in_form, written, calls)
            if read.parsed.content:
                self._emit_answer(read.parsed.content)
        else:
            read.parsed = ParsedReply(written.text)
        if not read.parsed.tool_calls and written.finish_reason == "stop" and not is_json(written.text):
            logger.warning("the target ended a reply before its form was complete: its engine does not hold to forms")
            written = replace(written, finish_reason="length")
        return read, [*parts, written]

    async def _decide(self, prompt: list[int], sampling: Sampling, parts: list[Reply]) -> bool:
        """Whether a reply that may be a call or in a form is to be a call: the model's own first words decide.

        Under a grammar of both, a model that knows of no form would begin the same call again and again.
        """
        free = replace(sampling, structured=None, max_tokens=min(_FIRST_TOKENS, sampling.max_tokens))
        begun = await self._write(prompt, free, Regions(), _ignore, speculate=False)
        begun.report.not_part_of_reply()
        parts.append(replace(begun, token_ids=()))
        return (await asyncio.to_thread(self._in_own_format, begun)).called

    def _in_form(self, written: Reply, calls: bool) -> ParsedReply:
        """A reply that must be a call, or in the form although it might have been one."""
        if not calls:
            return ParsedReply(written.text) if is_json(written.text) else self._in_own_format(written)
        parsed = parse_constrained(written.text, self.request.tools)
        if parsed.tool_calls:
            return parsed
        # A server that knows no constraints leaves the model to its own format.
        own = self._in_own_format(written)
        return ParsedReply("", own.tool_calls, own.invalid_tool_calls) if own.tool_calls else parsed

    def _in_own_format(self, written: Reply) -> ParsedReply:
        """A reply without thinking, read in the model's own format."""
        reader = ReplyReader(
            None, inside=False, after=False, parser=self.parser, tools=self.request.tools, emit=_ignore
        )
        reader.push(written.text)
        return reader.finish(written.cut).parsed

    def _emit_answer(self, text: str) -> None:
        self.emit(TextDelta("answer", text))


def decoding_settings(policy: VerifierPolicy) -> DecodingSettings:
    """The part of a policy that the decoder reads."""
    fields = DecodingSettings.__dataclass_fields__.keys() & VerifierPolicy.model_fields.keys()
    return DecodingSettings(**{field: getattr(policy, field) for field in fields} | {"depth": policy.steps_ahead})
