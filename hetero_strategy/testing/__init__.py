"""Tools for tests: worlds of processes, a small model with random batches, and parity with one process.

A test of a schedule of your own::

    from hetero_strategy import ModuleLayout
    from hetero_strategy.testing import FP64, Pool, Setting, differences, step

    def test_my_schedule():
        layouts = {"vision": ModuleLayout([0]), "llm": ModuleLayout([1, 2], pp=2)}
        setting = Setting("mine", layouts, schedule="mine", storage=FP64)
        assert not differences(setting.alone(), Pool().run(3, step, setting))

A model and data of your own are compared by :func:`train`, called first without and then with ``strategy=``.

A language model of your own keeps packed sequences apart if the numbers of :func:`packing_errors` are rounding.
"""

from hetero_strategy.model.packing_errors import packing_errors
from hetero_strategy.testing.parity import Trained, differences, gradients_of, relative_errors, train
from hetero_strategy.testing.setting import FP64, Planned, Setting, one_rank, planned, ragged_step, rearranged, step
from hetero_strategy.testing.worlds import Operations, Pool, WorkerError

__all__ = [
    "FP64", "Operations", "Planned", "Pool", "Setting", "Trained", "WorkerError", "differences", "gradients_of",
    "one_rank", "packing_errors", "planned", "ragged_step", "rearranged", "relative_errors", "step", "train",
]  # fmt: skip
