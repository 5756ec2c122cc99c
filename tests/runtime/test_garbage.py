"""Garbage is collected at set steps and at no other time."""

from __future__ import annotations

import gc
import weakref

from hetero_strategy.runtime.garbage import EVERY, GarbageCollection


class Ring:
    def __init__(self) -> None:
        self.ring = self


def test_rings_live_until_a_set_step() -> None:
    assert gc.isenabled()
    garbage = GarbageCollection()
    garbage.step()
    assert not gc.isenabled()
    ring = weakref.ref(Ring())
    for _ in range(1, EVERY):
        garbage.step()
    assert ring() is not None
    garbage.step()
    assert ring() is None
    garbage.stop()
    assert gc.isenabled()


def test_who_has_switched_it_off_finds_it_so() -> None:
    gc.disable()
    try:
        garbage = GarbageCollection()
        garbage.step()
        garbage.stop()
        assert not gc.isenabled()
    finally:
        gc.enable()
