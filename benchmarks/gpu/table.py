"""Lines of a table that a check gives, or why it has none."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

ENVIRONMENT = dict(os.environ)
"""Before a Trainer of this process adds ranks and ports of its own."""


class Skipped(Exception):
    """This machine cannot do a check; the message says why."""


@dataclass(frozen=True)
class Line:
    """One figure beside its peer or bound."""

    what: str
    ours: float | None
    """None: not measured; the note says why."""
    unit: str
    peer: str = ""
    theirs: float | None = None
    goal: str = ""
    """Of :attr:`ratio`, or of the figure itself where there is no peer."""
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over theirs."""
        return self.ours / self.theirs if self.ours is not None and self.theirs else None


def script(module: str, arguments: Iterable[str], timeout: float) -> None:
    """Run ``python -m module`` as a process of its own, which leaves nothing behind on the device.

    Raises:
        RuntimeError: it failed; the message holds the end of what it printed.
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was ended.
    """
    command = [sys.executable, "-m", module, *arguments]
    ran = subprocess.run(
        command, env=ENVIRONMENT, timeout=timeout, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with code {ran.returncode}:\n{ran.stdout[-4000:]}")
