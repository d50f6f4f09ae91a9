"""`lookahead-agent ask`: prints one reply."""

import json
import time
from typing import Annotated, Any

import typer
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage

from lookahead_agent.cli import options
from lookahead_agent.cli.terminal import ProgressBars, Terminal, echo
from lookahead_agent.system.plain_text import PlainTextStream


@options.with_option_group
def ask(
    models: options.ReplyOptions,
    question: Annotated[str, typer.Argument(help="What to ask.")],
    policy: options.Policy = options.DEFAULT_POLICY,
    depth: options.Depth = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Ask one question and stream the reply."""
    options.check_text(question, "QUESTION", empty=False)
    options.check_text(system, "--system")
    llm = models.chat_model(policy=options.policy_of(policy, depth), return_token_ids=True)
    messages = [*([SystemMessage(system)] if system else []), HumanMessage(question)]
    with llm:
        llm.start(ProgressBars())
        started = time.monotonic()
        if as_json:
            message: AIMessage = llm.invoke(messages)
            metadata = message.response_metadata
            result: dict[str, Any] = {"text": message.text, "tool_calls": message.tool_calls}
            result |= {name: metadata[name] for name in ("lookahead", "finish_reason", "token_ids")}
            result |= {"usage": message.usage_metadata, "seconds": time.monotonic() - started}
            typer.echo(json.dumps(result))
            return
        full: AIMessageChunk | None = None
        pieces, lines = PlainTextStream(), Terminal().word_wrap()
        for chunk in llm.stream(messages):
            echo(lines.feed(pieces.feed(chunk.text)), nl=False)
            full = chunk if full is None else full + chunk
        echo(lines.feed(pieces.end()) + lines.end())
        assert full is not None
        figures = full.response_metadata["lookahead"]
        tokens = full.usage_metadata["output_tokens"] if full.usage_metadata else 0
        Terminal(stderr=True).print(
            f"{figures['policy']} ({figures['mode']}): {figures['accepted']} of {figures['steps']} steps from the "
            f"draft, {tokens} tokens in {figures['seconds']['total']:.1f} s",
            style="dim",
        )
