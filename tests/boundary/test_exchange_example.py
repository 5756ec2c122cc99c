"""The example of docs/exchange.md runs as it is printed."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
from pathlib import Path

from tests.distributed.harness import Pool

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "exchange.py"


def script(rank: int, world: int) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return printed.getvalue()


def test_the_example_prints_what_the_page_says(pool: Pool) -> None:
    (shown,) = re.findall(r"^```text\n(.*?)^```", (DOCS / "exchange.md").read_text(), re.M | re.S)
    assert "".join(pool.run(3, script, group=False)) == shown


def test_the_page_prints_the_script() -> None:
    (printed,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "exchange.md").read_text(), re.M | re.S)
    assert printed == EXAMPLE.read_text()
