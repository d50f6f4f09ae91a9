"""Pauses of Python's garbage collection."""

from __future__ import annotations

import gc

import pytest

from lookahead_agent.engines.processes import gc_paused


def test_garbage_is_collected_again_after_the_last_of_several_pauses() -> None:
    assert gc.isenabled()
    with gc_paused():
        with pytest.raises(ZeroDivisionError), gc_paused():
            raise ZeroDivisionError
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_the_user_has_switched_off_stays_off() -> None:
    gc.disable()
    try:
        with gc_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
