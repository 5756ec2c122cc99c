"""Hydra's launcher for sweeps of recipes: every job in processes of its own.

Hydra finds launchers in this name space only, and imports every file of it at every start: imports stand in functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

OF_THE_SWEEP = ("hydra.sweep", "hydra.mode", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
"""Overrides of hydra's own configuration that are not those of a job."""


class ProcessLauncher(Launcher):
    """Runs the program once more for every job, with the job's overrides; see `recipes.jobs`."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what jobs are composed with."""
        self.loader, self.config = hydra_context.config_loader, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run a batch of jobs, one after another, and show all jobs of the sweep so far.

        Raises:
            ConfigError: torchrun or SLURM started this process, or the sweep's folder holds other jobs.
        """
        from hydra._internal.utils import get_args_parser

        from recipes import jobs

        given, flags = get_args_parser().parse_args(), ("config_dir", "config_name", "config_path")
        module: Any = sys.modules["__main__"].__spec__
        program = [sys.executable, "-m", module.name]
        program += [f"--{f.replace('_', '-')}={getattr(given, f)}" for f in flags if getattr(given, f)]
        program += [o for o in self.config.hydra.overrides.hydra if not o.startswith(OF_THE_SWEEP)]
        batch = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            composed = self.loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
            batch.append(jobs.Job([*program, *overrides], str(composed.hydra.sweep.subdir)))
        folder = Path(self.config.hydra.sweep.dir).absolute()
        sweep = jobs.prepare(folder, f"{folder.parent.name}/{folder.name}", batch, initial_job_idx)
        failed = jobs.run(sweep)
        return [
            JobReturn(
                overrides=overrides,
                status=JobStatus.FAILED if job.state == "failed" else JobStatus.COMPLETED,
                _return_value=failed if job.state == "failed" else None,
            )
            for job, overrides in zip(sweep.jobs[initial_job_idx:], job_overrides, strict=False)
        ]
