"""Runs programs of `escapes.py` as an unprivileged user: `python -m tests.unit.escapes_as_user PLACES NAME ...`.

It needs no packages. It prints a JSON object: the outputs per sandbox backend, or why it is unavailable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from lookahead_agent.sandbox import Isolation, PythonLimits, available, run_isolated
from tests.unit.escapes import ESCAPES, EXHAUSTIONS

LIMITS = PythonLimits(seconds=3, memory=256 << 20, output=2000, files=16 << 20)


def attempt(isolation: Isolation, places: dict[str, Any], name: str) -> str:
    """Return the output of a program or the message of its error."""
    code = ESCAPES[name].format(**places) if name in ESCAPES else EXHAUSTIONS[name]
    try:
        return run_isolated(code, LIMITS, isolation)
    except ValueError as error:
        return str(error)


def main(places: dict[str, Any], names: list[str]) -> None:
    """Run the programs on each available backend and print the outputs."""
    assert os.geteuid() != 0
    outputs: dict[str, Any] = {}
    with subprocess.Popen(["sleep", "600"]) as victim:
        places |= {"victim": victim.pid, "agent": os.getpid()}
        for isolation, problem in available().items():
            outputs[isolation] = problem
            if problem is None:
                with ThreadPoolExecutor(4) as pool:
                    outputs[isolation] = dict(
                        zip(names, pool.map(partial(attempt, isolation, places), names), strict=True)
                    )
        assert victim.poll() is None
        victim.kill()
    print(json.dumps(outputs))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
