"""Compares policies on the same problems, turn by turn, so that a noisy machine treats all alike."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
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
) -> list[dict[str, Any]]:
    """Ask each model each problem and append what comes to a file; what the file already has is not asked again.

    The order of the models changes from problem to problem, so that none always has the warmer cache.

    Args:
        problems: What to ask.
        models: A model per policy name, each with `return_token_ids`.
        out: JSON Lines file with one line per reply.
        settings: What else determines the replies; a file with other settings is refused.
        on_reply: Told about every new reply.

    Returns:
        All replies to these problems, old and new.

    Raises:
        ConfigurationError: The file was made with other settings.
    """
    known = {(row["id"], row["policy"]): row for row in _read(out, settings)}
    rows = []
    names = list(models)
    for index, problem in enumerate(problems):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            row = known.get((problem.id, name))
            if row is None:
                row = _ask(problem, name, models[name]) | {"settings": settings}
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


def _ask(problem: Problem, name: str, model: ChatLookahead) -> dict[str, Any]:
    message = model.invoke([HumanMessage(problem.question)])
    lookahead = message.response_metadata["lookahead"]
    return {
        "id": problem.id,
        "policy": name,
        "right": is_right(message.text, problem.answer),
        "seconds": lookahead["seconds"]["total"],
        "finish_reason": message.response_metadata["finish_reason"],
        "lookahead": lookahead,
        "token_ids": message.response_metadata["token_ids"],
        "text": message.text,
    }


def summarize(rows: Sequence[dict[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Figures per policy.

    Each has `right`, `replies`, `acceptance_rate` (of all steps together), `same_tokens` (replies with the
    baseline's tokens), `tokens_per_second` (all together) and `speedup` (median over problems of the ratio of tokens
    per second to the baseline's).
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
            }
        )
    return summary


def _rate(row: dict[str, Any]) -> float:
    return len(row["token_ids"]) / float(row["seconds"])
