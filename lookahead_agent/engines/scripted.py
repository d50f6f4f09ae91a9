"""An engine that follows a script, for tests and simulation; its delays run on the event loop's clock."""

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from lookahead_agent.engines.chat_template import ThinkingTags, check_arguments, continues
from lookahead_agent.engines.protocol import Delta, Sampling
from lookahead_agent.engines.tokenizer import ChatPrompt, TextStream, prompt_too_long
from lookahead_agent.errors import EngineError


@dataclass(frozen=True)
class ScriptedStep:
    """The engine's output for one step of a reply."""

    text: str  # text of the step, including the delimiter if it has one
    seconds: float = 0.0  # duration, spread evenly over the tokens
    error: str | None = None  # message of an EngineError that is raised after the tokens
    hangs: bool = False  # whether the request hangs after the tokens
    ids: tuple[int, ...] | None = None  # token ids in place of the text's; they may be outside the vocabulary


Script = Callable[[str, str], Sequence[ScriptedStep]]  # all remaining steps after the prompt and the reply so far


class ScriptedTokenizer:
    """A tokenizer without a model: words, single white-space characters and punctuation marks are tokens.

    Ids are assigned in the order of first occurrence, so the ids of one instance mean nothing to another.
    """

    EOS = 0
    _PIECE = re.compile(r"<[\w/|]+>|\n\n|\s?\w+|\s|.", re.DOTALL)
    eos_ids = frozenset({EOS})
    template_variables = frozenset({"enable_thinking"})

    def __init__(self, thinking: ThinkingTags | None = None, *, opens_thinking: bool = False) -> None:
        self.thinking = thinking
        self.fingerprint = f"scripted-{id(self)}"
        self._reply_opening = f"{thinking.open}\n" if thinking is not None and opens_thinking else ""
        self._ids: dict[str, int] = {"": self.EOS}
        self._texts: list[str] = [""]
        self.size = 1  # number of ids assigned so far

    def encode(self, text: str, longest: int | None = None) -> list[int]:
        """Token ids of `text`; see `Tokenizer.encode`."""
        ids: list[int] = []
        for match in self._PIECE.finditer(text):
            piece = match.group()
            if longest is not None and len(ids) >= longest:
                raise prompt_too_long(longest)
            if piece not in self._ids:
                self._ids[piece] = self.size
                self._texts.append(piece)
                self.size += 1
            ids.append(self._ids[piece])
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens; ids without a text have none."""
        return "".join(self._texts[token_id] for token_id in token_ids if token_id < len(self._texts))

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Start decoding; the tokenizer is its own stream, since each token is a complete text."""
        return self

    def push(self, token_id: int) -> str:
        """See `TextStream.push`."""
        return self.decode((token_id,))

    def flush(self) -> str:
        """See `TextStream.flush`."""
        return ""

    def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        longest: int | None = None,
        *,
        whole: bool = False,
    ) -> ChatPrompt:
        """Token ids of the messages, one line each; see `Tokenizer.chat_prompt`."""
        check_arguments(template_arguments or {}, self.template_variables)
        lines = [f"{message['role']}: {message.get('content') or ''}" for message in messages]
        if tools:
            lines.insert(0, "tools: " + json.dumps(list(tools)))
        if not continues(messages):
            lines.append("assistant: " + self._reply_opening)
        return ChatPrompt(self.encode("\n".join(lines), longest))

    def remember_reply(self, prompt: ChatPrompt, reply_ids: Sequence[int]) -> None:
        """Do nothing: a text has only one encoding."""

    def follow_up(self, question: str) -> list[int]:
        """Token ids of another user line and the start of the assistant's line."""
        return self.encode(f"\nuser: {question}\nassistant: ")


@dataclass(eq=False, repr=False)
class ScriptedEngine:
    """Generates the tokens of a script; if `script` is a list of steps, the reply ends (EOS) after the last step."""

    tokenizer: ScriptedTokenizer  # shared by engines that exchange token ids
    # A list of steps, where step `n` follows the reply's first `n` (delimited) steps, or a function of the prompt and
    # the reply so far
    script: Sequence[ScriptedStep] | Script
    prompt_length: int | None = None  # tokens of the prompt; None: the reply begins after the last "assistant: "
    _: KW_ONLY
    # Log-probabilities of tokens by text, for requests with `logprobs` or `prompt_logprobs` (in the latter, a text that
    # is not listed has -1)
    logprobs: Mapping[str, float] = field(default_factory=dict)
    context_length: int = 1 << 20  # maximum number of tokens of prompt and reply together
    tokens_per_delta: int = 1  # number of tokens per delta
    prefix_cache: bool = False  # whether to report cached tokens of earlier prompts, in blocks of one token

    def __post_init__(self) -> None:
        self._script = self.script if callable(self.script) else script_from_steps(self.script)
        self.healthy = True
        self.in_flight = 0
        self.generated = 0  # tokens generated in total, without those of `answers`
        self.answers = 0  # requests for log-probabilities, each answered with one token
        self.requests: list[tuple[tuple[int, ...], Sampling]] = []  # prompt and sampling parameters of every request

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Generate the script's tokens; see `Engine.generate`."""
        if not self.healthy:
            raise EngineError("the engine is shut down")
        cached = self._count_cached_tokens(tuple(prompt_ids), sampling.cache_salt)
        self.requests.append((tuple(prompt_ids), sampling))
        self.in_flight += 1
        try:
            if sampling.logprobs is not None:
                yield self._top_logprobs(sampling)
                return
            if sampling.prompt_logprobs:
                yield self._prompt_logprobs(prompt_ids)
                return
            room = min(sampling.max_tokens, self.context_length - len(prompt_ids))
            pending: tuple[int, ...] = ()
            for count, (token, seconds, step) in enumerate(self._tokens(prompt_ids), 1):
                if seconds:
                    await asyncio.sleep(seconds)
                if token is None:
                    if step.hangs:
                        await asyncio.Event().wait()
                    raise EngineError(step.error or "the script has no more to say")
                is_eos = token in self.tokenizer.eos_ids
                pending += (token,)
                last = is_eos or count >= room
                if last or len(pending) == self.tokens_per_delta:
                    self.generated += len(pending)
                    yield Delta(pending, None, "stop" if is_eos else "length" if last else None, None, cached)
                    pending, cached = (), None
                if last:
                    return
        finally:
            self.in_flight -= 1

    def _count_cached_tokens(self, prompt_ids: tuple[int, ...], salt: str | None) -> int | None:
        """The longest common prefix with an earlier prompt of this salt, without the last token: it is always read."""
        if not self.prefix_cache:
            return None
        common = partial(takewhile, lambda pair: pair[0] == pair[1])
        salted = (earlier for earlier, sampling in self.requests if sampling.cache_salt == salt)
        lengths = (sum(1 for _ in common(zip(prompt_ids, earlier, strict=False))) for earlier in salted)
        return min(max(lengths, default=0), len(prompt_ids) - 1)

    def _tokens(self, prompt_ids: Sequence[int]) -> list[tuple[int | None, float, ScriptedStep]]:
        """The tokens to generate, each with the seconds before it; None where the script fails or hangs."""
        if self.prompt_length is not None:
            prompt = self.tokenizer.decode(prompt_ids[: self.prompt_length])
            reply = self.tokenizer.decode(prompt_ids[self.prompt_length :])
        else:
            prompt, _, reply = self.tokenizer.decode(prompt_ids).rpartition("assistant: ")
        tokens: list[tuple[int | None, float, ScriptedStep]] = []
        for step in self._script(prompt, reply):
            ids: list[int | None] = [*(step.ids if step.ids is not None else self.tokenizer.encode(step.text))]
            if step.error is not None or step.hangs:
                ids.append(None)
            tokens += [(token, step.seconds / len(ids), step) for token in ids]
            if ids and ids[-1] is None:
                return tokens
        return [*tokens, (ScriptedTokenizer.EOS, 0.0, ScriptedStep(""))]

    def _prompt_logprobs(self, prompt_ids: Sequence[int]) -> Delta:
        logprobs = [self.logprobs.get(self.tokenizer.decode((token,)), -1.0) for token in prompt_ids[1:]]
        self.answers += 1
        return Delta((ScriptedTokenizer.EOS,), None, "length", (None, *logprobs))

    def _top_logprobs(self, sampling: Sampling) -> Delta:
        logprobs = {self.tokenizer.encode(text)[0]: value for text, value in self.logprobs.items()}
        if sampling.allowed_token_ids is not None:
            logprobs = {token: logprobs.get(token, -math.inf) for token in sampling.allowed_token_ids}
        self.answers += 1
        best = max(logprobs, key=lambda token: logprobs[token])
        return Delta((best,), (logprobs,), "length")

    def close(self) -> None:
        """Refuse further requests."""
        self.healthy = False


def reply_script(reply: Callable[[str], str] | str, seconds: float = 0.0) -> Script:
    """A script of whole replies: one for all prompts, or a function of the prompt; each step takes `seconds`."""

    def script(prompt: str, written: str) -> Sequence[ScriptedStep]:
        parts = re.findall(r".*?\n\n|.+\Z", reply if isinstance(reply, str) else reply(prompt), re.DOTALL)
        return script_from_steps([ScriptedStep(part, seconds) for part in parts])(prompt, written)

    return script


def script_from_steps(steps: Sequence[ScriptedStep]) -> Script:
    """The script of a list: step `n` follows `n` delimited steps, without the part of it that is already written."""

    def script(_: str, reply: str) -> Sequence[ScriptedStep]:
        *complete, partial_step = reply.split("\n\n")
        remaining = list(steps[sum(1 for part in complete if part.strip()) :])
        if remaining and partial_step and remaining[0].text.startswith(partial_step):
            remaining[0] = replace(remaining[0], text=remaining[0].text[len(partial_step) :])
        return remaining

    return script
