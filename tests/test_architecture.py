"""The shape of the house: imports go down only, and pure files know nothing of processes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "hetero_strategy"
ROOMS = (
    "strategy",
    "refusals",
    "collectives",
    "assembly",
    "checkpoint",
    "blueprint",
    "monitor",
    "planner",
    "simulator",
    "precision",
    "launch",
    "schedule",
    "boundary",
    "parallelize",
    "data",
    "model",
    "layout",
    "errors",
)
"""From the roof down."""
PURE = (
    "errors.py",
    "layout/spec.py",
    "layout/pipeline.py",
    "layout/placement.py",
    "data/balance/*.py",
    "data/balancing.py",
    "data/manifest.py",
    "data/nodes/*.py",
    "data/orchestrator.py",
    "data/pack.py",
    "data/plan.py",
    "data/reorder.py",
    "data/sizes.py",
    "data/stored.py",
    "boundary/route.py",
    "schedule/__init__.py",
    "schedule/action.py",
    "schedule/graph.py",
    "schedule/numbers.py",
    "schedule/programs.py",
    "schedule/warmup.py",
    "schedule/merge.py",
    "schedule/modules.py",
    "schedule/build.py",
    "schedule/check.py",
    "simulator/*.py",
    "planner/layers.py",
    "planner/partition.py",
    "planner/predict.py",
    "planner/allocate.py",
    "monitor/flops.py",
    "monitor/traffic.py",
)
LONGEST = 430
"""Lines; a longer file is usually two rooms."""


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module, line) of every import in a file, those for type checkers alone left out."""
    tree = ast.parse(path.read_text())
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped |= {id(child) for statement in node.body for child in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module), node.lineno


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def files() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_every_room_is_known() -> None:
    assert {room(p) for p in files()} <= set(ROOMS)


def test_imports_go_down_only() -> None:
    wrong = []
    for path in files():
        floor = ROOMS.index(room(path))
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] == "hetero_strategy" and len(parts) > 1 and ROOMS.index(parts[1]) < floor:
                wrong.append(f"{path.relative_to(PACKAGE)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_pure_files_import_no_processes() -> None:
    names = sorted(str(p.relative_to(PACKAGE)) for pattern in PURE for p in PACKAGE.glob(pattern))
    assert len(names) > len(PURE)
    pure = {"hetero_strategy." + n.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".") for n in names}
    for name in names:
        for module, line in imports(PACKAGE / name):
            assert not module.startswith(("torch.distributed", "lightning")), f"{name}:{line} imports {module}"
            if module.startswith("hetero_strategy"):
                assert module in pure, f"{name}:{line} imports {module}, which is not pure"


def test_files_are_short() -> None:
    long = {str(p.relative_to(PACKAGE)): n for p in files() if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long
