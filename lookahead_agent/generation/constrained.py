"""Generates a reply that must be a tool call or have a form: the target's own, but for the thinking before it."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from lookahead_agent.decoding import Reply
from lookahead_agent.decoding.request import Regions
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.vllm_engine import VLLMEngine
from lookahead_agent.generation.backend import TextDelta
from lookahead_agent.generation.constraints import is_json
from lookahead_agent.generation.generator import Generated, ReplyGenerator
from lookahead_agent.generation.reader import ReadReply, ReplyReader
from lookahead_agent.generation.tool_calls import ParsedReply, parse_constrained

logger = logging.getLogger(__name__)

_FIRST_TOKENS = 16
"""Tokens in which a reply that may be a call shows that it is one."""


class ConstrainedGenerator(ReplyGenerator):
    """Generates a reply under the constraint of `Sampling.structured`."""

    async def _generate(self, prompt: list[int], sampling: Sampling) -> Generated:
        # A text that ends replies may be in a string of the form, which would be no form without its end.
        sampling = replace(sampling, stop=())
        target, tags = self._engines.target, self._thinking
        calls = self._request.must_call
        thinks = tags is not None and not tags.closed_by(self._end_of(prompt))
        if isinstance(target, VLLMEngine) and (thinks or (self._tools and not calls)):
            for structured in filter(None, (sampling.structured, self._request.form)):
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
                self._emit(piece)
            left = sampling.max_tokens - len(thought.token_ids)
            if left < 1 or not tags.closed_by(target.tokenizer.decode(thought.token_ids)):
                # Also where the model itself ended its thinking.
                return read, [replace(thought, finish_reason="length")]
            parts.append(thought)
            prompt, sampling = [*opened, *thought.token_ids], replace(sampling, max_tokens=left)
        if self._tools and not calls:
            calls = await self._decide(prompt, sampling, parts)
            if not calls:
                sampling = replace(sampling, structured=self._request.form)
        # What may be a call is shown when it is complete.
        show = _ignore if self._tools else self._emit_answer
        written = await self._write(prompt, sampling, Regions(), show, speculate=False)
        if self._tools:
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

        Under a grammar of both, a model that has called a tool, and that no prompt tells of the form, would begin the
        same call again and again: its calls are the only JSON that it knows of.
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
        parsed = parse_constrained(written.text, self._tools)
        if parsed.tool_calls:
            return parsed
        # A server that knows no constraints leaves the model to its own format.
        own = self._in_own_format(written)
        return ParsedReply("", own.tool_calls, own.invalid_tool_calls) if own.tool_calls else parsed

    def _in_own_format(self, written: Reply) -> ParsedReply:
        """A reply without thinking, read in the model's own format."""
        reader = ReplyReader(None, False, False, self._parser, self._tools, _ignore)
        reader.push(written.text)
        return reader.finish(written.cut).parsed

    def _emit_answer(self, text: str) -> None:
        self._emit(TextDelta("answer", text))


def _ignore(_: object) -> None:
    """For text that is shown when it is complete, or not at all."""
