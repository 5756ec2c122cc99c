"""From a command line to a task: one run folder for all ranks, and one clear message where the input is wrong."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, InstantiationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from hetero_strategy.errors import CheckpointError, ConfigError, HeteroError
from hetero_strategy.strategy.ending import lost_a_rank
from hetero_strategy.strategy.launch import STARTED_BY, die_with_script
from hetero_strategy.zoo import quiet
from recipes import torchrun
from recipes.hints import explained

CONF = str(Path(__file__).parent.parent / "conf")
SAVED, ASKED = Path(".hydra") / "config.yaml", Path(".hydra") / "overrides.yaml"
PATIENCE = 5.0
"""Seconds that ranks above 0 hold back a message: where rank 0 has the same one, it ends them in that time."""


def rank() -> int:
    """Global rank of this process before any process group exists."""
    env = os.environ
    return int(env.get("RANK") or env.get("LOCAL_RANK") or env.get("SLURM_PROCID") or 0)


def external() -> bool:
    """Whether torchrun or SLURM started this process as one of several."""
    several = int(os.environ.get("SLURM_NTASKS", "1")) > 1
    return torchrun.started() or (several and not _shell())


def srun() -> bool:
    """Whether SLURM started this process, as one of several or for good."""
    return "SLURM_PROCID" in os.environ and not torchrun.started() and not _shell()


def _shell() -> bool:
    """Whether a job of SLURM is a person's shell, as Lightning tells."""
    return os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")


def _step() -> int | None:
    """Number of the step of a SLURM job, where srun made it for this process; a batch script is no step."""
    given = os.environ.get("SLURM_STEP_ID", "")
    return int(given) if srun() and given.isdigit() and int(given) < 0xFFFFFFF0 else None


def start(task: Callable[[], None], outputs: str = "outputs") -> None:
    """Run a hydra main so that all ranks share a run folder, below ``outputs``, and none outlives the first."""
    die_with_script()  # before the slow imports: rank 0 may be killed while this process is still starting
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # hydra raises what it would print, and cuts no traceback short
    hush()
    try:
        from recipes import jobs

        folder = Path(given := resumed(sys.argv[1:])).expanduser().absolute()
        if given and (folder / jobs.STATE).is_file():
            if len(sys.argv) > 2:
                raise ConfigError(
                    "a sweep goes on with the jobs that it has: give resume=<its folder> and nothing else"
                )
            if failed := jobs.run(jobs.Sweep.load(folder)):
                fail(failed)
            return
        sys.argv[1:] = of_no_experiment(with_run_folder(with_layout_file(sys.argv[1:]), outputs))
        task()
    except HydraException as error:
        if isinstance(error, InstantiationException):
            raise
        fail(ConfigError(explained(error, CONF, sys.argv, _saved(sys.argv[1:]))))
    except HeteroError as error:
        fail(error)
    except ValueError as error:
        if not str(error).startswith("Config group override"):
            raise
        fail(ConfigError("a group of conf/ was set to null; choose one of its files, such as experiment=none"))


def hush() -> None:
    """Leave out what libraries say of themselves in every process, and no person can act on."""
    quiet.hush()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", module="lightning.*")


def one_message(task: Callable[[DictConfig], None]) -> Callable[[DictConfig], None]:
    """Turn a person's error, and an end by SIGTERM, into one message and a non-zero exit; other exceptions keep their
    traceback.
    """

    @functools.wraps(task)
    def run(cfg: DictConfig) -> None:
        try:
            task(cfg)
        except SIGTERMException:
            if STARTED_BY in os.environ and rank():  # the first rank tells, and takes any other code for a failure
                raise
            told_to_end(trains="run" not in cfg)
        except OmegaConfBaseException as error:
            fail(ConfigError(str(error).splitlines()[0]))
        except Exception as error:
            if lost_a_rank(error):  # as was said; the message is that one's
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


def fail(error: HeteroError) -> NoReturn:
    """Print the message, once over all ranks, and end this process."""
    sys.stdout.flush()
    if rank():
        time.sleep(PATIENCE)
    print(f"\nerror: {error}", file=sys.stderr, flush=True)
    os._exit(1)  # not sys.exit: threads of a process group must not hold the end up


def told_to_end(*, trains: bool) -> NoReturn:
    """Say, once over all ranks, that SIGTERM ended this and how a training run goes on; end with that signal's code."""
    if not rank():
        how = f"; {command('recipes.train', resume=run_folder())} goes on" if trains else ""
        print(f"\nerror: ended by SIGTERM{how}", file=sys.stderr)
    sys.exit(128 + signal.SIGTERM)


def _saved(arguments: list[str]) -> DictConfig | None:
    """Configuration of the run that a command line names, if it does."""
    given = [a.partition("=")[2].strip("'\"") for a in arguments if a.startswith(("resume=", "run="))]
    with suppress(ConfigError):
        return OmegaConf.load(folder_of(given[-1]) / SAVED) if given else None  # type: ignore[return-value]
    return None


# ---- run folders -----------------------------------------------------------------------------------------------------


def run_folder() -> Path:
    """Of this run."""
    return Path(HydraConfig.get().runtime.output_dir)


def resumed(arguments: list[str]) -> str:
    """What ``resume=`` names on a command line; empty: nothing."""
    given = [a.removeprefix("resume=").strip("'\"") for a in arguments if a.startswith("resume=")]
    return given[-1] if given and given[-1] != "null" else ""


def with_run_folder(arguments: list[str], outputs: str = "outputs") -> list[str]:
    """Command-line arguments with ``hydra.run.dir`` where hydra's own choice would not do: when resuming, and where
    every rank composes its configuration at another second.

    Raises:
        ConfigError: ``resume=`` names neither a run folder nor a checkpoint in one, or does not go with the rest.
    """
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    added = []
    if resume := resumed(arguments):
        folder, other = folder_of(resume), given.get("hydra.run.dir", "").strip("'\"")
        if {"-m", "--multirun"} & set(arguments) or given.get("hydra.mode") == "MULTIRUN":
            raise ConfigError(f"resume={resume}: jobs of a sweep are new runs; go on with one run, without -m")
        if other and Path(other).expanduser().resolve() != folder.resolve():
            raise ConfigError(f"resume={resume}: a run goes on in its own folder; leave out hydra.run.dir={other}")
        added += [f'hydra.run.dir="{folder}"', "hydra.output_subdir=null"]
    elif (external() or _step() is not None) and not {"hydra.run.dir", "hydra.sweep.dir"} & set(given):
        added.append(f'hydra.run.dir="{_agreed(outputs, arguments)}"')
        added += ["hydra.output_subdir=null"] if rank() else []
    return [*arguments, *(a for a in added if a.split("=")[0] not in given)]


NO_EXPERIMENT = "experiment='none'"
"""In quotes, as nobody writes it."""


def of_no_experiment(arguments: list[str]) -> list[str]:
    """Command-line arguments; where they name a run, whose configuration holds, groups that they choose are as in conf/
    and not as the default experiment changes them.
    """
    runs = any(re.match(r"(resume|run)=(?!(null)?$)", argument) for argument in arguments)
    said = any(argument.startswith("experiment=") for argument in arguments)
    return [*arguments, *([NO_EXPERIMENT] if runs and not said else [])]


def with_layout_file(arguments: list[str]) -> list[str]:
    """Command-line arguments where ``layout=<file>``, as the planner writes it, names a choice that hydra finds.

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
        said = [a for a in arguments if a.startswith("hydra.searchpath=")]
        parsed = OverridesParser.create().parse_overrides(said[-1:])
        others = [path for override in parsed for path in _list(override.value())]
        found = [f"layout={file.stem}", searchpath([f"file://{file.parent}{ABOVE}", *others])]
        return [*(a for a in arguments if a not in (argument, *said)), *found]
    return arguments


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


ABOVE = "/.."
"""Ends the search path of a layout file, which a command with another one leaves out."""


def searchpath(folders: Sequence[str]) -> str:
    """The override that lets hydra find files in these folders, too."""
    quoted = ",".join(f'"{folder}"' for folder in folders)
    return f"hydra.searchpath=[{quoted}]"


def searched(run: Path | None = None) -> list[str]:
    """Absolute folders, besides conf/, that a run's first command line let hydra search, without those of layout files;
    without a run those of this process.
    """
    saved = None if run is None else run / SAVED.with_name("hydra.yaml")
    if saved is None:
        runtime = HydraConfig.get().runtime if HydraConfig.initialized() else None
    else:
        runtime = OmegaConf.select(OmegaConf.load(saved), "hydra.runtime") if saved.is_file() else None
    sources = runtime.config_sources if runtime is not None else []
    found = [
        f"{one.schema}://{Path(runtime.cwd, one.path) if one.schema == 'file' else one.path}"
        for one in sources
        if "command-line" in one.provider
    ]
    return [folder for folder in found if not folder.endswith(ABOVE)]


def _agreed(outputs: str, arguments: Sequence[str]) -> str:
    """A run folder that rank 0 names for all, by when torchrun began: processes that it starts again have the same. Of
    processes that srun started, job, step and arguments name it: a job that is queued again has the same, and other
    runs of a step have others.
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
    """Run folder of a run folder or of a checkpoint in it, absolute.

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
    """The checkpoint that ``run`` is, or the first of ``names`` in its folder that exists.

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
    """The checkpoint that a stopped run goes on from; None: it had written none yet, so it starts at its first step.

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
    """The newest checkpoint in the folder of a job that SLURM has queued again, or of one whose processes torchrun has
    started again, written since it began; None: there is none, or the job is new.
    """
    if torchrun.started():
        since = torchrun.began().timestamp()
        said = torchrun.said_by_first("checkpoint", lambda: str(_newest(folder, since) or ""))
        return Path(said) if said else None
    return _newest(folder) if srun() and int(os.environ.get("SLURM_RESTART_COUNT") or 0) else None


def _newest(folder: Path, since: float = 0.0) -> Path | None:
    """The newest checkpoint in a run folder that was written after a time, in seconds."""
    places = (*folder.glob("checkpoints/last.ckpt*"), *folder.glob("hpc_ckpt_*.ckpt*"))
    whole = (path for path in places if path.is_dir() and path.name.endswith((".ckpt", ".ckpt.old")))
    found = (path for path in whole if path.stat().st_mtime >= since)
    newest = max(found, key=lambda path: path.stat().st_mtime, default=None)
    return newest and newest.with_name(newest.name.removesuffix(".old"))  # which stands for either


GROUPS = ("optimizer", "strategy", "checkpoint", "monitor", "report")
"""Nodes of the configuration that have the same fields in every run of one version."""


def saved_configuration(cfg: DictConfig, run: str | Path) -> DictConfig:
    """The configuration of a run, with what this command line changes.

    Args:
        cfg: composed from this command line.
        run: run folder or checkpoint.

    Raises:
        ConfigError: the command line changes the experiment, or what the run's configuration has no place for.
    """
    text = (folder_of(run) / SAVED).read_text()
    for old, new in RENAMED.items():
        text = text.replace(f"_target_: {old}\n", f"_target_: {new}\n")
    saved = OmegaConf.create(text)
    assert isinstance(saved, DictConfig)
    said = [override for override in HydraConfig.get().overrides.task if override != NO_EXPERIMENT]
    overrides = OverridesParser.create().parse_overrides(said)
    with open_dict(saved):
        for name in set(cfg) - set(saved):  # fields of `evaluate`, or of a newer version
            saved[name] = cfg[name]
        saved.data.module.pop("language_models", None)  # the model says them
        if "timeout_minutes" in saved.strategy:
            saved.strategy.timeout = saved.strategy.pop("timeout_minutes")
        for name in GROUPS:
            for field in set(cfg[name]) - set(saved[name]):
                saved[name][field] = cfg[name][field]
        for override in overrides:
            key = str(override.package or override.key_or_group).replace("/", ".")
            if override.key_or_group == "experiment":
                raise ConfigError(f"experiment: {run} has its configuration; name the fields to change one by one")
            OmegaConf.update(saved, key, OmegaConf.select(cfg, key), merge=False)
            if key == "layout":  # a plan's file says these too, and they are for its layouts
                for option, value in _planned(cfg).items():
                    saved.strategy[option] = value
    OmegaConf.set_struct(saved, True)
    return saved


def _planned(cfg: DictConfig) -> dict[str, Any]:
    """Options of the strategy that go with the layouts of this command line, where those are not the run's."""
    return {option: cfg.strategy[option] for option in ("schedule", "fill", "pieces", "prefetch", "tp_bubbles")} | {
        option: value
        for option in ("recompute", "offload", "reshard_after_forward")
        if (value := cfg.strategy[option]) not in (None, "auto")
    }


RENAMED = {
    "hetero_strategy.monitor.csv_logger": "lightning.pytorch.loggers.CSVLogger",
    **{
        f"hetero_strategy.model.{name}": f"hetero_strategy.zoo.{name}"
        for name in ("siglip2_encoder", "whisper_encoder", "titan_llama", "hf_llama", "hf_qwen3", "flow_decoder")
    },
}
"""Where what saved configurations name as ``_target_`` has moved."""


def save_configuration(cfg: DictConfig, folder: Path) -> None:
    """The run's configuration is what ran last, and its command line what was ever said."""
    if rank() == 0:
        now = [override for override in asked() if not override.startswith("resume=")]
        for content, path in ((cfg, SAVED), (OmegaConf.create([*asked(folder), *now]), ASKED)):
            new = folder / path.with_suffix(".new")
            OmegaConf.save(content, new)
            new.replace(folder / path)  # whole or not at all: there is no other copy


def asked(run: Path | None = None) -> list[str]:
    """Overrides of a run's command lines, none where they are not known; without a run those of this process."""
    if run is None:
        said = HydraConfig.get().overrides.task if HydraConfig.initialized() else []
        return [override for override in said if override != NO_EXPERIMENT]
    return list(OmegaConf.load(run / ASKED)) if (run / ASKED).exists() else []


def near(value: object) -> object:
    """A path relative to the working directory if it lies below it; anything else as it is."""
    path = Path(str(value))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else value


def command(module: str, **arguments: object) -> str:
    """A command line to copy, with paths relative to the working directory where they lie below it."""
    python = "python" if shutil.which("python") == sys.executable else near(sys.executable)
    shown = [shlex.quote(f"{name}={near(value)}") for name, value in arguments.items()]
    return " ".join([shlex.quote(str(python)), "-m", module, *shown])
