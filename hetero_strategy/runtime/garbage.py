"""Python's garbage collection at set steps: left to itself it stops single ranks at moments of their own, and the
others wait for them each time (torchtitan does the same, ``tools/utils.py``).
"""

from __future__ import annotations

import gc

EVERY = 50
"""Training steps between two collections; most memory is freed without any."""


class GarbageCollection:
    """Keeps Python from collecting by itself from the first :meth:`step` until :meth:`stop`."""

    def __init__(self) -> None:
        self._steps = 0
        self._stopped = False

    def step(self) -> None:
        """Before a training step: collect, where it is due, what lives for long left out."""
        if not self._steps and gc.isenabled():
            self._stopped = True
            gc.disable()
            gc.collect()
        elif self._steps % EVERY == 0:
            gc.collect(1)
        self._steps += 1

    def stop(self) -> None:
        """Let Python collect by itself again."""
        if self._stopped:
            gc.enable()
        self._steps, self._stopped = 0, False
