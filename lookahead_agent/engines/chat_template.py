"""Messages in the form that chat templates take, thinking tags, and checks of template arguments."""

import ctypes
import json
import mmap
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_agent.errors import ConfigurationError

TemplateMessage = Mapping[str, Any]  # message in OpenAI's format, but with the arguments of tool calls as mappings
FINISHED = "finished"  # field that marks an assistant message as complete; no template reads it
_MAX_LENGTH = 1 << 17  # characters of a template: compiling is a single operation
_MAX_DIGITS = 8  # digits of a number in a template
_MAX_MEMORY = 256 << 20  # bytes by which the process may grow while a template runs
_WATCH_SECONDS = 0.02
_MAX_ARGUMENTS_LENGTH = 1 << 16  # characters of the template arguments as JSON


@dataclass(frozen=True)
class ThinkingTags:
    """The tags around a model's thinking."""

    open: str = "<think>"  # opening tag; some chat templates write it, so that the reply begins inside
    close: str = "</think>"  # closing tag
    # Whether the model thinks before each answer unless the prompt says otherwise: text before a closing tag without
    # an opening tag is then thinking.
    always: bool = True
    separator: str = ""  # line breaks between the closing tag and the answer, as far as the chat template shows them

    def is_opened_by(self, prompt: str) -> bool:
        """Whether the prompt opens the thinking, so that the reply begins inside it."""
        return prompt.rstrip().endswith(self.open)

    def is_closed_by(self, prompt: str) -> bool:
        """Whether the prompt closes the thinking, so that the reply begins after it."""
        return prompt.rstrip().endswith(self.close)


def continues(messages: Sequence[TemplateMessage]) -> bool:
    """Whether the reply continues the last message: an assistant message that is not marked `FINISHED`."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get(FINISHED)


def choose_ending(messages: Sequence[TemplateMessage]) -> dict[str, bool]:
    """Return the template options for the end of the prompt: start a reply, or leave the last message open."""
    if not continues(messages):
        return {"add_generation_prompt": True}
    return {"add_generation_prompt": False, "continue_final_message": not messages[-1].get("tool_calls")}


def tool_calls(message: TemplateMessage) -> Sequence[TemplateMessage]:
    """The tool calls of a message."""
    return message.get("tool_calls") or ()


MARK = re.compile(r"mark\d+(?:content|name|call\d+)x")  # a marker that `with_placeholders` writes


def with_placeholders(message: TemplateMessage, index: int) -> dict[str, Any]:
    """Replace each text of a message, and the arguments of each tool call, by a unique marker."""
    marked = dict(message)
    for field in ("content", "name"):
        if message.get(field):
            marked[field] = f"mark{index}{field}x"
    if tool_calls(message):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"mark": f"mark{index}call{call_index}x"}}}
            for call_index, call in enumerate(tool_calls(message))
        ]
    return marked


def without_lone_results(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Turn the results of tools that no message calls into user messages."""
    call_ids = {call.get("id") for message in messages for call in tool_calls(message)}
    return [
        {"role": "user", "content": message.get("content")}
        if message["role"] == "tool" and message.get("tool_call_id") not in call_ids
        else message
        for message in messages
    ]


def with_argument_texts(messages: Sequence[TemplateMessage]) -> list[TemplateMessage]:
    """Return the messages with the arguments of tool calls as JSON text."""

    def with_text(call: TemplateMessage) -> TemplateMessage:
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": text}}

    return [
        {**message, "tool_calls": [*map(with_text, tool_calls(message))]} if tool_calls(message) else message
        for message in messages
    ]


class TemplateLimitError(ConfigurationError):
    """A chat template runs for too long, or takes too much memory."""


def check_template(text: str) -> None:
    """Raise ConfigurationError for a template that is too long, or has a number as in `'x'.ljust(1000000000)`."""
    if len(text) > _MAX_LENGTH:
        raise ConfigurationError(f"the chat template has {len(text)} characters; at most {_MAX_LENGTH} are taken")
    if number := re.search(rf"\d{{{_MAX_DIGITS + 1},}}", text):
        raise ConfigurationError(f"the chat template has a number without a bound: {number[0][:20]}")


def bound_operations() -> None:
    """Bound the operations of templates that transformers compiles from now on: no time-out interrupts a single one."""
    from transformers.utils import chat_template_utils

    from lookahead_agent.engines.template_sandbox import BoundedEnvironment

    chat_template_utils.ImmutableSandboxedEnvironment = BoundedEnvironment


def within(seconds: float, render: Callable[[], str]) -> str:
    """Run a template in this thread; raises TemplateLimitError after `seconds`, or when the process grows too much."""
    thread, lock, ended = threading.get_ident(), threading.Lock(), threading.Event()
    problem = ""

    def watch() -> None:
        nonlocal problem
        end, before = time.monotonic() + seconds, _resident_bytes()
        while not ended.wait(_WATCH_SECONDS):
            with lock:
                if ended.is_set():
                    return
                if time.monotonic() > end:
                    problem = f"ran for {seconds:g} s and was ended: it may loop without end"
                elif _resident_bytes() - before > _MAX_MEMORY:
                    problem = f"took more than {_MAX_MEMORY >> 20} MiB and was ended"
                if problem:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(_OverdueError))
                    return

    threading.Thread(target=watch, name="lookahead-agent-template", daemon=True).start()
    try:
        try:
            return render()
        finally:
            with lock:
                ended.set()
            # An interrupt arrives at the next jump, at the latest here.
            for _ in range(1000 if problem else 0):
                pass
    except _OverdueError:
        raise TemplateLimitError(f"the chat template {problem}; take another template") from None


def _resident_bytes() -> int:
    """The memory of this process; 0 where the system does not tell it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except OSError:
        return 0


class _OverdueError(BaseException):
    """Interrupts a template; no handler of `Exception` stops it."""


def check_arguments(arguments: Mapping[str, Any], variables: frozenset[str]) -> None:
    """Raise ConfigurationError if the template reads no such variable, or the values are too long or not JSON."""
    if unknown := sorted(str(name)[:80] for name in arguments.keys() - variables):
        readable = ", ".join(sorted(variables)) or "none"
        raise ConfigurationError(
            f"the model's chat template reads no {', '.join(unknown[:5])}; a call may set what it does read: {readable}"
        )
    try:
        length = len(json.dumps(dict(arguments), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the arguments of the chat template are not JSON: {error}") from None
    if length > _MAX_ARGUMENTS_LENGTH:
        raise ConfigurationError(
            f"the arguments of the chat template have {length} characters; at most {_MAX_ARGUMENTS_LENGTH} are taken"
        )
