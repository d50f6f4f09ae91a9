"""Measures the speed of every mode on engines of any shape that write recorded replies."""

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from lookahead_agent.bench.samples import environment
from lookahead_agent.cost_model.estimator import LOOKAHEAD, EstimatedMode
from lookahead_agent.cost_model.pair import ModelRole, Pair
from lookahead_agent.cost_model.synthetic import SPECULATION, Speculation
from lookahead_agent.cost_model.synthetic_bench import ModeEngines
from lookahead_agent.decoding import DecodingSettings, Reply, ReplyRequest, lookahead
from lookahead_agent.decoding.verifier import Verifier
from lookahead_agent.engines.protocol import Sampling
from lookahead_agent.engines.vllm_config import REPLAY_PATH, without_folders
from lookahead_agent.errors import ConfigurationError, EngineError, validation_message
from lookahead_agent.replay.replies import EXTENSION, TABLE, UNRECORDED, RecordedReplies, ReplayedReply, write_model
from lookahead_agent.replay.verifiers import DrawnVerifier, RecordedVerifier
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.system.progress import Progress
from lookahead_agent.trace.node_times import Table
from lookahead_agent.verifiers.model_free import ExactVerifier
from lookahead_agent.verifiers.prefilter import PrefilterVerifier

_ROLES: tuple[ModelRole, ...] = ("target", "draft")


class ReplayRow(BaseModel):
    """One replayed reply."""

    mode: EstimatedMode
    depth: int  # steps ahead (γ₁); 0 without step speculation
    replies: int  # concurrent ones
    repeat: int  # number of the measurement, from 0
    name: str  # of the recording
    seconds: float
    writing: float  # seconds after the first token
    output_tokens: int
    steps: int  # committed ones
    accepted: int  # draft steps among them
    passes: int  # forward passes of the target
    verifier_calls: int
    same: bool | None  # whether the reply has the recorded tokens; None: verdicts were drawn
    unrecorded: int  # tokens of the reply after which the recording ends
    # Numbers of "committed", "rejected", "aborted" and "speculative" tokens, by "target" and "draft"
    tokens: dict[str, dict[str, int]]
    settings: dict[str, Any] = Field(default_factory=dict)  # everything else that determines the result
    environment: dict[str, Any] = Field(default_factory=dict)  # versions and hardware


@dataclass(frozen=True)
class ReplayConfiguration:
    """A mode and its depth."""

    mode: EstimatedMode
    depth: int


class ReplaySettings(BaseModel):
    """Settings of a replay."""

    model_config = ConfigDict(frozen=True)

    modes: tuple[EstimatedMode, ...] = Field(tuple(SPECULATION), min_length=1)  # "off" is always among them
    depths: tuple[PositiveInt, ...] = Field((4,), min_length=1)  # steps ahead
    replies: PositiveInt = 1  # concurrent replies
    alpha: float | None = Field(None, ge=0, le=1)  # of drawn verdicts; None: the recorded ones
    draft_tokens: PositiveInt | None = None  # for each forward pass; None: the method's default
    repeats: PositiveInt = 1
    seed: int = 0  # of the draws

    @property
    def configurations(self) -> list[ReplayConfiguration]:
        """Every mode with each of its depths."""
        modes = dict.fromkeys(("off", *self.modes))
        return [
            ReplayConfiguration(mode, depth) for mode in modes for depth in (self.depths if mode in LOOKAHEAD else (0,))
        ]


class ReplayPair(Pair):
    """A pair of shapes that can write recorded replies."""

    def replay(self, replies: RecordedReplies, folder: Path) -> None:
        """Let the models write recorded replies from now on, from files in `folder`.

        Raises ConfigurationError if a shape cannot.
        """
        for role in _ROLES:
            self._folders[role] = write_model(replies, role, self._folders[role].resolve(), folder / role)
            self.arguments[role] |= {"worker_extension_cls": EXTENSION}
        self.draft_folder = self._folders["draft"]
        tokens = folder / "tokens.npz"
        replies.write_tokens(tokens)
        self.arguments["target"] |= {"additional_config": {TABLE: str(tokens)}}


@dataclass(eq=False)
class ReplayBench:
    """A measurement into a file of rows; `run` loads the engines."""

    pair: Pair  # whose models write the recorded replies
    replies: Sequence[ReplayedReply]
    settings: ReplaySettings
    out: Path
    longest: float = 600.0  # timeout of one reply in seconds

    def __post_init__(self) -> None:
        self._file = RowFile(self.out)
        first = self.replies[0].recording
        recorded = int(first.settings.get("depth", max(self.settings.depths)))
        if max(self.settings.depths) > recorded and set(self.settings.modes) & set(LOOKAHEAD):
            raise ConfigurationError(f"the replies are recorded up to {recorded} steps ahead: choose smaller depths")
        kept = self.settings.model_dump(include={"alpha", "draft_tokens", "seed"})
        self._recorded = {"models": self.pair.names, "arguments": without_folders(self.pair.arguments), **kept}
        if any(row.settings != self._recorded for row in self.rows()):
            raise ConfigurationError(f"{self.out} has results of other settings: choose another file")

    def rows(self) -> list[ReplayRow]:
        """The rows measured so far; raises ConfigurationError if the file holds others."""
        try:
            return [ReplayRow.model_validate(row) for row in self._file.rows]
        except ValidationError as error:
            reason = validation_message(error)
            raise ConfigurationError(f"{self._file.path} has other rows than of bench replay: {reason}") from error

    @property
    def _missing(self) -> list[tuple[int, ReplayConfiguration, ReplayedReply]]:
        known = {(row.repeat, row.mode, row.depth, row.replies, row.name) for row in self.rows()}
        return [
            (repeat, config, reply)
            for repeat in range(self.settings.repeats)
            for at in range(0, len(self.replies), self.settings.replies)
            for config in self.settings.configurations
            for reply in self.replies[at : at + self.settings.replies]
            if (repeat, config.mode, config.depth, self.settings.replies, reply.recording.name) not in known
        ]

    @property
    def total(self) -> int:
        """The number of rows of the whole measurement."""
        return self.settings.repeats * len(self.settings.configurations) * len(self.replies)

    def run(self, progress: Progress, seconds: float | None = None) -> bool:
        """Measure the missing rows, and return whether everything is measured; a rerun continues after a failure.

        No reply starts after `seconds`. Raises EngineError at the end if an engine has failed, which ends its modes
        only.
        """
        end = float("inf") if seconds is None else time.monotonic() + seconds
        missing = self._missing
        with self._file.open_for_writing(), ExitStack() as stack:
            if not missing:
                return True
            engines = ModeEngines(self.pair, {config.mode for _, config, _ in missing}, self._method, stack)
            failures = dict(engines.failures)
            with progress.task("Replaying", len(missing)) as advance:
                done = 0
                for (repeat, config), turn in _turns(missing):
                    if time.monotonic() >= end:
                        return False
                    try:
                        if config.mode in engines.targets and config.mode not in failures:
                            for row in background.run(self._measure(engines, repeat, config, turn)):
                                self._file.append(row.model_dump(mode="json"))
                    except EngineError as error:
                        failures[config.mode] = error
                    done += len(turn)
                    advance(done)
        if failures:
            raise EngineError("; ".join(f"{name}: {error}" for name, error in failures.items()))
        return True

    def _method(self, kind: Speculation) -> dict[str, Any]:
        count = self.settings.draft_tokens
        proposer = {"model": REPLAY_PATH} if kind == "shared_draft" else {}
        return proposer | ({"num_speculative_tokens": count} if count is not None else {})

    async def _measure(
        self, engines: ModeEngines, repeat: int, config: ReplayConfiguration, turn: Sequence[ReplayedReply]
    ) -> list[ReplayRow]:
        try:
            async with asyncio.timeout(self.longest):
                return await background.gather_or_cancel(self._replay(engines, repeat, config, reply) for reply in turn)
        except TimeoutError as error:
            raise EngineError(f"a reply of {config.mode} was not done after {self.longest:g} s") from error

    async def _replay(
        self, engines: ModeEngines, repeat: int, config: ReplayConfiguration, reply: ReplayedReply
    ) -> ReplayRow:
        recording, drawn = reply.recording, self.settings.alpha is not None
        written = await self._write(engines, repeat, config, reply)
        report = written.report
        expected = reply.lookahead if config.depth else reply.target_alone
        return ReplayRow(
            mode=config.mode,
            depth=config.depth,
            replies=self.settings.replies,
            repeat=repeat,
            name=recording.name,
            seconds=report.seconds["total"],
            writing=report.seconds["writing"],
            output_tokens=len(written.token_ids),
            steps=report.steps,
            accepted=report.accepted,
            passes=report.target_forward_passes,
            verifier_calls=report.verifier_calls,
            same=None if drawn and config.depth else written.token_ids == expected,
            unrecorded=written.token_ids.count(UNRECORDED),
            tokens={
                role: {
                    fate: getattr(getattr(report, f"{role}_tokens"), fate)
                    for fate in ("committed", "rejected", "aborted", "speculative")
                }
                for role in _ROLES
            },
            settings=self._recorded,
            environment=environment(),
        )

    async def _write(
        self, engines: ModeEngines, repeat: int, config: ReplayConfiguration, reply: ReplayedReply
    ) -> Reply:
        recording, kept = reply.recording, reply.recording.settings
        # Each measurement reads its prompt anew.
        sampling = Sampling(recording.max_tokens, cache_salt=f"{repeat} {config.mode} {config.depth}")
        request = ReplyRequest(reply.prompt, sampling, recording.name, recording.regions.regions)
        decoding = DecodingSettings(
            depth=config.depth,
            delimiter=str(kept.get("delimiter", "\n\n")),
            max_step_tokens=int(kept.get("max_step_tokens", 256)),
            shared_draft=config.mode in ("shared_draft", "lr+shared_draft"),
        )
        draft = engines.draft if config.mode not in ("off", "sd") else None
        return await lookahead(
            request, engines.targets[config.mode], draft, self._verifier if config.depth else None, decoding
        )

    @property
    def _verifier(self) -> Verifier:
        if self.settings.alpha is not None:
            return DrawnVerifier(self.replies, self.settings.alpha, self.settings.seed)
        early = self.replies[0].recording.settings.get("early")
        exact = ExactVerifier()
        return RecordedVerifier(
            self.replies, exact if early == "exact" else PrefilterVerifier(exact) if early == "results" else None
        )


def _turns(
    missing: Sequence[tuple[int, ReplayConfiguration, ReplayedReply]],
) -> Iterator[tuple[tuple[int, ReplayConfiguration], list[ReplayedReply]]]:
    """Group the replies that are written at the same time."""
    turn: list[ReplayedReply] = []
    key: tuple[int, ReplayConfiguration] | None = None
    for repeat, config, reply in missing:
        if key is not None and (repeat, config) != key:
            yield key, turn
            turn = []
        key = repeat, config
        turn.append(reply)
    if key is not None:
        yield key, turn


def replay_table(rows: Sequence[ReplayRow]) -> Table:
    """Measured speed of each configuration, relative to the target alone on the same replies."""
    headings = ["mode", "depth", "replies", "rows", "same", "α", "tokens/s", "speed (least to most)", "tokens per pass"]
    groups: dict[tuple[str, int, int], list[ReplayRow]] = {}
    for row in rows:
        groups.setdefault((row.mode, row.depth, row.replies), []).append(row)
    table = []
    for (mode, depth, replies), group in groups.items():
        speeds = _speeds(group, groups.get(("off", 0, replies), []))
        steps, same = sum(row.steps for row in group), [row.same for row in group if row.same is not None]
        generated = sum(sum(row.tokens["target"].values()) for row in group)
        table.append(
            [
                mode,
                str(depth or ""),
                str(replies),
                str(len(group)),
                f"{sum(same)} of {len(same)}" if same else "",
                f"{sum(row.accepted for row in group) / steps:.2f}" if depth and steps else "",
                f"{sum(row.output_tokens for row in group) / sum(row.seconds for row in group):.1f}",
                f"{statistics.median(speeds):.2f} ({min(speeds):.2f} to {max(speeds):.2f})" if speeds else "",
                f"{generated / max(sum(row.passes for row in group), 1):.2f}",
            ]
        )
    return headings, table


def _speeds(rows: Sequence[ReplayRow], alone: Sequence[ReplayRow]) -> list[float]:
    """Tokens per second against the target alone, of each repeat, over the replies that both have."""
    speeds = []
    for repeat in sorted({row.repeat for row in rows}):
        mine, base = ({row.name: row for row in group if row.repeat == repeat} for group in (rows, alone))
        names = mine.keys() & base.keys()
        if names:
            paces = [
                sum(side[name].output_tokens for name in names) / sum(side[name].seconds for name in names)
                for side in (mine, base)
            ]
            speeds.append(paces[0] / paces[1])
    return speeds
