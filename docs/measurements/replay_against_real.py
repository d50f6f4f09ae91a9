"""Measure the seconds of a replay against those of the recorded pair: the same problems in turns, in each mode.

    python docs/measurements/replay_against_real.py recordings.jsonl problems.jsonl results/replay-against-real.jsonl 24

The last argument is the number of problems, which are the first of both files. The same command continues.
"""

import sys
from collections import defaultdict
from pathlib import Path
from statistics import median

from lookahead_agent.bench.config import BenchConfig, TaskConfig, TaskConfiguration, chat_model, make_config
from lookahead_agent.bench.replay import ReplayBench
from lookahead_agent.bench.runner import Bench
from lookahead_agent.bench.samples import Sample
from lookahead_agent.chat.model import ChatLookahead
from lookahead_agent.models.resolve import choose_models, fetch_tokenizer
from lookahead_agent.replay.recording import read_recordings
from lookahead_agent.system.progress import LogProgress

MODES = ("off", "sd", "lr")
GROUP = 6  # problems of the pair and of its replay in turns
SPECULATION = {"method": "draft_model", "num_speculative_tokens": 4}  # the replay's


def main(recordings: str, dataset: str, out: str, count: str) -> None:
    """Measure what is missing in the file, and print the seconds of each mode."""
    known = read_recordings(Path(recordings), int(count))
    settings = known[0].settings
    models = choose_models(settings["model"], None)
    assert models.draft is not None
    shapes = fetch_tokenizer(models.target, LogProgress()), fetch_tokenizer(models.draft, LogProgress())
    replayed = ReplayBench(known, shapes, Path(out), task={"modes": MODES}, engine_args={})

    def make(config: BenchConfig, task: TaskConfig, configuration: TaskConfiguration) -> ChatLookahead:
        if task.name.startswith("replay"):
            return replayed.chat_model(replayed.bench.config, task, configuration)
        return chat_model(config, task, configuration)

    shared = {"modes": MODES, "policies": [settings["policy"]], "max_tokens": settings["max_tokens"], "limit": GROUP}
    datasets = {"pair": dataset, "replay": replayed.bench.config.tasks[0].dataset}
    config = make_config(
        {
            "model": settings["model"],
            "token_speculation": SPECULATION,
            "blocks": [[mode] for mode in MODES if mode != "off"],
            "tasks": [
                {"name": f"{name} {skip}", "dataset": datasets[name], "skip": skip, **shared}
                for skip in range(0, int(count), GROUP)
                for name in datasets
            ],
        }
    )
    bench = Bench(config, Path(out), make)
    show(bench.run(LogProgress(), lambda sample: print(sample.task, sample.mode, sample.problem, sample.seconds)))


def show(samples: list[Sample]) -> None:
    """Print the seconds and the accepted steps of the pair and of its replay, by block and mode."""
    rows: dict[tuple[int, str], dict[str, dict[str, Sample]]] = defaultdict(lambda: defaultdict(dict))
    for sample in samples:
        kind = sample.task.partition(" ")[0]
        rows[sample.block, sample.mode][kind][sample.problem.removeprefix("questions ")] = sample
    for (block, mode), by_kind in rows.items():
        both = by_kind["pair"].keys() & by_kind["replay"].keys()
        pair, replay = ([by_kind[kind][problem] for problem in both] for kind in ("pair", "replay"))
        ratios = [again.seconds / real.seconds for real, again in zip(pair, replay, strict=True)]
        print(f"block {block} {mode}, {len(both)} problems: median ratio {median(ratios):.3f}")
        for name, each in (("pair", pair), ("replay", replay)):
            calls = [call for sample in each for call in sample.calls]
            tokens, seconds = sum(call.output_tokens for call in calls), sum(sample.seconds for sample in each)
            steps, accepted = sum(call.steps for call in calls), sum(call.accepted for call in calls)
            print(f"  {name}: {seconds:.1f} s, {tokens} tokens, {1000 * seconds / tokens:.1f} ms each", end="; ")
            print(f"{accepted} of {steps} steps accepted, {sum(call.passes for call in calls)} passes of the target")


if __name__ == "__main__":
    main(*sys.argv[1:])
