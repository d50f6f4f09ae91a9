"""Pauses of Python's garbage collector."""

from __future__ import annotations

import gc

import pytest

from lookahead_agent.engines.processes import gc_paused


def test_nested_pauses_resume_collection_after_the_outermost_one() -> None:
    assert gc.isenabled()
    with gc_paused():
        with pytest.raises(ZeroDivisionError), gc_paused():
            raise ZeroDivisionError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_collector_that_the_user_disabled_stays_disabled() -> None:
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
