"""What belongs to a model besides its weights."""

from __future__ import annotations

import shutil
from pathlib import Path


def copy_beside_weights(model: Path, folder: Path) -> None:
    """Write a model's tokenizer, chat template and generation settings into the folder of weights made of its own.

    Args:
        model: Folder of the model.
        folder: Folder of the other weights.
    """
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(model).save_pretrained(folder)
    for name in ("generation_config.json", "chat_template.jinja"):
        if (model / name).is_file() and not (folder / name).is_file():
            shutil.copy(model / name, folder / name)
    for file in folder.iterdir():
        file.chmod(0o644)
