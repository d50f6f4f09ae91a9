"""The format of recordings: JSON Lines, with a prompt on each line; see docs/reference/recordings.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lookahead_agent.decoding.request import Regions
from lookahead_agent.decoding.step import StepEnd
from lookahead_agent.engines.chat_template import ThinkingTags
from lookahead_agent.errors import ConfigurationError, validation_message
from lookahead_agent.system.jsonl import RowFile

VERSION = 1
Writer = Literal["target", "draft"]


class Place(NamedTuple):
    """A prefix of a reply: the prefix that a run continues, and this many tokens of the run."""

    run: int
    tokens: int


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Tokens(_Part):
    """Tokens, with the text that each of them completes."""

    ids: tuple[int, ...]
    texts: tuple[str, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.ids) != len(self.texts):
            raise ValueError(f"there are {len(self.ids)} ids and {len(self.texts)} texts")
        return self


class RunRecord(Tokens):
    """Tokens that a model writes after a prefix, each the likeliest; None: after the prompt."""

    model: Writer
    after: Place | None


class StepRecord(_Part):
    """A step that a model writes after a prefix."""

    model: Writer
    after: Place | None  # None: the prompt
    end: Place  # the prefix that ends with the step
    position: int = Field(ge=0)  # number of the step in the reply, from 0
    ended_by: StepEnd


class VerdictRecord(_Part):
    """The verdict on a draft step and the target step after the same prefix."""

    draft: int  # index of the draft step
    target: int  # index of the target step
    accepted: bool
    seconds: float = Field(ge=0)
    reason: str = ""
    score: float | None = None


class ReplyRecord(_Part):
    """The reply that the steps add up to."""

    ids: tuple[int, ...]
    steps: int = 0  # committed steps
    accepted: int = 0  # draft steps among them


class RegionsRecord(_Part):
    """The parts of a reply that only the target may write; see `Regions`."""

    action_markers: tuple[str, ...] = ()
    thinking: ThinkingTags | None = None
    answer_from_target: bool = False

    @property
    def regions(self) -> Regions:
        """The decoder's regions."""
        return Regions(self.action_markers, self.thinking, self.answer_from_target)


class Recording(_Part):
    """Everything that a pair writes to one prompt at temperature 0."""

    version: Literal[1]
    name: str  # unique in a file
    question: str = ""
    prompt: Tokens
    max_tokens: int = Field(ge=1)  # token limit of the reply
    regions: RegionsRecord = RegionsRecord()
    tokenizer: str  # fingerprint of the tokenizer: rows of one replay have the same
    eos_ids: tuple[int, ...]  # tokens that end a reply
    runs: tuple[RunRecord, ...] = Field(min_length=1)
    steps: tuple[StepRecord, ...] = ()
    verdicts: tuple[VerdictRecord, ...] = ()
    target_alone: ReplyRecord
    lookahead: ReplyRecord
    settings: dict[str, Any] = Field(default_factory=dict)  # models, policy, depth and the rules of steps
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.prompt.ids:
            raise ValueError("the prompt is empty")
        for index, run in enumerate(self.runs):
            if not run.ids:
                raise ValueError(f"run {index} has no token")
            self._check_place(run.after, f"run {index}", index)
        for index, step in enumerate(self.steps):
            self._check_place(step.after, f"step {index}", len(self.runs))
            self._check_place(step.end, f"step {index}", len(self.runs))
        for verdict in self.verdicts:
            pair = {"draft": verdict.draft, "target": verdict.target}
            for model, index in pair.items():
                if not 0 <= index < len(self.steps) or self.steps[index].model != model:
                    raise ValueError(f"a verdict names step {index}, which is not a step of the {model}")
        return self

    def _check_place(self, place: Place | None, where: str, runs: int) -> None:
        if place is None:
            return
        if not 0 <= place.run < runs or not 1 <= place.tokens <= len(self.runs[place.run].ids):
            raise ValueError(f"{where} follows a place that no run before it has: {tuple(place)}")


class PrefixTree:
    """The prefixes that a pair reaches after one prompt, as numbers; 0 is the prompt without a reply."""

    def __init__(self) -> None:
        self.children: list[dict[int, int]] = [{}]  # each prefix's longer prefixes by their last token
        self.parents = [-1]
        self.ids = [-1]  # last token of each prefix
        self.texts = [""]
        self.places: list[Place | None] = [None]
        self.next: dict[Writer, dict[int, int]] = {"target": {}, "draft": {}}  # a model's next token, by prefix
        self.runs: list[tuple[Writer, Place | None, list[int]]] = []  # the last: prefixes

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """Build the tree of a recording; raises ConfigurationError if a model continues a prefix in two ways."""
        tree = cls()
        for run in recording.runs:
            prefix, number = tree.find(run.after), None
            for token, text in zip(run.ids, run.texts, strict=True):
                if tree.next[run.model].get(prefix, token) != token:
                    raise ConfigurationError(
                        f"{recording.name}: the {run.model} continues one prefix in two ways, by the tokens "
                        f"{tree.next[run.model][prefix]} and {token}: record it at temperature 0"
                    )
                number, prefix = tree.add(run.model, prefix, token, text, number)
        return tree

    def find(self, place: Place | None) -> int:
        """The prefix of a place."""
        return 0 if place is None else self.runs[place.run][2][place.tokens - 1]

    def add(self, model: Writer, prefix: int, token: int, text: str, run: int | None = None) -> tuple[int, int]:
        """Record a model's next token; returns the run, a new one for None, and the longer prefix."""
        if run is None:
            run = len(self.runs)
            self.runs.append((model, self.places[prefix], []))
        self.next[model][prefix] = token
        longer = self.children[prefix].setdefault(token, len(self.ids))
        self.runs[run][2].append(longer)
        if longer == len(self.ids):
            self.children.append({})
            self.parents.append(prefix)
            self.ids.append(token)
            self.texts.append(text)
            self.places.append(Place(run, len(self.runs[run][2])))
        return run, longer

    def follow(self, model: Writer, prefix: int) -> int | None:
        """The prefix that is longer by a model's next token; None: it is not recorded."""
        token = self.next[model].get(prefix)
        return None if token is None else self.children[prefix][token]

    def reply(self, prefix: int) -> list[int]:
        """The tokens of a prefix after the prompt."""
        ids: list[int] = []
        while prefix:
            ids.append(self.ids[prefix])
            prefix = self.parents[prefix]
        return ids[::-1]

    def records(self) -> tuple[RunRecord, ...]:
        """The runs of the format."""
        return tuple(
            RunRecord(
                model=model,
                after=after,
                ids=tuple(self.ids[prefix] for prefix in prefixes),
                texts=tuple(self.texts[prefix] for prefix in prefixes),
            )
            for model, after, prefixes in self.runs
        )


def read_recordings(file: Path, limit: int | None = None) -> list[Recording]:
    """Read the recordings of a file, at most `limit`.

    Raises ConfigurationError if there is none, if a row is invalid, or if two have one name or different tokenizers.
    """
    if not file.is_file():
        raise ConfigurationError(f"there is no file {file}: `lookahead-agent bench record` makes recordings")
    recordings = parse_recordings(file, RowFile(file).rows[:limit])
    if not recordings:
        raise ConfigurationError(f"{file} has no recording")
    return recordings


def parse_recordings(file: Path, rows: Sequence[dict[str, Any]]) -> list[Recording]:
    """Validate the rows of a file; see `read_recordings`."""
    recordings: dict[str, Recording] = {}
    for number, row in enumerate(rows, 1):
        if row.get("version") != VERSION:
            raise ConfigurationError(
                f"{file}, row {number} is not a recording of version {VERSION}: its version is {row.get('version')!r}"
            )
        try:
            recording = Recording.model_validate(row)
        except ValidationError as error:
            raise ConfigurationError(f"{file}, row {number} is not a recording: {validation_message(error)}") from error
        if recording.name in recordings:
            raise ConfigurationError(f"{file}, row {number}: there is another recording with the name {recording.name}")
        if recordings and recording.tokenizer != next(iter(recordings.values())).tokenizer:
            raise ConfigurationError(f"{file}, row {number} has another tokenizer than the first: replay them apart")
        recordings[recording.name] = recording
    return list(recordings.values())
