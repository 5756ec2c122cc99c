"""The frame of all recipes around their task: one run folder for all ranks, and one clear message for an error."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hetero_strategy.errors import CheckpointError, ConfigError, HeteroError
from hetero_strategy.model import hf_sources
from hetero_strategy.strategy.ending import lost_a_rank
from hetero_strategy.strategy.launch import STARTED_BY, die_with_script
from recipes import torchrun

CONF = str(Path(__file__).parent.parent / "conf")
SAVED, ASKED = Path(".hydra") / "config.yaml", Path(".hydra") / "overrides.yaml"
PATIENCE = 5.0
"""Seconds for which ranks above 0 hold back a message: if rank 0 has the same message, it ends them in that time."""


def rank() -> int:
    """Return the global rank of this process before any process group exists."""
    env = os.environ
    return int(env.get("RANK") or env.get("LOCAL_RANK") or env.get("SLURM_PROCID") or 0)


def external() -> bool:
    """Return whether torchrun or SLURM started this process as one of several."""
    several = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return torchrun.started() or (several and not _shell())


def srun() -> bool:
    """Return whether srun started this process, alone or as one of several."""
    return "SLURM_PROCID" in os.environ and not torchrun.started() and not _shell()


def _shell() -> bool:
    """Return whether the SLURM job is an interactive shell, by the names that Lightning uses."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def _step() -> int | None:
    """Return the number of the step that srun made for this process; None: there is none, as in a batch script."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return int(step) if srun() and step.isdigit() and int(step) < 0xFFFFFFF0 else None


def start(task: Callable[[], None], outputs: str = "outputs") -> None:
    """Run a hydra main whose ranks share one run folder below ``outputs``, and end with the first rank."""
    die_with_script()  # before the slow imports: rank 0 may be killed while this process is still starting
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # hydra raises what it would print, and cuts no traceback short
    hush()
    try:
        sys.argv[1:] = of_no_experiment(with_run_folder(with_layout_file(with_transforms(sys.argv[1:])), outputs))
        task()
    except HydraException as error:
        if isinstance(error, InstantiationException):
            raise
        fail(ConfigError(str(error).split("Config search path")[0].strip()))
    except HeteroError as error:
        fail(error)


def hush() -> None:
    """Silence messages of libraries that every process would repeat and no user can act on."""
    hf_sources.hush()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", module="lightning.*")


def one_message(task: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Turn a user's error, and an end by SIGTERM, into one message and a non-zero exit; other exceptions keep their
    traceback. The jobs of a multirun are started as programs of their own.
    """

    @functools.wraps(task)
    def run(cfg: DictConfig) -> None:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            run_job()
            return
        try:
            task(cfg)
        except SIGTERMException:
            if STARTED_BY in os.environ and rank():  # the first rank prints the message
                raise
            told_to_end(trains="run" not in cfg)
        except OmegaConfBaseException as error:
            fail(ConfigError(str(error).splitlines()[0]))
        except Exception as error:
            if lost_a_rank(error):  # the lost rank prints its own message
                sys.stdout.flush()
                os._exit(1)
            if not isinstance(error, (HeteroError, InstantiationException)):
                raise
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, HeteroError):
                cause = cause.__cause__
            if cause is None:
                raise
            fail(cause)

    return run


OF_MULTIRUN = ("hydra.mode", "hydra.sweep", "hydra/launcher", "hydra.launcher", "hydra/sweeper", "hydra.sweeper")
"""Beginnings of overrides that a job of a multirun does not take over."""


def run_job() -> None:
    """Run the job of a multirun that hydra has composed as a program of its own: no process group, environment variable
    or CUDA context of one job reaches the next one, and ranks that the job starts run that job alone.

    Raises:
        ConfigError: torchrun or SLURM started this process.
        HeteroError: the job failed.
    """
    config = HydraConfig.get()
    if external():
        raise ConfigError("the jobs of a multirun start their own processes; start it without torchrun or srun")
    command = [sys.executable, "-m", f"recipes.{config.job.name}", f"--config-name={config.job.config_name}"]
    command += [f"--config-dir={one.path}" for one in config.runtime.config_sources if one.provider == "command-line"]
    command += [override for override in config.overrides.hydra if not override.startswith(OF_MULTIRUN)]
    command += [*config.overrides.task, f'hydra.run.dir="{run_folder()}"']
    group = "/".join(run_folder().parts[-3:-1])  # date and time
    process = subprocess.Popen(command, env={"WANDB_RUN_GROUP": group, **os.environ})
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())  # the job saves a checkpoint
    code = process.wait()
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        sys.exit(128 + signal.SIGTERM)
    if code:
        raise HeteroError(f"job {config.job.num} of {run_folder().parent} ended with code {code}; its message is above")


def fail(error: HeteroError) -> NoReturn:
    """Print the message, once over all ranks, and end this process."""
    sys.stdout.flush()
    if rank():
        time.sleep(PATIENCE)
    print(f"\nerror: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # not sys.exit, which waits for threads of the process group


def told_to_end(*, trains: bool) -> NoReturn:
    """Print, once over all ranks, that SIGTERM ended this run and how to continue training; exit with code 143."""
    if not rank():
        how = f"; {command('recipes.train', resume=run_folder())} goes on" if trains else ""
        print(f"\nerror: ended by SIGTERM{how}", file=sys.stderr)
    sys.exit(128 + signal.SIGTERM)


def choices(*groups: str) -> str:
    """List the options of some groups of the configuration, one line each. Data sets that are statistics alone are left
    out where no cluster can be chosen: they serve to plan.
    """
    loader = GlobalHydra.instance().config_loader()
    options = {group: loader.get_group_options(group) for group in groups}
    if "cluster" not in groups:
        plans = [path.stem for path in Path(CONF, "data").glob("*.yaml") if "\nsample:" in path.read_text()]
        options["data"] = [name for name in options["data"] if name not in plans]
    return "\n".join(f"{group}: {', '.join(sorted(names))}" for group, names in options.items())


OmegaConf.register_new_resolver("choices", choices, replace=True)


# ---- run folders -----------------------------------------------------------------------------------------------------


def run_folder() -> Path:
    """Return the folder of this run."""
    return Path(HydraConfig.get().runtime.output_dir)


def resumed(arguments: list[str]) -> str:
    """Return what ``resume=`` names on a command line; empty: nothing."""
    runs = [a.removeprefix("resume=").strip("'\"") for a in arguments if a.startswith("resume=")]
    return runs[-1] if runs and runs[-1] != "null" else ""


def with_run_folder(arguments: list[str], outputs: str = "outputs") -> list[str]:
    """Add ``hydra.run.dir`` to the arguments of a run that is resumed, and of ranks that torchrun or srun started: by
    hydra's own default each rank would name the folder by the second of its start.

    Raises:
        ConfigError: ``resume=`` names neither a run folder nor a checkpoint in one, or contradicts another argument.
    """
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    added = []
    if resume := resumed(arguments):
        folder, other = folder_of(resume), given.get("hydra.run.dir", "").strip("'\"")
        if {"-m", "--multirun"} & set(arguments) or given.get("hydra.mode") == "MULTIRUN":
            raise ConfigError(f"resume={resume}: jobs of a multirun are new runs; resume a single run, without -m")
        if other and Path(other).expanduser().resolve() != folder.resolve():
            raise ConfigError(f"resume={resume}: a run continues in its own folder; leave out hydra.run.dir={other}")
        added += [f'hydra.run.dir="{folder}"', "hydra.output_subdir=null"]
    elif (external() or _step() is not None) and not {"hydra.run.dir", "hydra.sweep.dir"} & set(given):
        added.append(f'hydra.run.dir="{_agreed(outputs, arguments)}"')
        added += ["hydra.output_subdir=null"] if rank() else []
    return [*arguments, *(a for a in added if a.split("=")[0] not in given)]


NO_EXPERIMENT = "experiment='none'"
"""In quotes, which no user writes: this override is ours."""


def of_no_experiment(arguments: list[str]) -> list[str]:
    """Leave the default experiment out of a command line that names a run: the run's configuration holds, and a group
    that the command line chooses means the file of conf/, without the changes of an experiment. A command line that
    names a folder has that experiment.
    """
    named = {match[1] for argument in arguments if (match := re.match(r"(\w+)=(?!(null)?$)", argument))}
    if "experiment" in named or not named & {"resume", "run", "folder"}:
        return arguments
    return [*arguments, NO_EXPERIMENT if named & {"resume", "run"} else "experiment=folder"]


def with_transforms(arguments: list[str]) -> list[str]:
    """Let ``strategy.transforms.<module>.<name>=<setting>`` add fields: the configuration names no modules there."""
    return [f"++{argument}" if argument.startswith("strategy.transforms.") else argument for argument in arguments]


def with_layout_file(arguments: list[str]) -> list[str]:
    """Replace ``layout=<file>``, as the planner writes it, by an option of the group ``layout`` that hydra finds.

    Raises:
        ConfigError: the file does not exist, is not in a folder called layout, or has a name that conf/layout has.
    """
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name != "layout" or not value.endswith(".yaml"):
            continue
        file = Path(value.strip("'\"")).expanduser().absolute()
        if not file.is_file():
            raise ConfigError(f"layout={value}: there is no such file; python -m recipes.plan writes one")
        if file.parent.name != "layout":
            raise ConfigError(f"layout={value}: hydra finds layouts in folders called layout; move it into one")
        ours = Path(CONF, "layout", file.name)
        if ours.is_file() and not ours.samefile(file):
            raise ConfigError(f"layout={value}: conf/layout has one of this name, which hydra finds first; rename it")
        paths = [a for a in arguments if a.startswith("hydra.searchpath=")]
        (others,) = OverridesParser.create().parse_overrides(paths[-1:] or ["hydra.searchpath=[]"])
        searched = others.value() if isinstance(others.value(), list) else [others.value()]
        folders = ",".join(f'"{folder}"' for folder in (f"file://{file.parent}/..", *searched))
        kept = [a for a in arguments if a not in (argument, *paths)]
        return [*kept, f"layout={file.stem}", f"hydra.searchpath=[{folders}]"]
    return arguments


def _agreed(outputs: str, arguments: Sequence[str]) -> str:
    """Return the run folder that all ranks share.

    Under torchrun rank 0 names it by the time at which torchrun began, so restarted processes find it again. Under srun
    it is named by job, step and arguments, so a requeued job finds it again and runs of one step do not share it.
    """
    env = os.environ
    if srun():
        step, said = _step(), hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:8]
        return f"{outputs}/slurm-{env['SLURM_JOB_ID']}" + (f".{step}" if step else "") + (f"-{said}" * bool(arguments))
    form = f"{outputs}/%Y-%m-%d/%H-%M-%S"
    if not torchrun.started():
        return datetime.now().strftime(form)
    began = torchrun.began()
    return torchrun.said_by_first("run_folder", lambda: began.strftime(form))


def folder_of(run: str | Path) -> Path:
    """Return the absolute run folder of a run folder or of a checkpoint in it.

    Raises:
        ConfigError: it is neither.
    """
    path = Path(run).expanduser().absolute()
    for folder in (path, *path.parents[:2]):
        if (folder / SAVED).is_file():
            return folder
    raise ConfigError(
        f"{run}: not a run folder ({SAVED} is missing) nor a checkpoint in one; give outputs/<date>/<time>"
    )


def checkpoint_of(run: str | Path, *names: str) -> Path:
    """Return the checkpoint that ``run`` is, or the first of ``names`` in its folder that exists.

    Raises:
        CheckpointError: there is none.
    """
    path, folder = Path(run).expanduser().absolute(), folder_of(run)
    choices = [path] if path != folder else [folder / "checkpoints" / f"{name}.ckpt" for name in names]
    for choice in choices:
        if choice.is_dir() or choice.with_name(choice.name + ".old").is_dir():
            return choice
    raise CheckpointError(f"{run}: no checkpoint ({', '.join(c.name for c in choices)}) was written yet")


def last_checkpoint(run: str | Path) -> Path | None:
    """Return the checkpoint from which a stopped run continues; None: it wrote none, so it starts at its first step.

    Raises:
        CheckpointError: ``run`` names a checkpoint that does not exist.
    """
    try:
        return checkpoint_of(run, "last")
    except CheckpointError:
        if Path(run).expanduser().absolute() != folder_of(run):
            raise
        return None


def saved_before(folder: Path) -> Path | None:
    """Return the newest checkpoint of a job that SLURM has queued again, or of one whose processes torchrun has started
    again, written since torchrun began; None: there is none, or the job is new.
    """
    if torchrun.started():
        since = torchrun.began().timestamp()
        said = torchrun.said_by_first("checkpoint", lambda: str(_newest(folder, since) or ""))
        return Path(said) if said else None
    return _newest(folder) if srun() and int(os.environ.get("SLURM_RESTART_COUNT") or 0) else None


def _newest(folder: Path, since: float = 0.0) -> Path | None:
    """Return the newest checkpoint in a run folder that was written after a time in seconds."""
    places = (*folder.glob("checkpoints/last.ckpt*"), *folder.glob("hpc_ckpt_*.ckpt*"))
    whole = (path for path in places if path.is_dir() and path.name.endswith((".ckpt", ".ckpt.old")))
    found = (path for path in whole if path.stat().st_mtime >= since)
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest and newest.with_name(newest.name.removesuffix(".old"))  # which stands for either


def saved_configuration(cfg: DictConfig, run: str | Path) -> DictConfig:
    """Return the configuration of a run with the changes of this command line.

    Args:
        cfg: configuration composed from this command line.
        run: run folder or checkpoint.

    Raises:
        ConfigError: the command line changes the experiment.
    """
    saved = OmegaConf.load(folder_of(run) / SAVED)
    assert isinstance(saved, DictConfig)
    said = [override for override in HydraConfig.get().overrides.task if override != NO_EXPERIMENT]
    overrides = OverridesParser.create().parse_overrides(said)
    with open_dict(saved):
        for name in set(cfg) - set(saved):  # fields of `evaluate` or `plan`
            saved[name] = cfg[name]
        for override in overrides:
            key = str(override.package or override.key_or_group).replace("/", ".")
            if override.key_or_group == "experiment":
                raise ConfigError(f"experiment: {run} has its configuration; name the fields to change one by one")
            OmegaConf.update(saved, key, OmegaConf.select(cfg, key), merge=False)
            if key == "layout":  # options that go with the layouts, which a layout file names, too
                for option, value in _planned(cfg).items():
                    saved.strategy[option] = value
    OmegaConf.set_struct(saved, True)
    return saved


def _planned(cfg: DictConfig) -> dict[str, Any]:
    """Return the options of the strategy that go with the layouts of this command line."""
    return {option: cfg.strategy[option] for option in ("schedule", "fill", "pieces")} | {
        option: value
        for option in ("transforms", "reshard_after_forward")
        if (value := cfg.strategy[option]) not in (None, "auto")
    }


def save_configuration(cfg: DictConfig, folder: Path) -> None:
    """Save the configuration that runs now, and the overrides of all command lines of the run."""
    if rank() == 0:
        now = [override for override in asked() if not override.startswith("resume=")]
        for content, path in ((cfg, SAVED), (OmegaConf.create([*asked(folder), *now]), ASKED)):
            new = folder / path.with_suffix(".new")
            OmegaConf.save(content, new)
            new.replace(folder / path)  # atomic: there is no other copy


def asked(run: Path | None = None) -> list[str]:
    """Return the overrides of a run's command lines, if they were saved; without a run those of this process."""
    if run is None:
        said = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
        return [override for override in said if override != NO_EXPERIMENT]
    return list(OmegaConf.load(run / ASKED)) if (run / ASKED).exists() else []


def near(value: object) -> object:
    """Return a path relative to the working directory if it lies below it, and any other value unchanged."""
    path = Path(str(value))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else value


def command(module: str, **arguments: object) -> str:
    """Return a command line to copy, with paths relative to the working directory where they lie below it."""
    python = "python" if shutil.which("python") == sys.executable else near(sys.executable)
    shown = [shlex.quote(f"{name}={near(value)}") for name, value in arguments.items()]
    return " ".join([shlex.quote(str(python)), "-m", module, *shown])
