"""The shape of the house: imports go down only, and pure files know nothing of processes."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Int64

from hetero_strategy.layout.row_sharding import Pieces
from hetero_strategy.plan.balance import Cost, loads
from hetero_strategy.plan.step_plan import EdgeBlocks
from tests.shapes import checked

PACKAGE = Path(__file__).parent.parent / "hetero_strategy"
ROOMS = (
    "testing",
    "papers",
    "planner",
    "strategy",
    "monitor",
    "profiling",
    "runtime",
    "simulator",
    "loading",
    "schedule",
    "boundary",
    "parallelize",
    "checkpoint",
    "plan",
    "zoo",
    "data",
    "model",
    "layout",
    "disk_cache",
    "mask",
    "ragged",
    "errors",
)
"""From the roof down."""
PURE = (
    "errors.py",
    "ragged.py",
    "mask.py",
    "layout/spec.py",
    "layout/row_sharding.py",
    "plan/**/*.py",
    "boundary/route.py",
    "schedule/**/*.py",
    "simulator/**/*.py",
    "model/spec.py",
    "layout/split_layers.py",
    "monitor/balance.py",
)
PLAIN_TABLES = "torch.distributed.pipelining.schedules"
"""Lists of actions, which torch computes without processes."""
LARGEST = 1 / 6
"""Of the whole package: a room with more is two."""
LONGEST = 430
"""Lines; a longer file is usually two rooms."""


def dotted(path: Path) -> str:
    """Name by which a file is imported."""
    parts = ("hetero_strategy", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


FILES = {dotted(p): p for p in sorted(PACKAGE.rglob("*.py"))}


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
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield (whole if whole in FILES or node.module == "hetero_strategy" else str(node.module)), node.lineno


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


def test_nothing_below_the_planner_imports_it() -> None:
    """Type checkers' imports count, too; ``layouts="auto"`` is looked up by name when a run asks for it."""
    for path in files():
        if room(path) not in ("papers", "planner"):
            names = {alias for node in ast.walk(ast.parse(path.read_text())) for alias in imported(node)}
            assert not any(name.startswith("hetero_strategy.planner") for name in names), path


def imported(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_only_tests_of_papers_import_papers() -> None:
    tests = Path(__file__).parent
    for path in sorted(tests.rglob("*.py")):
        if path.parent not in (tests / "papers", tests / "fuzz"):  # drawn settings have transforms of papers
            assert not any(m.startswith("hetero_strategy.papers") for m, _ in imports(path)), path


def test_tests_and_benchmarks_do_not_import_each_other() -> None:
    """But for tests of the benchmarks, and algorithms of others that balancing is compared with."""
    root = Path(__file__).parents[1]
    for folder, other in (("benchmarks", "tests"), ("recipes", "tests"), ("tests", "benchmarks")):
        for path in sorted((root / folder).rglob("*.py")):
            wrong = [name for name, _ in imports(path) if name.split(".")[0] == other]
            wrong = [name for name in wrong if not name.startswith("benchmarks.peers")]
            assert not wrong or path.parent == root / "tests/benchmarks", f"{path} imports {wrong}"


def test_pure_files_import_no_processes() -> None:
    names = sorted(str(p.relative_to(PACKAGE)) for pattern in PURE for p in PACKAGE.glob(pattern))
    assert len(names) > len(PURE)
    pure = {dotted(PACKAGE / n) for n in names}
    for name in names:
        for module, line in imports(PACKAGE / name):
            processes = module.startswith(("torch.distributed", "lightning")) and module != PLAIN_TABLES
            assert not processes, f"{name}:{line} imports {module}"
            if module.startswith("hetero_strategy"):
                assert module in pure, f"{name}:{line} imports {module}, which is not pure"


def test_files_are_short() -> None:
    long = {str(p.relative_to(PACKAGE)): n for p in files() if (n := len(p.read_text().splitlines())) > LONGEST}
    assert not long


def test_rooms_are_of_a_size() -> None:
    lines = Counter({room(p): 0 for p in files()})
    for path in files():
        lines[room(path)] += len(path.read_text().splitlines())
    whole = sum(lines.values())
    assert not {name: n for name, n in lines.items() if n > LARGEST * whole}


def test_no_file_is_in_a_circle() -> None:
    """Imports between files make no circle, not even those within functions."""
    after = {name: {module for module, _ in imports(path) if module in FILES} - {name} for name, path in FILES.items()}
    while loose := {name for name, others in after.items() if not others & after.keys()}:
        after = {name: others for name, others in after.items() if name not in loose}
    assert not after, f"in circles or after them: {sorted(after)}"


def test_no_two_public_classes_share_a_name() -> None:
    names = Counter(
        node.name
        for path in FILES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not [name for name, count in names.items() if count > 1]


ALIKE = Int64[np.ndarray, "n"]


def _first(pair: tuple[ALIKE, ALIKE]) -> ALIKE:
    return pair[0]


@pytest.mark.parametrize("wrong", [np.ones(3), np.ones((3, 1), np.int64), np.ones(2, np.int64)], ids=str)
def test_a_wrong_dtype_rank_or_size_of_an_array_is_noticed(wrong: np.ndarray) -> None:
    """In tests, where ``tests/shapes.py`` checks what is stated."""
    right = np.ones(3, np.int64)
    assert loads(right, right, 2, Cost()).tolist() == [0, 3]
    EdgeBlocks(*[right] * 5), Pieces(*[right] * 5)
    first = checked(_first)
    assert first((right, right)) is right
    for call in (
        lambda: first((right, wrong)),
        lambda: loads(right, wrong, 2, Cost()),  # a function, a dataclass and a named tuple
        lambda: EdgeBlocks(right, right, right, right, wrong),
        lambda: Pieces(right, right, right, right, wrong),
    ):
        with pytest.raises(BeartypeCallHintViolation):
            call()
