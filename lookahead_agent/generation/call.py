"""One reply of the chat model: written, and read for what it says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lookahead_agent.decoding import DecodingSettings, Reply, ReplyReport, ReplyRequest, lookahead
from lookahead_agent.decoding.request import PROMPT_TAIL, Regions
from lookahead_agent.engines.protocol import ChecksSampling, Sampling
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import ConfigurationError, ContextLengthError
from lookahead_agent.generation.reader import ReadReply, ReplyReader
from lookahead_agent.generation.request import ChatReply, ChatRequest, Emit, TextDelta
from lookahead_agent.generation.structured_output import call_constraint, constraint, is_call, is_json
from lookahead_agent.generation.tool_calls import ParsedReply, parse_constrained
from lookahead_agent.generation.tool_parsers import ToolParser
from lookahead_agent.hardware.choice import acceptance_rate_of
from lookahead_agent.hardware.core_time import CoreTime
from lookahead_agent.hardware.observed import Observed
from lookahead_agent.models.thinking_tags import ThinkingTags
from lookahead_agent.policy import VerifierPolicy
from lookahead_agent.runtime.engine_set import EngineSet
from lookahead_agent.runtime.modes import Mode, ModeChoice

logger = logging.getLogger(__name__)

_TELLING_TOKENS = 24
"""Tokens of a reply from which its pace tells something."""
_GATHERING = 0.02
"""Seconds for which a reply waits for others that come with it, where engines are idle and work otherwise alone."""
_FIRST_WORDS = 16
"""Tokens in which a reply that may be a call shows that it is one."""
_OTHERS = 0.1
"""Share of the cores' time from which other programs slowed a reply down, so that its pace is not the machine's."""
_TELLING_PASSES = 12
"""Passes from which their tokens tell how many guesses were right."""


class ReplyGenerator:
    """Writes one reply.

    Args:
        request: What to reply to.
        engines: What writes it.
        thinking: The tags around the target's thinking; None: it does not think apart.
        parser: Reads the target's tool calls.
        emit: Given the reply's text as it becomes certain, and what happens to its steps.
    """

    def __init__(
        self,
        request: ChatRequest,
        engines: EngineSet,
        thinking: ThinkingTags | None,
        parser: ToolParser,
        emit: Emit,
    ) -> None:
        policy, certificate, self._certificate = engines.certified(request.policy)
        self._request = request if policy is request.policy else replace(request, policy=policy)
        self._engines = engines
        self._thinking = thinking if request.is_chat else None
        self._parser = parser
        self._emit = emit
        self._tools = request.options.tools
        self._forced = request.options.tool_choice is not None
        self._verifier = engines.verifier(policy)
        if certificate is not None and self._verifier is not None:
            self._verifier = engines.drift_monitor.over(self._verifier, certificate, request.audit_rate)
        self._chosen = self._mode()

    def _mode(self) -> ModeChoice:
        """How the reply is written: as the policy commands, else whatever is fastest in this node."""
        engines, policy = self._engines, self._request.policy
        tokens: Mode = "sd" if engines.speculates_on_tokens else "off"
        both: Mode = "lr+sd" if engines.speculates_on_tokens else "lr"
        if self._verifier is None:
            return ModeChoice(tokens, "the policy allows no draft step" if not policy.speculates else "no draft engine")
        if policy.forces_speculation:
            return ModeChoice(both, "the policy says how steps are speculated on")
        if engines.engine_setup is None:
            return ModeChoice(both, "engines were given")
        modes: tuple[Mode, ...] = ("sd", "lr+sd", "off") if engines.shared_draft else (tokens, both)
        return engines.modes.choose(self._kind, modes, max(engines.target.in_flight, engines.replies.now))

    @property
    def _kind(self) -> str:
        """What makes replies alike in speed: the node, and which steps may stand there."""
        return f"{self._request.path}|{self._request.policy.name}"

    async def reply(self) -> ChatReply:
        """Write the reply.

        Raises:
            ContextLengthError: The prompt leaves no room for one.
            ConfigurationError: The engine cannot write in the form that is asked for.
            EngineError: The target failed.
        """
        with self._engines.replies.one() as was_alone:
            idle = self._engines.target.in_flight == 0
            if idle and self._engines.draft_pauses:
                # A burst arrives reply by reply; its first would have the draft read a prompt for nothing.
                await asyncio.sleep(_GATHERING)
            began = asyncio.create_task(asyncio.to_thread(CoreTime.now)) if idle and self._kept is not None else None
            reply = await self._reply()
            if was_alone() and idle and self._engines.target.in_flight == 0:
                await self._learn(reply, await began if began is not None else None)
        self._engines.drift_monitor.go_on()
        return reply

    async def _reply(self) -> ChatReply:
        request, tokenizer = self._request, self._engines.target.tokenizer
        longest = min(
            request.longest_prompt or self._engines.target.context_length, self._engines.target.context_length
        )
        prompt = await asyncio.to_thread(self._prompt, tokenizer, longest)
        if request.longest_prompt is not None and len(prompt) > request.longest_prompt:
            raise ContextLengthError(f"the prompt has {len(prompt)} tokens; at most {request.longest_prompt} are taken")
        room = self._engines.target.context_length - len(prompt)
        if room < 1:
            raise ContextLengthError(
                f"the messages are {len(prompt)} tokens long and the context {self._engines.target.context_length}: "
                "shorten them, or raise max_model_len in engine_args"
            )
        sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, room))
        return await self._in_its_form(prompt, sampling)

    @property
    def _kept(self) -> tuple[Observed, str] | None:
        """Where the pace of replies in this way is kept for later runs, and under which name; None: it is not."""
        engine_setup = self._engines.engine_setup
        if engine_setup is None or engine_setup.arrangement is None or engine_setup.observed is None:
            return None
        of_it = self._chosen.mode == ("off" if engine_setup.speculation_method == "none" else "sd")
        return (engine_setup.observed, engine_setup.arrangement.name) if of_it else None

    async def _learn(self, reply: ChatReply, began: CoreTime | None) -> None:
        """Remember what the reply took, beside which no other was written.

        Args:
            reply: The reply.
            began: What the cores had worked when it began; None: its pace is not kept for later runs.
        """
        engines, tokens = self._engines, len(reply.token_ids)
        unguessed = self._request.sampling.seeded
        if tokens < _TELLING_TOKENS or reply.report.speculation_disabled is not None or unguessed:
            return
        # Without the prompt: what it takes depends on its length, and on how much of it the engine has seen before.
        pace = reply.report.pace(tokens)
        if not self._request.policy.forces_speculation:
            engines.modes.learn(self._kind, self._chosen.mode, pace)
        if self._kept is not None and began is not None:
            await asyncio.to_thread(_keep, *self._kept, pace, self._right(reply), began)

    def _right(self, reply: ChatReply) -> float | None:
        """Which share of the tokens that the draft model guessed was right, by how many each pass won."""
        engine_setup, passes = self._engines.engine_setup, reply.report.target_forward_passes
        if (
            engine_setup is None
            or not engine_setup.draft_tokens
            or passes < _TELLING_PASSES
            or self._chosen.mode != "sd"
        ):
            return None
        return acceptance_rate_of((len(reply.token_ids) - 1) / (passes - 1), engine_setup.draft_tokens)

    async def _in_its_form(self, prompt: list[int], sampling: Sampling) -> ChatReply:
        structured = self._request.options.structured
        if structured is None:
            return await self._free(prompt, sampling)
        # A text that ends replies may well be in a string of the form, which would be no form without its end.
        return await self._constrained(prompt, replace(sampling, structured=structured, stop=()))

    def _prompt(self, tokenizer: Tokenizer, longest: int | None = None) -> list[int]:
        request = self._request
        if isinstance(request.messages, str):
            ids = tokenizer.encode(request.messages, longest)
        elif request.is_chat:
            messages = [message for message in request.messages if isinstance(message, dict)]
            arguments = request.options.template_arguments
            if tokenizer is self._engines.target.tokenizer:
                tokenizer.check_shown(messages, request.options.tools, arguments)
            else:  # whose template may not have the target's variables
                arguments = {name: arguments[name] for name in arguments.keys() & tokenizer.template_variables}
            ids = tokenizer.chat_prompt(messages, request.options.tools, arguments, longest)
        else:
            ids = [token for token in request.messages if isinstance(token, int)]
            if any(not 0 <= token < tokenizer.size for token in ids):
                raise ConfigurationError(f"the prompt has token ids outside of 0 … {tokenizer.size - 1}")
        if not ids:
            raise ConfigurationError("the prompt is empty")
        return ids

    async def _free(self, prompt: list[int], sampling: Sampling) -> ChatReply:
        """A reply in the model's own words, with tool calls if it likes."""
        markers = self._parser.markers if self._tools else ()
        regions = Regions(markers or (), self._thinking, self._request.policy.answer_from_target or markers is None)
        # In a format whose beginning nobody knows, all may be a call: what comes after the thinking is the target's.
        speculate = markers is not None or self._thinking is not None
        reader = self._reader(prompt, with_calls=True)
        written = await self._write(prompt, sampling, regions, reader.push, speculate=speculate)
        # vLLM's parsers are slow to start.
        read = await asyncio.to_thread(reader.finish, written.cut)
        if self._request.options.parallel_tool_calls is False:
            del read.parsed.tool_calls[1:]
        self._pass_on(read)
        return self._complete(read, len(prompt), [written])

    def _reader(self, prompt: list[int], *, with_calls: bool) -> ReplyReader:
        """The reader of a reply to this prompt."""
        end, tags = self._end_of(prompt), self._thinking
        return ReplyReader(
            tags,
            inside=tags is not None and tags.opened_by(end),
            after=tags is not None and tags.closed_by(end),
            parser=self._parser if with_calls and self._tools else None,
            tools=self._tools,
            emit=self._emit,
        )

    async def _constrained(self, prompt: list[int], sampling: Sampling) -> ChatReply:
        """A reply in a given form: all the target's, but for the thinking before it."""
        target = self._engines.target
        tokenizer = target.tokenizer
        thoughts: list[Reply] = []
        read = ReadReply()
        thinks = self._thinking is not None and not self._thinking.closed_by(self._end_of(prompt))
        if isinstance(target, ChecksSampling) and (thinks or (self._tools and not self._forced)):
            await target.check(sampling)  # or what is written before would be for nothing
        if self._thinking is not None and thinks:
            opened = list(prompt)
            if not self._thinking.opened_by(self._end_of(prompt)):
                opened += tokenizer.encode(f"{self._thinking.open}\n")
            reader = self._reader(opened, with_calls=False)
            free = replace(sampling, structured=None, stop=(self._thinking.close,))
            thought = await self._write(opened, free, Regions(thinking=self._thinking), reader.push, speculate=True)
            thoughts, read = [thought], reader.finish(thought.cut)
            self._pass_on(read)
            left = sampling.max_tokens - len(thought.token_ids)
            closed = self._thinking.closed_by(tokenizer.decode(thought.token_ids))
            if not closed or left < 1:
                unfinished = replace(thought, finish_reason="length")  # also where the model ended itself its thinking
                return self._complete(read, len(prompt), [unfinished])
            prompt_after = [*opened, *thought.token_ids]
            sampling = replace(sampling, max_tokens=left)
        else:
            prompt_after = prompt
        calls = self._forced
        if self._tools and not calls:
            sampling, calls = await self._decided(prompt_after, sampling, thoughts)
        # What may be a call is shown when it is complete.
        answer = self._silent if self._tools else self._answer
        written = await self._write(prompt_after, sampling, Regions(), answer, speculate=False)
        if self._tools:
            read.parsed = await asyncio.to_thread(self._in_form, written, calls)
        else:
            read.parsed = ParsedReply(written.text)
        if self._tools and read.parsed.content:
            self._answer(read.parsed.content)
        if not read.parsed.tool_calls and written.finish_reason == "stop" and not is_json(written.text):
            logger.warning("the target ended a reply before its form was complete: its engine does not hold to forms")
            written = replace(written, finish_reason="length")
        return self._complete(read, len(prompt), [*thoughts, written])

    async def _decided(self, prompt: list[int], sampling: Sampling, before: list[Reply]) -> tuple[Sampling, bool]:
        """Whether a reply that may be a call or in a form is to be a call, and under which constraint it is written.

        The model's own first words decide. Under a grammar of both, a model that has called a tool, and that no prompt
        tells of the form, would begin the same call again and again: its calls are the only JSON that it knows of.
        """
        options = self._request.options
        free = replace(sampling, structured=None, max_tokens=min(_FIRST_WORDS, sampling.max_tokens))
        begun = await self._write(prompt, free, Regions(), self._silent, speculate=False)
        begun.report.not_part_of_reply()
        before.append(replace(begun, token_ids=()))
        if begun.text.lstrip().startswith(("{", "```")):
            return sampling, False  # JSON may be either, and the grammar is of both
        own = await asyncio.to_thread(self._in_own_format, begun)
        if own.tool_calls or own.invalid_tool_calls:
            several = options.parallel_tool_calls is True
            return replace(sampling, structured=call_constraint(self._tools, several=several)), True
        return replace(sampling, structured=constraint(options.response_format)), False

    def _in_form(self, written: Reply, calls: bool) -> ParsedReply:
        """A reply that must be a call, or may be one instead of its form."""
        if not calls:
            form = constraint(self._request.options.response_format) or {}
            if not is_call(written.text, self._tools, form):
                return ParsedReply(written.text) if is_json(written.text) else self._in_own_format(written)
        parsed = parse_constrained(written.text, self._tools)
        if parsed.tool_calls or not calls:
            return parsed
        # A server that knows no constraints leaves the model to its own format.
        own = self._in_own_format(written)
        return ParsedReply("", own.tool_calls, own.invalid_tool_calls) if own.tool_calls else parsed

    def _in_own_format(self, written: Reply) -> ParsedReply:
        """A reply without thinking, read in the model's own format."""
        reader = ReplyReader(None, False, False, self._parser, self._tools, lambda _: None)
        reader.push(written.text)
        return reader.finish(written.cut).parsed

    def _pass_on(self, read: ReadReply) -> None:
        for piece in read.pieces:
            self._emit(piece)

    def _answer(self, text: str) -> None:
        self._emit(TextDelta("answer", text))

    @staticmethod
    def _silent(_: str) -> None:
        """For what is shown when it is complete, or not at all."""

    def _end_of(self, prompt: list[int]) -> str:
        return self._engines.target.tokenizer.decode(prompt[-PROMPT_TAIL:])

    async def _write(
        self,
        prompt: list[int],
        sampling: Sampling,
        regions: Regions,
        on_text: Callable[[str], None],
        *,
        speculate: bool,
    ) -> Reply:
        request, engines = self._request, self._engines
        steps = speculate and self._chosen.mode in ("lr", "lr+sd")
        verifier = self._verifier if steps else None
        draft_prompt, refused = None, None
        if verifier is not None:
            try:
                draft_prompt = await self._draft_prompt()
            except ConfigurationError as error:  # never worse than the target alone
                verifier, refused = None, f"the draft cannot take the prompt: {error}"
        reply = await lookahead(
            ReplyRequest(tuple(prompt), sampling, request.question, regions, draft_prompt),
            engines.target,
            engines.draft,
            verifier,
            replace(
                settings_of(request.policy),
                target_timeout=request.target_timeout,
                shared_draft=self._chosen.mode in ("sd", "lr+sd"),
            ),
            on_text,
            self._emit,
        )
        reply.report.speculation_disabled = reply.report.speculation_disabled or refused
        return reply

    async def _draft_prompt(self) -> tuple[int, ...] | None:
        """The prompt in the draft's own words, if it has another tokenizer."""
        draft, target = self._engines.draft, self._engines.target
        if draft is None or draft.tokenizer.fingerprint == target.tokenizer.fingerprint:
            return None
        return tuple(await asyncio.to_thread(self._prompt_in_words_of, draft.tokenizer))

    def _prompt_in_words_of(self, tokenizer: Tokenizer) -> list[int]:
        if isinstance(self._request.messages, str) or self._request.is_chat:
            return self._prompt(tokenizer)
        target = self._engines.target.tokenizer
        return tokenizer.encode(target.decode(self._prompt(target)))

    def _complete(self, read: ReadReply, prompt_tokens: int, written: list[Reply]) -> ChatReply:
        report = ReplyReport()
        for reply in written:
            report.add(reply.report)
        missing = self._request.policy.speculates and self._verifier is None and not self._forced
        finish = written[-1].finish_reason
        if finish == "stop" and read.parsed.tool_calls:
            finish = "tool_calls"
        return ChatReply(
            read.parsed,
            read.thinking,
            prompt_tokens,
            [token for reply in written for token in reply.token_ids],
            finish,
            report,
            self._engines.problem if missing else report.speculation_disabled,
            self._chosen,
            self._arrangement(),
            self._certificate,
            replace(self._engines.drift_monitor.counts),
            read.thinking_tokens(written[0].text_ends),
        )

    def _arrangement(self) -> dict[str, Any]:
        engine_setup = self._engines.engine_setup
        if engine_setup is None:
            return {}
        return {
            "speculation_method": engine_setup.speculation_method,
            "precision": dict(engine_setup.precision),
            "reason": engine_setup.reason,
        }


def settings_of(policy: VerifierPolicy) -> DecodingSettings:
    """What of a policy concerns the decoder."""
    fields = DecodingSettings.__dataclass_fields__.keys() & VerifierPolicy.model_fields.keys()
    settings = DecodingSettings(**{field: getattr(policy, field) for field in fields - {"depth"}})
    return replace(settings, depth=policy.steps_ahead)


def _keep(observed: Observed, arrangement: str, pace: float, right: float | None, began: CoreTime) -> None:
    others = CoreTime.now().others_share(began)
    if others < _OTHERS:
        observed.learn(arrangement, pace, right)
    else:
        logger.debug("other programs had %.0f %% of the cores: a reply's pace is not kept", 100 * others)
