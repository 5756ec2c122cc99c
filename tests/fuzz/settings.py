"""Does any setting give other gradients than one process? Draws settings at random and runs each on real processes.

    python -m tests.fuzz --count 100 --seed 0
    python -m tests.fuzz --count 300 --degree cp
    python -m tests.fuzz --setting '{"layouts": ...}'

A setting is a model (encoders, language models, a generator), a layout for every module, what is frozen, an order, ways
to spread work, and batches, some of them without anything for some module. It runs on up to 8 gloo processes and on
one, mostly in fp64. Every loss on every rank, the gradient of every parameter on every rank that owns it, and what is
frozen must be the same. A setting that is refused with one of our own errors, by all ranks alike, is counted by
message. One that fails is made as small as it can be while it still fails, and printed as the line that runs it again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hetero_strategy.errors import HeteroError
from hetero_strategy.testing import Pool, WorkerError
from tests.distributed.exact import EXACT, differences
from tests.distributed.rendezvous import KINDS, unforgiving
from tests.distributed.stepping import SHARED, Setting, batches_on_rank, reference
from tests.fuzz.drawn_settings import DEGREES, Data, draw, write
from tests.fuzz.smaller_settings import smaller

BOUNDS = {"64-true": EXACT, "32-true": 1e-3, "32-mixed": 1e-3, "bf16-mixed": 0.3}
"""Of relative errors."""
PATIENCE = 40.0
"""Seconds after which a host that is held up is said to hang, on a machine with more ranks than cores."""
_one_at_a_time = threading.Lock()
"""One process computes with torch's default dtype changed, which all threads see."""


@dataclass(frozen=True)
class Found:
    """What became of a setting."""

    number: int
    setting: Setting
    kind: str
    """right, refused, or how it fails: wrong, hung, or the class of what a rank raised."""
    text: str
    """Why it was refused or fails."""
    seconds: float

    @property
    def fails(self) -> bool:
        return self.kind not in ("right", "refused")


def batches(rank: int, world: int, setting: Setting, wanted: Any, damage: str, held_up: str) -> Any:
    """:func:`batches_on_rank`, whose messages may hold up their hosts."""
    with unforgiving(held_up, PATIENCE) if held_up else nullcontext():
        return batches_on_rank(rank, world, setting, wanted, damage)


def run(
    pool: Pool, setting: Setting, *, timeout: float = 60, damage: str = "", number: int = 0, held_up: str = ""
) -> Found:
    """One setting beside one process.

    Args:
        pool: of processes.
        setting: what runs.
        timeout: seconds after which it counts as hung.
        held_up: which messages hold up their hosts, see `tests.distributed.rendezvous`; empty: none.
        damage: what to break, to see that it is noticed; see `tests.distributed.damage`.
        number: of the setting among all.
    """
    began = time.monotonic()

    def found(kind: str, text: str = "") -> Found:
        return Found(number, setting, kind, text, time.monotonic() - began)

    try:
        with _one_at_a_time:
            count = setting.microbatches if setting.dropout or setting.lm == "balanced" else 1
            assert count is not None, "dropout and balance depend on microbatches, so their number must be given"
            wanted = [reference(setting, count, step=step) for step in range(len(setting.batches))]
        ranks = pool.run(setting.world, batches, setting, wanted, damage, held_up, timeout=timeout)
    except HeteroError as refusal:
        return found("refused", str(refusal))
    except WorkerError as error:
        return found(error.error or "hung or died", str(error))
    if any(isinstance(steps, str) for steps in ranks):
        texts = set(map(str, ranks))
        return found("refused", texts.pop()) if len(texts) == 1 else found("refused otherwise", " | ".join(texts))
    bound = BOUNDS[setting.precision]
    wrong = [d for w, s in zip(wanted, zip(*ranks, strict=True), strict=True) for d in differences(w, s, bound)]
    return found("wrong", "; ".join(wrong[:8])) if wrong else found("right")


def with_degree(setting: Setting, degree: str) -> bool:
    """Return whether some module's layout has more than 1 of a degree, or leaves it to be derived."""
    return any(layout.get(degree, 1) != 1 for layout in setting.layouts.values())


def shrunk(failing: Found, again: Callable[[Setting], Found], most: int) -> Found:
    """The smallest setting found that fails in the same way, trying at most so many."""
    tried = {line(failing.setting)}
    while True:
        for setting in smaller(failing.setting):
            if line(setting) in tried:
                continue
            if len(tried) > most:
                return failing
            tried.add(line(setting))
            found = again(setting)
            if found.kind == failing.kind:
                failing = found
                break
        else:
            return failing


def line(setting: Setting) -> str:
    """A setting as JSON: what differs from the defaults."""
    given = {f.name: getattr(setting, f.name) for f in fields(setting) if f.name != "folder"}
    plain = Setting("", {})
    return json.dumps({name: value for name, value in given.items() if value != getattr(plain, name)})


def of_line(text: str, data: Mapping[bool, Data]) -> Setting:
    """A setting from its JSON.

    Args:
        text: as :func:`line` makes it.
        data: without and with drawings.
    """
    given = json.loads(text)
    for option in ("freeze", "per_item", "unused"):
        given[option] = tuple(given.get(option, ()))
    if given.get("edges") is not None:
        given["edges"] = tuple((source, target) for source, target in given["edges"])
    if "batches" in given:
        given["batches"] = tuple(map(tuple, given["batches"]))
    return Setting(data["draw" in given["layouts"]].folder, **given)


def shown(failing: Found) -> str:
    """The end of a failure's text, and the option that runs its setting."""
    return f"\n  {failing.text.strip()[-2000:]}\n  --setting '{line(failing.setting)}'"


def masked(message: str) -> str:
    """A message without its numbers, so that equal ones can be counted."""
    return re.sub(r"\d+(\.\d+)?", "#", message)


@contextmanager
def data_folder(folder: Path | None) -> Iterator[dict[bool, Data]]:
    """Both data sets, in a folder that is given or for as long as this lasts."""
    with tempfile.TemporaryDirectory(prefix="settings-") as temporary:
        yield write(folder or Path(temporary))


def preloaded(data: Mapping[bool, Data]) -> Pool:
    """Return a pool whose processes have the models' code and both data sets' indices from the start."""
    os.environ[SHARED] = os.pathsep.join(data[draws].folder for draws in (False, True))
    return Pool(["tests.distributed.preload"])


def run_all(
    pool: Pool,
    data: Mapping[bool, Data],
    count: int,
    seed: int,
    *,
    worlds: int = 2,
    timeout: float = 60,
    most: int = 60,
    held_up: str = "",
    minutes: float = math.inf,
    degree: str = "",
    say: Callable[[str], None] = print,
) -> list[Found]:
    """Draw settings and run them; failures are told, shrunk, as they occur.

    Args:
        pool: of processes.
        data: without and with drawings.
        count: settings.
        seed: of all of them.
        worlds: settings that run at a time.
        timeout: seconds after which a setting counts as hung.
        most: settings that are tried to make a failing one smaller.
        held_up: see :func:`run`.
        minutes: after which no further setting starts.
        degree: field of layouts that is above 1 in some module of each setting; empty: any setting.
        say: where failures are told.
    """

    last, drawing = time.monotonic() + 60 * minutes, threading.Lock()
    drawn = ((n, draw(seed, n, data)) for n in itertools.count())
    wanted = (pair for pair in drawn if not degree or with_degree(pair[1], degree))

    def one(_: int) -> Found | None:
        if time.monotonic() > last:
            return None
        with drawing:
            number, setting = next(wanted)
        options: dict[str, Any] = {"number": number, "held_up": held_up}
        found = run(pool, setting, timeout=timeout, **options)
        if found.fails:
            say(f"setting {number} of seed {seed} fails ({found.kind}): {shown(found)}")
            again = run(pool, found.setting, timeout=timeout, **options)
            if again.kind != found.kind:
                say(f"setting {number} of seed {seed} does not fail so again: it is {again.kind}")
            elif most:
                found = shrunk(found, lambda s: run(pool, s, timeout=min(timeout, 20.0), **options), most)
                say(f"setting {number} of seed {seed}, made smaller: {shown(found)}")
        return found

    with ThreadPoolExecutor(worlds) as threads:
        ran = tqdm(threads.map(one, range(count)), total=count, mininterval=30)
        return [found for found in ran if found is not None]


def main(argv: list[str] | None = None, pool: Pool | None = None) -> dict[str, Any]:
    """The program; what :func:`summary` counts."""
    parser = argparse.ArgumentParser(
        "tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=100, help="settings to draw")
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which no further setting starts")
    parser.add_argument("--seed", type=int, default=0, help="of the settings")
    parser.add_argument(
        "--degree", choices=(*DEGREES, "ep"), default="", help="draw only settings with more than 1 of it, such as cp"
    )
    parser.add_argument("--setting", metavar="JSON", help="run this one, as a failing one was printed")
    parser.add_argument("--worlds", type=int, default=2, help="settings that run at a time")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which a setting counts as hung")
    parser.add_argument("--held-up", choices=KINDS, default="", help="messages that hold up their hosts, as NCCL's do")
    parser.add_argument("--shrink", type=int, default=60, help="settings tried to make a failing one smaller")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="keep the data sets there")
    args = parser.parse_args(argv)
    with data_folder(args.data) as data:
        pool = pool or preloaded(data)
        began = time.monotonic()
        if args.setting:
            found = [run(pool, of_line(args.setting, data), timeout=args.timeout, held_up=args.held_up)]
            print(found[0].kind, found[0].text)
        else:
            found = run_all(
                pool, data, args.count, args.seed, worlds=args.worlds, timeout=args.timeout, most=args.shrink,
                held_up=args.held_up, minutes=args.minutes, degree=args.degree,
                say=lambda text: print(text, flush=True),
            )  # fmt: skip
    results = summary(found, time.monotonic() - began)
    print(f"{results['right']} of {len(found)} settings are right; {results['seconds_each']:.2f} s for each")
    for what in ("refused", "failing"):
        for text, number in results[what].items():
            print(f"{number} {what}: {text}")
    return results


def summary(found: Sequence[Found], seconds: float) -> dict[str, Any]:
    """Counts of what became of settings; refusals by message, failures by kind with the lines that run them."""
    refused = Counter(masked(f.text) for f in found if f.kind == "refused")
    failing = [f for f in found if f.fails]
    return {
        "settings": len(found),
        "right": sum(f.kind == "right" for f in found),
        "refused": dict(refused.most_common()),
        "failing": dict(Counter(f.kind for f in failing).most_common()),
        "lines": [line(f.setting) for f in failing],
        "seconds_each": seconds / max(1, len(found)),
    }
