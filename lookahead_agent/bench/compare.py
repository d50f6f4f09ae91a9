"""Compares policies on the same problems, turn by turn, so that a noisy machine treats all alike."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage

from lookahead_agent.bench.problems import Problem, is_right
from lookahead_agent.chat_model import ChatLookahead
from lookahead_agent.errors import ConfigurationError


def compare_policies(
    problems: Sequence[Problem],
    models: dict[str, ChatLookahead],
    out: Path,
    settings: dict[str, Any],
    on_reply: Callable[[dict[str, Any]], None],
    concurrency: int = 1,
) -> list[dict[str, Any]]:
    """Ask each model each problem and append what comes to a file; what the file already has is not asked again.

    The order of the models changes from turn to turn, so that none always has the warmer cache.

    Args:
        problems: What to ask.
        models: A model per policy name, each with `return_token_ids`.
        out: JSON Lines file with one line per reply.
        settings: What else determines the replies; a file with other settings is refused.
        on_reply: Told about every new reply.
        concurrency: Problems that a model is asked at once in its turn.

    Returns:
        All replies to these problems, old and new.

    Raises:
        ConfigurationError: The file was made with other settings.
    """
    known = {(row["id"], row["policy"]): row for row in _read(out, settings)}
    rows = []
    names = list(models)
    groups = [problems[start : start + concurrency] for start in range(0, len(problems), concurrency)]
    for index, group in enumerate(groups):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            rows += [known[problem.id, name] for problem in group if (problem.id, name) in known]
            asked = [problem for problem in group if (problem.id, name) not in known]
            for row in _ask(asked, name, models[name]):
                row["settings"] = settings
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                on_reply(row)
                rows.append(row)
    return rows


def _read(out: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        return []
    rows = []
    for line in out.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue  # the line that an interruption cut; its reply is asked for again
    if any(row["settings"] != settings for row in rows):
        raise ConfigurationError(f"{out} has results of other settings: choose another --out, or delete it")
    return rows


def _ask(problems: Sequence[Problem], name: str, model: ChatLookahead) -> Iterator[dict[str, Any]]:
    """Ask all problems at once; the replies as they come."""
    questions = [[HumanMessage(problem.question)] for problem in problems]
    for index, message in model.batch_as_completed(questions):
        lookahead = message.response_metadata["lookahead"]
        yield {
            "id": problems[index].id,
            "policy": name,
            "right": is_right(message.text, problems[index].answer),
            "seconds": lookahead["seconds"]["total"],
            "finish_reason": message.response_metadata["finish_reason"],
            "lookahead": lookahead,
            "token_ids": message.response_metadata["token_ids"],
            "text": message.text,
        }


def summarize(rows: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Figures per policy.

    Each has `right`, `replies`, `acceptance_rate` (of all steps together), `same_tokens` (replies with the
    baseline's tokens), `tokens_per_second` (all together), `speedup` (median over problems of the ratio of tokens per
    second to the baseline's), `judge_calls` (per reply) and `wasted` (tokens that target and draft generated for
    nothing, per token of the replies).
    """
    by_policy: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], {})[row["id"]] = row
    base = by_policy.get(baseline, {})
    summary = []
    for policy, replies in by_policy.items():
        steps = sum(row["lookahead"]["steps"] for row in replies.values())
        ratios = [_rate(row) / _rate(base[id_]) for id_, row in replies.items() if id_ in base]
        summary.append(
            {
                "policy": policy,
                "replies": len(replies),
                "right": sum(row["right"] for row in replies.values()),
                "acceptance_rate": sum(row["lookahead"]["accepted"] for row in replies.values()) / max(steps, 1),
                "same_tokens": sum(
                    row["token_ids"] == base[id_]["token_ids"] for id_, row in replies.items() if id_ in base
                ),
                "tokens_per_second": sum(len(row["token_ids"]) for row in replies.values())
                / sum(row["seconds"] for row in replies.values()),
                "speedup": statistics.median(ratios) if ratios else None,
                "judge_calls": sum(row["lookahead"]["judge_calls"] for row in replies.values()) / len(replies),
                "wasted": {role: _wasted(replies.values(), role) for role in ("target", "draft")},
            }
        )
    return summary


def _rate(row: dict[str, Any]) -> float:
    return len(row["token_ids"]) / float(row["seconds"])


def _wasted(replies: Iterable[dict[str, Any]], role: str) -> float:
    replies = list(replies)
    fates = [row["lookahead"]["tokens"][role] for row in replies]
    wasted = sum(int(fate["rejected"]) + int(fate["aborted"]) for fate in fates)
    return wasted / sum(len(row["token_ids"]) for row in replies)
