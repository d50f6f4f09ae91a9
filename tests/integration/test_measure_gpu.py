"""The script for a GPU, from end to end on a CPU: real engines of a tiny pair in place of the shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from lookahead_agent.cost_model.synthetic import SyntheticRow
from lookahead_agent.system.jsonl import RowFile

SCRIPT = Path(__file__).parents[2] / "examples" / "measure_gpu.sh"


def test_every_part_measures_its_rows(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    shapes = tmp_path / "shapes"
    shapes.mkdir()
    for target, draft in (("qwen3-8b", "qwen3-0.6b"), ("qwen3-32b", "qwen3-1.7b")):
        (shapes / target).symlink_to(tiny_pair[0])
        (shapes / draft).symlink_to(tiny_pair[1])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "SHAPES": str(shapes), "OUT": str(tmp_path / "out"), "MODES": "off,lr"}
    completed = subprocess.run(
        ["sh", SCRIPT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    rows = {
        part: [SyntheticRow.model_validate(row) for row in RowFile(tmp_path / "out" / f"{part}.jsonl").rows]
        for part in ("8b", "32b")
    }
    measured = {part: Counter((row.mode, row.alpha, row.replies) for row in found) for part, found in rows.items()}
    configurations = [("off", 0.0), ("lr", 0.45), ("lr", 0.6)]
    assert measured["8b"] == {(*config, replies): 3 for config in configurations for replies in (1, 8)}
    assert measured["32b"] == {(*config, 1): 2 for config in configurations}
    report = (tmp_path / "out" / "8b.md").read_text(encoding="utf-8")
    assert "predicted" in report, "by the costs of the page"
