"""The Lightning strategy, `HeteroStrategy`: the only module of the package that implements Lightning's protocol."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_only, rank_zero_warn
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
)
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only as utilities_rank_zero_only
from torch.optim import Optimizer

from hetero_strategy.errors import ConfigError, check_types
from hetero_strategy.layout.spec import ModuleLayout, Placement, place
from hetero_strategy.loading.batch import Batch
from hetero_strategy.loading.context import TrainingContext
from hetero_strategy.model.multimodal import MultimodalModel
from hetero_strategy.model.without_values import models_without_values, nothing_lost
from hetero_strategy.parallelize.gradients import Owned, global_norm
from hetero_strategy.parallelize.optimizer import choose_kernels
from hetero_strategy.parallelize.transform import Transform
from hetero_strategy.parallelize.transforms import Transforms, read_transforms
from hetero_strategy.runtime.agreement import Stop
from hetero_strategy.runtime.executor import Executor
from hetero_strategy.runtime.memory import out_of_memory
from hetero_strategy.runtime.step import StepRunner
from hetero_strategy.schedule.config import Reshard, ScheduleConfig
from hetero_strategy.strategy.assembly import Assembled, assemble, find_model, move_rest
from hetero_strategy.strategy.blueprint import Options, checked_blueprint
from hetero_strategy.strategy.ending import end_together, free, stop_together, tear_down
from hetero_strategy.strategy.launch import (
    ScriptLauncher,
    bound_device,
    check_process_count,
    die_with_script,
    minutes,
    prepare_device,
)
from hetero_strategy.strategy.many_ranks import ManyRanks, about_to_zero_gradients
from hetero_strategy.strategy.precision import check_trainable, seed_scale, stand_in, storage_of
from hetero_strategy.strategy.refusals import (
    Backend,
    check_dataloader,
    check_optimizers,
    check_trainer,
    note_parts,
    read_layouts,
    trains,
)


class HeteroStrategy(ManyRanks):
    """A strategy that trains a :class:`MultimodalModel` with every module in its own layout, on its own ranks.

    ``Trainer(strategy=HeteroStrategy(layouts={...}))``; the LightningModule stays an ordinary one that builds its model
    in ``configure_model`` and calls ``self.model(batch)``. Every rank sees the same outputs, so logging, callbacks and
    schedulers need nothing special.

    Args:
        layouts: module name -> :class:`ModuleLayout` or its fields; ``auto``: the planner chooses, also schedule, fill,
            recompute and reshard_after_forward if not given, and the data module's microbatches if these are ``auto``.
            None (``strategy="hetero"``): every module sharded over all ranks.
        transforms: changes of modules' stages: module -> transforms, as ``[Recompute(), Compile()]``, or module ->
            name -> setting, as ``{"recompute": "whole"}``. ``recompute``: activations are computed again in backward.
            ``offload``: they wait in host memory. ``compile``: torch compiles blocks and loss. ``float8``: blocks
            multiply in float8 (torchao).
        schedule: order of a step's work: ``1f1b``, ``gpipe``, ``interleaved_1f1b`` (modules with vpp > 1), ``zb_h1``,
            ``zbv`` (vpp=2, pp_style="v"), ``sequential``; torch.distributed.pipelining's by name, such as
            ``DualPipeV``; or ``auto``: the one that fits the layouts.
        max_in_flight: most microbatches whose activations a stage of a module holds, by module.
        reshard_after_forward: time at which FSDP frees gathered parameters: ``never`` within a step (they are gathered
            once and gradients reduced once), ``always`` (with every microbatch), or ``auto``: as planned, else
            ``never`` if a module is pipelined or fills bubbles or the schedule splits backwards.
        fill: use of a pipeline's bubbles by modules that feed it on its ranks: ``fine`` (wherever a rank idles),
            ``decoupled`` (around the pipeline's work, recomputed), ``none``, or your own; ``auto``: none, or as
            planned.
        pieces: number of parts of about equal cost into which a filling module's forwards and backwards are cut, by
            module.
        process_group_backend: backend of torch.distributed; default: by device.
        timeout: timeout of every collective; a number is minutes.
        step_timeout: shorter timeout for collectives after the first training step, which connects and compiles. Choose
            more than the time of two steps. None: use ``timeout``. gloo's messages between two ranks keep ``timeout``.
        async_checkpoint: write checkpoints in the background, while training goes on.
        verify_checkpoints: compare the checksum of every loaded tensor with the saved one.
        keep_fp32: parameters, as ``llm.*.router.*``, whose layers compute in fp32 in mixed precision.

    Raises:
        LayoutError: the layouts cannot be placed; raised when the Trainer is made, before any process starts.
        ConfigError: an option is not valid.
    """

    strategy_name = "hetero"
    is_distributed = True

    def __init__(
        self,
        layouts: Mapping[str, ModuleLayout | Mapping[str, Any]] | Literal["auto"] | None = None,
        *,
        transforms: Mapping[str, Sequence[Transform] | Mapping[str, Any]] | None = None,
        schedule: str = "auto",
        max_in_flight: Mapping[str, int] | None = None,
        reshard_after_forward: Reshard = "auto",
        fill: str = "auto",
        pieces: Mapping[str, int] | None = None,
        process_group_backend: Backend | None = None,
        timeout: timedelta | float = timedelta(minutes=30),
        step_timeout: timedelta | float | None = timedelta(minutes=10),
        async_checkpoint: bool = False,
        verify_checkpoints: bool = True,
        keep_fp32: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        check_types(
            "HeteroStrategy", HeteroStrategy.__init__,
            process_group_backend=process_group_backend, async_checkpoint=async_checkpoint,
            verify_checkpoints=verify_checkpoints, schedule=schedule, fill=fill,
            reshard_after_forward=reshard_after_forward, keep_fp32=keep_fp32,
        )  # fmt: skip
        self._auto, self._layouts = layouts == "auto", read_layouts(layouts, schedule)
        self.transforms: Transforms = read_transforms(transforms)
        self._scheduling = ScheduleConfig(schedule, max_in_flight or {}, reshard_after_forward, fill, pieces or {})
        self._process_group_backend = process_group_backend
        self._timeout = minutes("timeout", timeout)
        short = self._timeout if step_timeout is None else minutes("step_timeout", step_timeout)
        self._step_timeout = min(short, self._timeout)
        self._async_checkpoint, self._verify = async_checkpoint, verify_checkpoints
        self._keep_fp32 = tuple(keep_fp32 or ())
        self.num_nodes, self._prefix, self._stop, self._device_waits = 1, "", Stop(), False
        self._placement: Placement | None = None
        self._multimodal: MultimodalModel | None = None
        self._runner: StepRunner | None = None
        self._assembled: Assembled | None = None
        self._planned_microbatches: int | None = None

    # ---- what others may ask ---------------------------------------------------------------------------------------

    @property
    def placement(self) -> Placement | None:
        """Return the resolved layouts of all modules over the world; without ``layouts`` None until the model is
        configured.
        """
        return self._placement

    @property
    def executor(self) -> Executor:
        """Return the executor of this rank's steps; available after ``setup``."""
        assert self._runner is not None
        return self._runner.executor

    @property
    def background(self) -> dist.ProcessGroup:
        """Return the group of all ranks on the host for work beside training; available after ``setup``. Wait for a
        save under way in another thread, which uses the group too.
        """
        assert self._assembled is not None
        self._assembled.state.finalize()
        return self._assembled.registry.background

    @property
    def context(self) -> TrainingContext:
        """Return the context for the data module; model and groups are set from ``setup`` on."""
        context = TrainingContext(self._placement, placed_later=self._placement is None)
        if self._assembled is None:
            return context
        assembled = self._assembled
        return replace(
            context,
            microbatches=self._planned_microbatches,
            row_multiple=assembled.plan.row_multiple,
            model=assembled.plan.context(self.num_processes),
            rank=self.global_rank,
            compiler=assembled.executor.compiler,
            group=assembled.registry.loading,
            compute_dtype=storage_of(self.precision_plugin).narrow,
        )

    # ---- identity and processes ------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Return one logical replica: every rank walks the same global batches."""
        return {"num_replicas": 1, "rank": 0}

    def set_world_ranks(self) -> None:
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        for only in (rank_zero_only, utilities_rank_zero_only):
            cast(Any, only).rank = self.global_rank

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        world_size = self.num_nodes * self.num_processes
        check_process_count(self.cluster_environment, self.num_nodes, world_size)
        if self._layouts is not None:
            self._placement = place(self._layouts, world_size)
            self._check_names()
            self._scheduling.check(self._placement.layouts)
        if self.cluster_environment.creates_processes_externally:
            die_with_script()
            return
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def _check_names(self) -> None:
        """Refuse options of modules that have no layout, before processes start."""
        scheduling, known = self._scheduling, [*(self._layouts or {})]
        by_option: dict[str, Mapping[str, object]] = {"transforms": self.transforms, "pieces": scheduling.pieces}
        for option, named in by_option.items():
            if unknown := [repr(name) for name in named if name not in known]:
                raise ConfigError(
                    f"HeteroStrategy: {option} names {', '.join(unknown)}; the modules are {', '.join(known)}"
                )

    def setup_environment(self) -> None:
        if self.lightning_module is not None:
            trainer = self.lightning_module.trainer
            check_trainer(trainer)
            check_trainable(self.precision_plugin, fit=trainer.state.fn == TrainerFn.FITTING)
            stop_together(trainer, self._stop)
            # Lightning's own sampler would shuffle training data even with shuffling off.
            trainer._accelerator_connector.use_distributed_sampler = False
        prepare_device(self.root_device)
        super().setup_environment()
        assert self.cluster_environment is not None
        reset_seed()
        self.set_world_ranks()
        backend = self._process_group_backend or _get_default_process_group_backend_for_device(self.root_device)
        device = bound_device(self.root_device, backend)
        _init_dist_connection(self.cluster_environment, backend, timeout=self._timeout, device_id=device)

    # ---- precision -------------------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else stand_in(plugin)

    # ---- model -----------------------------------------------------------------------------------------------------

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Build the model on the meta device, so that no rank ever holds a module that it does not own.

        Other objects made here, and modules given to the model with values, are made from one random state on all
        ranks.
        """
        torch.set_rng_state(self.broadcast(torch.get_rng_state()))
        with models_without_values(), nothing_lost(), self.precision_plugin.tensor_init_context():
            yield

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        if self._multimodal is None or all(m is not self._multimodal for m in self.lightning_module.modules()):
            self._build(self.lightning_module)
        assert self._multimodal is not None and self._runner is not None
        self._multimodal.attach(self._runner)
        move_rest(self.lightning_module, self.root_device)
        self.prepare_loops(trainer)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _build(self, module: LightningModule) -> None:
        self._prefix, self._multimodal = find_model(module, partial(self.reduce_boolean_decision, all=False))
        self.model = self.precision_plugin.convert_module(module)
        storage = storage_of(self.precision_plugin, self._keep_fp32)
        if self._placement is None and self._auto:
            planner = import_module("hetero_strategy.planner.auto")  # which no lower room imports
            chosen = planner.choose(self, self._multimodal, module.trainer, storage, self._scheduling)
            self.transforms = chosen.transforms
            self._scheduling = self._scheduling.instead_of_auto(chosen.scheduling)
            self._placement = place(chosen.layouts, self.world_size)
            self._planned_microbatches = chosen.microbatches
        elif self._placement is None:
            everywhere = ModuleLayout(tuple(range(self.world_size)))
            self._placement = place(dict.fromkeys(self._multimodal.modules_by_name, everywhere), self.world_size)
        plan = checked_blueprint(self._multimodal, self._placement, Options(self._scheduling, self.transforms, storage))
        self._assembled = assembled = assemble(
            self._prefix, self._multimodal, plan, self.global_rank, self.root_device,
            timeout=self._timeout, async_checkpoint=self._async_checkpoint,
        )  # fmt: skip
        graph = plan.graph
        if self._scheduling.fills and not graph.filling and all(node.cohort < 0 for node in graph.stages):
            rank_zero_warn(
                f"HeteroStrategy: fill={self._scheduling.fill!r} does nothing: no module shares ranks with a pipeline"
                " that its rows reach"
            )
        self._owned, self.transforms, model = assembled.owned, plan.options.transforms, self._multimodal
        self._runner = StepRunner(
            assembled.executor,
            [o.parameter for o in self._owned.values()],
            lambda: seed_scale(self.precision_plugin, self.root_device),
            lambda: trains(model, self.lightning_module),
            lambda: about_to_zero_gradients(self.lightning_module),
            self.precision_plugin.forward_context,
        )
        if self._step_timeout < self._timeout:
            self._runner.after_first = partial(assembled.registry.limit, self._step_timeout)
        assembled.executor.agreement.stop = self._stop
        plugin = cast(Any, self.precision_plugin)
        plugin.owned_by = self.owned_by
        plugin.norm_device = self.root_device

    def setup_optimizers(self, trainer: Trainer) -> None:
        self._reset_optimizers_and_schedulers()
        super().setup_optimizers(trainer)
        trainer.fit_loop._combined_loader = None  # made early if something asked for the length of the run
        stepping = check_optimizers(self.optimizers, self.world_size)
        choose_kernels(stepping, self._owned, partial(self.reduce_boolean_decision, all=False))

    def grad_norm(self) -> torch.Tensor:
        """Return the norm of all modules' gradients, the same on every rank; all of them call it."""
        return global_norm(list(self._owned.values()), self.root_device)

    def owned_by(self, optimizer: Optimizer) -> list[Owned]:
        return [self._owned[id(p)] for g in optimizer.param_groups for p in g["params"] if id(p) in self._owned]

    def model_to_device(self) -> None: ...

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Leave a :class:`Batch` on the host: each microbatch's part goes to the device just before it is computed."""
        if isinstance(batch, Batch) and self.lightning_module is not None:
            return self.lightning_module._call_batch_hook("on_after_batch_transfer", batch, dataloader_idx)
        return super().batch_to_device(batch, device, dataloader_idx)

    def process_dataloader(self, dataloader: object) -> object:
        check_dataloader(dataloader, placed=self._assembled is not None, alone=self.world_size == 1)
        return dataloader

    # ---- the end ---------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """End all ranks; report the error of the rank that is the cause."""
        if isinstance(exception, torch.OutOfMemoryError) and self._runner is not None:
            exception.add_note(out_of_memory(self.executor, self.optimizers))
        note_parts(exception)
        end_together(exception, self.global_rank, self._launcher, self._stop)
        if not self._stop.agreed:
            self._device_waits = not free(self.root_device, exception, getattr(self._assembled, "state", None))

    def teardown(self) -> None:
        if self._assembled is not None:
            self._assembled.state.finalize()
        if self._multimodal is not None and self._runner is not None:
            self._runner.garbage.stop()
            self._multimodal.detach()
        assert self.cluster_environment is not None and self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        tear_down(self.accelerator, self._launcher, device_waits=self._device_waits)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("hetero", cls, description="every module in its own layout", override=True)


HeteroStrategy.register_strategies(StrategyRegistry)
