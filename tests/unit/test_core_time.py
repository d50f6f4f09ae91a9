"""What other programs take of the cores is told apart from what this one takes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from lookahead_agent.hardware.core_time import CoreTime


def test_shares_are_of_all_cores_that_may_be_used() -> None:
    began = CoreTime(every=10.0, own=4.0, cores=2, at=100.0)
    assert CoreTime(every=18.0, own=9.0, cores=2, at=105.0).others_share(began) == pytest.approx(0.3)
    assert CoreTime(every=14.0, own=8.5, cores=2, at=105.0).others_share(began) == 0.0, (
        "clocks that differ are no one's"
    )
    assert began.others_share(began) == 0.0


def test_work_of_this_program_and_of_its_children_is_its_own() -> None:
    began = CoreTime.now()
    until = time.monotonic() + 0.3
    working = threading.Thread(target=_work, args=(until,))
    working.start()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = psutil.Process(child.pid).cpu_times().user
        while psutil.Process(child.pid).cpu_times().user - before < 0.2:
            time.sleep(0.02)
        working.join()
        now = CoreTime.now()
    finally:
        child.kill()
        child.wait()
    assert now.own - began.own >= 0.2
    assert now.every >= began.every
    assert now.cores == len(os.sched_getaffinity(0))


def _work(until: float) -> None:
    while time.monotonic() < until:
        sum(range(1000))


def test_a_child_that_ends_meanwhile_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(ended.pid)
    ended.wait()
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [process])
    assert CoreTime.now().own > 0
