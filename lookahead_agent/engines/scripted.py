"""An engine that follows a script: for tests and simulation, in the time of its event loop."""

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
    """What the engine does for one step of a reply."""

    text: str  # what it writes; with the delimiter, if the step has one
    seconds: float = 0.0  # how long that takes, spread evenly over its tokens
    error: str | None = None  # Raised instead of the last token
    hangs: bool = False  # whether it never ends after its tokens
    ids: tuple[int, ...] | None = None  # token ids that it writes in place of the text's, which may be in no vocabulary


Script = Callable[[str, str], Sequence[ScriptedStep]]  # by the prompt and the reply so far, all that is written next


class ScriptedTokenizer:
    """A tokenizer that needs no model: words, single white-space characters and punctuation marks are tokens.

    Ids are given out as texts come, so texts made by one instance mean nothing to another.
    """

    EOS = 0
    _PIECE = re.compile(r"<[\w/|]+>|\n\n|\s?\w+|\s|.", re.DOTALL)
    eos_ids = frozenset({EOS})
    template_variables = frozenset({"enable_thinking"})

    def __init__(self, thinking: ThinkingTags | None = None, *, opens_thinking: bool = False) -> None:
        self.thinking = thinking
        self.fingerprint = f"scripted-{id(self)}"
        self._opening = f"{thinking.open}\n" if thinking is not None and opens_thinking else ""
        self._ids: dict[str, int] = {"": self.EOS}
        self._texts: list[str] = [""]
        self.size = 1  # tokens given out so far

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
        """Text of tokens; those that no text has been given have none."""
        return "".join(self._texts[token_id] for token_id in token_ids if token_id < len(self._texts))

    def stream(self, before: Sequence[int] = ()) -> TextStream:
        """Start decoding: each token is a whole text."""
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
            lines.append("assistant: " + self._opening)
        return ChatPrompt(self.encode("\n".join(lines), longest))

    def remember_reply(self, prompt: ChatPrompt, reply_ids: Sequence[int]) -> None:
        """Nothing: a text has one encoding."""

    def follow_up(self, question: str) -> list[int]:
        """Token ids of a further line of the user's, and the beginning of the assistant's."""
        return self.encode(f"\nuser: {question}\nassistant: ")


@dataclass(eq=False, repr=False)
class ScriptedEngine:
    """Writes what a script says; with a list of steps, a reply ends (EOS) after the last step."""

    tokenizer: ScriptedTokenizer  # shared by engines that exchange token ids
    # A list of steps, of which step `n` follows the reply's first `n` (delimited) steps, or a function of the prompt
    # and the reply so far
    script: Sequence[ScriptedStep] | Script
    prompt_length: int | None = None  # tokens before the reply begins; None: it begins after the last "assistant: "
    _: KW_ONLY
    # Log-probabilities of tokens by text, for requests that ask for those of the first token or of the prompt's (there
    # -1 for a text that is not listed)
    logprobs: Mapping[str, float] = field(default_factory=dict)
    context_length: int = 1 << 20  # most tokens of prompt and reply together
    tokens_per_delta: int = 1  # how many tokens come at once
    prefix_cache: bool = False  # whether it tells what it has read of a prompt before, in blocks of one token

    def __post_init__(self) -> None:
        self._script = self.script if callable(self.script) else following(self.script)
        self.healthy = True
        self.in_flight = 0
        self.generated = 0  # tokens that were generated in all, but for answers
        self.answers = 0  # requests for log-probabilities that were answered, with one token each
        self.requests: list[tuple[tuple[int, ...], Sampling]] = []  # prompt and sampling parameters of every request

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> AsyncGenerator[Delta, None]:
        """Write what the script says, token by token; see `Engine.generate`."""
        if not self.healthy:
            raise EngineError("the engine is shut down")
        cached = self._cached(tuple(prompt_ids))
        self.requests.append((tuple(prompt_ids), sampling))
        self.in_flight += 1
        try:
            if sampling.logprobs is not None:
                yield self._likelihoods(sampling)
                return
            if sampling.prompt_logprobs:
                yield self._prompt_likelihoods(prompt_ids)
                return
            room = min(sampling.max_tokens, self.context_length - len(prompt_ids))
            together: tuple[int, ...] = ()
            for written, (token, seconds, step) in enumerate(self._tokens(prompt_ids), 1):
                if seconds:
                    await asyncio.sleep(seconds)
                if token is None:
                    if step.hangs:
                        await asyncio.Event().wait()
                    raise EngineError(step.error or "the script has no more to say")
                ended = token in self.tokenizer.eos_ids
                together += (token,)
                last = ended or written >= room
                if last or len(together) == self.tokens_per_delta:
                    self.generated += len(together)
                    yield Delta(together, None, "stop" if ended else "length" if last else None, None, cached)
                    together, cached = (), None
                if last:
                    return
        finally:
            self.in_flight -= 1

    def _cached(self, prompt_ids: tuple[int, ...]) -> int | None:
        """The longest beginning of a prompt that an earlier one has, but for its last token, which is always read."""
        if not self.prefix_cache:
            return None
        equal = partial(takewhile, lambda pair: pair[0] == pair[1])
        shared = (sum(1 for _ in equal(zip(prompt_ids, earlier, strict=False))) for earlier, _ in self.requests)
        return min(max(shared, default=0), len(prompt_ids) - 1)

    def _tokens(self, prompt_ids: Sequence[int]) -> list[tuple[int | None, float, ScriptedStep]]:
        """Tokens to write with the seconds before each; None where the script fails or hangs."""
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

    def _prompt_likelihoods(self, prompt_ids: Sequence[int]) -> Delta:
        known = [self.logprobs.get(self.tokenizer.decode((token,)), -1.0) for token in prompt_ids[1:]]
        self.answers += 1
        return Delta((ScriptedTokenizer.EOS,), None, "length", (None, *known))

    def _likelihoods(self, sampling: Sampling) -> Delta:
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
    """A script that writes whole replies, each step in some seconds: one for all prompts, or by a function of them."""

    def script(prompt: str, begun: str) -> Sequence[ScriptedStep]:
        parts = re.findall(r".*?\n\n|.+\Z", reply if isinstance(reply, str) else reply(prompt), re.DOTALL)
        return following([ScriptedStep(part, seconds) for part in parts])(prompt, begun)

    return script


def following(steps: Sequence[ScriptedStep]) -> Script:
    """The script of a list: after `n` delimited steps comes step `n`, without what is already written of it."""

    def script(_: str, reply: str) -> Sequence[ScriptedStep]:
        *complete, begun = reply.split("\n\n")
        rest = list(steps[sum(1 for part in complete if part.strip()) :])
        if rest and begun and rest[0].text.startswith(begun):
            rest[0] = replace(rest[0], text=rest[0].text[len(begun) :])
        return rest

    return script
