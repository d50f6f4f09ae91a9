"""The reply so far: its committed text, and the prefix up to each undecided step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lookahead_agent.decoding.request import PROMPT_TAIL, ReplyRequest
from lookahead_agent.decoding.segmenter import PrefixContext, Segmentation, Segmenter
from lookahead_agent.decoding.step import Node, Source, Step, StepEnd
from lookahead_agent.decoding.thinking import ThinkingBudget, ThinkingState
from lookahead_agent.engines.tokenizer import Tokenizer
from lookahead_agent.errors import EngineError


@dataclass(eq=False)
class ReplyText:
    """Collects committed tokens and streams their text, except an end in which a stop string may begin."""

    tokenizer: Tokenizer
    prompt_ids: Sequence[int]
    stop: tuple[str, ...]
    on_text: Callable[[str], None] | None
    thinking: ThinkingState = field(default_factory=ThinkingState)  # state where the pending text begins
    token_ids: list[int] = field(default_factory=list)
    text_ends: list[int] = field(default_factory=list)  # Length of the text after each token

    def __post_init__(self) -> None:
        self._stream = self.tokenizer.stream(self.prompt_ids)
        self._held = max((len(text) for text in self.stop), default=1) - 1
        self._pieces: list[str] = []  # joined on demand: appending to one string would copy the reply for each token
        self._pending = ""  # committed and not passed on: a stop string may begin in it
        self._length = self._passed_on = 0

    @property
    def text(self) -> str:
        """The committed text, with a stop string if one was written."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    def commit(self, token_ids: Sequence[int]) -> None:
        """Add tokens that are certain to be part of the reply."""
        for token_id in token_ids:
            self.token_ids.append(token_id)
            self._add(self._stream.push(token_id))
            self.text_ends.append(self._length)
        self._pass_on(min(self._end(), len(self._pending) - self._held))

    def finish(self) -> str:
        """Pass on the pending text and return the whole text, truncated before a stop string."""
        self._add(self._stream.flush())
        self._pass_on(self._end())
        return self.text[: self._passed_on]

    def _add(self, text: str) -> None:
        text = without_surrogates(text)
        self._pieces.append(text)
        self._length += len(text)
        self._pending += text

    def _end(self) -> int:
        """The length of the pending text, or of its part before a stop string."""
        found = (self.thinking.find(self._pending, stop) for stop in self.stop)
        return min((at for at in found if at >= 0), default=len(self._pending))

    def _pass_on(self, end: int) -> None:
        if end > 0:
            if self.on_text is not None:
                self.on_text(self._pending[:end])
            if self.stop:
                self.thinking = self.thinking.then(self._pending[:end])
            self._pending = self._pending[end:]
            self._passed_on += end


def without_surrogates(text: str) -> str:
    """The text without lone surrogates, which neither UTF-8 nor clients' JSON parsers accept."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class Prefixes:
    """Prompt and reply up to any node that is not dropped: as each model's token ids, or as text."""

    def __init__(
        self, request: ReplyRequest, target: Tokenizer, draft: Tokenizer, on_text: Callable[[str], None] | None
    ) -> None:
        self.shared = target.fingerprint == draft.fingerprint  # whether draft and target have one vocabulary
        self._target = target
        self._draft = draft
        tags, prompt_end = request.regions.thinking, target.decode(request.prompt_ids[-PROMPT_TAIL:])
        thinking = ThinkingState(tags, tags is not None and tags.is_opened_by(prompt_end))
        self.awaits_thinking = request.regions.answer_from_target and tags is not None and not thinking.inside
        """Whether the reply begins before its thinking, in text that only the target may write."""
        self.committed = ReplyText(target, request.prompt_ids, request.sampling.stop, on_text, thinking)
        self._max_tokens = request.sampling.max_tokens
        limit = request.thinking_tokens if tags is not None else None
        self._thinking = ThinkingBudget(limit, thinking) if limit is not None else None  # the budget at the beginning
        # Prompt and committed tokens in each model's vocabulary; with one vocabulary, the two share them.
        translated = request.prompt_ids if self.shared else request.draft_prompt_ids or request.prompt_ids
        self._prompts = {Source.TARGET: request.prompt_ids, Source.DRAFT: translated}
        ids = self.committed.token_ids
        self._replies: dict[Source, list[int]] = {Source.TARGET: ids, Source.DRAFT: ids if self.shared else []}
        self._draft_ids: dict[int, tuple[int, ...]] = {}  # undecided steps in the draft's vocabulary, by job
        # A marker or stop string may begin this many characters before the step that completes it.
        markers = (*request.sampling.stop, *request.regions.action_markers, *((tags.open, tags.close) if tags else ()))
        self._context = PrefixContext(max(map(len, markers), default=0), thinking=thinking)  # the front's context
        self._contexts: dict[int, PrefixContext] = {}  # contexts after undecided steps, by job

    def ids(self, node: Node, source: Source) -> list[int]:
        """The token ids of prompt and reply up to a node, in one model's vocabulary."""
        ids = [*self._prompts[source], *self._replies[source]]
        for undecided in _list_undecided(node):
            ids.extend(self._ids_of(undecided, source))
        return ids

    def reply_length(self, node: Node, source: Source = Source.TARGET) -> int:
        """The reply's length up to a node, in one model's tokens."""
        return len(self._replies[source]) + sum(
            len(self._ids_of(undecided, source)) for undecided in _list_undecided(node)
        )

    def text(self, node: Node) -> str:
        """The reply's text up to a node."""
        return self.committed.text + "".join(part.step.text for part in _list_undecided(node) if part.step is not None)

    def context(self, node: Node) -> PrefixContext:
        """The context that decides where the step after a node ends."""
        if node.parent is None or node.step is None:
            return self._context
        if node.job not in self._contexts:
            self._contexts[node.job] = self.context(node.parent).after(node.step)
        return self._contexts[node.job]

    def thinking(self, node: Node, source: Source = Source.TARGET) -> ThinkingBudget | None:
        """The budget of the thinking after a node, for a model whose tokens it counts; None: no budget."""
        if source is Source.DRAFT and not self.shared:
            return None
        return self._thinking if node.step is None else node.step.thinking

    def from_draft(self, job: int, node: Node, step: Step) -> Step:
        """Convert the step that a draft job wrote after a node to the target's tokens."""
        if not step.token_ids:
            raise EngineError("the draft model ended a step without writing anything")
        if self.shared:
            if max(step.token_ids) >= self._target.size or min(step.token_ids) < 0:
                raise EngineError("the draft model wrote a token that is not in the vocabulary")
            return step
        self._draft_ids[job] = step.token_ids  # the draft reads its own step as these tokens
        ids = self._target.encode(step.text)
        budget, thinking = self._max_tokens - self.reply_length(node), self.thinking(node)
        if thinking is not None:
            stream = self._target.stream(self.ids(node, Source.TARGET))
            counter = Segmenter(Segmentation(None, budget + 1), stream, self.context(node), budget + 1, thinking)
            if any(map(counter.push, ids)):
                step = replace(step, end=StepEnd.LIMIT)
            thinking = counter.thinking
        if step.end is StepEnd.EOS:
            ids.append(min(self._target.eos_ids))
        end = StepEnd.BUDGET if len(ids) >= budget else step.end
        return replace(step, token_ids=tuple(ids), end=end, thinking=thinking)

    def commit(self, node: Node, live: bool) -> None:
        """Add the last step of a node to the reply; the tokens of a live step are committed already."""
        assert node.step is not None
        if not self.shared:
            self._replies[Source.DRAFT].extend(self._ids_of(node, Source.DRAFT))
        self._context = self._contexts.get(node.job) or self._context.after(node.step)
        self.forget(node.job)
        if not live:
            self.committed.commit(node.step.token_ids)

    def forget(self, job: int) -> None:
        """Drop the cached data of a decided step: later steps follow it only if it is the front."""
        self._draft_ids.pop(job, None)
        self._contexts.pop(job, None)

    def _ids_of(self, node: Node, source: Source) -> Sequence[int]:
        assert node.step is not None
        if self.shared or source is Source.TARGET:
            return node.step.token_ids
        if node.job not in self._draft_ids:
            self._draft_ids[node.job] = tuple(self._draft.encode(node.step.text))
        return self._draft_ids[node.job]


def _list_undecided(node: Node) -> list[Node]:
    """The nodes after the front down to `node`."""
    nodes: list[Node] = []
    while node.parent is not None:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]
