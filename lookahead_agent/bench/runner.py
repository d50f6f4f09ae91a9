"""Runs a benchmark: interleaves configurations, appends each result to a file, and continues on a rerun."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableConfig, RunnableLambda
from langchain_core.tools import BaseTool

from lookahead_agent.agents.templates import template
from lookahead_agent.agents.tool_sources import load_tools, specialists
from lookahead_agent.bench.config import (
    BASELINE,
    MODES,
    PEER,
    BenchConfig,
    ModeName,
    TaskConfig,
    TaskConfiguration,
    TaskName,
    chat_model,
    configurations_of,
)
from lookahead_agent.bench.problems import Problem, dataset_file, read_problems
from lookahead_agent.bench.samples import CallRecorder, Sample, SampleKey, environment, read_results
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.chat.requests import POLICY_KEY
from lookahead_agent.engines.starter import keep_starters
from lookahead_agent.errors import ConfigurationError, EngineError
from lookahead_agent.policy import as_policy
from lookahead_agent.system import background
from lookahead_agent.system.jsonl import RowFile
from lookahead_agent.system.progress import Progress

_WARM_UP = "What is 7 * 8? Think in two short steps with a blank line between them."
_WARM_UP_TOKENS = 48
_VOTING_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Job:
    """A sample to be measured; `block` and `sample` as in `Sample`."""

    task: TaskConfig
    configuration: TaskConfiguration
    problem: Problem
    sample: int
    block: int = 0

    @property
    def key(self) -> SampleKey:
        """The key of the sample, equal to its `Sample.key`."""
        return self.block, self.task.name, self.configuration.name, self.problem.id, self.sample


JobTurn = list[Job]  # jobs of one configuration that run in parallel


def solve(
    task: TaskConfig,
    llm: BaseChatModel,
    question: str,
    seed: int | None,
    config: RunnableConfig,
    *,
    needs: Sequence[str] = (),
) -> str:
    """Return the reply to a question, or the answer of a template's graph with the tools in `needs` (empty: all)."""
    question = f"{question}\n\n{task.prompt}" if task.prompt else question
    llm = llm.model_copy(update={"seed": seed})
    if task.task == "questions":
        # A runnable calls the model, since a streaming model dispatches its step events only inside one.
        chain: Runnable[str, str] = RunnableLambda(lambda text: llm.invoke([HumanMessage(text)]).text)
        return chain.invoke(question, config)
    if task.task == "self_consistency" and getattr(llm, "temperature", None) == 0:
        llm = llm.model_copy(update={"temperature": _VOTING_TEMPERATURE})  # greedy votes would all be equal
    with tools_of(task, needs) as tools:
        graph = build(task.task, llm, tools)
        return str(graph.invoke({"messages": [HumanMessage(question)]}, config)["messages"][-1].text)


def build(name: TaskName, llm: BaseChatModel, tools: Sequence[BaseTool] | None = None) -> Any:
    """Build a template's graph, by default with tools for problems with numbers."""
    make = getattr(template("graphs", name), f"build_{name}")
    calculator = template("tools", "calculator").calculator
    if name == "supervisor":
        teams = {"calculator": [calculator], "programmer": [template("tools", "python_code").python]}
        return make(llm, teams if tools is None else specialists(tools))
    if name in ("reflection", "self_consistency"):
        return make(llm)
    return make(llm, [calculator] if tools is None else list(tools))


@contextmanager
def tools_of(task: TaskConfig, needs: Sequence[str] = ()) -> Iterator[list[BaseTool] | None]:
    """Open the tools in `needs` (empty: all) on copies of their folders; yields None if the task has no sources."""
    if not task.tools:
        yield None
        return
    with TemporaryDirectory(prefix="lookahead-bench-") as copies:
        sources = []
        for number, source in enumerate(task.tools):
            kind, colon, folder = source.partition("files:")
            if colon and (not kind or kind.endswith("=")):
                copy = copytree(folder, Path(copies, str(number)))
                source = f"{kind}files:{copy}"
            sources.append(source)
        yield [tool for tool in load_tools(sources) if not needs or tool.name in needs]


def check_tools(task: TaskConfig, problems: Sequence[Problem]) -> None:
    """Raise ConfigurationError if a task lacks a tool that its problems need, before any model loads."""
    if not task.tools:
        return
    names = {tool.name for tool in load_tools(task.tools)}
    for problem in problems:
        if missing := ", ".join(sorted(set(problem.tools) - names)):
            known = ", ".join(sorted(names))
            raise ConfigurationError(f"the problem {problem.id} needs {missing}; the tools are {known}: add --tools")


class Bench:
    """A validated benchmark and its file of results; `run` loads the models."""

    def __init__(
        self,
        config: BenchConfig,
        out: Path,
        make_model: Callable[[BenchConfig, TaskConfig, TaskConfiguration], ChatLookahead] = chat_model,
        solve_problem: Callable[..., str] = solve,
    ) -> None:
        self.config = config
        self._solve = solve_problem
        self.out = RowFile(out)
        blocks = config.blocks or (MODES,)
        parts = [
            (task, configurations_of(task), read_problems(dataset_file(task.dataset), task.limit, task.skip))
            for task in config.tasks
        ]
        self._turns = [
            turn for block, modes in enumerate(blocks) for part in parts for turn in _turns(*part, block, modes)
        ]
        for task, _, problems in parts:
            check_tools(task, problems)
        self._settings = {task.name: _settings(config, task) for task in config.tasks}
        self._check_settings()
        # A peer has a chat model of another class, also with `start` and `close`.
        self._models: dict[tuple[TaskConfig, TaskConfiguration], Any] = {}
        self._running: set[tuple[TaskConfig, TaskConfiguration]] = set()
        for job in itertools.chain.from_iterable(self._turns):
            if (job.task, job.configuration) not in self._models:
                create: Callable[..., Any] = make_model
                if job.configuration.peer:  # imported on demand: its package is an extra
                    from lookahead_agent.bench.peers import peer_chat as create
                self._models[job.task, job.configuration] = create(config, job.task, job.configuration)

    @property
    def total(self) -> int:
        """Number of samples of the whole benchmark."""
        return sum(len(turn) for turn in self._turns)

    def list_missing(self) -> list[JobTurn]:
        """Return the turns, without the samples that the file already has."""
        known = {sample.key for sample in self.results()}
        turns = [[job for job in turn if job.key not in known] for turn in self._turns]
        return [turn for turn in turns if turn]

    def results(self) -> list[Sample]:
        """Return the results so far."""
        return read_results(self.out.rows)

    def run(
        self,
        progress: Progress | None = None,
        on_sample: Callable[[Sample], None] = lambda _: None,
        seconds: float | None = None,
    ) -> list[Sample]:
        """Measure the missing samples, and begin none after `seconds`; `progress` shows how models are loaded."""
        end = float("inf") if seconds is None else time.monotonic() + seconds
        with self.out.open_for_writing(), ExitStack() as running:
            running.enter_context(keep_starters())
            running.callback(self._run_only, set(), progress)
            for _, turns in itertools.groupby(self.list_missing(), lambda turn: turn[0].block):
                block_turns = list(turns)
                self._run_only({(job.task, job.configuration) for turn in block_turns for job in turn}, progress)
                for turn in block_turns:
                    if time.monotonic() >= end:
                        return self.results()
                    self._measure(turn, on_sample)
        return self.results()

    def _check_settings(self) -> None:
        problems = {(job.task.name, job.problem.id): job.problem for turn in self._turns for job in turn}
        for sample in self.results():
            if sample.task not in self._settings:
                continue
            problem = problems.get((sample.task, sample.problem))
            same_problem = problem is None or problem.fingerprint == sample.problem_fingerprint
            if sample.settings != self._settings[sample.task] or not same_problem:
                raise ConfigurationError(f"{self.out.path} has results of other settings: choose another file")

    def _run_only(self, needed: set[tuple[TaskConfig, TaskConfiguration]], progress: Progress | None) -> None:
        for name in self._running - needed:
            self._models[name].close()
        self._running &= needed
        new = needed - self._running
        self._running |= new
        for name in new:
            self._models[name].start(progress)
        for name in new:
            self._models[name].invoke(_WARM_UP, max_tokens=_WARM_UP_TOKENS)

    def _measure(self, turn: JobTurn, on_sample: Callable[[Sample], None]) -> None:
        llm, peer = self._models[turn[0].task, turn[0].configuration], turn[0].configuration.peer
        engines = background.run(_engines(llm)) if not peer else {"target": {"server": peer, "model": llm.model_name}}
        # Daemon threads do not block the exit of an interrupted program; the first failure ends the turn.
        jobs = (background.in_daemon_thread(partial(self._sample, job, llm, engines)) for job in turn)
        for sample in background.stream(partial(background.forward, background.as_completed(jobs))):
            self.out.append(sample.model_dump(mode="json"))
            on_sample(sample)

    def _sample(self, job: Job, llm: Any, engines: dict[str, Any]) -> Sample:
        recorder = CallRecorder(None if job.configuration.peer else llm.backend.tokenizer().decode)
        config: RunnableConfig = {"callbacks": [recorder]}
        if not job.configuration.speculates_on_steps:
            config["configurable"] = {POLICY_KEY: "off"}
        seed = None if self.config.seed is None else self.config.seed + job.sample
        answer, failure = "", None
        try:
            answer = self._solve(job.task, llm, job.problem.question, seed, config, needs=job.problem.tools)
        except EngineError:
            raise
        except Exception as error:  # a failed graph is a result; other samples continue
            failure = f"{type(error).__name__}: {error}"
        seconds = recorder.measure_elapsed()
        return Sample(
            task=job.task.name,
            workload=job.task.task,
            problem=job.problem.id,
            problem_fingerprint=job.problem.fingerprint,
            sample=job.sample,
            block=job.block,
            seed=seed,
            mode=job.configuration.mode,
            configuration=job.configuration.name,
            seconds=seconds,
            correct=job.problem.accepts(answer),
            answer=answer,
            error=failure,
            calls=recorder.calls,
            tools=recorder.tools,
            settings=self._settings[job.task.name],
            engines=engines,
            environment=environment(),
        )


def _turns(
    task: TaskConfig,
    known: Sequence[TaskConfiguration],
    problems: Sequence[Problem],
    block: int,
    modes: Sequence[ModeName],
) -> list[JobTurn]:
    """List all turns of a task in these modes.

    The order rotates with each group of problems, and every other round of three or more configurations is reversed.
    This balances the cache hits that configurations with shared engines get on the prompts of earlier ones.
    """
    configurations = [each for each in known if each.mode in (BASELINE, PEER, *modes)]
    if len(configurations) == 1 and block > 0:
        return []  # nothing to compare the baseline with
    samples = [(problem, sample) for problem in problems for sample in range(task.samples)]
    turns = []
    for number, start in enumerate(range(0, len(samples), task.concurrency)):
        first = number % len(configurations)
        order = configurations[first:] + configurations[:first]
        if len(configurations) > 2 and number // len(configurations) % 2:
            order.reverse()
        group = samples[start : start + task.concurrency]
        turns += [[Job(task, each, problem, sample, block) for problem, sample in group] for each in order]
    return turns


def _settings(config: BenchConfig, task: TaskConfig) -> dict[str, Any]:
    """Collect the settings that determine a sample, apart from its problem and configuration."""
    fields = config.model_dump(mode="json", exclude={"tasks", "seed", "blocks"})
    included = {"dataset", "prompt", "concurrency", "max_tokens"}
    task_fields = task.model_dump(mode="json", include=included)
    task_fields |= {name: value for name, value in (("parity", task.parity), ("tools", list(task.tools))) if value}
    return fields | task_fields | {"dataset": Path(task.dataset).name, "seed": config.seed}


async def _engines(llm: ChatLookahead) -> dict[str, Any]:
    async with llm.backend.engines(as_policy(llm.policy)) as engines:
        by_role = {role: engine for role, engine in (("target", engines.target), ("draft", engines.draft)) if engine}
        return {role: engine.description for role, engine in by_role.items() if hasattr(engine, "description")}
