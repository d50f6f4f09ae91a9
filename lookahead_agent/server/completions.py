"""`/v1/completions`: a prompt without a chat template."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from langchain_core.messages import AIMessage
from starlette.requests import Request
from starlette.responses import Response

from lookahead_agent.engines.background import all_of
from lookahead_agent.generation.request import TextDelta
from lookahead_agent.server.errors import RefusedError
from lookahead_agent.server.protocol import CompletionReplyBody, CompletionRequestBody, TextChoice
from lookahead_agent.server.replies import Chosen, ReplyWriter, figures_of, unless_gone, usage_of
from lookahead_agent.server.streaming import EventStream, begun, merged


async def completions(
    writer: ReplyWriter, body: CompletionRequestBody, request: Request, chosen: Chosen
) -> CompletionReplyBody | Response:
    """Answer a request.

    Args:
        writer: Writes the replies.
        body: The request.
        request: Tells when the client goes away.
        chosen: Policy and node by header.

    Raises:
        RefusedError: It asks for what is not allowed, or too many wait.
        LookaheadError: The text could not be written.
    """
    writer.check(body, body.max_tokens)
    if len(body.prompts) * body.n > writer.settings.max_choices:
        raise RefusedError(400, f"a request has at most {writer.settings.max_choices} choices here", param="prompt")
    asked = [
        (prompt, writer.options(body, body.max_tokens, chosen, choice))
        for prompt in body.prompts
        for choice in range(body.n)
    ]
    identifier, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    if body.stream:
        streams = [writer.stream(prompt, options) for prompt, options in asked]
        base = {"id": identifier, "object": "text_completion", "created": created, "model": writer.model_name}
        events = _chunks(streams, base, body.n, body.streams_usage)
        return EventStream(await unless_gone(request, begun(events)), writer.metrics.refused)
    replies = await unless_gone(request, all_of([writer.reply(prompt, options) for prompt, options in asked]))
    return CompletionReplyBody(
        id=identifier,
        created=created,
        model=writer.model_name,
        choices=[
            TextChoice(index=index, text=reply.text, finish_reason=reply.response_metadata["finish_reason"])
            for index, reply in enumerate(replies)
        ],
        usage=usage_of(replies, body.n),
        lookahead=[figures_of(reply) for reply in replies],
    )


async def _chunks(
    streams: list[AsyncGenerator[TextDelta | AIMessage, None]], base: dict[str, Any], choices: int, wants_usage: bool
) -> AsyncGenerator[dict[str, Any], None]:
    replies: dict[int, AIMessage] = {}
    nothing = {"usage": None} if wants_usage else {}
    async with aclosing(merged(streams)) as items:
        async for index, item in items:
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
            if isinstance(item, TextDelta):
                yield base | nothing | {"choices": [choice | {"text": item.text}]}
                continue
            replies[index] = item
            finished = choice | {"finish_reason": item.response_metadata["finish_reason"]}
            yield base | nothing | {"choices": [finished], "lookahead": figures_of(item).model_dump()}
    if wants_usage:
        ordered = [replies[index] for index in sorted(replies)]
        yield base | {"choices": [], "usage": usage_of(ordered, choices).model_dump()}
