"""The target's replies, from which the draft learns: kept in a file as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from lookahead_agent.align.prompts import Prompt
from lookahead_agent.align.rows import append_rows
from lookahead_agent.bench.row_file import RowFile
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.policy import as_policy
from lookahead_agent.progress import Progress

_AT_ONCE = 24


class ReplyRow(BaseModel):
    """A reply of the target.

    Attributes:
        prompt: The prompt's id.
        writer: The model, its precision and sampling.
        prompt_ids: The prompt's tokens.
        reply_ids: The reply's, with the one that ends it, if it came to its end.
    """

    model_config = ConfigDict(frozen=True)

    prompt: str
    writer: str
    prompt_ids: list[int]
    reply_ids: list[int]


def write_replies(llm: ChatLookahead, prompts: Sequence[Prompt], file: Path, progress: Progress) -> dict[str, ReplyRow]:
    """Have the target reply to what it has not replied to yet.

    Args:
        llm: The chat model, with the policy "off".
        prompts: What is asked.
        file: Rows of replies, appended; a rerun goes on.
        progress: Told how far it is.

    Returns:
        The replies by the prompts' ids.

    Raises:
        ConfigurationError: The file has replies of another model or other sampling.
        EngineError: The engine failed; a rerun goes on.
    """
    writer = f"{llm.model} {llm.precision}, temperature {llm.temperature}, at most {llm.max_tokens} tokens"
    with RowFile(file).writing() as rows:
        done = {row.prompt: row for row in map(ReplyRow.model_validate, rows.rows)}
        if other := next((row.writer for row in done.values() if row.writer != writer), None):
            raise ConfigurationError(f"{file} has replies of {other}, and these are of {writer}: choose another folder")
        missing = [prompt for prompt in prompts if prompt.id not in done]
        work = partial(_reply, llm.model_copy(update={"return_token_ids": True}), writer)
        append_rows(missing, len(prompts) - len(missing), work, rows, _AT_ONCE, "Writing replies", progress)
        done = {row.prompt: row for row in map(ReplyRow.model_validate, rows.rows)}
    return {prompt.id: done[prompt.id] for prompt in prompts}


async def _reply(llm: ChatLookahead, writer: str, prompt: Prompt) -> ReplyRow:
    message = await llm.ainvoke(list(prompt.messages))
    async with llm.access.engines(as_policy(llm.policy)) as engines:
        prompt_ids = await asyncio.to_thread(engines.target.tokenizer.chat_prompt, prompt.messages)
    ids = list(message.response_metadata["token_ids"])
    return ReplyRow(prompt=prompt.id, writer=writer, prompt_ids=list(prompt_ids), reply_ids=ids)
