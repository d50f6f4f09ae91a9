"""The paper's datasets: where they are on the Hugging Face Hub, and how their rows become problems.

None of them ships with the package. `lookahead-agent bench fetch NAME` downloads one and writes the JSON Lines file
that a benchmark reads.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_agent.bench.answers import AnswerKind
from lookahead_agent.errors import ConfigurationError, DownloadError, MissingExtraError
from lookahead_agent.jsonl import line_of
from lookahead_agent.models.cache import writable, write_whole

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Dataset:
    """A dataset on the Hub.

    Attributes:
        hub_id: Its id.
        split: Which part.
        convert: Makes `question` and `answer` from a row; None: the row is left out.
        answer: How its answers are compared; None: they are not.
        config: Which of its configurations.
        files: Files to read in place of a configuration.
    """

    hub_id: str
    split: str
    convert: Callable[[Row], dict[str, str | None] | None]
    answer: AnswerKind | None = "number"
    config: str | None = None
    files: str | None = None


def _gsm8k(row: Row) -> dict[str, str | None]:
    return {"question": row["question"], "answer": row["answer"].rpartition("####")[2].strip()}


def _problem(row: Row) -> dict[str, str | None]:
    return {"question": row.get("problem") or row.get("question"), "answer": str(row["answer"])}


def _humaneval(row: Row) -> dict[str, str | None]:
    question = f"Complete this Python function.\n\n```python\n{row['prompt']}```"
    return {"question": question, "answer": f"{row['test']}\ncheck({row['entry_point']})"}


def _gpqa(row: Row) -> dict[str, str | None]:
    right = row["Correct Answer"].strip()
    choices = [right, *(row[f"Incorrect Answer {number}"].strip() for number in (1, 2, 3))]
    # The same order in every run, and another for every question.
    random.Random(row["Question"]).shuffle(choices)
    listed = "\n".join(f"({letter}) {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    return {"question": f"{row['Question'].strip()}\n\n{listed}", "answer": "ABCD"[choices.index(right)]}


def _mt_bench(row: Row) -> dict[str, str | None]:
    return {"question": row["prompt"][0], "answer": None}


def _livecodebench(row: Row) -> dict[str, str | None] | None:
    if not "2024-08-01" <= str(row["contest_date"])[:10] <= "2025-01-31":
        return None
    begun = f"\n\nBegin with:\n```python\n{row['starter_code']}\n```" if row.get("starter_code") else ""
    return {"question": row["question_content"] + begun, "answer": None}


DATASETS: dict[str, Dataset] = {
    "gsm8k": Dataset("openai/gsm8k", "test", _gsm8k, config="main"),
    "aime24": Dataset("HuggingFaceH4/aime_2024", "train", _problem),
    "amc23": Dataset("math-ai/amc23", "test", _problem),
    "math500": Dataset("HuggingFaceH4/MATH-500", "test", _problem, "math"),
    "humaneval": Dataset("openai/openai_humaneval", "test", _humaneval, "code"),
    "gpqa": Dataset("Idavidrein/gpqa", "train", _gpqa, "choice", config="gpqa_diamond"),
    "mt-bench": Dataset("HuggingFaceH4/mt_bench_prompts", "train", _mt_bench, None),
    "livecodebench": Dataset("livecodebench/code_generation_lite", "train", _livecodebench, None, files="test*.jsonl"),
}


def fetch_dataset(name: str, file: Path, load: Callable[[Dataset], Iterable[Row]] | None = None) -> int:
    """Download a dataset and write its problems to a JSON Lines file.

    Args:
        name: One of `DATASETS`.
        file: Written when all of it is there.
        load: Gives its rows; None: from the Hub.

    Returns:
        How many problems it has.

    Raises:
        ConfigurationError: There is no such dataset, or the file cannot be written.
        DownloadError: It could not be downloaded.
        MissingExtraError: The `datasets` library is not installed.
    """
    if name not in DATASETS:
        raise ConfigurationError(f"there is no dataset {name}: choose one of {', '.join(DATASETS)}")
    dataset = DATASETS[name]
    converted = [dataset.convert(row) for row in (load or _from_hub)(dataset)]
    problems = [problem for problem in converted if problem is not None]
    lines = [line_of({"id": f"{name}-{number}", **problem}) for number, problem in enumerate(problems)]
    with writable(file):
        write_whole(file, "".join(lines))
    return len(problems)


def _from_hub(dataset: Dataset) -> Iterable[Row]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingExtraError("the paper's datasets need another library: pip install datasets") from error
    try:
        if dataset.files is not None:
            files = f"hf://datasets/{dataset.hub_id}/{dataset.files}"
            rows: Iterable[Row] = load_dataset("json", data_files=files, split=dataset.split)
        else:
            rows = load_dataset(dataset.hub_id, dataset.config, split=dataset.split)
    except Exception as error:  # the library raises what its many parts raise
        raise DownloadError(f"{dataset.hub_id} could not be downloaded: {error}") from error
    return rows
