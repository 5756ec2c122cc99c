from __future__ import annotations

import gc
import os
import signal

# Before torch is imported: one thread per process, profiles are kept beside the tests and not at home, nothing reaches
# for the network, and a look for CUDA devices leaves processes that may fork.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("XDG_CACHE_HOME", os.path.join(os.path.dirname(__file__), os.pardir, ".cache"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.shapes import check_shapes

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background jobs ignore it, and tests send it
    signal.signal(signal.SIGINT, signal.default_int_handler)

check_shapes()  # before anything imports the package

from hetero_strategy.testing import Pool  # noqa: E402
from recipes.digits import write_digits, write_digits_draw  # noqa: E402
from tests.distributed.stepping import SHARED, data  # noqa: E402

torch.set_num_threads(1)
# How long an example takes says more of what else the machine does than of what is tested. Continuous integration draws
# the same examples each time, so that a change fails only by its own fault; everywhere else they are new ones.
hypothesis.settings.register_profile(
    "busy",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
hypothesis.settings.load_profile("busy")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Data of ``stepping`` without and with drawings, only to be read: workers are forked with their index."""
    root = tmp_path_factory.mktemp("steps")
    made = {draws: data(root / str(draws), draws=draws) for draws in (False, True)}
    os.environ[SHARED] = os.pathsep.join(made.values())
    return made


@pytest.fixture(scope="session")
def pool(folders: dict[bool, str]) -> Pool:
    """Real processes on gloo: ``pool.run(world, function, *args, timeout=120)``."""
    return Pool(["tests.distributed.preload"])


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training, 20 validation and 20 test samples of the digits data."""
    return write_digits(tmp_path_factory.mktemp("data") / "digits", train=60, val=20, test=20, seed=3, progress=False)


@pytest.fixture(scope="session")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 training, 20 validation and 20 test samples of the data to draw."""
    return write_digits_draw(
        tmp_path_factory.mktemp("data") / "drawings", train=60, val=20, test=20, seed=3, progress=False
    )


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests/distributed as such and the cases that ``full_cases`` names as full; skip CUDA tests without a device.

    Raises:
        pytest.UsageError: ``full_cases`` names a case that the test does not have.
    """
    here = Path(__file__).parent / "distributed"
    no_cuda = pytest.mark.skip(reason="needs a CUDA device")
    unknown: dict[str, set[str]] = {}
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.distributed)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_cuda)
        if cases := item.get_closest_marker("full_cases"):
            test, _, case = item.nodeid.removesuffix("]").partition("[")
            if case in cases.args:
                item.add_marker(pytest.mark.full)
            unknown.setdefault(test, {*cases.args}).discard(case)
    wrong = {test: sorted(ids) for test, ids in unknown.items() if ids}
    if wrong and not any("::" in arg for arg in config.args):
        raise pytest.UsageError(f"full_cases names cases that do not exist: {wrong}")


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage would take longer than many a test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _nothing_of_other_modules_is_looked_through() -> None:
    """What tests of other modules have left stays too: a dry run collects garbage for every rank that it builds."""
    pytest_collection_finish()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> Iterator[None]:
    """Every test starts from the same torch random state, whichever tests ran before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
