"""The draft is trained on the target's replies: LoRA (arXiv 2106.09685) by `peft`, merged, in a child process."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lookahead_agent.align.replies import ReplyRow
from lookahead_agent.models.beside_weights import copy_beside_weights
from lookahead_agent.models.cache import made_once
from lookahead_agent.models.child import run_in_child
from lookahead_agent.progress import Progress

_AGREEMENT = "agreement.json"
_AT_ONCE = 4
_CLIP = 1.0
_IGNORED = -100
"""Of a prompt's tokens: nothing is learnt from them."""


class Training(BaseModel):
    """How a draft is trained.

    Attributes:
        epochs: How often it sees each reply; a part of one is some of them.
        rank: Of the matrices that are learnt.
        learning_rate: At its highest, after a tenth of the steps; it falls to nothing by a cosine.
        seed: Of the order of replies and of the matrices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: float = Field(2.0, gt=0)
    rank: int = Field(32, ge=1)
    learning_rate: float = Field(1e-4, gt=0)
    seed: int = 0


class Agreement(BaseModel):
    """The share of the target's tokens that the draft would have written, each after the target's own.

    Attributes:
        before: On the replies that are held back, before training.
        after: After it.
    """

    model_config = ConfigDict(frozen=True)

    before: float
    after: float


def train(
    draft: Path,
    replies: Sequence[ReplyRow],
    held_back: Sequence[ReplyRow],
    how: Training,
    folder: Path,
    progress: Progress,
) -> Agreement:
    """Train a draft, and write it into a folder; one that is there is kept as it is.

    Args:
        draft: Folder of the draft, in safetensors.
        replies: What it learns from.
        held_back: What it is measured on.
        how: How.
        folder: Where the trained draft is to be.
        progress: Told how far it is.

    Raises:
        ConversionError: It failed; the message ends with the child's last words.
    """

    def write(unfinished: Path) -> None:
        order = {
            "draft": str(draft),
            "folder": str(unfinished),
            "how": how.model_dump(),
            "replies": [row.model_dump() for row in replies],
            "held_back": [row.model_dump() for row in held_back],
        }
        work = unfinished / "order.json"
        work.write_text(json.dumps(order))
        command = [sys.executable, "-m", "lookahead_agent.align.training", str(work)]
        run_in_child(command, "Training the draft", progress)
        work.unlink()

    made_once(folder, write)
    return Agreement.model_validate_json((folder / _AGREEMENT).read_text(encoding="utf-8"))


# In the child


def _batch(rows: Sequence[ReplyRow], torch: Any) -> tuple[Any, Any, Any]:
    """Tokens, what is attended to, and labels: shape (rows, longest)."""
    longest = max(len(row.prompt_ids) + len(row.reply_ids) for row in rows)
    tokens = torch.zeros((len(rows), longest), dtype=torch.long)
    attended = torch.zeros_like(tokens)
    labels = torch.full_like(tokens, _IGNORED)
    for index, row in enumerate(rows):
        ids = torch.tensor([*row.prompt_ids, *row.reply_ids])
        tokens[index, : len(ids)] = ids
        attended[index, : len(ids)] = 1
        labels[index, len(row.prompt_ids) : len(ids)] = ids[len(row.prompt_ids) :]
    return tokens, attended, labels


def _logits(model: Any, rows: Sequence[ReplyRow], torch: Any) -> tuple[Any, Any]:
    """Logits where the replies' tokens are predicted, and these tokens: the vocabulary is large, prompts are long."""
    tokens, attended, labels = (each.to(model.device) for each in _batch(rows, torch))
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.model(input_ids=tokens, attention_mask=attended).last_hidden_state[:, :-1]
    wanted = labels[:, 1:]
    learnt = wanted != _IGNORED
    return inner.lm_head(hidden[learnt]).float(), wanted[learnt]


def _agreement(model: Any, rows: Sequence[ReplyRow], torch: Any) -> float:
    model.eval()
    right = seen = 0
    with torch.inference_mode():
        for begin in range(0, len(rows), _AT_ONCE):
            logits, tokens = _logits(model, rows[begin : begin + _AT_ONCE], torch)
            right += int((logits.argmax(-1) == tokens).sum())
            seen += len(tokens)
    return right / max(seen, 1)


def _order(count: int, epochs: float, torch: Any) -> list[int]:
    """Which replies are seen, one after the other."""
    seen: list[int] = []
    wanted = max(1, round(epochs * count))
    while len(seen) < wanted:
        seen.extend(torch.randperm(count).tolist())
    return seen[:wanted]


def _train(order: dict[str, Any]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    draft, folder, how = Path(order["draft"]), Path(order["folder"]), Training.model_validate(order["how"])
    replies = [ReplyRow.model_validate(row) for row in order["replies"]]
    held_back = [ReplyRow.model_validate(row) for row in order["held_back"]]
    torch.manual_seed(how.seed)
    model = AutoModelForCausalLM.from_pretrained(draft, dtype="auto")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    before = _agreement(model, held_back, torch)
    model = get_peft_model(
        model, LoraConfig(r=how.rank, lora_alpha=how.rank, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    learnt = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learnt, lr=how.learning_rate)
    seen = _order(len(replies), how.epochs, torch)
    steps = -(-len(seen) // _AT_ONCE)
    schedule = get_cosine_schedule_with_warmup(optimizer, -(-steps // 10), steps)
    model.train()
    for step in range(steps):
        rows = [replies[index] for index in seen[step * _AT_ONCE : (step + 1) * _AT_ONCE]]
        loss = torch.nn.functional.cross_entropy(*_logits(model, rows, torch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learnt, _CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        sys.stderr.write(f"{100 * (step + 1) // steps}%|\n")
        sys.stderr.flush()
    after = _agreement(model, held_back, torch)
    model.merge_and_unload().save_pretrained(folder)
    copy_beside_weights(draft, folder)
    (folder / _AGREEMENT).write_text(Agreement(before=before, after=after).model_dump_json())


if __name__ == "__main__":
    _train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
