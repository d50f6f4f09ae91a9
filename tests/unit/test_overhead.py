"""The benchmark of the decoder's own cost; what it finds is asserted nowhere."""

from __future__ import annotations

import json

import pytest

from lookahead_agent.bench.overhead import Overhead, measure
from tests.unit.test_cli import run


@pytest.mark.parametrize("requests", [1, 3])
@pytest.mark.parametrize(("rejected", "depth"), [(0.0, 4), (0.5, 4), (0.0, 0)])
def test_all_replies_are_written_to_their_ends(requests: int, rejected: float, depth: int) -> None:
    found = measure(requests, 320, 20, rejected=rejected, depth=depth)
    assert found.requests == requests
    if depth:
        assert found.accepted == pytest.approx(1 - rejected, abs=0.1)
    else:
        assert found.accepted == 0


def test_the_share_of_a_pass() -> None:
    assert Overhead(4, 1.0, 250.0, 250.0, 250.0).share(0.009) == pytest.approx(0.1)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("bench", "overhead", "--requests")
    assert run(*command, "1,2", "--tokens", "640", "--json") == 0
    assert [one["requests"] for one in json.loads(capsys.readouterr().out)] == [1, 2]
    assert run(*command, "1", "--tokens", "320") == 0
    assert "of a pass" in capsys.readouterr().out
    assert run(*command, "x") == 2
    assert run(*command, "0") == 2
