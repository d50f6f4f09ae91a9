"""Problems with answers that can be checked: from a JSON Lines file, packaged, or from the Hugging Face Hub.

The paper's datasets do not ship with the package. `lookahead-agent bench fetch NAME` downloads one and writes the JSON
Lines file that a benchmark reads.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lookahead_agent.bench.answers import AnswerKind
from lookahead_agent.errors import ConfigurationError, DownloadError, MissingExtraError
from lookahead_agent.jsonl import line_of, read_lines, read_value
from lookahead_agent.models.cache import writable, write_whole

Row = Mapping[str, Any]

OWN = "own"
"""The packaged problems: word problems in several steps. A program made them: no model has been trained on them."""


@dataclass(frozen=True)
class Problem:
    """One problem; `answer` is None where there is nothing to check."""

    id: str
    question: str
    answer: str | None

    @property
    def fingerprint(self) -> str:
        """Equal for equal questions and answers."""
        return hashlib.sha256(f"{self.question}\0{self.answer}".encode(errors="surrogatepass")).hexdigest()[:12]


def read_problems(file: Path, limit: int | None = None, skip: int = 0) -> list[Problem]:
    """Read problems with `question`, and possibly `answer` and `id` (else the line number), from a JSON Lines file.

    Raises:
        ConfigurationError: A line that is not a problem, two with one id, or no problem at all.
    """
    try:
        lines = read_lines(file)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    problems: dict[str, Problem] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = read_value(line)
            answer = row.get("answer")
            problem = Problem(
                str(row.get("id", number)), str(row["question"]), str(answer) if answer is not None else None
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{file}, line {number} is no problem with a question: {error!r}") from error
        if problem.id in problems:
            raise ConfigurationError(f"{file}, line {number}: there is another problem with the id {problem.id!r}")
        problems[problem.id] = problem
    chosen = list(problems.values())[skip:][:limit]
    if not chosen:
        raise ConfigurationError(f"{file} has no problem after the first {skip}")
    return chosen


def dataset_file(name: str) -> Path:
    """The file of a dataset: a path, or "own" for the problems that ship with the package.

    Raises:
        ConfigurationError: There is no such file.
    """
    if name == OWN:
        return Path(__file__).parent / "data" / "own.jsonl"
    file = Path(name)
    if not file.is_file():
        raise ConfigurationError(
            f"there is no dataset {name}: give a JSON Lines file with question and answer, or {OWN!r}; "
            "`lookahead-agent bench datasets` lists those that can be downloaded"
        )
    return file


@dataclass(frozen=True)
class Dataset:
    """A dataset on the Hub."""

    hub_id: str
    split: str
    # Makes `question` and `answer` from a row; None: the row is left out
    convert: Callable[[Row], dict[str, str | None] | None]
    answer: AnswerKind | None = "number"  # the comparison of its answers; None: there is none
    config: str | None = None  # its configuration on the Hub
    files: str | None = None  # files to read in place of a configuration


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
    """Download a dataset, write its problems to a JSON Lines file when all are there, and return their number.

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
