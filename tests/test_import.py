"""What an import of the package brings with it, and what its face is."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hetero_strategy
from hetero_strategy import AudioProcessor, BalanceMonitor, TimelineMonitor, titan_llama
from hetero_strategy.data.manifest import read_entries
from hetero_strategy.errors import ConfigError
from hetero_strategy.loading import ray_pool
from hetero_strategy.zoo import titan

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "lightning", "transformers", "matplotlib", "scipy", "PIL")
"""Not with the package itself."""
OPTIONAL = ("hydra", "wandb", "ray", "sklearn", "cvxpy", "soundfile", "torchtitan", "datasets")
"""Not with any of its names either: what needs one of them brings it in."""


def loaded(*programs: str) -> list[set[str]]:
    """Modules that are there after each of some programs, which one fresh interpreter runs in turn."""
    shown = "\nprint('loaded', *sys.modules)\n"
    code = f"import sys\n{shown.join(programs)}{shown}"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return [{*line.split()} for line in run.stdout.splitlines() if line.startswith("loaded ")]


def test_the_package_itself_is_light_and_the_exchange_needs_no_lightning() -> None:
    package, exchange = loaded("import hetero_strategy", "from hetero_strategy import exchange\nassert exchange")
    assert not package & {*HEAVY, *OPTIONAL}
    assert "torch" in exchange and "lightning" not in exchange


@pytest.mark.full
def test_any_name_registers_the_strategy_and_no_name_brings_in_what_is_optional() -> None:
    one = "from hetero_strategy import MultimodalDataModule\n"
    one += "from lightning.pytorch.strategies import StrategyRegistry\nassert 'hetero' in StrategyRegistry"
    registered, every = loaded(one, "from hetero_strategy import *\nassert HeteroStrategy")
    assert "hetero_strategy.strategy.strategy" in registered
    assert not every & set(OPTIONAL)


def test_a_loader_process_needs_no_lightning() -> None:
    (worker,) = loaded("import hetero_strategy.loading.process_pool")
    assert "torch" in worker and not worker & {"lightning", "transformers"}


def test_the_names_are_those_that_are_listed() -> None:
    assert sorted(hetero_strategy._FILES) == hetero_strategy.__all__
    assert set(hetero_strategy.__all__) <= set(dir(hetero_strategy))
    for name in hetero_strategy.__all__:
        assert getattr(hetero_strategy, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Placement'"):
        hetero_strategy.Placement  # noqa: B018


def test_pages_import_what_the_package_exports() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for names in re.findall(r"^from hetero_strategy import \(?([^()]*?)\)?$", page.read_text(), re.M):
            wrong = {name.strip() for name in names.split(",") if name.strip()} - set(hetero_strategy.__all__)
            assert not wrong, f"{page.name}: {wrong}"


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("soundfile", "audio", lambda: AudioProcessor()),
        ("torchtitan", "titan", lambda: titan_llama(vocab_size=8)),
        ("matplotlib", "plots", lambda: TimelineMonitor()),
        ("matplotlib", "plots", lambda: BalanceMonitor()),
        ("ray", "ray", lambda: ray_pool._ray()),
        ("datasets", "datasets", lambda: next(read_entries(Path("a.parquet"), lambda number, message: None))),
    ],
)
def test_what_is_missing_is_named(
    package: str, extra: str, use: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    titan._titan.cache_clear()
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=rf"needs {package}.*hetero-strategy\[{extra}\]"):
        use()
