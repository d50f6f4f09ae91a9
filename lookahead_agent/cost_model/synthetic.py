"""Speed by itself: every way of writing, with models whose words mean nothing and acceptance that is drawn.

How fast a pair writes does not depend on what it says. So steps end by their number of tokens, whether a draft step is
accepted is drawn for each position of a reply, and how many draft tokens are is drawn by vLLM: α and α₂ are exact,
and what is measured can be held against theory. All replies are as long as each other.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lookahead_agent.bench.environment import environment
from lookahead_agent.cost_model.costs import MachineCosts, always_the_same, meaningless_prompt
from lookahead_agent.cost_model.estimator import Acceptance, ModeName, predicted_speed
from lookahead_agent.cost_model.pair import Pair
from lookahead_agent.decoding import DecodingSettings, ReplyRequest, StepEvent, lookahead
from lookahead_agent.decoding.verifier import StepPair, Verdict
from lookahead_agent.engines import background
from lookahead_agent.engines.protocol import Engine
from lookahead_agent.engines.token_speculation import speculative_config
from lookahead_agent.errors import ConfigurationError
from lookahead_agent.jsonl import RowFile
from lookahead_agent.progress import Progress
from lookahead_agent.verifiers.random_accept import draw

Block = Literal["off", "sd", "lr", "lr+sd", "shared_draft"]
"""Engines that are in memory at the same time, by the way that needs them."""

_BLOCK_OF: dict[ModeName, Block] = {
    "off": "off",
    "sd": "sd",
    "lr": "lr",
    "lr+sd": "lr+sd",
    "shared_draft": "shared_draft",
    "lr+shared_draft": "shared_draft",
}
STEPS_ONLY: tuple[ModeName, ...] = ("off", "lr")
"""Modes in which no tokens are guessed."""
_PROMPT_TOKENS = 128
_PROMPTS = 1 << 24
_MOST_AT_ONCE = 64


@dataclass(frozen=True)
class Way:
    """One way of writing replies.

    Attributes:
        mode: As of the benchmark.
        depth: Steps ahead (γ₁); 0 without.
        alpha: Probability that a draft step is accepted; 0 where none is written.
        replies: At once.
    """

    mode: ModeName
    depth: int
    alpha: float
    replies: int


class SyntheticRow(BaseModel):
    """What replies in one way came to, beside the target alone.

    Attributes:
        block: Which engines there were.
        mode: As of `Way`, as of the next three.
        depth: Steps ahead.
        alpha: Probability of acceptance.
        replies: At once.
        repeat: Number of the measurement, from 0.
        pace: Seconds for each token of a reply after its first, on average over the replies.
        steps: Committed, but for the last of each reply, which no draft step is held against.
        accepted: Those of them that the draft wrote.
        judged: Those about which the verifier had decided.
        late: Those that the target wrote before the draft did, so that nothing was drawn.
        passes: How often a target gave tokens.
        waiting: Share of the time in which no engine and no verifier had work.
        tokens: Of "target" and "draft": how many were "committed", "rejected", "aborted", "speculative".
        settings: What else determines the result.
        environment: Versions and hardware.
    """

    model_config = ConfigDict(extra="ignore")

    block: Block
    mode: ModeName
    depth: int
    alpha: float
    replies: int
    repeat: int
    pace: float
    steps: int
    accepted: int
    judged: int
    late: int
    passes: int
    waiting: float
    tokens: dict[str, dict[str, int]]
    settings: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)

    @property
    def key(self) -> tuple[Block, Way, int]:
        """What it is of."""
        return self.block, Way(self.mode, self.depth, self.alpha, self.replies), self.repeat


@dataclass(frozen=True)
class Synthetic:
    """What is measured.

    Attributes:
        modes: Ways of writing; "off" is always measured too.
        alphas: Probabilities that a draft step is accepted.
        depths: Steps ahead.
        replies: Replies at once.
        step_tokens: Tokens of a step.
        steps: Steps of a reply.
        token_alpha: Probability that a draft token is accepted, if those before it are.
        draft_tokens: Tokens guessed for a pass.
        repeats: Measurements of each way.
        seed: Of what is drawn.
        apart: Whether the target alone is loaded after the pair instead of beside it, where cores are divided.

    Raises:
        ConfigurationError: A value out of its range.
    """

    modes: tuple[ModeName, ...] = ("off", "sd", "lr", "lr+sd", "shared_draft", "lr+shared_draft")
    alphas: tuple[float, ...] = (0.4, 0.6, 0.8)
    depths: tuple[int, ...] = (1, 2, 4, 8)
    replies: tuple[int, ...] = (1,)
    step_tokens: int = 32
    steps: int = 16
    token_alpha: float = 0.7
    draft_tokens: int = 4
    repeats: int = 3
    seed: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        if not self.modes or set(self.modes) - set(_BLOCK_OF):
            raise ConfigurationError(f"modes are some of {', '.join(_BLOCK_OF)}")
        if not self.alphas or not all(0 <= rate <= 1 for rate in (*self.alphas, self.token_alpha)):
            raise ConfigurationError("acceptance rates are probabilities, from 0 to 1")
        if not self.depths or not all(1 <= depth <= 16 for depth in self.depths):
            raise ConfigurationError("depths are from 1 to 16")
        if (
            not self.replies
            or min(*self.replies, self.step_tokens, self.draft_tokens, self.repeats) < 1
            or self.steps < 2
        ):
            raise ConfigurationError(
                "replies, tokens of a step, guesses and repeats are at least 1, steps of a reply at least 2"
            )

    @property
    def tokens(self) -> int:
        """Of a reply."""
        return self.steps * self.step_tokens

    @property
    def batches(self) -> list[int]:
        """Sizes of batches whose costs a prediction needs: doubled up to the most steps or guesses that a pass has."""
        ahead = max(self.depths) if set(self.modes) - {"off", "sd", "shared_draft"} else 1
        guessed = self.draft_tokens + 1 if set(self.modes) - set(STEPS_ONLY) else 1
        sizes = [1]
        while sizes[-1] < min(max(self.replies) * max(ahead, guessed), _MOST_AT_ONCE):
            sizes.append(2 * sizes[-1])
        return sizes

    def ways(self, mode: ModeName) -> list[Way]:
        """All ways of a mode."""
        if mode in ("off", "sd", "shared_draft"):
            return [Way(mode, 0, 0.0, replies) for replies in self.replies]
        return [Way(mode, *rest) for rest in product(self.depths, self.alphas, self.replies)]

    def blocks(self, divided: bool) -> list[tuple[Block, list[Way]]]:
        """Which engines are needed, one after another, and the ways that are measured with them.

        Args:
            divided: Whether cores are. A GPU is shared and has no room for a second target: there the target alone is
                measured once, with a target that guesses no tokens.
        """
        wanted = list(dict.fromkeys(mode for mode in self.modes if mode != "off"))
        names = list(dict.fromkeys(_BLOCK_OF[mode] for mode in wanted))
        plain: Block = "lr" if "lr" in names and not divided else "off"
        beside = divided and not self.apart
        if not names or not beside:
            names = [plain, *(name for name in names if name != plain)]
        found = []
        for name in names:
            modes: list[ModeName] = ["off"] if beside or name == plain else []
            modes += [mode for mode in wanted if _BLOCK_OF[mode] == name]
            found.append((name, [way for mode in modes for way in self.ways(mode)]))
        return found


class ChanceByPosition:
    """Accepts by a draw for each position of a reply, whatever the steps say.

    Args:
        alpha: Probability of acceptance, in [0, 1].
        seed: Of the draws: the same positions are accepted whatever way a reply is written in.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha = alpha
        self._seed = seed

    async def verify(self, pair: StepPair) -> Verdict:
        """Draw for a pair."""
        drawn = draw(self._seed, pair.question, pair.position)
        return Verdict(drawn < self._alpha, "drawn", drawn)


def synthetic_acceptance(token_alpha: float, draft_tokens: int) -> dict[str, Any]:
    """What makes vLLM accept guesses by chance: each with this probability if those before it are accepted.

    Args:
        token_alpha: The probability (α₂), in [0, 1].
        draft_tokens: Tokens guessed for a pass, at most.

    Returns:
        Entries of `speculative_config`.
    """
    rates = [token_alpha**position for position in range(1, draft_tokens + 1)]
    return {
        "num_speculative_tokens": draft_tokens,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }


class SyntheticBench:
    """A measurement; nothing is loaded yet.

    Args:
        pair: The models.
        what: What is measured.
        out: Where rows are, or will be.

    Raises:
        ConfigurationError: `out` has rows of other settings, or something else; or a mode cannot be measured here.
    """

    def __init__(self, pair: Pair, what: Synthetic, out: Path) -> None:
        self._pair = pair
        self._what = what
        self._file = RowFile(out)
        self._settings = {
            "models": pair.names,
            "arguments": pair.arguments,
            "step_tokens": what.step_tokens,
            "steps": what.steps,
            "token_alpha": what.token_alpha,
            "draft_tokens": what.draft_tokens,
            "seed": what.seed,
        }
        tokens = [mode for mode in what.modes if mode not in STEPS_ONLY]
        if tokens and not pair.draws_tokens:
            raise ConfigurationError(
                f"vLLM's CPU build does not draw whether draft tokens are accepted, which {', '.join(tokens)} would "
                f"need: choose the modes {','.join(STEPS_ONLY)}"
            )
        if any(row.settings != self._settings for row in self.rows()):
            raise ConfigurationError(f"{out} has results of other settings: choose another file")

    def rows(self) -> list[SyntheticRow]:
        """What was measured so far.

        Raises:
            ConfigurationError: It is something else.
        """
        try:
            return [SyntheticRow.model_validate(row) for row in self._file.rows]
        except ValidationError as error:
            raise ConfigurationError(f"{self._file.path} has other rows than of bench synthetic: {error}") from error

    @property
    def total(self) -> int:
        """How many rows it has in the end."""
        return self._what.repeats * sum(len(ways) for _, ways in self._what.blocks(self._pair.divided))

    def missing(self) -> list[tuple[Block, list[tuple[Way, int]]]]:
        """What is not measured yet, repeat after repeat, all ways in turns."""
        known = {row.key for row in self.rows()}
        turns = [
            (block, [(way, repeat) for repeat in range(self._what.repeats) for way in ways])
            for block, ways in self._what.blocks(self._pair.divided)
        ]
        left = [(block, [each for each in turn if (block, *each) not in known]) for block, turn in turns]
        return [(block, turn) for block, turn in left if turn]

    def run(
        self, progress: Progress, seconds: float | None = None, measure_costs: Callable[[], None] | None = None
    ) -> bool:
        """Measure what is not there yet.

        Args:
            progress: Told how far it is.
            seconds: After which no other measurement is begun; None: all are.
            measure_costs: Called once, where the engines that it needs are loaded if they ever are.

        Returns:
            Whether everything is measured.

        Raises:
            EngineError: An engine failed; a rerun goes on.
        """
        end = float("inf") if seconds is None else time.monotonic() + seconds
        with self._file.writing():
            for block, turn in self.missing():
                if time.monotonic() >= end:
                    return False
                with ExitStack() as engines:
                    loaded = _Engines(self._pair, self._what, block, engines)
                    if block == "lr" and not self._what.apart and measure_costs is not None:
                        measure_costs()
                        measure_costs = None
                    with progress.task(f"Measuring {block}", len(turn)) as task:
                        for done, (way, repeat) in enumerate(turn, 1):
                            if time.monotonic() >= end:
                                return False
                            row = background.run(self._measure(loaded, block, way, repeat))
                            self._file.append(row.model_dump(mode="json"))
                            task.advance(done)
            if measure_costs is not None:
                measure_costs()
        return True

    async def _measure(self, engines: _Engines, block: Block, way: Way, repeat: int) -> SyntheticRow:
        target = engines.alone if way.mode == "off" else engines.target
        draft = engines.draft if way.mode not in ("off", "sd") else None
        settings = DecodingSettings(
            depth=way.depth,
            step_tokens=self._what.step_tokens,
            shared_draft=way.mode in ("shared_draft", "lr+shared_draft"),
        )
        positions: list[dict[str, set[int]]] = [defaultdict(set) for _ in range(way.replies)]  # by kind of event

        async def write(number: int) -> Any:
            name = f"{repeat}.{number}"
            # Different prompts, or the prefix cache would make all but one for nothing.
            prompt = meaningless_prompt(target, _PROMPT_TOKENS, int(_PROMPTS * draw(name, way)))
            request = ReplyRequest(tuple(prompt), always_the_same(target, self._what.tokens), question=name)
            verifier = ChanceByPosition(way.alpha, self._what.seed) if way.depth else None

            def see(event: StepEvent) -> None:
                positions[number][event.kind].add(event.position)

            return await lookahead(request, target, draft, verifier, settings, on_step=see)

        reports = [reply.report for reply in await background.all_of(map(write, range(way.replies)))]
        last = {self._what.steps - 1}
        drafts, targets, judged = (
            [of_reply[kind] - last for of_reply in positions] for kind in ("accepted", "committed", "judged")
        )
        return SyntheticRow(
            block=block,
            mode=way.mode,
            depth=way.depth,
            alpha=way.alpha,
            replies=way.replies,
            repeat=repeat,
            pace=statistics.mean((r.seconds["total"] - r.seconds["first"]) / (self._what.tokens - 1) for r in reports),
            steps=sum(len(d) + len(t) for d, t in zip(drafts, targets, strict=True)),
            accepted=sum(map(len, drafts)),
            judged=sum(len(j & (d | t)) for j, d, t in zip(judged, drafts, targets, strict=True)),
            late=sum(len(t - j) for t, j in zip(targets, judged, strict=True)) if way.depth else 0,
            passes=sum(r.target_forward_passes for r in reports),
            waiting=statistics.mean(r.seconds["waiting"] / r.seconds["total"] for r in reports),
            tokens={
                role: {
                    fate: sum(getattr(getattr(r, f"{role}_tokens"), fate) for r in reports)
                    for fate in ("committed", "rejected", "aborted", "speculative")
                }
                for role in ("target", "draft")
            },
            settings=self._settings,
            environment=environment(),
        )


class _Engines:
    """The engines of a block, with the target alone beside them, on all cores."""

    def __init__(self, pair: Pair, what: Synthetic, block: Block, stack: ExitStack) -> None:
        chance = synthetic_acceptance(what.token_alpha, what.draft_tokens)
        config: dict[str, Any] | None = None
        if block in ("sd", "lr+sd"):
            config = speculative_config({"method": "draft_model"} | chance, pair.draft_folder, on_cpu=pair.divided)
            assert config is not None
            if pair.draft_quantization is not None:
                config["quantization"] = pair.draft_quantization
        elif block == "shared_draft":
            config = speculative_config({"method": "shared_draft"} | chance, None, on_cpu=pair.divided)
        more = {"speculative_config": config} if config is not None else {}
        own_cores = pair.every_core if block in ("off", "sd") else pair.shares["target"]
        self.target: Engine = stack.enter_context(pair.engine("target", own_cores, **more))
        self.draft: Engine | None = (
            stack.enter_context(pair.engine("draft", pair.shares["draft"])) if block not in ("off", "sd") else None
        )
        beside = pair.divided and not what.apart and block != "off"
        alone = stack.enter_context(pair.engine("target", pair.every_core)) if beside else self.target
        self.alone: Engine = alone


@dataclass(frozen=True)
class SyntheticResult:
    """How fast a way is, and how fast it should be.

    Attributes:
        way: The way.
        measured: How many times it was.
        speed: Against the target alone with as many replies at once: median over repeats.
        least: The least of them.
        most: The largest.
        predicted: By simulation with the costs that were measured and the share that was accepted; None: no costs.
        alpha: Share of the steps that were drawn for that were accepted; None: none was.
        late: Share of the steps that the target wrote before the draft did.
        tokens_a_pass: Of the target, over those that it was for.
        waiting: Share of the time in which nothing had work.
    """

    way: Way
    measured: int
    speed: float
    least: float
    most: float
    predicted: float | None
    alpha: float | None
    late: float
    tokens_a_pass: float
    waiting: float


def results(rows: Sequence[SyntheticRow], what: Synthetic, costs: MachineCosts | None) -> Iterator[SyntheticResult]:
    """Each way against the target alone, of its own block and repeat where it was measured there.

    Args:
        rows: What was measured.
        what: How.
        costs: What the pair costs here, for the prediction.
    """
    alone = {(row.block, row.replies, row.repeat): row.pace for row in rows if row.mode == "off"}
    anywhere = {(row.replies, row.repeat): row.pace for row in rows if row.mode == "off"}
    ways: dict[Way, list[SyntheticRow]] = {}
    for row in rows:
        if row.mode != "off":
            ways.setdefault(row.key[1], []).append(row)
    for way, of_way in ways.items():
        bases = [
            alone.get((row.block, row.replies, row.repeat), anywhere.get((row.replies, row.repeat))) for row in of_way
        ]
        speeds = [base / row.pace for row, base in zip(of_way, bases, strict=True) if base is not None]
        if not speeds:
            continue
        judged, steps = sum(row.judged for row in of_way), sum(row.steps for row in of_way)
        generated = sum(sum(row.tokens["target"].values()) for row in of_way)
        # A few draws may be luckier than they should be, which is no merit of the way.
        drawn = sum(row.accepted for row in of_way) / judged if judged else None
        acceptance = Acceptance(way.alpha if drawn is None else drawn, what.token_alpha, what.step_tokens)
        yield SyntheticResult(
            way,
            len(speeds),
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            predicted_speed(costs, acceptance, way.mode, way.depth, what.draft_tokens + 1, way.replies)
            if costs
            else None,
            drawn,
            sum(row.late for row in of_way) / steps if steps else 0.0,
            generated / max(sum(row.passes for row in of_way), 1),
            statistics.mean(row.waiting for row in of_way),
        )
